"""A prompt's parts on a card, each beside its bound, and whole prompts of a computed model with where their time goes.

    python benchmarks/prompt_card.py all --profile trace.json
    python benchmarks/prompt_card.py parts
    python benchmarks/prompt_card.py whole --shape flash-next --vram-gib 32 --max-context 40960 --tokens 2048 8192 32768

``parts``: library products at several numbers of rows, whether a row's bits depend on its place there, the experts'
kernel over rows an expert, the delta rule, attention, streams. ``whole``: seconds of fresh prompts in one process, the
host's own time, peaks of memory, kernels by kind (--profile), and a hash of the logits, which must not depend on chunk
or cap. ``all``: both, the
second with three plans. Prints lines, then one JSON line. Needs an NVIDIA card and no model.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from strata.config_sources import resolve_here
from strata.engine.synthetic_text import token_list
from strata.errors import StrataError

Figures = dict[str, float | str]

KINDS = (
    ("experts: gate and up", r"^gate_up_"), ("experts: down", r"^down_"), ("experts: sums", r"^sum_parts"),
    ("delta rule", r"^(delta|prepare|scan)_\d"), ("FP32 products", r"^split_product"),
    ("gates and norms", r"^(delta_inputs|gated|norm_rope|route|add_gated|streams_)"), ("dequantise", r"^dequantise"),
    ("products", r"nvjet|gemm|cutlass|cublas|sm90_|sm80_xmma"),
    ("attention, dense", r"flash"), ("attention, masked", r"fmha|efficient|mem_eff"),
    ("sorting", r"[Ss]ort|topk|[Rr]adix|[Ss]can|searchsorted|gatherTopK"), ("sums of rows", r"reduce"),
    ("copies to the card", r"HtoD|Memcpy.*Host"), ("copies", r"Memcpy|[Cc]opy|Cat"),
    ("element by element", r"elementwise|vectorized|Memset|fill|index"),
)  # fmt: skip


def timed(run: Callable[[], Any], repeats: int = 5) -> float:
    """Seconds on the card's clock, the median."""
    run()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        found.append(start.elapsed_time(stop) / 1e3)
    return sorted(found)[repeats // 2]


def measure_products() -> Figures:
    """Matrices of Flash-Next: TFLOP/s by rows, and whether a row's bits depend on where it stands among them."""
    from strata.kernels.cuda.prompt.calls import CudaCalls

    calls, found = CudaCalls(), {}
    shapes = {
        "qkv": (10240, 2560), "z": (6144, 2560), "out": (2560, 6144), "hyper_down": (320, 10240),
        "hyper_up": (10240, 320), "router": (512, 2560), "shared_up": (640, 2560), "shared_down": (2560, 640),
        "attention_q": (12288, 2560), "inject": (4, 10240), "beta": (48, 2560), "one": (1, 2560),
    }  # fmt: skip
    for name, (out, inner) in shapes.items():
        w = torch.randn(out, inner, device="cuda").bfloat16()
        for rows in (2048, 4096, 8192):
            x = torch.randn(rows, inner, device="cuda").bfloat16()
            seconds = timed(partial(calls.product, x, w))
            found[f"product_{name}_{rows}_tflops"] = round(2 * rows * out * inner / seconds / 1e12, 1)
            if rows == 2048:
                y = calls.product(x, w)
                moved = calls.product(x.roll(777, 0), w).roll(-777, 0)
                again = torch.equal(y, calls.product(x, w))
                found[f"product_{name}_rows_move"] = f"{'same' if torch.equal(y, moved) else 'DIFFER'}"
                assert again, f"{name} differs from run to run"
        print({key: value for key, value in found.items() if f"_{name}_" in key})
    return found


def measure_experts(launch: Callable[[list[Any]], None]) -> Figures:
    """A layer of 512 NVFP4 experts of 2,560 x 640 in VRAM under uniform routing."""
    from strata.kernels.cuda.prompt.experts import ChunkExperts
    from strata.quant.layout import ExpertLayout

    layout, experts, top_k, found = ExpertLayout(2560, 640, "nvfp4"), 512, 10, {}
    blobs = torch.randint(0, 120, (experts, layout.blob_bytes), dtype=torch.uint8, device="cuda")
    scales = torch.full((experts, 3), 1e-4, device="cuda")
    order = torch.arange(experts, dtype=torch.int32, device="cuda")
    address = blobs.data_ptr() + torch.arange(experts, device="cuda") * layout.blob_bytes
    for rows in (2048, 4096, 8192, 16384, 32768):
        chunk = ChunkExperts(layout, rows, top_k, torch.device("cuda"), 132)
        chunk.x_CH.normal_()
        ids = torch.rand(rows, experts, device="cuda").topk(top_k, dim=1).indices.int()
        weights, y = torch.rand(rows, top_k, device="cuda"), torch.empty(rows, layout.hidden, device="cuda")
        chunk.begin_layer(ids, order, address, scales)
        whole = chunk.wave(0, experts)
        for name, launches in (("gate_up", whole[:1]), ("down", whole[1:]), ("both", whole)):
            seconds = timed(partial(launch, launches))
            flop = 2 * rows * top_k * 2560 * 640 * {"gate_up": 2, "down": 1, "both": 3}[name]
            found[f"experts_{rows}_{name}_ms"] = round(1e3 * seconds, 3)
            found[f"experts_{rows}_{name}_tflops"] = round(flop / seconds / 1e12, 1)
        for count in (32, 64):
            waves = [one for first in range(0, experts, count) for one in chunk.wave(first, first + count)]
            found[f"experts_{rows}_in_waves_of_{count}_ms"] = round(1e3 * timed(partial(launch, waves)), 3)
        found[f"experts_{rows}_sums_ms"] = round(1e3 * timed(partial(launch, chunk.sums(ids, weights, y))), 3)
        found[f"experts_{rows}_sorting_ms"] = round(
            1e3 * timed(partial(chunk.begin_layer, ids, order, address, scales)), 3
        )
        print({key: value for key, value in found.items() if f"_{rows}_" in key})
        del chunk
    return found


def measure_expanded(launch: Callable[[list[Any]], None]) -> Figures:
    """The same layer by the library: NVFP4 expanded to BF16 in waves, then grouped products. No SiLU, no weighted sum;
    sizes of waves are known to the host. Whether bits depend on waves or on where a row stands is checked."""
    from strata.kernels.cuda.program import Launch
    from strata.quant.layout import ExpertLayout

    layout, experts, top_k, hidden, inner = ExpertLayout(2560, 640, "nvfp4"), 512, 10, 2560, 640
    found: Figures = {}
    blobs = torch.randint(0, 120, (experts, layout.blob_bytes), dtype=torch.uint8, device="cuda")
    address = blobs.data_ptr() + torch.arange(experts, device="cuda") * layout.blob_bytes

    def expand(first: int, count: int, before: int, units: int, superblocks: int, out: torch.Tensor) -> None:
        grid = (-(-units * 64 // 256), count, 1)
        launch([Launch("expand_prompt.expand_nvfp4", grid, 256, 0,
                       (address[first:], before, units, superblocks, out))])  # fmt: skip

    def wave(first: int, count: int, rows: slice, offsets: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
        up, down = wide[:count], narrow[:count]
        expand(first, count, 0, 80 * 40, 40, up)
        expand(first, count, 80 * 40 * 576, 160 * 10, 10, down)
        inner_rows = torch._grouped_mm(x[rows], up.transpose(1, 2), offs=offsets)
        y[rows] = torch._grouped_mm(inner_rows[:, :inner], down.transpose(1, 2), offs=offsets)

    wide = torch.empty(64, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda")
    narrow = torch.empty(64, hidden, inner, dtype=torch.bfloat16, device="cuda")
    seconds = timed(lambda: [expand(first, 64, 0, 80 * 40, 40, wide) for first in range(0, experts, 64)])
    found["experts_c_expand_gate_up_ms"] = round(1e3 * seconds, 3)
    seconds = timed(lambda: [expand(first, 64, 80 * 40 * 576, 1600, 10, narrow) for first in range(0, experts, 64)])
    found["experts_c_expand_down_ms"] = round(1e3 * seconds, 3)
    for rows in (2048, 8192, 16384, 32768):
        x = torch.randn(rows, hidden, device="cuda").bfloat16()
        ids = torch.rand(rows, experts, device="cuda").topk(top_k, dim=1).indices.flatten()
        order = ids.argsort(stable=True)
        ends = ids.bincount(minlength=experts).cumsum(0)
        bounds = [0, *ends.tolist()]
        y = torch.empty(rows * top_k, hidden, dtype=torch.bfloat16, device="cuda")
        plans = {
            count: [
                (first, count, slice(bounds[first], bounds[first + count]),
                 (ends[first : first + count] - bounds[first]).int())
                for first in range(0, experts, count)
            ] for count in (32, 64)
        }  # fmt: skip
        results = []
        for count, plan in plans.items():
            gathered = x[order // top_k]

            def whole(plan: Any = plan, gathered: torch.Tensor = gathered, y: torch.Tensor = y) -> None:
                for one in plan:
                    wave(*one, gathered, y)

            found[f"experts_c_{rows}_waves_{count}_ms"] = round(1e3 * timed(whole), 3)
            results.append(y.clone())
        found[f"experts_c_{rows}_gather_ms"] = round(1e3 * timed(lambda x=x, order=order: x[order // top_k]), 3)
        found[f"experts_c_{rows}_waves"] = "same" if torch.equal(*results) else "DIFFER"
        kept = ends.diff(prepend=ends.new_zeros(1)) // 2  # half of each expert's rows, so at other places
        starts = ends - ends.diff(prepend=ends.new_zeros(1))
        chosen = torch.cat([torch.arange(int(a), int(a + n)) for a, n in zip(starts + kept, kept, strict=True)]).cuda()
        fewer = torch.empty(len(chosen), hidden, dtype=torch.bfloat16, device="cuda")
        cuts = [0, *kept.cumsum(0).tolist()]
        gathered = x[order // top_k][chosen]
        for first in range(0, experts, 64):
            offsets = (kept.cumsum(0)[first : first + 64] - cuts[first]).int()
            wave(first, 64, slice(cuts[first], cuts[first + 64]), offsets, gathered, fewer)
        found[f"experts_c_{rows}_places"] = "same" if torch.equal(fewer, results[1][chosen]) else "DIFFER"
        print({key: value for key, value in found.items() if f"_{rows}_" in key})
    return found


def measure_mixers(launch: Callable[[list[Any]], None]) -> Figures:
    """A pass of Flash-Next's delta net, streams and attention, and of Qwen3-30B's attention, at several positions."""
    from strata.kernels.cuda.prompt.calls import CudaCalls
    from strata.kernels.cuda.prompt.frame import FRAME_ROWS, Frame
    from strata.kernels.cuda.prompt.ops import DenseWeights, PromptOps

    calls, found, rows = CudaCalls(), {}, FRAME_ROWS
    random = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    for start in (0, 6144, 30720):
        ops = PromptOps(Frame(start, rows, 0, rows), calls, DenseWeights(launch), launch)
        for name, heads, groups, width in (("qwen3", 32, 4, 128), ("flash", 24, 2, 256)):
            q, k, v = (
                random(rows, heads, width),
                random(start + rows, groups, width),
                random(start + rows, groups, width),
            )
            k, v = k.bfloat16(), v.bfloat16()
            seconds = timed(partial(ops.attention, q, k, v, start, 0.1))
            flop = 4 * rows * (start + rows / 2) * heads * width
            found[f"attention_{name}_{start}_ms"] = round(1e3 * seconds, 3)
            found[f"attention_{name}_{start}_tflops"] = round(flop / seconds / 1e12, 1)
        if start:
            iq, ik = random(rows, 4, 128), random((start + rows) // 4, 128)
            chosen = ops.select_blocks(iq, ik, start, 4, 512)
            found[f"select_{start}_ms"] = round(1e3 * timed(partial(ops.select_blocks, iq, ik, start, 4, 512)), 3)
            found[f"sparse_{start}_ms"] = round(
                1e3 * timed(partial(ops.sparse_attention, q, k, v, start, 0.1, chosen, 4)), 3
            )
    ops = PromptOps(Frame(0, rows, 0, rows), calls, DenseWeights(launch), launch)
    found |= measure_elements(ops, launch)
    print(found)
    return found


def measure_elements(ops: Any, launch: Callable[[list[Any]], None]) -> Figures:
    """A pass of Flash-Next's delta net, gates, streams, router and FP32 products, each with its rate and beside torch's
    own (``ReferenceOps`` on the card: what ran before)."""
    from strata.kernels.cuda.prompt.frame import FRAME_ROWS
    from strata.kernels.cuda.prompt.ops import DenseWeights
    from strata.kernels.ops import DeltaWeights, HyperWeights, Matrix
    from strata.kernels.reference import ReferenceOps
    from strata.kernels.reference.delta import recurrent_delta

    found, rows, plain = dict[str, float | str](), FRAME_ROWS, ReferenceOps()
    random = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731

    def note(name: str, run: Callable[[], Any], nbytes: float, flop: float = 0.0, old: Callable[[], Any] | None = None):
        seconds = timed(run)
        found[f"{name}_ms"], found[f"{name}_gbs"] = round(1e3 * seconds, 4), round(nbytes / seconds / 1e9)
        if flop:
            found[f"{name}_tflops"] = round(flop / seconds / 1e12, 1)
        if old is not None:
            found[f"{name}_old_ms"] = round(1e3 * timed(old), 4)
        print({key: value for key, value in found.items() if key.startswith(name)})

    wide, values = 10240, 6144
    weights = DeltaWeights(random(wide, 4), random(48), random(48), 16, 48, 128, 128)
    qkv, tail, b, a = random(rows, wide), random(3, wide), random(rows, 48), random(rows, 48) - 3
    q, delta = ops.delta_inputs(qkv, tail, b, a, weights)
    note(
        "delta_inputs", lambda: ops.delta_inputs(qkv, tail, b, a, weights), rows * wide * 6, 0,
        lambda: plain.delta_inputs(qkv, tail, b, a, weights),
    )  # fmt: skip
    state = torch.zeros(48, 128, 128, device="cuda")
    out = ops.gated_delta(q, delta, state, None, write=True)
    assert torch.equal(out, ops.gated_delta(q, delta, torch.zeros_like(state), None, write=True)), "two runs differ"
    some = slice(0, 256)
    parts = [x[None, some].double() for x in (q, delta.k_TGD, delta.v_TNV, delta.beta_TN, delta.g_TN)]
    exact, _ = recurrent_delta(*parts, torch.zeros(1, 48, 128, 128, device="cuda", dtype=torch.float64))
    assert exact is not None
    found["delta_error"] = float(f"{float((out[some] - exact[0]).norm() / exact[0].norm()):.2e}")
    blocks_flop = rows * 48 * 2 * (5 * 32 * 128 + 3 * 128 * 128)
    note(
        "delta", lambda: ops.gated_delta(q, delta, state, None, write=True), rows * (8192 * 2 + values * 6),
        blocks_flop, old_delta(q, delta, state, launch),
    )  # fmt: skip
    for index, name in enumerate(("delta_prepare", "delta_scan")):
        ops._launch = lambda launches, index=index: launch(launches[index : index + 1])
        note(name, lambda: ops.gated_delta(q, delta, state, None, write=True), rows * values * 10)
    ops._launch = launch
    o, z, w = random(rows, 48, 128), random(rows, 48, 128), random(128)
    note(
        "gated_norm", lambda: ops.gated_norm(o, z, w, 1e-6, "silu"), rows * values * 10, 0,
        lambda: plain.gated_norm(o, z, w, 1e-6, "silu").bfloat16(),
    )  # fmt: skip
    both, cos, sin = random(rows, 24, 2, 256), random(rows, 32), random(rows, 32)
    heads = [(both[:, :, 0], random(256)), (random(rows, 2, 256), random(256))]
    note(
        "norm_rope", lambda: ops.norm_rope(heads, 1e-6, cos, sin, plus_one=True), rows * 26 * 256 * 8, 0,
        lambda: plain.norm_rope(heads, 1e-6, cos, sin, plus_one=True),
    )  # fmt: skip
    logits = random(rows, 512)
    note(
        "router", lambda: ops.router(logits, 10, renormalise=True), rows * 512 * 4, 0,
        lambda: plain.router(logits, 10, renormalise=True),
    )  # fmt: skip
    u = random(rows, 2560)
    for name, matrices in (
        ("product_router", [Matrix("f32", random(512, 2560), 2560)]),
        ("product_gates", [Matrix("f32", random(48, 2560), 2560) for _ in range(2)]),
    ):
        outs = sum(one.rows for one in matrices)
        note(
            name, partial(ops.linears, u, matrices), 4 * (rows + outs) * 2560, 2 * rows * 2560 * outs,
            lambda matrices=matrices: [torch.mm(u, one.data.T) for one in matrices],
        )  # fmt: skip
    codes, scales = torch.randint(-127, 128, (wide, 2560), dtype=torch.int8, device="cuda"), random(wide, 80).half()
    eight = Matrix("q8_0", codes, 2560, scales)
    note("dequantise", lambda: DenseWeights(launch).get(eight), wide * 2560 * 3.06)
    x = random(rows, 4, 2560)
    mixer = HyperWeights(
        random(4, 2560), Matrix("bf16", random(320, wide).bfloat16(), wide),
        Matrix("bf16", random(wide, 320).bfloat16(), 320), Matrix("bf16", random(4, wide).bfloat16(), wide), 1e-6,
    )  # fmt: skip
    c, y = random(rows, 4), random(rows, 2560)
    note("streams_mix", lambda: ops.hyper_mix(x, mixer), rows * wide * 14)
    note("streams_add_mix", lambda: ops.hyper_mix(ops.hyper_add(x, c, y), mixer), rows * wide * 20)
    one = random(rows, 1)
    note("add_gated", lambda: ops.add_gated(y, one, u), rows * 2560 * 12, 0, lambda: plain.add_gated(y, one, u))
    return found


def old_delta(
    q: torch.Tensor, delta: Any, state: torch.Tensor, launch: Callable[[list[Any]], None]
) -> Callable[[], Any]:
    """The rule row after row in FP32, which ran before."""
    import ctypes

    from strata.kernels.cuda.program import Launch

    class Rows(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_uint64) for name in ("q", "k", "v", "beta", "decay", "state", "out")),
            *((name, ctypes.c_int) for name in ("first", "stop", "groups", "heads", "key", "value")),
        )

    kept = [q.float(), delta.k_TGD.float(), delta.v_TNV.float(), delta.beta_TN, delta.g_TN, state.clone()]
    kept.append(torch.empty_like(kept[2]))
    one = Rows(*(x.data_ptr() for x in kept), 0, q.shape[0], q.shape[1], state.shape[0], *state.shape[1:])
    launches = [Launch("delta_prompt.delta_128", (8, state.shape[0], 1), 128, 0, (one,))]

    def run() -> list[torch.Tensor]:
        launch(launches)
        return kept

    return run


def measure_parts() -> Figures:
    from strata.kernels.cuda.cuda_device import open_device

    card = open_device(0)
    torch.cuda.init()
    with torch.cuda.stream(card.machine.torch_stream), torch.no_grad():
        launch = card.machine.run_eagerly
        found = measure_products() | measure_experts(launch)
        try:
            found |= measure_expanded(launch)
        except RuntimeError as error:  # a library that has no such product for this card
            print(f"no grouped products: {error}")
        return found | measure_mixers(launch)


def measure_whole(args: argparse.Namespace) -> Figures:
    from strata.checkpoint.pack_writer import PackOptions
    from strata.checkpoint.synthetic_reader import SyntheticWeights
    from strata.engine.runtime import Runtime
    from strata.engine.session import Session
    from strata.engine.synthetic_model import open_synthetic

    options = PackOptions(experts="nvfp4", dense="q8_0")
    weights = SyntheticWeights(seed=0, experts=options.experts, dense=options.dense)
    asked: dict[str, Any] = {"model": args.shape, "device": "cuda", "max_context": args.max_context}
    asked |= {} if args.vram_gib is None else {"vram_gib": args.vram_gib}
    asked |= {} if args.prefill is None else {"prefill": args.prefill}
    opened = open_synthetic(args.shape, args.layers, weights)
    runtime = Runtime.open(opened, resolve_here(arguments=asked))
    found: Figures = {}
    try:
        found["slots"] = runtime.plan.num_slots
        for line in runtime.plan.lines():
            print(line)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for count in args.tokens:
            seconds = []
            for run in range(args.runs):
                ids = token_list(runtime.vocabulary, count, f"{count} {run}")
                session = Session(runtime)
                began = time.perf_counter()
                logits = session.read_prompt(ids)
                seconds.append(time.perf_counter() - began)
                print(f"{count:,} tokens: {seconds[-1]:.3f} s, {count / seconds[-1]:,.0f} tok/s")
                if run == 0:
                    found[f"prompt_{count}_sha"] = hashlib.sha256(logits.numpy().tobytes()).hexdigest()[:16]
            found[f"prompt_{count}_first"] = round(count / seconds[0])
            found[f"prompt_{count}"] = round(count / sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2])
        found["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)
        found["planned_gib"] = round((runtime.plan.vram.get("prompt buffers", 0) + runtime.plan.lent_bytes) / 2**30, 2)
        found["chunk_rows"] = runtime.chunk_rows
        if args.profile:
            profile(runtime, token_list(runtime.vocabulary, args.tokens[-1], "profile"), args.profile)
    finally:
        runtime.close()
        opened.close()
    return found


def measure_all(args: argparse.Namespace) -> Figures:
    """Parts, then whole prompts with chunks by auto, of 8,192 rows, and under another cap: hashes must be equal."""
    found = measure_parts()
    torch.cuda.empty_cache()
    hashes: dict[int, set[str]] = {}
    for vram_gib, prefill, trace in ((32, None, args.profile), (32, "8192", None), (16, None, None)):
        args.vram_gib, args.prefill, args.profile = vram_gib, prefill, trace
        name = f"{vram_gib}_{prefill or 'auto'}"
        print(f"{vram_gib} GiB, --prefill {prefill or 'auto'}")
        one = measure_whole(args)
        found |= {f"{name}_{key}": value for key, value in one.items()}
        for count in args.tokens:
            hashes.setdefault(count, set()).add(str(one[f"prompt_{count}_sha"]))
    for count, values in hashes.items():
        found[f"prompt_{count}_hashes"] = "same" if len(values) == 1 else "DIFFER"
    return found


def profile(runtime: Any, ids: Sequence[int], trace: str) -> None:
    """Kernels by kind, and a trace for chrome://tracing."""
    from torch.profiler import ProfilerActivity

    from strata.engine.session import Session

    session = Session(runtime)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as one:
        began = time.perf_counter()
        session.read_prompt(ids)
        wall = time.perf_counter() - began
    by_kind: dict[str, float] = {}
    others: dict[str, float] = {}
    for event in one.key_averages():
        microseconds = float(getattr(event, "self_device_time_total", 0.0))
        if not microseconds:
            continue
        kind = next((kind for kind, pattern in KINDS if re.search(pattern, event.key)), "others")
        by_kind[kind] = by_kind.get(kind, 0.0) + microseconds / 1e6
        others[event.key[:100]] = others.get(event.key[:100], 0.0) + microseconds / 1e6
    print(f"profile of {len(ids):,} tokens, {wall:.3f} s under the profiler")
    for kind, seconds in sorted(by_kind.items(), key=lambda one: -one[1]):
        print(f"  {kind:<24}{1e3 * seconds:10.1f} ms")
    for name, seconds in sorted(others.items(), key=lambda one: -one[1])[:30]:
        print(f"    {1e3 * seconds:10.1f} ms  {name}")
    one.export_chrome_trace(trace)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("parts", "whole", "all"))
    parser.add_argument("--shape", default="flash-next")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vram-gib", type=float)
    parser.add_argument("--max-context", type=int, default=40960)
    parser.add_argument("--prefill")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--profile", help="a file for the trace")
    args = parser.parse_args()
    try:
        if args.what == "all":
            found = measure_all(args)
        else:
            found = measure_parts() if args.what == "parts" else measure_whole(args)
    except StrataError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

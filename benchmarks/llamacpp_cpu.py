"""Decode and prompt speed on the CPU beside llama.cpp's CPU build: same shape, same threads, interleaved.

Shape of Qwen3-30B-A3B with fewer layers, random weights: experts at 4.5 bits (Q4_0 there, NVFP4 here), dense
matrices at 8 bits. llama.cpp comes as the prebuilt wheel ``xllamacpp`` (extra ``bench``). Each engine lives in a
child process that keeps its model loaded; the parent asks them in turn, so that drift of the machine meets both.
Prints one JSON line and writes ``benchmarks/results/<machine>/llamacpp.json``.

    python benchmarks/llamacpp_cpu.py --machine cpu2 --threads 2
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from strata.benchmark_record import Figure, Record, measured, record_path
from strata.kernels.bench import machine

RESULTS = Path(__file__).resolve().parent / "results"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, TOP_K, INTERMEDIATE, VOCAB = 128, 8, 768, 151936


def write_gguf(path: Path, layers: int) -> None:
    """Writes random weights of the shape: block bytes are drawn at random, block scales are set to sane sizes."""
    import gguf
    import numpy as np

    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(6144)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP_K)
    writer.add_expert_feed_forward_length(INTERMEDIATE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = [f"t{index}" for index in range(VOCAB)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * VOCAB)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(VOCAB - 1)

    def blocks(name: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, block_bytes: int) -> None:
        count = int(np.prod(shape)) // 32
        data = random.integers(0, 256, (count, block_bytes), dtype=np.uint8)
        spread = 4.6 if kind is gguf.GGMLQuantizationType.Q4_0 else 74.0
        scale = np.float16(1.0 / (spread * shape[-1] ** 0.5))
        data[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
        writer.add_tensor(name, data.reshape(*shape[:-1], shape[-1] // 32 * block_bytes), raw_dtype=kind)

    def q8(name: str, *shape: int) -> None:
        blocks(name, shape, gguf.GGMLQuantizationType.Q8_0, 34)

    def q4(name: str, *shape: int) -> None:
        blocks(name, shape, gguf.GGMLQuantizationType.Q4_0, 18)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, np.float32))

    q8("token_embd.weight", VOCAB, HIDDEN)
    q8("output.weight", VOCAB, HIDDEN)
    ones("output_norm.weight", HIDDEN)
    for layer in range(layers):
        prefix = f"blk.{layer}."
        ones(prefix + "attn_norm.weight", HIDDEN)
        ones(prefix + "ffn_norm.weight", HIDDEN)
        ones(prefix + "attn_q_norm.weight", HEAD_DIM)
        ones(prefix + "attn_k_norm.weight", HEAD_DIM)
        q8(prefix + "attn_q.weight", HEADS * HEAD_DIM, HIDDEN)
        q8(prefix + "attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        q8(prefix + "attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN)
        q8(prefix + "attn_output.weight", HIDDEN, HEADS * HEAD_DIM)
        router = random.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) / HIDDEN**0.5
        writer.add_tensor(prefix + "ffn_gate_inp.weight", router)
        q4(prefix + "ffn_gate_exps.weight", EXPERTS, INTERMEDIATE, HIDDEN)
        q4(prefix + "ffn_up_exps.weight", EXPERTS, INTERMEDIATE, HIDDEN)
        q4(prefix + "ffn_down_exps.weight", EXPERTS, HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def serve_llamacpp(model: Path, threads: int) -> None:
    """Child: answers each line of stdin ``{"prompt": ids, "tokens": n}`` with measured milliseconds."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx = 2048
    params.n_parallel = 1
    params.warmup = True
    params.n_gpu_layers = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print(json.dumps({"ready": str(xllamacpp.get_system_info())}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        request = {
            "prompt": ask["prompt"],
            "n_predict": ask["tokens"],
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0.0,
        }
        answer = server.handle_completions(request)
        timings = (answer if isinstance(answer, dict) else json.loads(str(answer)))["timings"]
        reply = {"prompt_ms": timings["prompt_ms"], "decode_ms": timings["predicted_ms"]}
        reply |= {"prompt_n": timings["prompt_n"], "decode_n": timings["predicted_n"]}
        print(json.dumps(reply), flush=True)


def serve_strata(model: Path, threads: int) -> None:
    """Child: the same dialogue, answered by Strata with every expert resident."""
    from strata import Engine

    engine = Engine.load(model, threads=threads, device="cpu", max_context=2048, expert_cache=0, arena_pin_gib="none")
    print(json.dumps({"ready": engine.describe()}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps(engine.measure(ask["prompt"], ask["tokens"])), flush=True)


class Child:
    """One engine in its own process, spoken to by lines of JSON."""

    def __init__(self, role: str, model: Path, threads: int) -> None:
        command = [sys.executable, __file__, "--child", role, "--model", str(model), "--threads", str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.ready = self._read()["ready"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return dict(json.loads(line))
        raise SystemExit("a child process ended before it answered; run it with --child to see why")

    def ask(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompt": prompt, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


def fresh_prompt(run: int, length: int) -> list[int]:
    """Ids whose first differs from every earlier run's, so that no prefix can be reused."""
    return [(run * 7919 + 17 + index * 104729) % (VOCAB - 1) for index in range(length)]


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Figure]:
    gguf_path, pack_path = folder / "shape.gguf", folder / "pack"
    if not gguf_path.exists():
        write_gguf(gguf_path, arguments.layers)
    if not pack_path.exists():
        from strata.checkpoint.random_model import write_random_pack
        from strata.models import find
        from strata.models.known_shapes import known_config
        from strata.text.byte_tokenizer import byte_tokenizer
        from strata.text.tokenizer_files import tokenizer_files

        config = {**known_config("qwen3-30b"), "num_hidden_layers": arguments.layers}
        byte_tokenizer(folder / "tokenizer")
        files = tuple(tokenizer_files(folder / "tokenizer"))
        write_random_pack(pack_path, config, find, seed=1, tokenizer_files=files)
    rates: dict[str, dict[str, list[float]]] = {}
    children = {
        "llamacpp": Child("llamacpp", gguf_path, arguments.threads),
        "strata": Child("strata", pack_path, arguments.threads),
    }
    for number in range(arguments.runs + 1):
        for name, child in children.items():
            decode = child.ask(fresh_prompt(2 * number, 8), arguments.tokens)
            prompt = child.ask(fresh_prompt(2 * number + 1, arguments.prompt), 1)
            if number == 0:
                continue  # the first pass touches all pages; it is not counted
            rate = rates.setdefault(name, {"decode": [], "prompt": []})
            rate["decode"].append(1e3 * decode["decode_n"] / decode["decode_ms"])
            rate["prompt"].append(1e3 * prompt["prompt_n"] / prompt["prompt_ms"])
            print(f"run {number} {name}: decode {rate['decode'][-1]:.2f}, prompt {rate['prompt'][-1]:.1f} tok/s")
    for child in children.values():
        child.close()
    return figures(rates, arguments.prompt)


def figures(rates: dict[str, dict[str, list[float]]], prompt: int) -> dict[str, Figure]:
    """The ratios pair by pair, and what each engine reached."""
    result: dict[str, Figure] = {}
    for what, context in (("decode", 8), ("prompt", prompt)):
        ours, theirs = rates["strata"][what], rates["llamacpp"][what]
        pairs = [a / b for a, b in zip(ours, theirs, strict=True)]
        result[f"cpu_{what}_over_llamacpp"] = measured([round(pair, 3) for pair in pairs], "ratio")
        for name, values in (("strata", ours), ("llamacpp", theirs)):
            figure = measured([round(value, 2) for value in values], "tok/s")
            result[f"{what}_{name}"] = replace(figure, context_tokens=context, routing="random")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machine", default="cpu2")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="keeps the two model files between runs")
    parser.add_argument("--child", choices=["llamacpp", "strata"], help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        (serve_llamacpp if arguments.child == "llamacpp" else serve_strata)(arguments.model, arguments.threads)
        return
    began = time.time()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = run(arguments, folder)
    command = f"python benchmarks/llamacpp_cpu.py --machine {arguments.machine} --threads {arguments.threads}"
    command += (
        f" --layers {arguments.layers} --runs {arguments.runs} --tokens {arguments.tokens} --prompt {arguments.prompt}"
    )
    record = Record(command, machine() | {"threads": arguments.threads, "layers": arguments.layers}, result)
    record.write(record_path(RESULTS, arguments.machine, "llamacpp"))
    print(f"{time.time() - began:.0f} s")
    print(record.line())


if __name__ == "__main__":
    main()

"""``strata demo``: what ``make run`` shows. Found hardware, an answer, placements with one hash, an outlook.

Lives in ``cli``; it sees text, rows and plans, never a tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from strata.cli.configure import Configure
from strata.logs import quiet_unless_asked

if TYPE_CHECKING:
    from rich.table import Table

    from strata.config import Requested
    from strata.engine.identity import ArmResult

# Of a package that the built-in model never saw (tests/data holds it to that).
DEFAULT_PROMPT = 'def get_source_checksum(self, source: str) -> str:\n    """Returns a checksum for the source."""\n'
COLUMNS = ("placement", "tok/s", "hit rate", "misses", "moved MiB", "sha256 of all logits", "")
TIERS = ("pinned", "pageable", "mapped", "file")


def command(
    configure: Configure,
    name: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A pack, checkpoint folder or name.")] = None,
    prompt: Annotated[str, typer.Option(help="Text to complete.")] = DEFAULT_PROMPT,
) -> int:
    """Shows what Strata does on this PC, in a minute."""
    requested = configure(name)
    print_found()
    print_answer(requested, prompt)
    good = print_placements(requested, prompt)
    print_outlook(requested)
    print_next()
    return 0 if good else 1


def print_found() -> None:
    from strata.kernels.cpu.library import isa
    from strata.memory.planner import format_bytes
    from strata.memory.probe import probe_machine

    machine = probe_machine()
    cards = ", ".join(f"{gpu.name} {format_bytes(gpu.memory_total)}" for gpu in machine.gpus)
    where = cards or "no GPU: running on the CPU"
    cores = f"{machine.num_cpus} core{'s' if machine.num_cpus != 1 else ''}"
    print(f"found: {machine.cpu_name}, {isa()}, {cores}, {format_bytes(machine.ram_total)} RAM, {where}\n", flush=True)


def print_answer(requested: Requested, prompt: str) -> None:
    from strata.cli.loading import load_engine
    from strata.cli.streaming import stream_answer

    with load_engine(requested) as engine:
        print(f"model: {engine.describe()}")
        if engine.model.random:
            print("(random weights, made once from a seed: what follows is noise, and the same noise every time)")
        print("─" * 60)
        sys.stdout.write(prompt)
        request = engine.plain_request(prompt, engine.sampling({"max_tokens": min(96, requested.max_tokens)}))
        if stream_answer(engine, request):
            raise KeyboardInterrupt  # it ended the answer, and nobody asked for the rest
        print("─" * 60 + "\n", flush=True)


def print_placements(requested: Requested, prompt: str) -> bool:
    """The live table; True when all rows have the same bytes and did what they are there for."""
    from strata.engine.proof import Proof

    quiet_unless_asked(requested)
    results: list[ArmResult] = []
    with Proof.open(requested, (), 64) as proof:
        rows = proof.demo(prompt)
        show_live(rows, results) if sys.stdout.isatty() else show_plain(rows, results)
        total = proof.num_demo
    good = len(results) == total and all(result.good for result in results)
    print("identical\n" if good else "NOT identical\n", flush=True)
    return good


def show_live(rows: Iterator[ArmResult], results: list[ArmResult]) -> None:
    from rich.live import Live

    with Live(make_table(results), auto_refresh=False) as live:
        for result in rows:
            results.append(result)
            live.update(make_table(results), refresh=True)


def show_plain(rows: Iterator[ArmResult], results: list[ArmResult]) -> None:
    from rich.console import Console

    results.extend(rows)
    Console(width=150).print(make_table(results))


def make_table(results: list[ArmResult]) -> Table:
    from rich.table import Table

    table = Table(*COLUMNS, title="the same prompt, experts in every RAM mode", title_justify="left")
    for result in results:
        table.add_row(*cells(result))
    return table


def cells(result: ArmResult) -> list[str]:
    count = result.counters.get
    misses = {tier: count(f"misses_{tier}", 0) for tier in TIERS}
    picks = count("hits", 0) + sum(misses.values())
    named = [f"{tier} {number:,}" for tier, number in misses.items() if number]
    moved = {"DMA": count("direct_bytes", 0), "staged": count("staged_bytes", 0), "file": count("file_bytes", 0)}
    bytes_moved = [f"{way} {number / 2**20:,.1f}" for way, number in moved.items() if number]
    transcript = result.transcript
    return [
        result.name,
        f"{transcript.decode_tokens_per_second:.1f}" if transcript else "-",
        f"{100 * count('hits', 0) / picks:.1f} %" if picks else "-",
        ", ".join(named) or "none",
        ", ".join(bytes_moved) or "none",
        transcript.sha256[:20] if transcript else "-",
        result.verdict,
    ]


def print_outlook(requested: Requested) -> None:
    from strata.engine.outlook import known_outlooks
    from strata.memory.planner import format_bytes
    from strata.memory.probe import probe_machine

    print("what this PC could run (planned, nothing allocated):")
    for outlook in known_outlooks(requested, probe_machine()):
        sizes = f"{format_bytes(outlook.experts_bytes)} of experts, {format_bytes(outlook.dense_bytes)} dense"
        if outlook.plan is None:
            print(f"  {outlook.name:12} {sizes}: no, {outlook.refusal}")
            continue
        plan = outlook.plan
        ram = format_bytes(plan.ram_bytes)
        share = (plan.num_slots + plan.num_ram_experts) / plan.shape.total_experts  # device memory is RAM here
        answer = "yes, all experts in RAM"
        if share < 1:  # rounded down, so that 100 % is said of all of them alone
            answer = f"slowly, from the file: {int(100 * share)} % of the experts fit in RAM"
        print(f"  {outlook.name:12} {sizes}: {answer}; {ram} of RAM with headroom, mode {plan.mode}")
    print()


def print_next() -> None:
    from strata.words import program

    name = program()
    rows = (
        ("run 'def read_lines(path):'", "complete a text"),
        ("chat", "talk to the model in the terminal"),
        ("verify", "prove that placement never changes a token"),
        ("run path/to/checkpoint 'Hello'", "a Hugging Face folder of your own, packed once"),
    )
    print("next:")
    for words, what in rows:
        print(f"  {f'{name} {words}':{len(name) + 33}}{what}")

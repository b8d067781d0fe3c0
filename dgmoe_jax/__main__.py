"""`python -m dgmoe_jax doctor`, `warmup`, `network` and `parity`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as missing:
    sys.exit(f"python -m dgmoe_jax needs {missing.name}: pip install 'dgmoe_jax[cli]'")

# JAX would take most of the GPU for itself, which those that compile beside it need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax

import dgmoe_jax as dg
from dgmoe_jax import doctor as doctor_module
from dgmoe_jax.config import LAYOUTS

app = typer.Typer(help=dg.__doc__, no_args_is_help=True, add_completion=False)
Json = Annotated[bool, typer.Option("--json", help="For machines.")]


def _help(text: str, **limits: int) -> Any:
    return typer.Option(help=text, show_default=False, **limits)


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has, what runs on it and why not the rest; status 0 if anything does."""
    found = doctor_module.examine()
    if as_json:
        print(json.dumps(found, indent=2))
        raise typer.Exit(not found["ok"])
    console = Console()
    machine = Table(show_header=False, box=None)
    for name, text in found["machine"].items():
        machine.add_row(name, text or "[red]none[/red]")
    console.print(machine)
    table, reasons = Table("recipe", "backend", *LAYOUTS[1:]), {}
    for (recipe, backend), runs in groupby(found["runs"], lambda r: (r["recipe"], r["backend"])):
        marks = []
        for why_not in (run["why_not"] for run in runs):
            number = reasons.setdefault(why_not, len(reasons) + 1) if why_not else None
            marks.append(f"[red]no ({number})[/red]" if number else "[green]yes[/green]")
        table.add_row(recipe, backend, *marks)
    console.print(table)
    for why_not, number in reasons.items():
        console.print(f"({number}) {why_not}", highlight=False, markup=False)
    if found["install"]:
        console.print("To install what is missing:", found["install"], soft_wrap=True)
    console.print("The layer runs here." if found["ok"] else "[red]The layer does not run here.[/]")
    raise typer.Exit(not found["ok"])


def token_counts(text: str) -> list[int]:
    """ "1,16,128-130" -> [1, 16, 128, 129, 130]."""
    counts = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers = first.isdecimal() and (last or first).isdecimal()
        if not numbers or int(last or first) < int(first):
            raise typer.BadParameter(f"{part!r}: a number such as 16, or a range such as 1-128")
        counts += range(int(first), int(last or first) + 1)
    return counts


@app.command()
def warmup(
    *,
    experts: Annotated[int, _help("Number of routed experts.")],
    hidden: Annotated[int, _help("Hidden size.")],
    intermediate: Annotated[int, _help("Intermediate size of an expert.")],
    top_k: Annotated[int, _help("Experts a token.")],
    tokens: Annotated[str, _help("Numbers of tokens: 1,16,1024 or 1-512,4096.")],
    recipe: str = "bf16",
    shared: Annotated[int, _help("Number of shared experts.")] = 0,
    layout: str = "auto",
    backend: str = "auto",
    cache_dir: Annotated[Path | None, _help("Where all goes that is compiled.")] = None,
    processes: Annotated[int | None, _help("Compile so many at a time.")] = None,
    as_json: Json = False,
) -> None:
    """Compile all that DeepGEMM needs for these sizes, into a directory that can be shipped."""
    counts = token_counts(tokens)
    try:
        router = dg.RouterConfig(top_k=top_k)
        cfg = dg.MoEConfig(
            *(experts, hidden, intermediate, router),
            recipe=recipe,
            num_shared_experts=shared,
            layout=layout,
            backend=backend,
        )
        report = dg.warmup(
            cfg, counts, cache_dir=cache_dir, processes=processes, progress=not as_json
        )
    except (ValueError, RuntimeError) as problem:
        sys.exit(f"warmup: {problem}")
    print(json.dumps(asdict(report), indent=2) if as_json else report)


@app.command()
def network(
    *,
    experts: Annotated[int, _help("Number of routed experts.")] = 256,
    hidden: Annotated[int, _help("Hidden size.")] = 7168,
    intermediate: Annotated[int, _help("Intermediate size of an expert.")] = 2048,
    top_k: Annotated[int, _help("Experts a token.")] = 8,
    recipe: str = "fp8_block",
    tokens: Annotated[str, _help("Tokens of each GPU.")] = "128,4096",
    gpus: Annotated[str, _help("Numbers of GPUs.")] = "8,72,256,1024,4096",
    ep: Annotated[int | None, _help("GPUs that share the experts, at most.", min=1)] = None,
    domains: Annotated[str, _help("GPUs that NVLink joins.")] = "8,72",
    capacity_factor: Annotated[float, _help("Parallel.capacity_factor.")] = 2.0,
    measured: Annotated[
        Path | None,
        _help("Lines of scripts/bench_parallel.py to fit to, and to print beside.", exists=True),
    ] = None,
    markdown: Annotated[bool, _help("The table for a page.")] = False,
) -> None:
    """How long dispatch and combine take on 8 to 4096 GPUs, by a model of six numbers."""
    from dgmoe_jax import network as model

    try:
        lines = model.read(measured) if measured else []
        networks = model.fits(lines)
        cfg = model.config(experts, top_k, hidden, intermediate, recipe)
        rows = [
            {"GPUs": ", ".join(map(str, counts))}
            | model.row(
                *(cfg, t, ranks), networks=networks, domain=domain, capacity_factor=capacity_factor
            )
            for t in token_counts(tokens)
            for ranks, counts in model.groups(cfg, token_counts(gpus), ep).items()
            for i, domain in enumerate(token_counts(domains))
            if i == 0 or ranks >= domain
        ]
    except (ValueError, NotImplementedError) as problem:
        sys.exit(f"network: {problem}")
    notes = [f"collectives: {networks['all_to_all']}", f"one_sided: {networks['one_sided']}"]
    if markdown:
        head = [list(rows[0]), ["---"] * len(rows[0])]
        for cells in head + [list(row.values()) for row in rows]:
            print("| " + " | ".join(cells) + " |")
        print("\n" + "\n".join(f"- {note}" for note in notes))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    shown = Table(*rows[0], title=f"us of dispatch and combine, {cfg.num_experts} experts")
    for row in rows:
        shown.add_row(*row.values())
    console.print(shown)
    for note in notes:
        console.print(note, highlight=False)
    beside = Table("dispatch", "GPUs", "T", "measured us", "model us", "ratio")
    for line, sent in model.measured(lines):
        us = networks[line["dispatch"]].seconds(sent) * 1e6
        sizes = (line["dispatch"], str(line["gpus"]), str(line["T"]))
        took = model.measured_us(line)
        beside.add_row(*sizes, f"{took:.0f}", f"{us:.0f}", f"{us / took:.2f}")
    console.print(beside if beside.row_count else "Nothing measured: all of it is assumed.")


@app.command()
def parity(
    *,
    model: Annotated[str, _help("deepseek_v3, deepseek_v4_hash, qwen3_moe, mixtral, ...")],
    against: Annotated[str, _help("Of transformers, torch, sglang.")] = "transformers,torch",
    tokens: Annotated[int, _help("Number of tokens.", min=1)] = 64,
    experts: Annotated[int, _help("Number of routed experts.", min=1)] = 16,
    hidden: Annotated[int, _help("Hidden size.", min=1)] = 256,
    intermediate: Annotated[int, _help("Intermediate size of an expert.", min=1)] = 128,
    top_k: Annotated[int, _help("Experts a token.", min=1)] = 4,
    recipe: str = "bf16",
    layout: str = "auto",
    backend: str = "auto",
    seed: int = 0,
    as_json: Json = False,
) -> None:
    """The layer against others' code, step by step, on random weights.

    Status 0: every step within its limit; 1: some are not; 2: nothing was compared, and why.
    """
    sides = against.split(",")
    try:
        import_module("transformers")
        harness = import_module("dgmoe_jax.interop.parity")
    except ImportError as missing:
        print(f"parity needs {missing.name}: pip install 'dgmoe_jax[parity]'", file=sys.stderr)
        raise typer.Exit(2) from None
    try:
        for side in sides:
            reason = harness.unavailable(side, recipe, layout=layout, backend=backend)
            if reason:
                raise NotImplementedError(f"against={side!r}: {reason}")
        case = harness.make_case(
            model,
            tokens=tokens,
            num_experts=experts,
            hidden=hidden,
            inner=intermediate,
            top_k=top_k,
            recipe=recipe,
            layout=layout,
            backend=backend,
            # SGLang's contiguous flow rounds the activation before it quantises.
            keep_fp32="sglang" not in sides,
            seed=seed,
        )
        lines = [line for side in sides for line in harness.compare(case, side)]
    except (ValueError, NotImplementedError) as problem:
        print(f"parity: {problem}", file=sys.stderr)
        raise typer.Exit(2) from None
    ok = all(line.ok for line in lines)
    if as_json:
        print(json.dumps([line.as_dict() for line in lines], indent=2))
        raise typer.Exit(not ok)
    table = Table(
        *("against", "step", "first difference: ours, theirs", "share", "largest", "relative"),
        *("limit", ""),
        title=f"{model}, {recipe}, {case.layer.cfg.activation}, on {jax.devices()[0].device_kind}",
    )
    for line in lines:
        limit = "same bits" if line.limit == 0 else f"{line.limit:.2g}"
        table.add_row(
            *(line.against, line.stage, line.first or "none", f"{line.differing:.2%}"),
            *(f"{line.max_abs:.3g}", f"{line.error:.2g}", limit),
            "[green]ok[/green]" if line.ok else "[red]differs[/red]",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    raise typer.Exit(not ok)


if __name__ == "__main__":
    app(prog_name="python -m dgmoe_jax")

"""Reads bench/*.jsonl: the README's tables, time against tokens and errors of recipes as plots."""

from __future__ import annotations

import json
from pathlib import Path

COLORS = {"fp8_block": "tab:blue", "bf16": "tab:orange"}
SHAPE = ("E", "k", "H", "I")
OURS = {"pallas": "ours", "deep_gemm": "DeepGEMM"}


def read(source: Path) -> list[dict]:
    """The file's lines."""
    return [json.loads(line) for line in source.read_text().splitlines() if line]


def fastest(records: list[dict]) -> dict[tuple, dict]:
    """(shape, recipe) -> T -> the fastest configuration's line, of each configuration the last."""
    last = {}
    for record in records:
        if record.get("bench") == "layer" and record.get("us"):
            key = [record[n] for n in (*SHAPE, "T", "recipe", "backend", "layout")]
            last[tuple(key)] = record
    found: dict[tuple, dict] = {}
    for record in sorted(last.values(), key=lambda record: -record["us"]):
        shape = (record.get("shape"), *(record[n] for n in SHAPE))
        found.setdefault((shape, record["recipe"]), {})[record["T"]] = record
    return found


def sglang_us(record: dict) -> float | None:
    """The control, where it is SGLang."""
    is_sglang = record.get("control", "").startswith("SGLang")
    return record.get("control_us") if is_sglang else None


def is_of_the_first_table(record: dict) -> bool:
    """Timed with too few layers in a program, before the masked layout, tiles and fused kernels."""
    return "layers" not in record


def table(records: list[dict], recipe: str) -> str:
    """Markdown: a row for each shape and number of tokens, times in us, the shorter one bold.

    A star marks lines of the first table.
    """

    def cell(us: float | None, bold: bool = False) -> str:
        return "-" if us is None else f"**{us:.0f}**" if bold else f"{us:.0f}"

    lines = [
        "| E, k, H, I | T | this layer | SGLang | ratio | floor | of floor | GEMM, layout"
        " | from Python | SGLang eager |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (shape, kind), at in fastest(records).items():
        if kind != recipe:
            continue
        name = f"{', '.join(map(str, shape[1:]))} ({shape[0]})"
        for tokens, record in sorted(at.items()):
            us, control = record["us"], sglang_us(record)
            row = [
                name,
                str(tokens),
                cell(us, control is not None and us <= control)
                + "\\*" * is_of_the_first_table(record),
                cell(control, control is not None and control < us),
                "-" if control is None else f"{us / control:.2f}",
                cell(record["floor_us"]),
                f"{100 * record['floor_us'] / us:.0f} %",
                f"{OURS.get(record['backend'], record['backend'])}, {record['layout']}",
                cell(record["one_call_us"]),
                cell(record.get("control_eager_us")),
            ]
            lines.append(f"| {' | '.join(row)} |")
            name = ""
    return "\n".join(lines)


def draw(source: Path, target: Path) -> None:
    """Write the PNG. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    found = fastest(read(source))
    if not found:
        raise ValueError(f"{source}: no timed layer in it")
    shapes = list(dict.fromkeys(shape for shape, _ in found))
    figure = Figure(figsize=(4.6 * len(shapes), 4.2), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for recipe, color in COLORS.items():
            points = sorted(found.get((shape, recipe), {}).items())
            for us, label, style in (
                (lambda r: r["us"], "dgmoe_jax", {"marker": "o", "lw": 1.8}),
                (sglang_us, "SGLang", {"marker": "s", "ls": "--", "lw": 1.2}),
                (lambda r: r["floor_us"], "floor", {"ls": ":", "lw": 1.2}),
            ):
                line = [(t, us(record)) for t, record in points if us(record)]
                if line:
                    axes.plot(
                        *zip(*line, strict=True), color=color, label=f"{label}, {recipe}", **style
                    )
        axes.set(yscale="log", xlabel="tokens", ylabel="µs per layer")
        axes.set_xscale("log", base=2)
        ticks = sorted({t for (s, _), at in found.items() if s == shape for t in at})
        axes.set_xticks(ticks, labels=list(map(str, ticks)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.4)))
        axes.set_title("{}: {} experts, top {}, {} x {}".format(*shape), fontsize=9)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.savefig(target, dpi=130)


def parallel_table(records: list[dict]) -> str:
    """Markdown: a row for each number of tokens a GPU, us, of the first line's shape, recipe and
    GPUs. Of all tokens on one GPU; then by dispatcher of the layer (times as fast), and of dispatch
    and combine alone, from start to start / by the profiler."""
    same = ("shape", "recipe", "gpus", "processes", "split", "chunks")
    kept = {
        (r["bench"], r["dispatch"], r["T"]): r
        for r in records
        if "us" in r and all(r[name] == records[0][name] for name in same)
    }
    ways = list(dict.fromkeys(way for _, way, _ in kept))
    lines = [f"| T a GPU | one GPU | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
    for tokens in sorted({t for *_, t in kept}):
        cells, one_gpu = [], "-"
        for way in ways:
            layer, alone = (kept.get((what, way, tokens), {}) for what in ("layer", "dispatch"))
            text = "-"
            if "speedup" in layer:
                text = f"{layer['us']:.0f} ({layer['speedup']:.2f}x)"
                one_gpu = f"{layer['one_gpu_us']:.0f}"
            if "device_us" in alone:
                text += f", {alone['us']:.0f} / {alone['device_us']:.0f}"
            cells.append(text)
        lines.append(f"| {' | '.join([str(tokens), one_gpu, *cells])} |")
    return "\n".join(lines)


def quantizers(records: list[dict]) -> dict[tuple, dict]:
    """(weights, recipe, arch, source) -> the last line of each."""
    keys = ("weights", "recipe", "arch", "source")
    return {tuple(r[k] for k in keys): r for r in records if r.get("bench") == "quantizers"}


def quantizers_table(records: list[dict]) -> str:
    """Markdown: a row for each recipe, architecture and source, errors in per cent by weights."""
    found = quantizers(records)
    kinds = list(dict.fromkeys(kind for kind, *_ in found))
    lines = [
        f"| recipe | on | weights come as | stored as | bits | {' | '.join(kinds)} | layer |",
        f"|{'---|' * (6 + len(kinds))}",
    ]
    for recipe, arch, source in dict.fromkeys(key[1:] for key in found):
        at = [found[kind, recipe, arch, source] for kind in kinds]
        stored = at[0]["format"] + (" UE8M0" if at[0]["ue8m0"] else "")
        errors = [f"{100 * r['relative_error']:.2f} %" for r in at]
        row = [recipe, arch, source, stored, f"{at[0]['bits']:.2f}", *errors]
        lines.append(f"| {' | '.join(row)} | {100 * at[0]['layer_error']:.2f} % |")
    return "\n".join(lines)


def draw_quantizers(source: Path, target: Path) -> None:
    """Write the PNG: relative and largest error of weights that are quantised. Needs matplotlib."""
    from matplotlib.figure import Figure

    found = {k: r for k, r in quantizers(read(source)).items() if k[3] == "bf16"}
    if not found:
        raise ValueError(f"{source}: no quantised weights in it")
    kinds = list(dict.fromkeys(kind for kind, *_ in found))
    runs = [run for run in dict.fromkeys(key[1:3] for key in found) if run[0] != "bf16"]
    figure = Figure(figsize=(11, 4), layout="constrained")
    quantities = (("relative_error", "relative error"), ("max_error", "largest error"))
    for axes, (quantity, label) in zip(figure.subplots(1, 2), quantities, strict=True):
        for i, kind in enumerate(kinds):
            values = [found[kind, *run, "bf16"][quantity] for run in runs]
            places = [place + (i - (len(kinds) - 1) / 2) * 0.25 for place in range(len(runs))]
            axes.bar(places, values, 0.25, label=kind.replace("_", " "))
        axes.set_xticks(range(len(runs)), labels=["\n".join(run) for run in runs], fontsize=8)
        axes.set(ylabel=f"{label} of weights")
        axes.grid(alpha=0.3, axis="y")
        axes.legend(fontsize=8)
    figure.savefig(target, dpi=130)

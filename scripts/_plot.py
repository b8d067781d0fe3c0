"""Draws bench/layer.jsonl: time against tokens, a panel per shape."""

from __future__ import annotations

import json
from pathlib import Path

COLORS = {"fp8_block": "tab:blue", "bf16": "tab:orange"}
SHAPE = ("E", "k", "H", "I")


def curves(records: list[dict]) -> dict[tuple, dict]:
    """(shape, recipe) -> T -> {"us", "floor_us", "control_us"}: of each configuration's last
    line the fastest; a control counts where it is SGLang."""
    last = {}
    for record in records:
        if record.get("bench") == "layer" and record.get("us"):
            key = [record[n] for n in (*SHAPE, "T", "recipe", "backend", "layout")]
            last[tuple(key)] = record
    found: dict[tuple, dict] = {}
    for record in last.values():
        shape = (record.get("shape"), *(record[n] for n in SHAPE))
        at = found.setdefault((shape, record["recipe"]), {}).setdefault(record["T"], {})
        times = {n: record[n] for n in ("us", "floor_us")}
        if record.get("control", "").startswith("SGLang"):
            times["control_us"] = record.get("control_us")
        for name, us in times.items():
            if us:
                at[name] = min(us, at.get(name, us))
    return found


def draw(source: Path, target: Path) -> None:
    """Write the PNG. Needs matplotlib."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    found = curves([json.loads(line) for line in source.read_text().splitlines() if line])
    if not found:
        raise ValueError(f"{source}: no timed layer in it")
    shapes = list(dict.fromkeys(shape for shape, _ in found))
    figure = Figure(figsize=(4.6 * len(shapes), 4.2), layout="constrained")
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        for recipe, color in COLORS.items():
            points = sorted(found.get((shape, recipe), {}).items())
            for name, label, style in (
                ("us", "dgmoe_jax", {"marker": "o", "lw": 1.8}),
                ("control_us", "SGLang", {"marker": "s", "ls": "--", "lw": 1.2}),
                ("floor_us", "floor", {"ls": ":", "lw": 1.2}),
            ):
                line = [(t, times[name]) for t, times in points if name in times]
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

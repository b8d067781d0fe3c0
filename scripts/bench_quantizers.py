"""What each recipe's weights cost in accuracy, on each architecture: writes JSONL. Runs on a CPU.

python scripts/bench_quantizers.py
python scripts/bench_quantizers.py --plot    # or --table: of what is in OUT
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path

import _bench
import _report
import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console

import dgmoe_jax as dg
from dgmoe_jax import reference
from dgmoe_jax.recipes import RECIPES, RUNS_ON

HIDDEN, INNER, TOKENS = 512, 1024, 256
ARCHS = ("sm90", "sm100")


def gaussian(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def heavy_tailed(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Student's t with 3 degrees of freedom."""
    return rng.standard_t(3, shape)


def outlier_channels(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Gaussian, with 1 % of the columns 20 times as large."""
    columns = np.where(rng.random(shape[-1]) < 0.01, 20.0, 1.0)
    return rng.standard_normal(shape) * columns


WEIGHTS = {f.__name__: f for f in (gaussian, heavy_tailed, outlier_channels)}


def weights_of(kind: str) -> dict[str, np.ndarray]:
    """w13 [1, 2I, H] and w2 [1, H, I] of one expert, in bf16's numbers, f32."""
    rng = np.random.default_rng(0)
    shapes = {"w13": (1, 2 * INNER, HIDDEN), "w2": (1, HIDDEN, INNER)}
    made = {name: WEIGHTS[kind](rng, shape) for name, shape in shapes.items()}
    made = {name: w / np.sqrt(np.mean(w**2) * w.shape[-1]) for name, w in made.items()}
    return {name: np.asarray(jnp.asarray(w, jnp.bfloat16), np.float32) for name, w in made.items()}


def encoded(weights: dict[str, np.ndarray], recipe: str) -> tuple[dict, dict]:
    """A checkpoint in the recipe's own format, and the numbers that it holds."""
    raw, numbers = {}, {}
    for name, w in weights.items():
        scaled = dg.quantize(jnp.asarray(w), RECIPES[recipe].weights)
        raw |= {name: scaled.values, f"{name}_scale": scaled.scales}
        numbers[name] = np.asarray(dg.dequantize(scaled))
    return raw, numbers


def errors(got: np.ndarray, want: np.ndarray) -> dict[str, float]:
    got, want = got.astype(np.float64), want.astype(np.float64)
    off = got - want
    return {
        "mse": float(np.mean(off**2)),
        "max_error": float(np.abs(off).max()),
        "relative_error": float(np.linalg.norm(off) / np.linalg.norm(want)),
    }


def measure(weights: dict[str, np.ndarray], recipe: str, arch: str, source: str) -> dict:
    """Of w2, and of the layer, against `source`: "bf16", the weights that are quantised here, or
    "checkpoint", the numbers of one in the recipe's own format."""
    raw = weights
    if source == "checkpoint":
        raw, weights = encoded(weights, recipe)
    gate = np.ones((1, HIDDEN), np.float32)
    cfg = dg.MoEConfig(1, HIDDEN, INNER, dg.RouterConfig(1), recipe=recipe, backend="xla")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "w13: converting|w2: converting")
        params = dg.prepare_params({"gate_weight": gate} | raw, cfg, arch=arch)
    w2 = params.experts.w2
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(w2))
    x = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN))
    x = jnp.asarray(x, jnp.bfloat16)
    y = jax.jit(dg.moe_layer, static_argnames="cfg")(x, params, cfg=cfg)
    nowhere = np.zeros((TOKENS, 1), np.int32), np.ones((TOKENS, 1))
    exact = reference.moe(np.asarray(x, np.float64), weights["w13"], weights["w2"], *nowhere)
    return {
        "bits": 8 * size / weights["w2"].size,
        **errors(np.asarray(dg.dequantize(w2)), weights["w2"]),
        "layer_error": errors(np.asarray(y), exact)["relative_error"],
    }


def main(
    plot: bool = False,
    table: bool = False,
    out: Path = Path("bench/quantizers.jsonl"),
) -> None:
    """A line for each kind of weights, recipe, architecture, and what the weights come as.

    --plot only draws OUT, as a PNG beside it, and --table only prints it, as the README has it.
    """
    if plot:
        _report.draw_quantizers(out, out.with_suffix(".png"))
        print(out.with_suffix(".png"))
        return
    if table:
        print(_report.quantizers_table(_report.read(out)))
        return
    console, env = Console(), _bench.environment()
    for kind, recipe in itertools.product(WEIGHTS, RECIPES):
        weights = weights_of(kind)
        for arch, source in itertools.product(ARCHS, ("bf16", "checkpoint")):
            if recipe == "bf16" and (arch, source) != (ARCHS[0], "bf16"):
                continue
            found = measure(weights, recipe, arch, source)
            stored = RUNS_ON[recipe][arch].operands.weights
            head = {"weights": kind, "recipe": recipe, "arch": arch, "source": source}
            head |= {"format": stored.name, "ue8m0": stored.ue8m0}
            _bench.append(out, {"bench": "quantizers", **env, **head, **found})
            shown = " ".join(f"{name} {value:.3g}" for name, value in found.items())
            console.print(*head.values(), shown, highlight=False)


if __name__ == "__main__":
    typer.run(main)

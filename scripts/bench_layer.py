"""Times the whole layer, router included: checks a few tokens first, then writes JSONL.

python scripts/bench_layer.py --shape deepseek_v3 --tokens 1,16,128 --recipe fp8_block
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

import _bench
import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

import dgmoe_jax as dg


@dataclass(frozen=True)
class Shape:
    E: int
    k: int
    H: int
    I: int  # noqa: E741
    tokens: tuple[int, ...]


SHAPES = {
    "deepseek_v3": Shape(256, 8, 7168, 2048, (1, 16, 128, 1024, 4096, 16384)),
    "deepseek_v3_ep8": Shape(32, 8, 7168, 2048, (128, 1024, 8192)),
    "qwen3_30b": Shape(128, 8, 2048, 768, (1, 64, 1024, 8192)),
    "tiny": Shape(8, 2, 256, 128, (1, 16)),
}


def random_params(cfg: dg.MoEConfig, key: jax.Array) -> dg.MoEParams:
    """Gaussian weights in the layer's formats, an expert at a time (no bf16 copy of all)."""
    fmt = dg.recipes.RECIPES[cfg.recipe].weights
    keys = jax.random.split(key, 3)

    def stack(key, n, k):
        def one(key):
            weight = jax.random.normal(key, (n, k), jnp.float32) * k**-0.5
            scaled = dg.quantize(weight.astype(jnp.bfloat16), fmt)
            return scaled.values, scaled.scales

        values, scales = jax.jit(lambda keys: jax.lax.map(one, keys))(
            jax.random.split(key, cfg.num_experts)
        )
        return dg.Scaled(values, scales, fmt)

    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    gate = jax.random.normal(keys[0], (cfg.num_experts, hidden)) * hidden**-0.5
    experts = dg.ExpertWeights(stack(keys[1], 2 * inner, hidden), stack(keys[2], hidden, inner))
    return dg.MoEParams(gate.astype(jnp.bfloat16), None, experts, None, None)


def check(y: jax.Array, x: jax.Array, params: dg.MoEParams, cfg: dg.MoEConfig) -> float:
    """Relative error of a few tokens against unquantised activations and dequantised weights."""
    some = np.unique(np.linspace(0, x.shape[0] - 1, 4).astype(int))
    logits = np.asarray(x[some], np.float64) @ np.asarray(params.gate_weight, np.float64).T
    routing = dg.route(jnp.asarray(logits, jnp.float32), cfg.router)

    matvec = functools.partial(jnp.dot, precision="highest")

    @jax.jit
    def expert(token, e, params):
        def weight(scaled):
            scales = None if scaled.scales is None else scaled.scales[e]
            return dg.dequantize(dg.Scaled(scaled.values[e], scales, scaled.format))

        gate, up = jnp.split(matvec(weight(params.experts.w13), token.astype(jnp.float32)), 2)
        return matvec(weight(params.experts.w2), gate * jax.nn.sigmoid(gate) * up)

    expected = np.zeros((some.size, cfg.hidden_size))
    for row, token in enumerate(some):
        for e, weight in zip(routing.topk_ids[row], routing.topk_weights[row], strict=True):
            expected[row] += float(weight) * np.asarray(expert(x[token], e, params))
    got = np.asarray(y[some], np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def floor_us(cfg: dg.MoEConfig, num_tokens: int, topk_ids: np.ndarray) -> float:
    """max(FLOPs / peak, bytes of the weights that this routing touches / copy rate)."""
    per_expert = 3 * cfg.hidden_size * cfg.intermediate_size
    flops = 2 * num_tokens * cfg.router.top_k * per_expert
    width = 2 if cfg.recipe == "bf16" else 1
    weight_bytes = np.unique(topk_ids).size * per_expert * width
    return max(flops / _bench.PEAK_FLOPS[cfg.recipe], weight_bytes / _bench.PEAK_BYTES) * 1e6


def layers_us(cfg: dg.MoEConfig, params: dg.MoEParams, num_tokens: int, layers: int) -> float:
    """Device time of one layer: `layers` of them on different tokens inside one program."""
    xs = jax.random.normal(jax.random.key(3), (layers, num_tokens, cfg.hidden_size), jnp.bfloat16)

    @jax.jit
    def run(xs, params):
        def step(carry, x):
            return carry, dg.moe_layer(x, params, cfg)

        return jax.lax.scan(step, 0, xs, unroll=min(4, layers))[1]

    return (
        _bench.median_us(lambda: run(xs, params), repeats=10 if num_tokens > 1024 else 20) / layers
    )


def bare_gemms_us(
    cfg: dg.MoEConfig, params: dg.MoEParams, num_tokens: int, ids: jax.Array
) -> float:
    """The control: the layer's two grouped GEMMs alone, by the same backend, in one program."""
    plan = dg.plan(cfg, num_tokens)
    index = dg.backends.get("permute_index", "xla")
    _, _, m_indices = index(
        ids, num_experts=cfg.num_experts, alignment=plan.alignment, rows=plan.rows
    )
    gemm = functools.partial(dg.backends.get("gemm", plan.backend), alignment=plan.alignment)
    fmt = dg.recipes.RECIPES[cfg.recipe].activations

    def operand(width, seed):
        x = jax.random.normal(jax.random.key(seed), (plan.rows, width), jnp.bfloat16)
        return dg.backends.get("quant", "xla")(x) if fmt.group else (x, None)

    a1, a2 = (
        jax.jit(operand, static_argnums=(0, 1))(cfg.hidden_size, 1),
        jax.jit(operand, static_argnums=(0, 1))(cfg.intermediate_size, 2),
    )
    repeats = 4

    @jax.jit
    def run(a1, a2, params, m_indices):
        w13, w2 = params.experts.w13, params.experts.w2
        outs = []
        for _ in range(repeats):
            # The barrier keeps XLA from computing one product for all repetitions.
            a1, a2, m_indices = jax.lax.optimization_barrier((a1, a2, m_indices))
            outs.append(gemm(*a1, w13.values, w13.scales, m_indices)[:1])
            outs.append(gemm(*a2, w2.values, w2.scales, m_indices)[:1])
        return outs

    return _bench.median_us(lambda: run(a1, a2, params, m_indices), repeats=10) / repeats


def measure(cfg: dg.MoEConfig, params: dg.MoEParams, num_tokens: int) -> dict:
    """Check, then time, one configuration at one number of tokens."""
    layer = jax.jit(dg.moe_layer, static_argnames="cfg")
    x = jax.random.normal(jax.random.key(num_tokens), (num_tokens, cfg.hidden_size), jnp.bfloat16)
    error = check(layer(x, params, cfg=cfg), x, params, cfg)
    low, high = (0.0, 0.006) if cfg.recipe == "bf16" else (0.04, 0.05)
    if not low <= error <= high:
        raise SystemExit(f"{cfg}, T={num_tokens}: relative error {error}, not timed")
    logits = jax.jit(dg.steps.route.router_logits)(x, params.gate_weight)
    ids = jax.jit(dg.route, static_argnums=1)(logits, cfg.router).topk_ids
    plan = dg.plan(cfg, num_tokens)
    memory = layer.lower(x, params, cfg=cfg).compile().memory_analysis()
    return {
        "backend": plan.backend,
        "layout": plan.layout,
        "alignment": plan.alignment,
        "us": layers_us(cfg, params, num_tokens, max(4, min(32, 2048 // num_tokens))),
        "one_call_us": _bench.median_us(functools.partial(layer, x, params, cfg=cfg)),
        "floor_us": floor_us(cfg, num_tokens, np.asarray(ids)),
        "control": "the layer's two grouped GEMMs alone, same run",
        "control_us": bare_gemms_us(cfg, params, num_tokens, ids),
        "error": error,
        "bytes_predicted": plan.workspace_bytes,
        "bytes_measured": memory.temp_size_in_bytes,
    }


def main(
    shape: str = "deepseek_v3,deepseek_v3_ep8,qwen3_30b",
    tokens: str = "",
    recipe: str = "fp8_block",
    backend: str = "auto",
    out: Path = Path("bench/layer.jsonl"),
) -> None:
    """Run every (shape, tokens, recipe, backend), each a comma-separated list; a line each."""
    console = Console()
    env = _bench.environment()
    copy = _bench.copy_bytes_per_s(2**32 if env["gpu"] != "cpu" else 2**26)
    columns = ("shape", "T", "recipe", "backend", "align", "us", "one call", "GEMMs", "floor", "%")
    table = Table(*columns, title=f"{env['gpu']}, copy {copy / 1e12:.2f} TB/s, times in us")
    for name, kind in itertools.product(shape.split(","), recipe.split(",")):
        s = SHAPES[name]
        base = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe=kind)
        params = random_params(base, jax.random.key(0))
        sizes = [int(t) for t in tokens.split(",")] if tokens else s.tokens
        for num_tokens, which in itertools.product(sizes, backend.split(",")):
            found = measure(replace(base, backend=which), params, num_tokens)
            record = {"bench": "layer", **env, "copy_bytes_per_s": copy, "shape": name}
            record |= {"E": s.E, "k": s.k, "H": s.H, "I": s.I, "T": num_tokens, "recipe": kind}
            _bench.append(out, record | found)
            times = [found[n] for n in ("us", "one_call_us", "control_us", "floor_us")]
            row = [name, num_tokens, kind, found["backend"], found["alignment"]]
            row += [f"{t:.0f}" for t in times] + [f"{100 * found['floor_us'] / found['us']:.0f}"]
            table.add_row(*map(str, row))
            console.print(*row, highlight=False)
        del params
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

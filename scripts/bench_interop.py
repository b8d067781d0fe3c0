"""What torch's users pay: hand-overs between torch and JAX, and TorchMoE beside the jitted layer.

python scripts/bench_interop.py --shape qwen3_30b --tokens 1,64,1024

Checks first, then times, and writes JSONL. A hand-over is the host's time of one call; a layer is
the wall time of one call until its result is ready, the same tokens and weights in both, and beside
it that of one of many calls in a row, as a model makes them, whose streams are busy.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

# torch takes its share of the device's memory beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import _bench
import jax
import numpy as np
import torch
import typer
from bench_layer import SHAPES, layer, random_params
from dgmoe_jax.interop import TorchMoE, to_jax, to_torch
from rich.console import Console
from rich.table import Table

import dgmoe_jax as dg

MOST_EXTRA_US = 30
IN_A_ROW = 32
DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def host_us(call: Callable[[], object], repeats: int = 1000) -> float:
    """Mean over many calls, of the fastest of some rounds: the host has other things to do."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append(time.perf_counter() - start)
        wait()
    return min(times[1:]) / repeats * 1e6


def until_ready_us(calls: dict[str, Callable[[], object]], repeats: int = 200) -> dict[str, float]:
    """Medians of calls that take turns, so that clocks and neighbours are the same for all."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeats + 10):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            result = call()
            if isinstance(result, jax.Array):
                result.block_until_ready()
            wait()
            if i >= 10:
                times[name].append(time.perf_counter() - start)
            del result  # not in the next one's time
    return {name: float(np.median(found)) * 1e6 for name, found in times.items()}


def in_a_row_us(calls: dict[str, Callable[[], object]], rounds: int = 30) -> dict[str, float]:
    """As `until_ready_us`, of `IN_A_ROW` calls, after which alone it waits; of one of them."""

    def many(call: Callable[[], object]) -> object:
        for _ in range(IN_A_ROW - 1):
            call()
        return call()

    found = until_ready_us(
        {name: functools.partial(many, call) for name, call in calls.items()}, rounds
    )
    return {name: us / IN_A_ROW for name, us in found.items()}


def hand_overs(num_tokens: int, hidden: int) -> dict[str, float]:
    tensor = torch.randn(num_tokens, hidden, device=DEVICE).bfloat16()
    array = jax.block_until_ready(to_jax(tensor, copy=True))
    if not torch.equal(to_torch(array), tensor):
        raise ValueError("a hand-over changed its values, not timed")
    return {
        "to_jax_us": host_us(lambda: to_jax(tensor)),
        "to_torch_us": host_us(lambda: to_torch(array)),
        "to_jax_copy_us": host_us(lambda: to_jax(tensor, copy=True), 100),
        "to_torch_copy_us": host_us(lambda: to_torch(array, copy=True), 100),
    }


def main(
    shape: str = "deepseek_v3,qwen3_30b",
    tokens: str = "1,64,1024",
    recipe: str = "fp8_block",
    out: Path = Path("bench/interop.jsonl"),
) -> None:
    """Every shape and number of tokens; status 1 if TorchMoE takes over 30 us more on a GPU."""
    unknown = set(shape.split(",")) - set(SHAPES)
    if unknown:
        raise typer.BadParameter(f"{sorted(unknown)}: known are {list(SHAPES)}")
    heads = ("shape", "T", "to_jax", "to_torch", "copies", "jitted", "TorchMoE", "more", "in a row")
    table, slow = Table(*heads, title=f"us, {DEVICE}"), 0
    for name in shape.split(","):
        s = SHAPES[name]
        cfg = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe=recipe)
        params = random_params(cfg, jax.random.key(0))
        module = TorchMoE(cfg, params)
        for num_tokens in map(int, tokens.split(",")):
            x = torch.randn(num_tokens, s.H, device=DEVICE).bfloat16()
            given = to_jax(x, copy=True)
            if not torch.equal(module(x), to_torch(layer(given, params, cfg=cfg))):
                raise ValueError("TorchMoE is not the layer bit for bit, not timed")
            found = hand_overs(num_tokens, s.H)
            both = {
                "jitted_us": functools.partial(layer, given, params, cfg=cfg),
                "module_us": functools.partial(module, x),
            }
            found |= until_ready_us(both)
            found["extra_us"] = found["module_us"] - found["jitted_us"]
            found |= {f"row_{name}": us for name, us in in_a_row_us(both).items()}
            slow += found["extra_us"] > MOST_EXTRA_US
            head = {"bench": "interop", **_bench.environment(), "shape": name, "recipe": recipe}
            head |= {"E": s.E, "k": s.k, "H": s.H, "I": s.I, "T": num_tokens}
            _bench.append(out, head | found)
            copies = f"{found['to_jax_copy_us']:.1f}, {found['to_torch_copy_us']:.1f}"
            times = [f"{found[f'{name}_us']:.1f}" for name in ("to_jax", "to_torch")]
            layers = [f"{found[f'{name}_us']:.1f}" for name in ("jitted", "module", "extra")]
            row = f"{found['row_jitted_us']:.1f}, {found['row_module_us']:.1f}"
            table.add_row(name, str(num_tokens), *times, copies, *layers, row)
    Console(width=120).print(table)
    raise typer.Exit(DEVICE == "cuda" and slow > 0)


if __name__ == "__main__":
    typer.run(main)

"""Times the one-sided exchange of rows beside lax.all_to_all: checks first, then writes JSONL.

python scripts/bench_exchange.py    # on a machine with two GPUs or more, one process
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import _bench
import _stages
import jax
import jax.numpy as jnp
import numpy as np
import typer
from dgmoe_jax.kernels_pallas import one_sided
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

ROWS = {"fp8": (7552, jnp.float8_e4m3fn), "bf16": (7168, jnp.bfloat16)}
"""The way in, 7168 values with their scales, expert ids and weights; the way back."""
EXPERTS, TOP_K = 256, 8
SPEC = PartitionSpec("x")


def sends(tokens: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """src2dst [ranks * tokens, ranks], counts [ranks * ranks] of tokens that go to every rank with
    one of their top-8 of 256 experts, capacity being `tokens`."""
    rng = np.random.default_rng(tokens)
    ids = np.argsort(rng.random((ranks * tokens, EXPERTS)), axis=1)[:, :TOP_K]
    peer = np.arange(ranks)
    wanted = (ids[:, :, None] // -(-EXPERTS // ranks) == peer).any(1)
    at = wanted.reshape(ranks, tokens, ranks).cumsum(1) - 1
    src2dst = np.where(wanted, peer * tokens + at.reshape(-1, ranks), -1)
    return src2dst.astype(np.int32), (at[:, -1] + 1).astype(np.int32).reshape(-1)


def slots(rows: np.ndarray, src2dst: np.ndarray, tokens: int) -> np.ndarray:
    """[ranks, ranks, tokens, W], from rank, for rank: what all_to_all moves; zeros in between."""
    ranks = src2dst.shape[1]
    out = np.zeros((ranks, ranks * tokens, rows.shape[1]), rows.dtype)
    for rank in range(ranks):
        here = slice(rank * tokens, (rank + 1) * tokens)
        n, j = np.nonzero(src2dst[here] >= 0)
        out[rank, src2dst[here][n, j]] = rows[here][n]
    return out.reshape(ranks, ranks, tokens, rows.shape[1])


def several(fn: Callable, mesh: Mesh) -> Callable:
    """A program of one call for each of its first argument's arrays, all results kept."""
    fn = jax.jit(fn)  # lowered once

    def run(each, *shared):
        return [fn(x, *shared) for x in each]

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False))


def device_us(run: Callable, calls: int) -> tuple[float, float]:
    """Time of a call's kernels on one GPU, waiting for the others included; how many they are."""
    kernels = _stages.stages(run, calls=5)
    share = calls * jax.device_count()
    return sum(k["us"] for k in kernels) / share, sum(k["launches"] for k in kernels) / share


def copied_bytes_per_s(devices: list[jax.Device], num_bytes: int = 2**32) -> float:
    """What the copy engines of two GPUs carry in each direction, both ways at once."""
    xs = [jax.device_put(jax.random.bits(jax.random.key(0), num_bytes // 4), d) for d in devices]

    def swap():
        return [jax.device_put(x, d) for x, d in zip(xs, reversed(devices), strict=True)]

    return num_bytes / _bench.median_us(swap, repeats=5) * 1e6


def main(
    tokens: str = "1,16,128,1024,8192",
    out: Path = Path("bench/exchange.jsonl"),
) -> None:
    """Check and time both exchanges over all GPUs of this process."""
    devices = jax.devices()
    if reason := one_sided.unavailable(devices):
        raise SystemExit(f"one_sided: {reason}")
    ranks, mesh = len(devices), Mesh(np.array(devices), ("x",))
    put = functools.partial(jax.device_put, device=NamedSharding(mesh, SPEC))
    env = _bench.environment() | {"gpus": ranks}
    columns = "rows", "T", "exchange", "us", "launches", "us from the host", "GB/s", "% of copies"
    copied = copied_bytes_per_s(devices[:2])
    _bench.append(out, {"bench": "copy", **env, "bytes_per_s": copied})
    table = Table(*columns, title=f"{ranks} x {env['gpu']}; copies: {copied / 1e9:.0f} GB/s")
    for num_tokens in map(int, tokens.split(",")):
        src2dst, counts = sends(num_tokens, ranks)
        by_rank = counts.reshape(ranks, ranks)
        remote = by_rank * ~np.eye(ranks, dtype=bool)  # what stays on a rank crosses no link
        calls = 20 if num_tokens <= 1024 else 4
        for name, (width, dtype) in ROWS.items():
            row_bytes = width * jnp.dtype(dtype).itemsize
            rng = np.random.default_rng(0)
            rows = rng.integers(0, 0x70, (ranks * num_tokens, row_bytes), np.uint8)  # no NaN
            rows = rows.view(jnp.dtype(dtype))
            given = slots(rows, src2dst, num_tokens)
            sent = np.arange(num_tokens) < by_rank[:, :, None]
            one = functools.partial(
                one_sided.exchange, axis_name="x", ranks=ranks, capacity=num_tokens
            )
            all_to_all = functools.partial(
                lax.all_to_all, axis_name="x", split_axis=0, concat_axis=0, tiled=True
            )
            exchanges = {
                "one_sided": (one, rows, src2dst, counts),
                "all_to_all": (all_to_all, given.reshape(-1, width)),
            }
            for exchange, (fn, each, *shared) in exchanges.items():
                # An array for each call, so that none is left out as another's twin.
                args = [jnp.copy(put(each)) for _ in range(calls)], *map(put, shared)
                run = functools.partial(several(fn, mesh), *args)
                for received in run():
                    got = np.asarray(received).view(np.uint8)
                    got = got.reshape(ranks, ranks, num_tokens, -1).swapaxes(0, 1)
                    if not np.array_equal(got[sent], given.view(np.uint8)[sent]):
                        raise SystemExit(f"{exchange}, {name}, T={num_tokens}: wrong, not timed")
                us, launches = device_us(run, calls)
                host_us = _bench.median_us(run) / calls
                num_bytes = int(max(remote.sum(0).max(), remote.sum(1).max())) * row_bytes
                rate = num_bytes / us * 1e6
                record = {"bench": "exchange", **env, "exchange": exchange, "rows": name}
                record |= {"T": num_tokens, "W": width, "E": EXPERTS, "k": TOP_K}
                record |= {"us": us, "launches": launches, "host_us": host_us}
                record |= {"bytes": num_bytes, "bytes_per_s": rate}
                _bench.append(out, record)
                cells = f"{us:.1f}", f"{launches:.3g}", f"{host_us:.1f}"
                cells += f"{rate / 1e9:.0f}", f"{100 * rate / copied:.0f}"
                table.add_row(name, str(num_tokens), exchange, *cells)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)

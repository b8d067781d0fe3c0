"""Times each Pallas kernel against the bytes it must move: checks first, then writes JSONL.

python scripts/bench_kernels.py --tokens 16384
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import _bench
import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from dgmoe_jax import backends, layouts
from dgmoe_jax.plan import alignment_for


@dataclass(frozen=True)
class Case:
    """One kernel on one input: `step` with `args` and static `kwargs`, moving `num_bytes`.

    `live` picks what is specified of the result (padding rows are not); `tolerance` is relative.
    """

    step: str
    args: tuple
    kwargs: dict
    num_bytes: int
    live: Callable = lambda out: out
    tolerance: float = 0.0


def size(*arrays) -> int:
    """Bytes of all arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def cases(tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> Iterator[Case]:
    """Every kernel of the layer at one size, on random data."""
    xla = functools.partial(backends.get, backend="xla")
    key = iter(jax.random.split(jax.random.key(0), 5))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(key), shape, dtype)

    logits = normal(tokens, experts, dtype=jnp.float32)
    bias = normal(experts, dtype=jnp.float32) * 0.1
    groups = 8 if experts % 8 == 0 and experts // 2 >= top_k else 1
    rule = dict(scoring="sigmoid", top_k=top_k, num_groups=groups, renormalize=True)
    rule["top_groups"] = -(-groups // 2)
    ids, weights = xla("route")(logits, bias, **rule)
    yield Case("route", (logits, bias), rule, size(logits, ids, weights), tolerance=1e-5)

    alignment = alignment_for(tokens * top_k / experts, "deep_gemm")
    rows = layouts.Contiguous(alignment).rows(tokens * top_k, experts)
    index = dict(num_experts=experts, alignment=alignment, rows=rows)
    src2dst, dst2src, m_indices = jax.jit(functools.partial(xla("permute_index"), **index))(ids)
    yield Case("permute_index", (ids,), index, size(ids, src2dst, dst2src, m_indices))

    live_rows = np.flatnonzero(np.asarray(m_indices) >= 0)
    real = live_rows.size

    def live(out):
        values, scales = out if isinstance(out, tuple) else (out, None)
        return values[live_rows], None if scales is None else scales[:, live_rows]

    x = normal(tokens, hidden)
    values, scales = jax.jit(xla("quant"))(x)
    # XLA's own division on a GPU is an ulp off now and then, which moves a value to its neighbour.
    yield Case(
        "quant",
        (x,),
        {},
        size(x, values, scales),
        lambda out: (out[0], out[1][:, :tokens]),
        tolerance=3e-3,
    )

    moved = size(values, scales) + real * (hidden + hidden // 32)
    yield Case("permute_rows", (values, scales, src2dst, dst2src), {}, moved, live)

    gateup = normal(rows, 2 * inner)
    silu = dict(activation="silu", params=(None,))
    # exp differs in the last bit between compilers, which moves a value to its neighbour.
    moved = real * (5 * inner + inner // 32)
    yield Case("act_quant", (gateup, m_indices), silu, moved, live, tolerance=3e-3)
    yield Case("act", (gateup, m_indices), silu, real * 6 * inner, live, tolerance=1e-3)

    out = normal(rows, hidden)
    moved = real * 2 * hidden + size(x)
    factor = dict(scaling_factor=2.5)
    yield Case("unpermute", (out, src2dst, weights, None), factor, moved, tolerance=1e-3)


def difference(got, want) -> float:
    """Largest relative (Frobenius) difference between corresponding arrays."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if not jnp.array_equal(a, b):
            worst = max(worst, float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)))
    return worst


def kernel_us(fn: Callable, args: tuple, repeats: int) -> float:
    """Device time of one call: `repeats` of them in one program."""

    @jax.jit
    def run(args):
        outs = []
        for _ in range(repeats):
            # The barrier keeps XLA from computing one result for all repetitions.
            args = jax.lax.optimization_barrier(args)
            outs.append(fn(*args))
        return outs

    return _bench.median_us(lambda: run(args), repeats=10) / repeats


def main(
    tokens: str = "16,1024,16384",
    experts: int = 256,
    top_k: int = 8,
    hidden: int = 7168,
    inner: int = 2048,
    backend: str = "pallas",
    only: str = "",
    repeats: int = 8,
    out: Path = Path("bench/kernels.jsonl"),
) -> None:
    """Check and time every kernel (or those in `only`), the xla backend beside it."""
    console = Console()
    env = _bench.environment()
    copy = _bench.copy_bytes_per_s(2**32 if env["gpu"] != "cpu" else 2**24)
    table = Table("kernel", "T", "us", "GB/s", "% of copy", "xla us", "difference")
    table.title = f"{env['gpu']}, copy {copy / 1e12:.2f} TB/s"
    for num_tokens in map(int, tokens.split(",")):
        for case in cases(num_tokens, experts, top_k, hidden, inner):
            if only and case.step not in only.split(","):
                continue
            fn, control = (
                functools.partial(backends.get(case.step, b), **case.kwargs)
                for b in (backend, "xla")
            )
            got, want = (case.live(jax.jit(f)(*case.args)) for f in (fn, control))
            differs = difference(got, want)
            del got, want
            if not differs <= case.tolerance:
                raise SystemExit(f"{case.step}, T={num_tokens}: differs by {differs}, not timed")
            us = kernel_us(fn, case.args, repeats)
            control_us = kernel_us(control, case.args, repeats)
            rate = case.num_bytes / us * 1e6
            record = {"bench": "kernel", **env, "kernel": case.step, "backend": backend}
            record |= {"T": num_tokens, "E": experts, "k": top_k, "H": hidden, "I": inner}
            record |= {"us": us, "bytes": case.num_bytes, "bytes_per_s": rate}
            record |= {"copy_bytes_per_s": copy, "control": "xla", "control_us": control_us}
            _bench.append(out, record)
            row = (
                f"{us:.1f}",
                f"{rate / 1e9:.0f}",
                f"{100 * rate / copy:.0f}",
                f"{control_us:.1f}",
            )
            table.add_row(case.step, str(num_tokens), *row, f"{differs:.1e}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

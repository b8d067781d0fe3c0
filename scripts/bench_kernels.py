"""Times each Pallas kernel against the bytes it must move: checks first, then writes JSONL.

python scripts/bench_kernels.py --tokens 16,1024,16384
python scripts/bench_kernels.py --tokens 16,8192 --only route,act_quant
python scripts/bench_kernels.py --tokens 1,16,64,128 --only fp4_gemm   # beside FP8; only if named
python scripts/bench_kernels.py --backend emulator --tokens 3 --experts 4 --top-k 2 --hidden 256 \\
    --inner 128 --out kernels.jsonl   # a dry run on a CPU
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import _bench
import _stages
import jax
import jax.numpy as jnp
import numpy as np
import typer
from dgmoe_jax.kernels_pallas.gemm import gemm, gemm_act_quant
from rich.console import Console
from rich.table import Table

from dgmoe_jax import backends, layouts
from dgmoe_jax.plan import tiling
from dgmoe_jax.weights import paths


@dataclass(frozen=True)
class Case:
    """One kernel on one input: `step` with `args` and static `kwargs`, moving `num_bytes`.

    `live` picks what is specified of the result (padding rows are not); `tolerance` is relative.
    `pair`: what is timed and its control, where they are not a step in two backends.
    """

    name: str
    args: tuple
    kwargs: dict
    num_bytes: int
    live: Callable = lambda out: out
    tolerance: float = 0.0
    pair: tuple[Callable, Callable] | None = None
    control: str = "xla"

    @property
    def step(self) -> str:
        return self.name.split()[0]


QUANTISED = {
    "": dict(group=128, ue8m0=False, packed=False),
    " packed": dict(group=128, ue8m0=True, packed=True),
    " 1x32": dict(group=32, ue8m0=False, packed=False),
    " 1x32 packed": dict(group=32, ue8m0=True, packed=True),
}
ACTIVATIONS = {
    "": ("silu", (None,)),
    " limit": ("silu", (10.0,)),
    " oai_swiglu": ("oai_swiglu", (1.702, 7.0)),
    " situ": ("situ", (4.0, 25.0)),
}


def quantised(width: int, *, group: int, ue8m0: bool, packed: bool) -> int:
    """Bytes of a quantised row and its scales."""
    groups = width // group
    return width + 4 * (-(-groups // 4) if packed else groups)


def size(*arrays) -> int:
    """Bytes of all arrays."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(arrays))


def cases(tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> Iterator[Case]:
    """Every kernel of the layer at one size, on random data."""
    xla = functools.partial(backends.get, backend="xla")
    key = iter(jax.random.split(jax.random.key(0), 10))

    def normal(*shape, dtype=jnp.bfloat16):
        return jax.random.normal(next(key), shape, dtype)

    logits = normal(tokens, experts, dtype=jnp.float32)
    bias = normal(experts, dtype=jnp.float32) * 0.1
    groups = 8 if experts % 8 == 0 and experts // 2 >= top_k else 1
    rule = dict(scoring="sigmoid", top_k=top_k, num_groups=groups, renormalize=True)
    rule["top_groups"] = -(-groups // 2)
    ids, weights = xla("route")(logits, bias, **rule)
    moved = size(logits, ids, weights)
    yield Case("route", (logits, bias), rule, moved, tolerance=1e-5)
    after = rule | dict(scoring="softmax_topk", num_groups=1, top_groups=1)
    yield Case("route softmax_topk", (logits, None), after, moved, tolerance=1e-5)
    table = jax.random.randint(next(key), (129280, top_k), 0, experts, jnp.int32)
    by_token = after | dict(scoring="sqrtsoftplus", hash_table=table)
    by_token["token_ids"] = jax.random.randint(next(key), (tokens,), 0, len(table), jnp.int32)
    yield Case("route hash", (logits, None), by_token, moved + size(ids), tolerance=1e-5)
    valid = jnp.arange(tokens) < max(1, tokens - 3)
    expert_map = jax.random.randint(next(key), (2, experts + 1), -1, 2 * experts, jnp.int32)
    mapped = rule | dict(valid=valid, expert_map=expert_map, fused_shared_experts=1)
    yield Case("route valid map shared", (logits, bias), mapped, moved, tolerance=1e-5)

    expected = tokens * top_k / experts
    alignment, tile, _ = tiling(expected, "deep_gemm", "fp8_block")
    capacity = -(-tokens // tile) * tile
    shared = dict(num_experts=experts, alignment=alignment, tile=tile)
    masked = dict(rows=experts * capacity, capacity=capacity, with_m_indices=False)
    yield Case("permute_index masked", (ids,), shared | masked, 2 * size(ids))
    rows = layouts.contiguous_rows(tokens * top_k, experts, alignment)
    index = shared | dict(rows=rows, capacity=None, with_m_indices=True)
    out = jax.jit(functools.partial(xla("permute_index"), **index))(ids)
    src2dst, tiles, m_indices, _ = out
    yield Case("permute_index", (ids,), index, size(ids, out))

    live_rows = np.flatnonzero(np.asarray(m_indices) >= 0)
    real = live_rows.size

    def live(out):
        values, scales = out if isinstance(out, tuple) else (out, None)
        return values[live_rows], None if scales is None else scales[:, live_rows]

    # XLA's own division on a GPU is an ulp off now and then, which moves a value to its neighbour.
    near = 3e-3
    x = normal(tokens, hidden)
    in_slab = dict(rows=rows, slabs=1)
    for name, rule in QUANTISED.items():
        written = quantised(hidden, **rule)
        moved = size(x) + tokens * written
        yield Case(
            f"quant{name}", (x,), rule, moved, lambda out: (out[0], out[1][:, :tokens]), near
        )
        moved = size(x) + real * written
        yield Case(f"permute{name}", (x, src2dst), in_slab | rule, moved, live, near)
        values, scales = xla("quant")(x, **rule)
        wire = jnp.pad(values, ((0, 0), (0, 256)))  # a row with metadata behind its values
        received = dict(scales=scales[:, :tokens].T, width=hidden)
        moved = (tokens + real) * written
        kwargs = in_slab | rule | received
        yield Case(f"permute moved{name}", (wire, src2dst), kwargs, moved, live)
    moved = size(x) + real * 2 * hidden
    unscaled = in_slab | dict(group=None, ue8m0=False)
    yield Case("permute bf16", (x, src2dst), unscaled, moved, live)

    gateup = normal(rows, 2 * inner)
    for activation, (kind, params) in ACTIVATIONS.items():
        act = dict(tile=tile, alignment=alignment, activation=kind, params=params)
        yield Case(f"act{activation}", (gateup, tiles), act, real * 6 * inner, live, 1e-3)
        # exp differs in the last bit between compilers, which moves a value to its neighbour.
        for name, rule in QUANTISED.items():
            moved = real * (4 * inner + quantised(inner, **rule))
            both = act | rule | dict(slabs=1)
            yield Case(f"act_quant{activation}{name}", (gateup, tiles), both, moved, live, near)

    out = normal(rows, hidden)
    moved = real * 2 * hidden + size(x)
    factor = dict(scaling_factor=2.5)
    yield Case("unpermute", (out, src2dst, weights, None), factor, moved, tolerance=1e-3)

    capacity = -(-tokens * top_k // experts)
    slabs = normal(experts, capacity, hidden).astype(jnp.float8_e4m3fn)
    scales = jnp.abs(normal(experts, capacity, hidden // 128, dtype=jnp.float32))
    masked_m, one = jnp.full(experts, capacity, jnp.int32), jnp.full(1, 0.37, jnp.float32)
    # Nobody donates the output here, so that it is copied first.
    moved = size(slabs, scales) + 3 * size(slabs)
    yield Case("requant", (slabs, scales, masked_m, one, slabs), {}, moved)


def fp4_gemm(tokens: int, experts: int, top_k: int, hidden: int, inner: int) -> Case:
    """w13 with its activation, and w2, from FP4 weights; the control reads the same as FP8.

    The bytes are those of the FP4 weights that this routing touches: where they fit the L2, calls
    one after the other find them there, unlike a layer among others.
    """
    alignment, tile, _ = tiling(tokens * top_k / experts, "pallas", "mxfp4")
    rows = layouts.contiguous_rows(tokens * top_k, experts, alignment)
    keys = jax.random.split(jax.random.key(0), 6)
    ids = jax.lax.top_k(jax.random.uniform(keys[0], (tokens, experts)), top_k)[1].astype(jnp.int32)
    index = dict(rows=rows, capacity=None, with_m_indices=True)
    index |= dict(num_experts=experts, alignment=alignment, tile=tile)
    permute_index = jax.jit(functools.partial(backends.get("permute_index", "xla"), **index))
    _, tiles, m_indices, _ = permute_index(ids)
    live_rows = np.flatnonzero(np.asarray(m_indices) >= 0)
    a = jax.random.normal(keys[1], (rows, hidden), jnp.bfloat16)
    a, a_scales = jax.jit(backends.get("quant", "xla"))(a)

    def weights(key, n, k):
        """As the two GEMMs read them: tiles and block FP8."""

        def one(key):
            values = jax.random.bits(key, (n, k // 2), jnp.uint8)
            scales = jnp.exp2(jax.random.randint(key, (n, k // 32), -9, -4).astype(jnp.float32))
            return paths.fp4_to_tiles(values, scales), paths.fp4_to_block_fp8(values, scales)

        return jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(key, experts))

    w13, w2 = weights(keys[2], 2 * inner, hidden), weights(keys[3], hidden, inner)
    how = dict(alignment=alignment, tile=tile, slabs=1, expected_m=-(-tokens * top_k // experts))
    how["interpret"] = jax.default_backend() != "gpu"

    def gemms(a, a_scales, w13, w2, tiles, which):
        act = dict(activation="silu", params=(None,))
        inner = gemm_act_quant(a, a_scales, *w13[which], tiles, **how, **act)
        return gemm(*inner, *w2[which], tiles, **how)

    touched = np.unique(np.asarray(ids)).size / experts
    return Case(
        "fp4_gemm",
        (a, a_scales, w13, w2, tiles),
        {},
        round(touched * size(w13[0], w2[0])),
        lambda out: out[live_rows],
        pair=tuple(functools.partial(gemms, which=which) for which in range(2)),
        control="fp8",
    )


def difference(got, want) -> float:
    """Largest relative (Frobenius) difference between corresponding arrays."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if not jnp.array_equal(a, b):
            worst = max(worst, float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)))
    return worst


def device_us(fn: Callable, args: tuple) -> tuple[float, float]:
    """Time of one call's kernels and how many there are; on a CPU wall time, and none."""
    run = jax.jit(fn)
    if jax.default_backend() != "gpu":
        return _bench.median_us(lambda: run(*args), repeats=3, warmups=1), 0
    kernels = _stages.stages(lambda: run(*args), calls=10)
    return sum(k["us"] for k in kernels), sum(k["launches"] for k in kernels)


def copy_us(num_bytes: int) -> float:
    """Time of a device copy that reads and writes `num_bytes` in all."""
    source = jax.random.bits(jax.random.key(0), (-(-num_bytes // 2),), jnp.uint8)
    return device_us(jnp.copy, (source,))[0]


def main(
    tokens: str = "16,1024,16384",
    experts: int = 256,
    top_k: int = 8,
    hidden: int = 7168,
    inner: int = 2048,
    backend: str = "pallas",
    only: str = "",
    out: Path = Path("bench/kernels.jsonl"),
) -> None:
    """Check and time every kernel; the xla backend and a copy beside it.

    `only`: names of cases, or of steps for all of theirs ("route,act_quant situ").
    """
    console = Console()
    env = _bench.environment()
    columns = "kernel", "T", "us", "launches", "GB/s", "% of copy", "control us", "difference"
    table = Table(*columns, title=env["gpu"])
    for num_tokens in map(int, tokens.split(",")):
        asked, sizes = set(only.split(",")), (num_tokens, experts, top_k, hidden, inner)
        narrow = (fp4_gemm(*sizes) for _ in {"fp4_gemm"} & asked)
        others = () if asked == {"fp4_gemm"} else cases(*sizes)
        for case in itertools.chain(others, narrow):
            if only and not {case.step, case.name} & asked:
                continue
            fn, control = case.pair or (
                functools.partial(backends.get(case.step, b), **case.kwargs)
                for b in (backend, "xla")
            )
            got, want = (case.live(jax.jit(f)(*case.args)) for f in (fn, control))
            differs = difference(got, want)
            del got, want
            if not differs <= case.tolerance:
                raise SystemExit(f"{case.name}, T={num_tokens}: differs by {differs}, not timed")
            us, launches = device_us(fn, case.args)
            control_us, copied_us = device_us(control, case.args)[0], copy_us(case.num_bytes)
            record = {"bench": "kernel", **env, "kernel": case.name, "backend": backend}
            record |= {"T": num_tokens, "E": experts, "k": top_k, "H": hidden, "I": inner}
            record |= {"us": us, "launches": launches, "bytes": case.num_bytes}
            record |= {"bytes_per_s": case.num_bytes / us * 1e6, "copy_us": copied_us}
            record |= {"control": case.control, "control_us": control_us}
            _bench.append(out, record)
            row = (
                f"{us:.1f}",
                f"{launches:.3g}",
                f"{case.num_bytes / us / 1e3:.0f}",
                f"{100 * copied_us / us:.0f}",
                f"{control_us:.1f}",
            )
            table.add_row(case.name, str(num_tokens), *row, f"{differs:.1e}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)

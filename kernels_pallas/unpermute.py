"""Combine: each token's expert rows, weighted and summed, scaled, plus shared experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import BF16, F32, I32, Registers, launch, own_index, pow2_floor, vector

THREADS = 128


def unpermute(
    rows: Array,
    src2dst: Array,
    topk_weights: Array,
    shared: Array | None,
    *,
    scaling_factor: float,
    interpret: bool = False,
) -> Array:
    """rows [M, H] bf16, src2dst [T, k] int32, topk_weights [T, k] f32, shared [T, H] bf16 or None
    -> [T, H] bf16: sum over slots, in order, of weight * row, times scaling_factor, plus shared.

    f32 with one rounding. A slot whose src2dst is -1 adds nothing, whatever any row holds. H is a
    multiple of 128. Raises ValueError for shapes or dtypes that do not fit.
    """
    t, k = src2dst.shape
    h = rows.shape[1]
    if rows.dtype != BF16 or h % THREADS:
        raise ValueError(
            f"rows is {rows.dtype}{list(rows.shape)}; it must be bf16 [M, H], H % 128 == 0"
        )
    if src2dst.dtype != I32 or topk_weights.shape != (t, k) or topk_weights.dtype != F32:
        raise ValueError(
            f"src2dst is {src2dst.dtype}{list(src2dst.shape)} and topk_weights "
            f"{topk_weights.dtype}{list(topk_weights.shape)}; they must be int32 and f32 [T, k]"
        )
    if shared is not None and (shared.shape != (t, h) or shared.dtype != BF16):
        raise ValueError(
            f"shared is {shared.dtype}{list(shared.shape)}; it must be bf16 [{t}, {h}]"
        )
    if t == 0 or rows.shape[0] == 0:
        return jnp.zeros((t, h), BF16) if shared is None else shared
    regs = Registers(interpret)
    # 16 bytes a thread where H allows; the last chunk overlaps the one before it.
    vec = min(8, pow2_floor(h // THREADS))
    chunk = vec * THREADS
    layout = vector(chunk, vec)
    chunks = pl.cdiv(h, chunk)

    def combine(rows_ref, src2dst_ref, weights_ref, *refs):
        *shared_ref, out_ref = refs
        block = own_index("b")
        token = lax.div(block, chunks)
        columns = pl.ds(jnp.minimum(lax.rem(block, chunks) * chunk, h - chunk), chunk)
        dst = [src2dst_ref[token, j] for j in range(k)]
        weights = [weights_ref[token, j] for j in range(k)]
        # Every load is issued before the first use; slots without a row read row 0 and drop it.
        loaded = [regs.load(rows_ref.at[jnp.maximum(d, 0), columns], layout) for d in dst]
        if shared_ref:
            base = regs.load(shared_ref[0].at[token, columns], layout)
        total = jnp.zeros((chunk,), F32)
        for d, weight, row in zip(dst, weights, loaded, strict=True):
            total = jnp.where(d >= 0, total + weight * row.astype(F32), total)
        total = total * scaling_factor
        if shared_ref:
            total = total + base.astype(F32)
        out_ref[token, columns] = total.astype(BF16)

    operands = (rows, src2dst, topk_weights, *(() if shared is None else (shared,)))
    return launch(
        combine,
        jax.ShapeDtypeStruct((t, h), BF16),
        grid={"b": t * chunks},  # One dimension: others end at 65535.
        interpret=interpret,
        barriers=False,
    )(*operands)

"""Tokens' rows into the experts' order and format, and rows that need no moving."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from dgmoe_jax import backends
from dgmoe_jax.plan import Plan
from dgmoe_jax.recipes import Format
from dgmoe_jax.types import Rows


def permute(
    x: Array,
    topk_ids: Array,
    fmt: Format,
    num_experts: int,
    plan: Plan,
    *,
    scales: Array | None = None,
    width: int | None = None,
) -> tuple[Rows, Array]:
    """x [T, W], topk_ids [T, k] -> Rows of `width` in `fmt`, and src2dst [T, k] (-1: no row).

    x is bf16, or in `fmt` where it has `scales` [T, G]; its first `width` columns (None: all) are
    values.
    """
    contiguous = plan.layout == "contiguous"
    src2dst, tiles, m_indices, masked_m = backends.get("permute_index", plan.backend)(
        topk_ids,
        num_experts=num_experts,
        rows=plan.rows,
        alignment=plan.alignment,
        capacity=None if contiguous else plan.capacity,
        tile=plan.tile,
        with_m_indices=contiguous and plan.backend in ("deep_gemm", "emulator"),
    )
    values, scales = backends.get("permute", plan.backend)(
        x,
        src2dst,
        rows=plan.rows,
        slabs=plan.slabs,
        scales=scales,
        width=width,
        **fmt.scaling,
    )
    return Rows(values, scales, tiles, m_indices, masked_m), src2dst


def in_place(x: Array, fmt: Format, plan: Plan, *, scales: Array | None = None) -> Rows:
    """x [T, K] -> all of its rows in `fmt`, for one expert: what shared experts read.

    x is bf16, or in `fmt` where it has `scales` [T, G]. `plan.rows` of them: those past T are
    padding.
    """
    count = x.shape[0]
    x = jnp.pad(x, ((0, plan.rows - count), (0, 0)))
    if scales is not None:
        scales = jnp.pad(scales, ((0, -(-plan.rows // 4) * 4 - count), (0, 0))).T
    elif fmt.group is not None:
        quant = backends.get("quant", plan.backend)
        x, scales = quant(x, **fmt.scaling)
    first = np.arange(0, count, plan.tile, dtype=np.int32)
    tiles = np.stack([np.zeros_like(first), first, np.minimum(plan.tile, count - first)])
    return Rows(x, scales, jnp.asarray(tiles), jnp.zeros(plan.rows, jnp.int32), None)

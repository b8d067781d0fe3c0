"""Tokens' rows into the experts' order."""

from __future__ import annotations

from jax import Array

from dgmoe_jax import backends
from dgmoe_jax.plan import Plan
from dgmoe_jax.types import Rows


def permute(
    values: Array, scales: Array | None, topk_ids: Array, num_experts: int, plan: Plan
) -> tuple[Rows, Array]:
    """values [T, K], scales [G, T4], topk_ids [T, k] -> Rows and src2dst [T, k] (-1: no row)."""
    src2dst, dst2src, m_indices = backends.get("permute_index", plan.backend)(
        topk_ids, num_experts=num_experts, alignment=plan.alignment, rows=plan.rows
    )
    values, scales = backends.get("permute_rows", plan.backend)(values, scales, src2dst, dst2src)
    return Rows(values, scales, m_indices), src2dst

"""Experts' rows back into token order."""

from __future__ import annotations

from jax import Array

from dgmoe_jax import backends


def unpermute(
    rows: Array,
    src2dst: Array,
    topk_weights: Array,
    shared: Array | None,
    scaling_factor: float,
    backend: str,
) -> Array:
    """rows [M, H], src2dst and topk_weights [T, k], shared [T, H] or None -> [T, H] bf16."""
    return backends.get("unpermute", backend)(
        rows, src2dst, topk_weights, shared, scaling_factor=scaling_factor
    )

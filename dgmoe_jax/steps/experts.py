"""The experts themselves: w13, activation, w2 on rows that already lie in expert order."""

from __future__ import annotations

from jax import Array

from dgmoe_jax import backends
from dgmoe_jax.config import Activation
from dgmoe_jax.recipes import Format
from dgmoe_jax.types import ExpertWeights, Rows, Scaled


def _gemm(rows: Rows, weights: Scaled, alignment: int, backend: str) -> Array:
    return backends.get("gemm", backend)(
        rows.values,
        rows.scales,
        weights.values,
        weights.scales,
        rows.m_indices,
        alignment=alignment,
    )


def _activate(gateup: Array, m_indices: Array, activation: Activation, fmt: Format, backend: str):
    kind, params = activation.params()
    if fmt.group is None:
        act = backends.get("act", backend)
        return act(gateup, m_indices, activation=kind, params=params), None
    return backends.get("act_quant", backend)(
        gateup, m_indices, activation=kind, params=params, group=fmt.group[1], ue8m0=fmt.ue8m0
    )


def experts(
    rows: Rows,
    weights: ExpertWeights,
    activation: Activation,
    fmt: Format,
    alignment: int,
    backend: str,
) -> Array:
    """Rows of width H -> [M, H] bf16: w2 . activation(w13 . row), the activation kept in `fmt`."""
    gateup = _gemm(rows, weights.w13, alignment, backend)
    values, scales = _activate(gateup, rows.m_indices, activation, fmt, backend)
    return _gemm(Rows(values, scales, rows.m_indices), weights.w2, alignment, backend)

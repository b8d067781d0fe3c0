"""The experts themselves: w13, activation, w2 on rows that already lie in expert order."""

from __future__ import annotations

from dataclasses import replace

from jax import Array

from dgmoe_jax import backends
from dgmoe_jax.config import Activation
from dgmoe_jax.plan import Plan
from dgmoe_jax.recipes import Format
from dgmoe_jax.types import ExpertWeights, Rows, Scaled


def _operands(rows: Rows, weights: Scaled) -> tuple:
    return (
        *(rows.values, rows.scales, weights.values, weights.scales),
        *(rows.tiles, rows.m_indices, rows.masked_m),
    )


def _how(fmt: Format, weights: Scaled, plan: Plan) -> dict[str, object]:
    return dict(
        alignment=plan.alignment,
        tile=plan.tile,
        slabs=plan.slabs,
        expected_m=plan.expected_m,
        recipe_a=fmt.shares,
        recipe_b=weights.format.shares,
    )


def gemm(rows: Rows, weights: Scaled, fmt: Format, plan: Plan) -> Array:
    """Rows of width K in `fmt`, weights [E, N, K] -> [M, N] bf16."""
    return backends.get("gemm", plan.backend)(*_operands(rows, weights), **_how(fmt, weights, plan))


def activate(gateup: Array, rows: Rows, activation: Activation, fmt: Format, plan: Plan) -> Rows:
    """gateup [M, 2I] bf16, where `rows` lie -> Rows of width I in `fmt`."""
    kind, params = activation.params()
    rule = dict(tile=plan.tile, alignment=plan.alignment, activation=kind, params=params)
    if fmt.group is None:
        values = backends.get("act", plan.backend)(gateup, rows.tiles, **rule)
        return replace(rows, values=values)
    rule |= dict(slabs=plan.slabs, keep_fp32=activation.keep_fp32, **fmt.scaling)
    values, scales = backends.get("act_quant", plan.backend)(gateup, rows.tiles, **rule)
    return replace(rows, values=values, scales=scales)


def _gemm_and_activate(
    rows: Rows, weights: Scaled, activation: Activation, fmt: Format, plan: Plan
) -> Rows:
    """Both in one kernel, the same bits."""
    kind, params = activation.params()
    values, scales = backends.get("gemm_act_quant", plan.backend)(
        *_operands(rows, weights),
        **_how(fmt, weights, plan),
        activation=kind,
        params=params,
        keep_fp32=activation.keep_fp32,
        **fmt.scaling,
    )
    return replace(rows, values=values, scales=scales)


def experts(
    rows: Rows, weights: ExpertWeights, activation: Activation, fmt: Format, plan: Plan
) -> Array:
    """Rows of width H -> [M, H] bf16: w2 . activation(w13 . row), the activation kept in `fmt`."""
    if plan.fused:
        inner = _gemm_and_activate(rows, weights.w13, activation, fmt, plan)
    else:
        inner = activate(gemm(rows, weights.w13, fmt, plan), rows, activation, fmt, plan)
    return gemm(inner, weights.w2, fmt, plan)

"""Activations into the recipe's format."""

from __future__ import annotations

from jax import Array

from dgmoe_jax import backends
from dgmoe_jax.recipes import Format


def encode(x: Array, fmt: Format, backend: str) -> tuple[Array, Array | None]:
    """x [M, K] bf16 -> values [M, K], MN-major scales [K / group, M4]; unscaled: x and None."""
    if fmt.group is None:
        return x, None
    return backends.get("quant", backend)(x, group=fmt.group[1], ue8m0=fmt.ue8m0)

"""What JAX's transformations need to be told."""

from __future__ import annotations

import jax
from jax import Array


@jax.custom_jvp
def not_differentiable(tree):
    """`tree` itself; differentiating through it raises NotImplementedError.

    Integer views and kernels have no derivative here, and JAX would call that a zero gradient.
    """
    return tree


@not_differentiable.defjvp
def _refuse_derivative(primals, tangents):
    raise NotImplementedError("moe_layer has no derivative: inference only; use stop_gradient")


def vary_alike(*arrays: Array) -> list[Array]:
    """The arrays, all varying over the same mesh axes, as loops and FFI calls in shard_map want."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if union - axes else x
        for x, axes in zip(arrays, varying, strict=True)
    ]

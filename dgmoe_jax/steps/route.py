"""Router: logits, then each token's experts and weights."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from dgmoe_jax import backends
from dgmoe_jax.config import RouterConfig
from dgmoe_jax.types import Routing


def router_logits(x: Array, gate_weight: Array) -> Array:
    """x [T, H] bf16, gate_weight [E, H] bf16 or f32 -> logits [T, E] f32.

    Products of the given inputs, accumulated in f32: bf16 operands multiply exactly; an f32
    weight takes full f32 products (TF32 would flip close choices).
    """
    dtype = jnp.promote_types(x.dtype, gate_weight.dtype)
    return lax.dot_general(
        x.astype(dtype),
        gate_weight.astype(dtype),
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def select(logits: Array, bias: Array | None, router: RouterConfig, backend: str) -> Routing:
    """logits [T, E] f32 -> each token's `top_k` experts by score (+ bias)."""
    if router.selection == "hash":
        raise NotImplementedError("selection='hash' does not run yet; 'scores' does")
    topk_ids, topk_weights = backends.get("route", backend)(
        logits,
        bias,
        scoring=router.scoring,
        top_k=router.top_k,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        renormalize=router.renormalize,
    )
    return Routing(topk_ids, topk_weights)


def drop_padding(routing: Routing, valid: Array | None) -> Routing:
    """Tokens that are not `valid` [T] go to no expert."""
    if valid is None:
        return routing
    return Routing(
        jnp.where(valid[:, None], routing.topk_ids, -1),
        jnp.where(valid[:, None], routing.topk_weights, 0.0),
    )

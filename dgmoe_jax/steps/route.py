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


def select(
    logits: Array,
    bias: Array | None,
    router: RouterConfig,
    backend: str,
    *,
    token_ids: Array | None = None,
    hash_table: Array | None = None,
    valid: Array | None = None,
    expert_map: Array | None = None,
) -> Routing:
    """logits [T, E] f32 -> each token's experts by score (+ bias) or by token id, in one kernel."""
    by_hash = router.selection == "hash"
    weight = router.shared_weight
    if router.fused_shared_experts and weight is None:
        weight = 1.0 / router.scaling_factor
    topk_ids, topk_weights = backends.get("route", backend)(
        logits,
        None if by_hash else bias,
        scoring=router.scoring,
        top_k=router.top_k,
        num_groups=router.num_groups,
        top_groups=router.top_groups,
        renormalize=router.renormalize,
        token_ids=token_ids if by_hash else None,
        hash_table=hash_table if by_hash else None,
        valid=valid,
        expert_map=expert_map,
        fused_shared_experts=router.fused_shared_experts,
        shared_weight=weight,
    )
    return Routing(topk_ids, topk_weights)


def drop_repeats(routing: Routing) -> tuple[Routing, Array]:
    """Tokens that name an expert twice go to none; also which they are, [T] bool."""
    ids = jnp.sort(routing.topk_ids, axis=1)
    broken = jnp.any((ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0), axis=1)
    kept = jnp.where(broken[:, None], -1, routing.topk_ids)
    return Routing(kept, routing.topk_weights), broken


def drop_padding(routing: Routing, valid: Array | None) -> Routing:
    """Tokens that are not `valid` [T] go to no expert, in a routing that the caller brings."""
    if valid is None:
        return routing
    return Routing(
        jnp.where(valid[:, None], routing.topk_ids, -1),
        jnp.where(valid[:, None], routing.topk_weights, 0.0),
    )

"""The layer: its steps, in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dgmoe_jax import backends, checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.plan import Plan, dense
from dgmoe_jax.plan import plan as make_plan
from dgmoe_jax.recipes import padded, run_of
from dgmoe_jax.steps import experts, permute, unpermute
from dgmoe_jax.steps import route as routing_step
from dgmoe_jax.tracing import not_differentiable
from dgmoe_jax.types import MoEParams, Routing


def moe_layer(
    x: Array,
    params: MoEParams,
    cfg: MoEConfig,
    *,
    routing: Routing | None = None,
    token_ids: Array | None = None,
    valid: Array | None = None,
    plan: Plan | None = None,
) -> Array:
    """The mixture-of-experts layer on one device, one XLA program under `jax.jit`.

    Args:
      x: [T, H] bf16 tokens; T = 0 is legal.
      params: from `prepare_params(raw, cfg)`.
      cfg: the layer; static under jit (`static_argnames="cfg"`).
      routing: overrides the router; any k, ids in [0, E) or -1 (contributes zero), weights
        without the scaling factor. The same expert twice in a row counts twice. Fused shared
        experts are E, E + 1, ... and take part where it names them.
      token_ids: [T] int32, for hash selection; otherwise not read. A token outside the table goes
        to no routed expert.
      valid: [T] bool; tokens marked False go to no expert and their rows of y are zero.
      plan: overrides `dgmoe_jax.plan(cfg, T)`, its backend and layout included. With a routing
        whose ids are distinct within a token, `plan(cfg, T, top_k=k, distinct_ids=True)` has
        slabs of T rows instead of T * k; a token that breaks this promise gets NaN, and no other.

    Returns:
      y [T, H] bf16: scaling_factor * sum over slots of weight * expert(x), accumulated in f32 in
      slot order, plus the shared experts, rounded once. A shared expert's gate (Qwen2-MoE) weighs
      its output by sigmoid(x . shared_gate_weight), in f32.

    Raises:
      ValueError, TypeError: arrays that do not fit `cfg`.
      NotImplementedError: a recipe, layout or backend that this device does not run; a derivative.
    """
    checks.instance("cfg", cfg, MoEConfig, "")
    checks.instance("params", params, MoEParams, "from prepare_params(raw, cfg)")
    checks.tokens(x, cfg.hidden_size)
    num_tokens = x.shape[0]
    checks.valid(valid, num_tokens)
    if routing is not None:
        checks.instance("routing", routing, Routing, "of topk_ids and topk_weights")
        checks.routing(routing.topk_ids, routing.topk_weights, num_tokens)
    elif cfg.router.selection == "hash":
        checks.hash_lookup(token_ids, params.hash_table, num_tokens, cfg.router.top_k)
    top_k = cfg.router.num_slots if routing is None else routing.topk_ids.shape[1]
    num_experts = cfg.as_grouped().num_experts
    checks.params(params, cfg)
    # A routing of the caller's or a hash table may name an expert twice in a row.
    distinct = routing is None and cfg.router.selection == "scores"
    if plan is None:
        plan = make_plan(cfg, num_tokens, top_k=top_k, distinct_ids=None if distinct else False)
    checks.instance("plan", plan, Plan, "from dgmoe_jax.plan(cfg, T)")
    checks.plan(plan, num_experts, num_tokens, top_k, distinct)
    if num_tokens == 0:
        return jnp.zeros_like(x)
    fmt = run_of(cfg.recipe, params.experts.w13.format).operands.activations
    backend = plan.backend
    checks.readable(params, cfg, backend)
    x, params, routing = not_differentiable((x, params, routing))
    x = backends.only_where_it_runs(x, backend)

    promised = not distinct and plan.layout == "masked" and plan.capacity < num_tokens * top_k
    shared_gate = None
    if params.shared_gate_weight is not None:
        shared_gate = jax.nn.sigmoid(routing_step.router_logits(x, params.shared_gate_weight))
    if routing is None:
        logits = routing_step.router_logits(x, params.gate_weight)
        routing = routing_step.select(
            logits,
            params.gate_bias,
            cfg.router,
            backend,
            token_ids=token_ids,
            hash_table=params.hash_table,
            valid=valid,
        )
    else:
        routing = routing_step.drop_padding(routing, valid)
    if cfg.router.fused_shared_experts and shared_gate is not None:
        fused = routing.topk_ids >= cfg.num_experts
        weights = routing.topk_weights * jnp.where(fused, shared_gate, 1.0)
        routing = Routing(routing.topk_ids, weights)
    if promised:
        routing, broken = routing_step.drop_repeats(routing)

    x = jnp.pad(x, ((0, 0), (0, padded(cfg.hidden_size) - cfg.hidden_size)))
    rows, src2dst = permute.permute(x, routing.topk_ids, fmt, num_experts, plan)
    routed = experts.experts(rows, params.experts, cfg.activation, fmt, plan)
    shared = None
    if params.shared is not None:
        alone = dense(plan, num_tokens, cfg.recipe)
        every_row = permute.in_place(x, fmt, alone)
        shared = experts.experts(every_row, params.shared, cfg.activation, fmt, alone)[:num_tokens]
        if shared_gate is not None:
            shared = (shared.astype(jnp.float32) * shared_gate).astype(shared.dtype)
    y = unpermute.unpermute(
        routed, src2dst, routing.topk_weights, shared, cfg.router.scaling_factor, backend
    )
    y = y[:, : cfg.hidden_size]
    if promised:
        y = jnp.where(broken[:, None], jnp.nan, y)
    return y if valid is None else jnp.where(valid[:, None], y, 0)

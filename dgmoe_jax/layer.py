"""The layer: its steps, in order."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dgmoe_jax import backends, checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.parallel import ALONE, Parallel, Ranks, gather, own_slice, reduce
from dgmoe_jax.plan import Plan, decide, dense
from dgmoe_jax.recipes import Format, padded, run_of
from dgmoe_jax.routing import expert_counts
from dgmoe_jax.steps import dispatch, experts, permute
from dgmoe_jax.steps import route as routing_step
from dgmoe_jax.tracing import not_differentiable
from dgmoe_jax.types import MoEParams, Routing, Stats


def moe_layer(
    x: Array,
    params: MoEParams,
    cfg: MoEConfig,
    *,
    routing: Routing | None = None,
    token_ids: Array | None = None,
    valid: Array | None = None,
    plan: Plan | None = None,
    parallel: Parallel = ALONE,
    stats: bool = False,
) -> Array | tuple[Array, Stats]:
    """The mixture-of-experts layer, one XLA program under `jax.jit`.

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
      parallel: how axes of the surrounding `shard_map` split the layer. x, routing, token_ids and
        valid are then this rank's, params its part of what `shard_params` made.
      stats: also return `Stats`.

    Returns:
      y [T, H] bf16: scaling_factor * sum over slots of weight * expert(x), accumulated in f32 in
      slot order, plus the shared experts, rounded once. A shared expert's gate (Qwen2-MoE) weighs
      its output by sigmoid(x . shared_gate_weight), in f32. What ranks add up, each has rounded to
      bf16 before.

    Raises:
      ValueError, TypeError: arrays that do not fit `cfg`.
      NotImplementedError: a recipe, layout or backend that this device does not run; a derivative.
    """
    checks.instance("cfg", cfg, MoEConfig, "")
    checks.instance("params", params, MoEParams, "from prepare_params(raw, cfg)")
    checks.instance("parallel", parallel, Parallel, "that names mesh axes")
    checks.tokens(x, cfg.hidden_size)
    num_tokens = checks.count("num_tokens", x.shape[0], 0)
    checks.valid(valid, num_tokens)
    if routing is not None:
        checks.instance("routing", routing, Routing, "of topk_ids and topk_weights")
        checks.routing(routing.topk_ids, routing.topk_weights, num_tokens)
    elif cfg.router.selection == "hash":
        checks.hash_lookup(token_ids, params.hash_table, num_tokens, cfg.router.top_k)
    else:
        token_ids = None
    ranks = Ranks.of(cfg, parallel, params.experts.w13.format)
    checks.params(params, cfg, ranks.share)
    if parallel.capacity_factor is not None and not (stats or parallel.strict):
        raise ValueError(
            f"Parallel.capacity_factor={parallel.capacity_factor}: rows may be lost; ask for their"
            " number with stats=True, or for NaN with strict=True"
        )
    x, params, routing = not_differentiable((x, params, routing))
    tokens = (x, routing, token_ids, valid)
    if parallel.sliced:
        if num_tokens % ranks.share.ep and valid is None:
            tokens = (*tokens[:3], jnp.ones(num_tokens, bool))
        tokens = jax.tree.map(partial(own_slice, axis=parallel.ep), tokens)
    run = partial(_sent_at_once, params=params, cfg=cfg, plan=plan, ranks=ranks)
    pieces, found = zip(*(run(*piece) for piece in _cut(tokens, parallel.chunks)), strict=True)
    y = jnp.concatenate(pieces)
    if parallel.sliced:
        y = gather(y, (parallel.ep,), "invarying")[:num_tokens]
    return (y, jax.tree.map(lambda *parts: sum(parts), *found)) if stats else y


def _cut(tokens: tuple, chunks: int) -> list[tuple]:
    """Arrays of T rows in at most so many pieces, nearly equal and none of them empty."""
    count = tokens[0].shape[0]
    ends = sorted({count * i // chunks for i in range(chunks + 1)})
    if len(ends) <= 2:
        return [tokens]
    return [jax.tree.map(lambda a: a[i:j], tokens) for i, j in itertools.pairwise(ends)]  # noqa: B023


def _sent_at_once(
    x: Array,
    routing: Routing | None,
    token_ids: Array | None,
    valid: Array | None,
    *,
    params: MoEParams,
    cfg: MoEConfig,
    plan: Plan | None,
    ranks: Ranks,
) -> tuple[Array, Stats]:
    """`moe_layer` of checked arguments, all tokens in one exchange."""
    num_tokens, parallel, part = x.shape[0], ranks.parallel, ranks.share
    grouped = cfg.as_grouped()
    top_k = grouped.router.top_k if routing is None else routing.topk_ids.shape[1]
    # A routing of the caller's or a hash table may name an expert twice in a row.
    distinct = routing is None and cfg.router.selection == "scores"
    most = ranks.load(num_tokens, top_k, distinct)
    if plan is None:
        plan = decide(grouped, num_tokens, most, experts=part.experts, inner=part.inner)
    checks.instance("plan", plan, Plan, "from dgmoe_jax.plan(cfg, T)")
    kept = ranks.load(num_tokens, top_k, distinct or plan.distinct_ids)
    # Only a promise by which there is less room can do harm when it is broken.
    promised = kept != most and (
        plan.capacity < most.per_expert or kept.assignments < most.assignments
    )
    distinct = distinct or plan.distinct_ids
    checks.plan(plan, part.experts, kept, distinct)
    if num_tokens == 0:
        counts = jnp.zeros(grouped.num_experts, jnp.int32)
        return jnp.zeros_like(x), Stats(counts, jnp.zeros((), jnp.int32))
    fmt = run_of(cfg.recipe, params.experts.w13.format).operands.activations
    checks.readable(params, cfg, plan.backend)
    x = backends.only_where_it_runs(x, plan.backend, parallel.dispatch)

    routing, shared_gate = _routed(x, routing, token_ids, valid, params, cfg, plan.backend)
    if promised:
        routing, broken = routing_step.drop_repeats(routing)
    counts = expert_counts(routing, grouped.num_experts)
    width = padded(cfg.hidden_size)
    x = jnp.pad(x, ((0, 0), (0, width - cfg.hidden_size)))
    slots = ranks.slots(routing.topk_ids)
    door = dispatch.Arrived(x, None, slots, routing.topk_weights, shared_gate)

    wire = dispatch.Wire(fmt, width, top_k, shared_gate is not None, plan.backend)
    sent, on_wire = door, None
    if parallel.gathered or parallel.dispatch != "standard":
        on_wire = wire.pack(door)
    if parallel.gathered:
        on_wire = gather(on_wire, parallel.gathered)
        sent = wire.unpack(on_wire)
    dispatcher = ranks.dispatcher(num_tokens, top_k, distinct, plan.backend)
    arrived, way_back = dispatcher.send(wire, sent, on_wire)
    rows, src2dst = permute.permute(
        *(arrived.x, arrived.topk_ids, fmt, part.experts, plan), scales=arrived.scales, width=width
    )
    routed = experts.experts(rows, params.experts, cfg.activation, fmt, plan)

    shared, split = None, bool(parallel.shared_axes)
    if params.shared is not None:
        shared = _shared(sent if split else door, params, cfg, fmt, width, plan)
    in_sum = shared if split or not parallel.reduced else None
    y = dispatcher.bring_back(
        routed, src2dst, arrived, way_back, sent, in_sum, cfg.router.scaling_factor
    )
    if parallel.strict:
        y = jnp.where(way_back.lost[:, None] > 0, jnp.nan, y)
    y = reduce(y, parallel)
    if shared is not None and in_sum is None:
        y = (y.astype(jnp.float32) + shared.astype(jnp.float32)).astype(y.dtype)
    y = y[:, : cfg.hidden_size]
    if promised:
        y = jnp.where(broken[:, None], jnp.nan, y)
    y = y if valid is None else jnp.where(valid[:, None], y, 0)
    lost = way_back.lost
    for axis in parallel.gathered:  # Each of its ranks counts those of its own tokens.
        lost = own_slice(lost, axis)
    return y, Stats(counts, jnp.sum(lost, dtype=jnp.int32))


def _routed(
    x: Array,
    routing: Routing | None,
    token_ids: Array | None,
    valid: Array | None,
    params: MoEParams,
    cfg: MoEConfig,
    backend: str,
) -> tuple[Routing, Array | None]:
    """Where the tokens x [T, H] go, and the shared experts' gate [T, 1]."""
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
    return routing, shared_gate


def _shared(
    tokens: dispatch.Arrived,
    params: MoEParams,
    cfg: MoEConfig,
    fmt: Format,
    width: int,
    plan: Plan,
) -> Array:
    """The shared experts of all tokens [T, H] bf16, weighed by their gate."""
    num_tokens = tokens.x.shape[0]
    alone = dense(plan, num_tokens, cfg.recipe)
    rows = permute.in_place(tokens.x[:, :width], fmt, alone, scales=tokens.scales)
    y = experts.experts(rows, params.shared, cfg.activation, fmt, alone)[:num_tokens]
    if tokens.shared_gate is None:
        return y
    return (y.astype(jnp.float32) * tokens.shared_gate).astype(y.dtype)

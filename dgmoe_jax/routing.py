"""`route`: the router on its own."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from dgmoe_jax import backends, checks
from dgmoe_jax.config import RouterConfig
from dgmoe_jax.steps import route as step
from dgmoe_jax.types import Routing


def route(
    logits: Array,
    router: RouterConfig,
    *,
    bias: Array | None = None,
    token_ids: Array | None = None,
    hash_table: Array | None = None,
    valid: Array | None = None,
    expert_map: Array | None = None,
    backend: str = "xla",
) -> Routing:
    """Each token's experts and weights; on a GPU one kernel, whatever is asked for.

    Selection is by score + bias (within the best groups, if grouped), weights are the scores
    without bias. Ties go to the lowest id, a NaN logit counts as -inf, and every row gets k
    distinct legal ids. Group score: the sum of a group's two best biased scores when there is a
    bias, else its best (DeepSeek-V3's and DeepSeek-V2's rules). Hash selection (DeepSeek-V4's first
    layers) takes a token's ids from its row of the table, in the table's order, and weighs them by
    the gate's scores; bias and groups are not read. Fused shared experts take the last slots.

    Numerics. Scores are f32. Softmax is relative to the row's greatest logit; "softmax_topk" to
    that of the chosen, as gpt-oss does, which equals a renormalised softmax but for rounding, and
    for logits so low that their softmax underflows to a tie at 0. sqrt(softplus(x)) takes softplus
    as max(x, 0) + log1p(exp(-|x|)), for log1p(exp(x)) is inf from x = 89. Weights are divided by
    their sum + 1e-20 (DeepSeek-V3's modeling code; Mixtral's and Qwen3's divide by the sum, which
    in f32 is the same number unless the sum is below 1e-13).

    Args:
      logits: [T, E] f32.
      bias: [E] f32, for selection only.
      token_ids: [T] int32, and hash_table: [vocab, k] int32, for hash selection; otherwise not
        read. A token outside the table has slots of -1, as has an entry that is no expert.
      valid: [T] bool; tokens marked False get ids -1 and weights 0, fused shared experts included.
      expert_map: [E + n] or [C, E + n] int32, n the fused shared experts: the physical id of each
        expert, and of each of its C copies, which tokens take in turn (token t the copy t % C; an
        expert of fewer copies repeats them). A negative entry lives elsewhere: id -1, weight 0.
        Weights are renormalised before it. Sums over ranks, each with its own map of the same
        copies, serve every slot exactly once.
      backend: "xla", "pallas" or "emulator".

    Returns:
      Routing(topk_ids [T, k + n] int32, topk_weights [T, k + n] f32), without the scaling factor.

    Raises:
      ValueError, TypeError: shapes or dtypes that do not fit each other or `router`.
    """
    checks.shape("logits", logits, (None, None))
    checks.dtype("logits", logits, ("float32",))
    num_tokens, num_experts = logits.shape
    router.check_experts(num_experts, "logits", "shape[1]")
    if bias is not None:
        checks.shape("bias", bias, (num_experts,))
        checks.dtype("bias", bias, ("float32",))
    if router.selection == "hash":
        checks.hash_lookup(token_ids, hash_table, num_tokens, router.top_k)
    checks.valid(valid, num_tokens)
    if expert_map is not None:
        expert_map = checks.expert_map(expert_map, num_experts + router.fused_shared_experts)
    if num_tokens == 0:
        shape = (0, router.num_slots)
        return Routing(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    logits = backends.only_where_it_runs(logits, backend)
    return step.select(
        logits,
        bias,
        router,
        backend,
        token_ids=token_ids,
        hash_table=hash_table,
        valid=valid,
        expert_map=expert_map,
    )


def expert_counts(routing: Routing, num_experts: int) -> Array:
    """How many slots name each expert: [num_experts] int32, ids outside [0, num_experts) uncounted.

    For load balancing, by the ids as they are: those of `expert_map` count physical experts.
    """
    checks.routing(routing.topk_ids, routing.topk_weights, None)
    ids = routing.topk_ids.reshape(-1)
    ids = jnp.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return jnp.zeros(num_experts, jnp.int32).at[ids].add(1, mode="drop")

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
    backend: str = "xla",
) -> Routing:
    """Each token's experts and weights.

    Selection is by score + bias (within the best groups, if grouped), weights are the scores
    without bias. Ties go to the lowest id, a NaN logit counts as -inf, and every row gets k
    distinct legal ids. Group score: the sum of a group's two best biased scores when there is a
    bias, else its best (DeepSeek-V3's and DeepSeek-V2's rules).

    Args:
      logits: [T, E] f32.
      bias: [E] f32, for selection only.
      token_ids, hash_table: for hash selection, which does not run yet; otherwise not read.
      valid: [T] bool; tokens marked False get ids -1 and weights 0.
      backend: "xla", "pallas" or "emulator".

    Returns:
      Routing(topk_ids [T, k] int32, topk_weights [T, k] f32), without the scaling factor.

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
    checks.valid(valid, num_tokens)
    if num_tokens == 0:
        shape = (0, router.top_k)
        return Routing(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))
    logits = backends.only_where_it_runs(logits, backend)
    return step.drop_padding(step.select(logits, bias, router, backend), valid)

"""The layer over a mesh: params in parts, and `moe_layer` in every rank."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dgmoe_jax import backends, checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.layer import moe_layer
from dgmoe_jax.parallel import Parallel, share
from dgmoe_jax.plan import Plan
from dgmoe_jax.types import ExpertWeights, MoEParams, Routing, Scaled, Stats


def shard_params(params: MoEParams, cfg: MoEConfig, mesh: Mesh, parallel: Parallel) -> MoEParams:
    """`prepare_params`' result over `mesh`: experts split over `parallel.ep`, each expert's
    intermediate size over `parallel.tp`, the rest on every rank.

    Every process of a mesh over several gives the same `params`, and puts only its ranks' parts on
    its devices, one after another. Where sizes do not divide, ranks get empty experts or columns of
    zeros at the end. A rank's w13 has its gate rows, then its up rows, so the whole array is not in
    the order of `params`.

    Raises ValueError for axes that the mesh lacks, and for params that do not fit `cfg` or that are
    split already.
    """
    checks.params(params, cfg)
    sizes = _sizes(mesh, parallel)
    weights = params.experts.w13.format
    part = share(cfg, parallel, sizes, weights)
    slots = parallel.placement or tuple(range(cfg.as_grouped().num_experts))
    slots += (-1,) * (part.ep * part.experts - len(slots))

    def block(weights: ExpertWeights, slots, ep, tp, inner) -> ExpertWeights:
        ranks = math.prod(sizes[axis] for axis in tp)

        def scaled(operand: Scaled, parts: int, rows: bool) -> Scaled:
            put = functools.partial(
                _put, slots=slots, ep=ep, tp=tp, ranks=ranks, mesh=mesh, parts=parts
            )
            fmt = operand.format
            # In what is stored: rows, bytes of FP4, or whole tiles.
            stored = fmt.values_shape(ranks * inner, ranks * inner)
            values = put(operand.values, axis=1 if rows else 2, size=stored[0 if rows else 1])
            if operand.scales is None:
                return Scaled(values, None, fmt)
            # Packed scales lie across: their rows are K's, four groups in a word.
            group = fmt.shares[0 if rows else 1] * (4 if fmt.packed_scales and not rows else 1)
            axis = 1 if rows != fmt.packed_scales else 2
            scales = put(operand.scales, axis=axis, size=-(-ranks * inner // group))
            return Scaled(values, scales, fmt)

        return ExpertWeights(scaled(weights.w13, 2, True), scaled(weights.w2, 1, False))

    everywhere = NamedSharding(mesh, PartitionSpec())
    whole = lambda x: _global(np.asarray(x), everywhere)  # noqa: E731
    shared = params.shared
    if shared is not None:
        shared = block(shared, (0,), None, parallel.shared_axes, part.shared_inner)
    experts = block(params.experts, slots, parallel.ep, parallel.tp_axes, part.inner)
    rest = jax.tree.map(whole, dataclasses.replace(params, experts=None, shared=None))
    return dataclasses.replace(rest, experts=experts, shared=shared, split=part.split)


def _put(
    x: Array | np.ndarray,
    *,
    slots: tuple[int, ...],
    ep: str | None,
    tp: tuple[str, ...],
    ranks: int,
    mesh: Mesh,
    parts: int,
    axis: int,
    size: int,
) -> Array:
    """x [E, ..] -> [slots, ..] over `ep`; along `axis`, x is `parts` equal parts that become `size`
    each, of which each of the `ranks` of `tp` gets a share, one part after another."""
    x = np.asarray(x)
    old, new = x.shape[axis] // parts, size // ranks
    shape = [len(slots), *x.shape[1:]]
    shape[axis] = parts * size
    spec = [ep, *[None] * (x.ndim - 1)]
    spec[axis] = tp or None

    def piece(index) -> np.ndarray:
        first, last, _ = index[0].indices(len(slots))
        rank = index[axis].indices(parts * size)[0] // (parts * new)
        cut = [slice(None)] * x.ndim
        out_shape = [last - first, *shape[1:]]
        out_shape[axis] = parts * new
        out = np.zeros(out_shape, x.dtype)
        for part in range(parts):
            begin = rank * new
            count = max(0, min(old - begin, new))
            source, target = list(cut), list(cut)
            source[axis] = slice(part * old + begin, part * old + begin + count)
            target[axis] = slice(part * new, part * new + count)
            for row, slot in enumerate(slots[first:last]):
                if slot >= 0:
                    source[0], target[0] = slot, row
                    out[tuple(target)] = x[tuple(source)]
        return out

    return _global(piece, NamedSharding(mesh, PartitionSpec(*spec)), tuple(shape), x.dtype)


def _global(
    x: np.ndarray | Callable,
    sharding: NamedSharding,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype | None = None,
) -> Array:
    if isinstance(x, np.ndarray):
        x, shape, dtype = x.__getitem__, x.shape, x.dtype
    return jax.make_array_from_callback(shape, sharding, x, dtype=dtype)


def _specs(params: MoEParams, parallel: Parallel) -> MoEParams:
    """How `shard_params` has split each array."""

    def block(weights: ExpertWeights | None, ep: str | None, tp: tuple[str, ...]):
        def scaled(operand: Scaled, rows: bool) -> Scaled:
            by_row, by_column = PartitionSpec(ep, tp or None), PartitionSpec(ep, None, tp or None)
            across = operand.format.packed_scales
            scales = None
            if operand.scales is not None:
                scales = by_row if rows != across else by_column
            return Scaled(by_row if rows else by_column, scales, operand.format)

        if weights is None:
            return None
        return ExpertWeights(scaled(weights.w13, True), scaled(weights.w2, False))

    rest = jax.tree.map(
        lambda _: PartitionSpec(), dataclasses.replace(params, experts=None, shared=None)
    )
    return dataclasses.replace(
        rest,
        experts=block(params.experts, parallel.ep, parallel.tp_axes),
        shared=block(params.shared, None, parallel.shared_axes),
    )


def sharded_moe_layer(
    x: Array,
    params: MoEParams,
    cfg: MoEConfig,
    mesh: Mesh,
    parallel: Parallel,
    *,
    routing: Routing | None = None,
    token_ids: Array | None = None,
    valid: Array | None = None,
    plan: Plan | None = None,
    stats: bool = False,
) -> Array | tuple[Array, Stats]:
    """`moe_layer` over `mesh`, one XLA program under `jax.jit`.

    Args:
      x: [T, H] bf16, split over the axes `parallel.dp` (any other sharding is changed to it).
      params: from `shard_params` with the same `mesh` and `parallel`.
      cfg, routing, token_ids, valid: as in `moe_layer`, of all tokens. Where ranks have unequal
        numbers of tokens, give each the most and mark the rest with `valid`, wherever they are.
      plan: of one rank, overrides what the layer would choose: `dgmoe_jax.plan(cfg, N, ep_size=,
        tp_size=)` with the N tokens that the ranks of `ep` and `tp` have together.
      stats: also return `Stats`, of all tokens.

    Returns:
      y [T, H] bf16, split as x.

    Raises:
      ValueError: axes that the mesh lacks; whatever `moe_layer` raises.
      NotImplementedError: dispatch="one_sided" over GPUs that cannot reach each other's memory.
    """
    checks.tokens(x, cfg.hidden_size)
    sizes = _sizes(mesh, parallel)
    if parallel.dispatch == "one_sided" and sizes[parallel.ep] > 1:
        gpus = mesh.devices.flat[0].platform == "gpu"
        if reason := gpus and backends.exchange_unavailable(mesh):
            raise NotImplementedError(f"dispatch='one_sided': {reason}; 'all_to_all' runs")
    axes = parallel.token_axes
    num_tokens, parts = x.shape[0], math.prod(sizes[axis] for axis in axes)
    tokens = (x, routing, token_ids, valid)
    if num_tokens % parts:
        if valid is None:
            tokens = (*tokens[:3], jnp.ones(num_tokens, bool))
        more = -num_tokens % parts
        tokens = jax.tree.map(
            lambda a: jnp.pad(a, ((0, more), *((0, 0) for _ in a.shape[1:]))), tokens
        )

    def local(x, routing, token_ids, valid, params):
        given = dict(routing=routing, token_ids=token_ids, valid=valid, plan=plan)
        out = moe_layer(x, params, cfg, **given, parallel=parallel, stats=stats)
        if not stats:
            return out
        over = (*axes, parallel.ep) if parallel.sliced else axes
        return out[0], jax.lax.psum(out[1], over) if over else out[1]

    by_token = PartitionSpec(axes or None)
    explicit = AxisType.Explicit in mesh.axis_types
    if explicit:
        tokens = jax.tree.map(
            lambda a: jax.sharding.reshard(a, NamedSharding(mesh, by_token)), tokens
        )
    specs = (*jax.tree.map(lambda _: by_token, tokens), _specs(params, parallel))
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=specs,
        out_specs=(by_token, PartitionSpec()) if stats else by_token,
        check_vma=False,  # a sum over an axis makes its ranks alike, which it cannot see
    )
    out = run(*tokens, params)
    y = out[0] if stats else out
    if y.shape[0] != num_tokens:
        if explicit:  # which has no unequal parts
            y = jax.sharding.reshard(y, NamedSharding(mesh, PartitionSpec()))
        y = y[:num_tokens]
    return (y, out[1]) if stats else y


def _sizes(mesh: Mesh, parallel: Parallel) -> Mapping[str, int]:
    named = {parallel.ep, parallel.tp, *parallel.token_axes} - {None}
    if absent := sorted(named - set(mesh.axis_names)):
        raise ValueError(f"{parallel}: axes {absent} are not in the mesh's {mesh.axis_names}")
    return {name: mesh.shape[name] for name in named}

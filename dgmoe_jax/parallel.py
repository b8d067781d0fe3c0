"""Which mesh axes split the layer, and what each rank of them does."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dgmoe_jax import checks
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.plan import Load, load
from dgmoe_jax.recipes import TILE, Format, padded
from dgmoe_jax.steps import dispatch
from dgmoe_jax.types import Split

SHARED = ("auto", "replicated", "sharded")


@dataclass(frozen=True)
class Parallel:
    """How a mesh splits the layer. `ep`, `tp` and `dp` are names of mesh axes; None: not split.

    ep:       experts are split over this axis; ranks get ceil(E / size) of them, the last ones
              fewer.
    tp:       every expert's intermediate size is split over this axis.
    dp:       tokens are split over these axes (a name or several); over the others every rank has
              the same tokens. May name `ep` and `tp`: "data-parallel attention".
    dispatch: how tokens reach the ranks of `ep`:
              "standard"     all tokens are here (or are gathered), and results are summed over the
                             axis: SGLang's StandardDispatcher.
              "all_to_all"   a token goes once to each rank that has an expert of it: DeepEP normal.
              "low_latency"  as quantised rows into slabs, each expert's row comes back and the
                             source weighs it: DeepEP low-latency.
              "expanded"     a row for every (token, expert), sorted by expert: DeepEP v2.
              "one_sided"    as "all_to_all", in kernels that write into the peers' memory over
                             NVLink: FlashInfer's one-sided all-to-all.
    shared:   "sharded" splits the shared experts' intermediate size over all axes that results are
              summed over (`tp`, and `ep` with dispatch="standard") and adds them in that one
              reduction; "replicated" has them whole on every rank, computed on the tokens that the
              rank brings, and adds them after it. "auto": sharded where that is possible.
    capacity_factor: bounds the rows that a rank can send to another at so many times their mean,
              rounded up to 8.
              None: at all it could ever have to, so that nothing is lost. Rows beyond a bound are
              not sent: they are counted (`stats=True`), or with `strict`, their tokens are NaN.
    strict:   a token of which a row was not sent is NaN. Needed with a bound unless stats are asked
              for.
    chunks:   tokens are sent in so many pieces, one's exchange beside another's computing.
    placement: logical expert in each of the physical slots, ep size * slots a rank of them, for
              redundant copies of busy experts; -1 is an empty one. Tokens take copies in turn, each
              rank from another one on.
    """

    ep: str | None = None
    tp: str | None = None
    dp: str | tuple[str, ...] | None = None
    dispatch: str = "standard"
    shared: str = "auto"
    capacity_factor: float | None = None
    strict: bool = False
    chunks: int = 1
    placement: tuple[int, ...] | None = None

    def __post_init__(self):
        for name in ("ep", "tp"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"Parallel.{name}={value!r}: must be the name of a mesh axis")
        if self.ep is not None and self.ep == self.tp:
            raise ValueError(f"Parallel.tp={self.tp!r}: must be another axis than ep")
        if self.dp is not None and not isinstance(self.dp, (str, tuple, list)):
            raise TypeError(f"Parallel.dp={self.dp!r}: must be the name of a mesh axis, or several")
        dp = self.token_axes
        if isinstance(self.dp, list):
            object.__setattr__(self, "dp", dp)
        if not all(isinstance(a, str) for a in dp) or len(set(dp)) != len(dp):
            raise ValueError(f"Parallel.dp={self.dp!r}: must be names of mesh axes, each once")
        for name, allowed in (("dispatch", tuple(dispatch.DISPATCHERS)), ("shared", SHARED)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"Parallel.{name}={getattr(self, name)!r}: must be in {allowed}")
        if self.dispatch != "standard" and self.ep is None:
            raise ValueError(
                f"Parallel.dispatch={self.dispatch!r}: needs ep, the axis to send over"
            )
        if self.shared == "sharded" and not self.reduced:
            raise ValueError(
                "Parallel.shared='sharded': needs tp, or ep with dispatch='standard'; 'replicated'"
                " works with all"
            )
        factor = self.capacity_factor
        if factor is not None:
            number = isinstance(factor, numbers.Real) and not isinstance(factor, bool)
            if not number or not 0 < factor < math.inf:
                raise ValueError(
                    f"Parallel.capacity_factor={factor!r}: must be positive and finite"
                )
            if self.dispatch == "standard":
                raise ValueError(
                    f"Parallel.capacity_factor={factor}: dispatch='standard' sends no rows to bound"
                )
        if not isinstance(self.strict, bool):
            raise TypeError(f"Parallel.strict={self.strict!r}: must be a bool")
        if isinstance(self.chunks, bool) or not isinstance(self.chunks, int) or self.chunks < 1:
            raise ValueError(f"Parallel.chunks={self.chunks!r}: must be an int of at least 1")
        if self.placement is not None:
            if self.ep is None:
                raise ValueError("Parallel.placement: given without ep, the axis of its ranks")
            if not isinstance(self.placement, (tuple, list)):
                raise TypeError(
                    f"Parallel.placement={self.placement!r}: must be a tuple of experts' ids"
                )
            slots = tuple(checks.count("Parallel.placement", e, -1) for e in self.placement)
            object.__setattr__(self, "placement", slots)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes over which tokens are split."""
        if self.dp is None:
            return ()
        return (self.dp,) if isinstance(self.dp, str) else tuple(self.dp)

    @property
    def tp_axes(self) -> tuple[str, ...]:
        return () if self.tp is None else (self.tp,)

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """The axes over which shared experts are split; none: they are whole everywhere."""
        return () if self.shared == "replicated" else self.reduced

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes over which tokens are split though all of their ranks must see them."""
        seen = (self.ep, self.tp) if self.dispatch == "standard" else (self.tp,)
        return tuple(a for a in seen if a is not None and a in self.token_axes)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes over which results are partial sums."""
        parts = (self.ep, self.tp) if self.dispatch == "standard" else (self.tp,)
        return tuple(a for a in parts if a is not None)

    @property
    def sliced(self) -> bool:
        """Ranks of `ep` have the same tokens: each sends its part, and results are gathered."""
        return self.dispatch != "standard" and self.ep not in self.token_axes


ALONE = Parallel()


@dataclass(frozen=True)
class Share:
    """What one rank holds: `experts` slots, `inner` columns of each, `shared_inner` of the shared
    block; of `ep` and `tp` ranks. split: as its params say, None: the whole layer."""

    ep: int
    tp: int
    split: Split | None
    experts: int
    inner: int
    shared_inner: int


def share(cfg: MoEConfig, parallel: Parallel, sizes: dict[str, int], weights: Format) -> Share:
    """Of one rank, where the axes have `sizes`. Columns are padded to whole scale groups on every
    rank and, where the scales of `weights` are packed four in a word, to whole words."""
    grouped = cfg.as_grouped()
    ep, tp = sizes.get(parallel.ep, 1), sizes.get(parallel.tp, 1)
    if parallel.placement is not None:
        check_placement(parallel.placement, grouped.num_experts, ep)
    slots = len(parallel.placement or range(grouped.num_experts))
    shared, split = grouped.num_shared_experts * grouped.intermediate_size, 1
    if shared:
        split = math.prod(sizes[axis] for axis in parallel.shared_axes)
    how = Split(ep, tp, split, parallel.placement)
    return Share(
        ep=ep,
        tp=tp,
        split=None if how == Split(1, 1, 1, None) else how,
        experts=-(-slots // ep),
        inner=_part(grouped.intermediate_size, tp, weights),
        shared_inner=_part(shared, split, weights),
    )


def _part(inner: int, ranks: int, weights: Format) -> int:
    unit = TILE * (4 if weights.packed_scales and ranks > 1 else 1)
    return -(-padded(inner) // (ranks * unit)) * unit


def check_placement(placement: tuple[int, ...], num_experts: int, ep: int) -> None:
    if len(placement) % ep:
        raise ValueError(
            f"Parallel.placement: {len(placement)} slots, must be a multiple of ep's {ep} ranks"
        )
    absent = sorted(set(range(num_experts)) - set(placement))
    unknown = sorted(set(placement) - set(range(-1, num_experts)))
    if absent or unknown:
        raise ValueError(
            f"Parallel.placement: unknown experts {unknown}, missing {absent}; must name each of"
            f" {num_experts} at least once, and -1 for empty slots"
        )


def _copies(placement: tuple[int, ...]) -> np.ndarray:
    """[C, E] int32: the slot of copy c mod (copies of e) of expert e, C the least common multiple
    of their numbers if that is at most 64, else 64."""
    slots = np.asarray(placement)
    where = [np.flatnonzero(slots == e) for e in range(slots.max() + 1)]
    rows = min(64, math.lcm(*(len(w) for w in where)))
    return np.array([[w[c % len(w)] for w in where] for c in range(rows)], np.int32)


@dataclass(frozen=True)
class Ranks:
    """`parallel` on a mesh: `sizes` of the axes that it names, and this rank's `share`."""

    parallel: Parallel
    sizes: dict[str, int]
    share: Share
    num_experts: int

    @classmethod
    def of(cls, cfg: MoEConfig, parallel: Parallel, weights: Format) -> Ranks:
        """Inside `shard_map`."""
        names = {parallel.ep, parallel.tp, *parallel.token_axes} - {None}
        try:
            sizes = {name: lax.axis_size(name) for name in names}
        except NameError as error:
            raise ValueError(
                f"{parallel}: {error}; call moe_layer(parallel=...) inside a shard_map over these"
                " axes, or sharded_moe_layer"
            ) from None
        part = share(cfg, parallel, sizes, weights)
        return cls(parallel, sizes, part, cfg.as_grouped().num_experts)

    def _gathered(self, num_tokens: int) -> int:
        return num_tokens * math.prod(self.sizes[axis] for axis in self.parallel.gathered)

    def _rows(self, num_tokens: int, top_k: int, distinct: bool) -> int:
        """Rows that one rank can send to another: tokens, or for "expanded" assignments."""
        slots = min(top_k, self.share.experts) if distinct else top_k
        expanded, factor = self.parallel.dispatch == "expanded", self.parallel.capacity_factor
        tokens = self._gathered(num_tokens)
        most = tokens * (slots if expanded else 1)
        if factor is not None:
            mean = tokens * top_k / self.share.ep
            most = min(most, math.ceil(factor * (mean if expanded else min(mean, tokens))))
        return -(-most // dispatch.STEP) * dispatch.STEP

    def load(self, num_tokens: int, top_k: int, distinct: bool) -> Load:
        """What this rank's experts may get where every rank sends `num_tokens` tokens."""
        tokens, received = self._gathered(num_tokens), None
        if self.parallel.dispatch != "standard":
            rows = self.share.ep * self._rows(num_tokens, top_k, distinct)
            received = rows, 1 if self.parallel.dispatch == "expanded" else top_k
            tokens *= self.share.ep
        return load(
            tokens,
            top_k,
            self.num_experts,
            self.share.experts,
            distinct=distinct,
            received=received,
            shared_tokens=num_tokens,
        )

    def dispatcher(self, num_tokens: int, top_k: int, distinct: bool, backend: str):
        return dispatch.DISPATCHERS[self.parallel.dispatch](
            axis=self.parallel.ep,
            ranks=self.share.ep,
            num_experts=self.share.experts,
            rows=self._rows(num_tokens, top_k, distinct),
            distinct=distinct,
            backend=backend,
        )

    def _number(self) -> Array | int:
        """Of this rank among those with other tokens."""
        sliced = (self.parallel.ep,) if self.parallel.sliced else ()
        axes = (*self.parallel.token_axes, *sliced)
        return lax.axis_index(axes) if axes else 0

    def slots(self, topk_ids: Array) -> Array:
        """Experts' ids [T, k] -> those of the slots that hold them; -1 where there is no expert."""
        if self.parallel.ep is None:
            return topk_ids
        # Nothing may be sent to an empty slot, which an id past the last expert would name.
        known = (topk_ids >= 0) & (topk_ids < self.num_experts)
        slots = jnp.where(known, topk_ids, 0)
        if self.parallel.placement is not None:
            table = jnp.asarray(_copies(self.parallel.placement))
            copy = (jnp.arange(topk_ids.shape[0]) + self._number()) % table.shape[0]
            slots = table[copy[:, None], slots]
        return jnp.where(known, slots, -1)


def own_slice(x: Array, axis: str) -> Array:
    """This rank's part of what all ranks of `axis` have, padded with zeros to equal parts."""
    ranks = lax.axis_size(axis)
    part = -(-x.shape[0] // ranks)
    x = jnp.pad(x, ((0, part * ranks - x.shape[0]), *((0, 0) for _ in x.shape[1:])))
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * part, part)


def gather(x: Array, axes: tuple[str, ...], to: str = "varying") -> Array:
    """Every rank's rows, one after another. `to`: "invarying" lets shard_map know that all ranks
    have them."""
    if x.shape[0] == 0:  # XLA gathers no empty arrays
        return x
    return dispatch.as_bits(lambda bits: lax.all_gather(bits, axes, tiled=True, to=to), x)


def reduce(y: Array, parallel: Parallel) -> Array:
    """Partial sums [N, H] -> the tokens that this rank brought, summed: one reduction."""
    axes, back = parallel.reduced, parallel.gathered
    rest = tuple(a for a in axes if a not in back)
    if not axes:
        return y
    if not back:
        return lax.psum(y, axes)
    if not rest:
        return lax.psum_scatter(y, back, tiled=True)
    # Scattered over all of them, each rank then has a part of its tokens: the rest is gathered.
    parts, ranks = math.prod(map(lax.axis_size, back)), math.prod(map(lax.axis_size, rest))
    y = y.reshape(parts, -1, y.shape[-1])
    tokens = y.shape[1]
    y = jnp.pad(y, ((0, 0), (0, -tokens % ranks), (0, 0)))
    y = lax.psum_scatter(y.reshape(-1, y.shape[-1]), (*back, *rest), tiled=True)
    return gather(y, rest, "invarying")[:tokens]

"""Router: scores, grouped top-k and the weights of the chosen experts, one kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import F32, I32, LANES, Registers, launch, pow2_floor, spread_rows, vector

LARGEST = float(np.finfo(np.float32).max)
# Where int32 arrays are selected below, the array comes first: Mosaic takes the signedness of the
# first case, a constant has none, and maxima of keys must be signed.
# Order keys, below that of any float: an expert of a losing group, and one already chosen.
LOSING, CHOSEN = -(2**31) + 1, -(2**31)


def route(
    logits: Array,
    bias: Array | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """logits [T, E] f32, bias [E] f32 or None -> topk_ids [T, k] int32, topk_weights [T, k] f32.

    scoring "softmax", "sigmoid" or "sqrtsoftplus"; the key of the choice is score + bias, slots in
    descending order of key, ties to the lowest id. Groups: the sum of the two best keys (bias) or
    the best one ranks a group, and experts of losing groups come after all others. Weights are
    scores without bias, divided by (sum + 1e-20) with `renormalize`. NaN counts as -inf and +inf as
    the largest finite f32; every row has distinct legal ids and finite weights.

    Raises ValueError for arguments that do not fit each other.
    """
    t, num_experts = logits.shape
    if logits.dtype != F32 or (bias is not None and bias.shape != (num_experts,)):
        raise ValueError(
            f"logits is {logits.dtype}{list(logits.shape)} and bias "
            f"{None if bias is None else list(bias.shape)}; they must be f32 [T, E] and [E]"
        )
    if scoring not in SCORING:
        raise ValueError(f"scoring={scoring!r}; known: {', '.join(SCORING)}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}; it must be 1..{num_experts}, the number of experts")
    if num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"num_groups={num_groups}, top_groups={top_groups}; num_groups must divide "
            f"{num_experts} experts and be at least top_groups"
        )
    out_type = (jax.ShapeDtypeStruct((t, top_k), I32), jax.ShapeDtypeStruct((t, top_k), F32))
    if t == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out_type)

    tile = 4 if t >= 4 else 1  # rows of a block, one a warp; a single row is every warp's
    experts = _Experts(num_experts, tile, Registers(interpret))

    def choose(logits_ref, *refs):
        *bias_ref, ids_ref, weights_ref = refs
        block = lax.axis_index("t")
        # The last block overlaps its neighbour rather than pass the end: both write equal bytes.
        rows = block if tile == 1 else pl.ds(jnp.minimum(block * tile, t - tile), tile)
        ids = experts.ids()
        logits = [jnp.where(x != x, -jnp.inf, x) for x in experts.load(logits_ref, rows)]
        logits = [jnp.where(x > LARGEST, LARGEST, x) for x in logits]
        scores = SCORING[scoring](logits, experts)
        keys = scores
        if bias_ref:
            keys = [s + b for s, b in zip(scores, experts.load_shared(bias_ref[0]), strict=True)]
        keys = experts.without_repeats([_order(key) for key in keys], CHOSEN)
        if num_groups > 1:
            keys = _lose_groups(keys, ids, experts, num_groups, top_groups, bias is not None)

        weights = []
        for slot in range(top_k):
            chosen = experts.lowest_best(keys, ids)
            here = [i == experts.spread(chosen) for i in ids]
            others = [i != experts.spread(chosen) for i in ids]
            # Scores are not negative: their bits order them, and integers reduce in one step.
            bits = [
                jnp.where(h, lax.bitcast_convert_type(s, I32), 0)
                for h, s in zip(here, scores, strict=True)
            ]
            weights.append(lax.bitcast_convert_type(experts.max(bits), F32))
            keys = [jnp.where(o, key, CHOSEN) for o, key in zip(others, keys, strict=True)]
            ids_ref[rows, slot] = chosen
        if renormalize:
            total = functools.reduce(jnp.add, weights) + 1e-20
            weights = [w / total for w in weights]
        for slot, weight in enumerate(weights):
            weights_ref[rows, slot] = weight

    operands = (logits,) if bias is None else (logits, bias)
    return launch(choose, out_type, grid={"t": -(-t // tile)}, interpret=interpret, barriers=False)(
        *operands
    )


class _Experts:
    """[rows, E] as one or two arrays [rows, a power of two], since register layouts divide evenly.
    With two, the second ends at E and repeats some of the first. One row: arrays without rows."""

    def __init__(self, num_experts: int, tile: int, regs: Registers):
        self.num_experts, self.regs = num_experts, regs
        self.width = pow2_floor(num_experts)
        self.starts = [0] if self.width == num_experts else [0, num_experts - self.width]
        vec = 1
        while vec < 4 and num_experts % (2 * vec) == 0 and 2 * vec * LANES <= self.width:
            vec *= 2
        self.one_row = tile == 1
        self.shape = (self.width,) if self.one_row else (tile, self.width)
        self.layout = (
            vector(self.width, vec, warps=1) if self.one_row else spread_rows(*self.shape, vec)
        )

    def ids(self) -> list[Array]:
        column = self.regs.iota(self.shape, len(self.shape) - 1, self.layout)
        return [column + start for start in self.starts]

    def load(self, ref, rows) -> list[Array]:
        parts = [pl.ds(start, self.width) for start in self.starts]
        return [self.regs.load(ref.at[rows, part], self.layout) for part in parts]

    def load_shared(self, ref) -> list[Array]:
        """[E], the same for every row."""
        layout = self.layout if self.one_row else self.layout.reduce(0)
        parts = [self.regs.load(ref.at[pl.ds(s, self.width)], layout) for s in self.starts]
        if self.one_row:
            return parts
        return [
            self.regs.cast(lax.broadcast_in_dim(p, self.shape, (1,)), self.layout) for p in parts
        ]

    def without_repeats(self, parts: list[Array], instead: float) -> list[Array]:
        if len(parts) == 1:
            return parts
        return [parts[0], jnp.where(self.ids()[1] >= self.width, parts[1], instead)]

    def max(self, parts: list[Array]) -> Array:
        return functools.reduce(jnp.maximum, [jnp.max(p, axis=-1) for p in parts])

    def sum(self, parts: list[Array]) -> Array:
        return functools.reduce(jnp.add, [jnp.sum(p, axis=-1) for p in parts])

    def spread(self, x: Array) -> Array:
        return self.regs.along_rows(x, self.shape, self.layout)

    def lowest_best(self, keys: list[Array], ids: list[Array]) -> Array:
        """The lowest id among those of the greatest key, [rows]."""
        best = self.spread(self.max(keys))
        # As a maximum: int32 maxima are the ones that Hopper reduces over a warp in one step.
        last = [
            jnp.where(k == best, self.num_experts - i, 0) for k, i in zip(keys, ids, strict=True)
        ]
        return self.num_experts - self.max(last)


def _order(key: Array) -> Array:
    """f32 -> int32 in the same order; NaN and -inf as the least finite f32, -0.0 as 0.0."""
    key = jnp.where(key >= -LARGEST, key, -LARGEST)
    bits = lax.bitcast_convert_type(key, I32)
    return _flip(jnp.where(bits != -(2**31), bits, 0))


def _flip(bits: Array) -> Array:
    """Bits of a float <-> an integer in its order: a negative float grows as its bits fall."""
    return bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF)


def _lose_groups(
    keys: list[Array],
    ids: list[Array],
    experts: _Experts,
    num_groups: int,
    top_groups: int,
    two_best: bool,
) -> list[Array]:
    """Puts the experts of all but the top_groups best groups below every other."""
    size = experts.num_experts // num_groups
    members, scores = [], []
    for group in range(num_groups):
        member = [(i >= group * size) & (i < (group + 1) * size) for i in ids]
        inside = [jnp.where(m, key, CHOSEN) for m, key in zip(member, keys, strict=True)]
        best = experts.max(inside)
        if two_best and size > 1:
            chosen = experts.spread(experts.lowest_best(inside, ids))
            second = experts.max(
                [jnp.where(i != chosen, k, CHOSEN) for i, k in zip(ids, inside, strict=True)]
            )
            total = _as_float(best) + _as_float(second)
            best = _flip(lax.bitcast_convert_type(total, I32))
        members.append(member)
        scores.append(best)
    for group, (member, score) in enumerate(zip(members, scores, strict=True)):
        better = score ^ score
        for other, rival in enumerate(scores):
            if other != group:
                ahead = rival >= score if other < group else rival > score
                better = better + jnp.where(ahead, 1, 0)
        lost = experts.spread(better) >= top_groups
        keys = [
            jnp.where(m & lost, jnp.minimum(key, LOSING), key)
            for m, key in zip(member, keys, strict=True)
        ]
    return keys


def _as_float(ordered: Array) -> Array:
    return lax.bitcast_convert_type(_flip(ordered), F32)


def _softmax(logits: list[Array], experts: _Experts) -> list[Array]:
    top = experts.max(logits)
    top = experts.spread(jnp.where(top == -jnp.inf, 0.0, top))
    exps = [jnp.exp(x - top) for x in logits]
    total = experts.spread(experts.sum(experts.without_repeats(exps, 0.0)))
    return [jnp.where(total > 0, e / total, 0.0) for e in exps]


def _sigmoid(logits: list[Array], experts: _Experts) -> list[Array]:
    return [1.0 / (1.0 + jnp.exp(-x)) for x in logits]


def _sqrtsoftplus(logits: list[Array], experts: _Experts) -> list[Array]:
    return [_sqrt(jnp.where(x > 0, x, 0.0) + _log1p(jnp.exp(-jnp.abs(x)))) for x in logits]


def _log1p(x: Array) -> Array:
    """x in [0, 1]: 2 artanh(s), s = x / (2 + x) <= 1/3, whose series is exact to f32 after s^13;
    log(1 + x) itself would lose a small x."""
    s = x / (2.0 + x)
    square = s * s
    series = jnp.full_like(x, 1 / 13)
    for power in (11, 9, 7, 5, 3, 1):
        series = series * square + 1 / power
    return 2.0 * s * series


def _sqrt(x: Array) -> Array:
    """Mosaic has no square root before jax 0.11; one Newton step mends that of rsqrt."""
    reciprocal = lax.rsqrt(x)
    root = x * reciprocal
    root = root + 0.5 * reciprocal * (x - root * root)
    return jnp.where(x > 0, root, 0.0)


SCORING = {"softmax": _softmax, "sigmoid": _sigmoid, "sqrtsoftplus": _sqrtsoftplus}

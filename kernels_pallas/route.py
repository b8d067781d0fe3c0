"""Router: scores, grouped top-k and the weights of the chosen experts, one kernel."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from ._common import F32, I32, LANES, Registers, launch, own_index, pow2_floor, spread_rows, vector

LARGEST = float(np.finfo(np.float32).max)
# Where int32 arrays are selected below, the array comes first: Mosaic takes the signedness of the
# first case, a constant has none, and maxima of keys must be signed.
# Order keys, below that of any float: an expert of a losing group, and one already chosen.
LOSING, CHOSEN = -(2**31) + 1, -(2**31)
LEAST = int(np.int32(np.float32(-LARGEST).view(np.int32)) ^ np.int32(0x7FFFFFFF))  # of -LARGEST


def route(
    logits: Array,
    bias: Array | None,
    *,
    scoring: str,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    token_ids: Array | None = None,
    hash_table: Array | None = None,
    valid: Array | None = None,
    expert_map: Array | None = None,
    fused_shared_experts: int = 0,
    shared_weight: float = 1.0,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """logits [T, E] f32, bias [E] f32 or None -> topk_ids [T, k + n] int32, topk_weights f32.

    scoring "softmax", "softmax_topk", "sigmoid" or "sqrtsoftplus"; the key of the choice is score +
    bias, slots in descending order of key, ties to the lowest id. Groups: the sum of the two best
    keys (bias) or the best one ranks a group, and experts of losing groups come after all others.
    Weights are scores without bias, divided by (sum + 1e-20) with `renormalize`; "softmax_topk"
    scores by the logit itself and weighs by the softmax of those chosen. NaN counts as -inf and
    +inf as the largest finite f32; every row has distinct legal ids and finite weights.

    `hash_table` [vocab, k] int32 gives the ids by `token_ids` [T] int32 instead (bias and groups
    are not read); what lies outside the table or names no expert is -1. n = `fused_shared_experts`
    slots E, E + 1, ... of `shared_weight` follow. Slots of tokens that are not `valid` [T] bool are
    -1; `expert_map` [C, E + n] int32 then turns ids into those of copy (token % C). Slots of -1
    weigh 0.

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
    slots, total = top_k + fused_shared_experts, num_experts + fused_shared_experts
    _check_options(t, top_k, total, token_ids, hash_table, valid, expert_map)
    out_type = (jax.ShapeDtypeStruct((t, slots), I32), jax.ShapeDtypeStruct((t, slots), F32))
    if t == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out_type)
    if hash_table is not None:
        bias, num_groups = None, 1
    operands = {
        "logits": logits,
        "bias": bias,
        "token_ids": None if hash_table is None else token_ids,
        "hash_table": hash_table,
        "valid": valid,
        "expert_map": expert_map,
    }
    operands = {name: x for name, x in operands.items() if x is not None}

    tile = 4 if t >= 4 else 1  # rows of a block, one a warp; a single row is every warp's
    # A map's rows start at multiples of `total`, which bounds the vectors that they are read by.
    several = expert_map is not None and expert_map.shape[0] > 1
    aligned = math.gcd(num_experts, total if several else 0)
    experts = _Experts(num_experts, tile, Registers(interpret), aligned)

    def choose(*refs):
        *inputs, ids_ref, weights_ref = refs
        refs = dict(zip(operands, inputs, strict=True))
        block = own_index("t")
        # The last block overlaps its neighbour rather than pass the end: both write equal bytes.
        first = block if tile == 1 else jnp.minimum(block * tile, t - tile)
        rows = first if tile == 1 else pl.ds(first, tile)
        each = [first + row for row in range(tile)]
        ids = experts.ids()
        logits = [jnp.where(x != x, -jnp.inf, x) for x in experts.load(refs["logits"], rows)]
        logits = [jnp.where(x > LARGEST, LARGEST, x) for x in logits]
        scores = SCORING[scoring](logits, experts)
        if hash_table is None:
            keys = _keys(scores, refs.get("bias"), ids, experts, num_groups, top_groups)
        else:
            tokens = [refs["token_ids"][row] for row in each]
        if valid is not None:
            is_valid = experts.by_row([refs["valid"][row].astype(I32) for row in each]) != 0
        if expert_map is not None:
            physical = experts.load_copies(refs["expert_map"], each)

        # Integers reduce in one step. Scores are not negative: their bits order them. Logits are
        # ordered by keys, as are all scores where no bias stands between a score and its key.
        unbiased = hash_table is None and bias is None
        if unbiased or scoring == "softmax_topk":
            bits, absent, value = [_order(x) for x in scores], LEAST, _as_float
        else:
            bits, absent = [lax.bitcast_convert_type(s, I32) for s in scores], 0
            value = functools.partial(lax.bitcast_convert_type, new_dtype=F32)

        weights, known = [], []

        def write(slot, chosen):
            if valid is not None:
                chosen = jnp.where(is_valid, chosen, -1)
            if valid is not None or expert_map is not None:
                known.append(chosen >= 0)
            ids_ref[rows, slot] = chosen

        for slot in range(top_k):
            if hash_table is None:
                best, chosen = experts.lowest_best(keys, ids)
            else:
                listed = [_listed(refs["hash_table"], x, slot, num_experts) for x in tokens]
                chosen = experts.by_row(listed)
            here = [i == experts.spread(chosen) for i in ids]
            if not unbiased:
                picked = [jnp.where(h, b, absent) for h, b in zip(here, bits, strict=True)]
                best = experts.max(picked)
            weights.append(value(best))
            if hash_table is None:
                others = [i != experts.spread(chosen) for i in ids]
                keys = [jnp.where(o, key, CHOSEN) for o, key in zip(others, keys, strict=True)]
            if expert_map is not None:
                mapped = [jnp.where(h, p, -1) for h, p in zip(here, physical, strict=True)]
                chosen = jnp.maximum(experts.max(mapped), -1)
            write(slot, chosen)
        if scoring == "softmax_topk":
            top = functools.reduce(jnp.maximum, weights)
            weights = [jnp.where(w > -LARGEST, jnp.exp(w - top), 0.0) for w in weights]
        if renormalize or scoring == "softmax_topk":
            total_weight = functools.reduce(jnp.add, weights) + 1e-20
            weights = [w / total_weight for w in weights]
        for shared in range(fused_shared_experts):
            expert = num_experts + shared
            listed = [jnp.full((), expert, I32) for row in each]
            if expert_map is not None:
                copies = expert_map.shape[0]
                listed = [refs["expert_map"][lax.rem(row, copies), expert] for row in each]
            write(top_k + shared, jnp.maximum(experts.by_row(listed), -1))
            weights.append(experts.full(shared_weight))
        if known:
            weights = [jnp.where(k, w, 0.0) for k, w in zip(known, weights, strict=True)]
        for slot, weight in enumerate(weights):
            weights_ref[rows, slot] = weight

    return launch(choose, out_type, grid={"t": -(-t // tile)}, interpret=interpret, barriers=False)(
        *operands.values()
    )


def _check_options(
    t: int,
    top_k: int,
    total: int,
    token_ids: Array | None,
    hash_table: Array | None,
    valid: Array | None,
    expert_map: Array | None,
) -> None:
    def refuse(name: str, x: Array | None, wanted: str) -> None:
        got = None if x is None else f"{x.dtype}{list(x.shape)}"
        raise ValueError(f"{name} is {got}; it must be {wanted}")

    if hash_table is not None:
        if hash_table.ndim != 2 or hash_table.shape[1] != top_k or hash_table.dtype != I32:
            refuse("hash_table", hash_table, f"int32 [vocab, {top_k}]")
        if token_ids is None or token_ids.shape != (t,) or token_ids.dtype != I32:
            refuse("token_ids", token_ids, f"int32 [{t}]")
    if valid is not None and valid.shape != (t,):
        refuse("valid", valid, f"bool [{t}]")
    if expert_map is not None and (
        expert_map.ndim != 2
        or not expert_map.shape[0]
        or expert_map.shape[1] != total
        or expert_map.dtype != I32
    ):
        refuse("expert_map", expert_map, f"int32 [copies, {total}]")


def _listed(table, token: Array, slot: int, num_experts: int) -> Array:
    """The expert that the hash table lists, a scalar; -1 if the table has no such token or the
    expert does not exist."""
    inside = jnp.minimum(jnp.maximum(token, 0), table.shape[0] - 1)
    expert = table[inside, slot]
    known = (token == inside) & (expert >= 0) & (expert < num_experts)
    return jnp.where(known, expert, -1)


class _Experts:
    """[rows, E] as one or two arrays [rows, a power of two], since register layouts divide evenly.
    With two, the second ends at E and repeats some of the first. One row: arrays without rows."""

    def __init__(self, num_experts: int, tile: int, regs: Registers, aligned: int):
        self.num_experts, self.regs = num_experts, regs
        self.width = pow2_floor(num_experts)
        self.starts = [0] if self.width == num_experts else [0, num_experts - self.width]
        vec = 1
        while vec < 4 and aligned % (2 * vec) == 0 and 2 * vec * LANES <= self.width:
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

    def load_copies(self, ref, each: list[Array]) -> list[Array]:
        """[C, E] -> for each row, the copy that is its turn."""
        copies = ref.shape[0]
        turn = self.by_row([lax.rem(row, copies) for row in each])
        parts = self.load_shared(ref.at[0])
        for copy in range(1, copies):
            mine = self.spread(turn) == copy
            others = self.load_shared(ref.at[copy])
            parts = [jnp.where(mine, o, p) for o, p in zip(others, parts, strict=True)]
        return parts

    def by_row(self, each: list[Array]) -> Array:
        """One int32 scalar a row -> [rows]."""
        if self.one_row:
            return each[0]
        layout = self.layout.reduce(1)
        row = self.regs.iota((len(each),), 0, layout)
        filled = [self.regs.full((len(each),), x, layout) for x in each]
        return functools.reduce(
            lambda out, r: jnp.where(row == r, filled[r], out), range(1, len(each)), filled[0]
        )

    def full(self, value: float) -> Array:
        """f32 [rows] of one value."""
        if self.one_row:
            return jnp.full((), value, F32)
        return self.regs.cast(jnp.full(self.shape[:1], value, F32), self.layout.reduce(1))

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

    def lowest_best(self, keys: list[Array], ids: list[Array]) -> tuple[Array, Array]:
        """The greatest key, and the lowest id among those of that key, both [rows]."""
        best = self.max(keys)
        # As a maximum: int32 maxima are the ones that Hopper reduces over a warp in one step.
        last = [
            jnp.where(k == self.spread(best), self.num_experts - i, 0)
            for k, i in zip(keys, ids, strict=True)
        ]
        return best, self.num_experts - self.max(last)


def _order(key: Array) -> Array:
    """f32 -> int32 in the same order; NaN and -inf as the least finite f32, -0.0 as 0.0."""
    key = jnp.where(key >= -LARGEST, key, -LARGEST)
    bits = lax.bitcast_convert_type(key, I32)
    return _flip(jnp.where(bits != -(2**31), bits, 0))


def _flip(bits: Array) -> Array:
    """Bits of a float <-> an integer in its order: a negative float grows as its bits fall."""
    return bits ^ (lax.shift_right_arithmetic(bits, 31) & 0x7FFFFFFF)


def _keys(
    scores: list[Array], bias, ids: list[Array], experts: _Experts, num_groups: int, top_groups: int
) -> list[Array]:
    """What the choice goes by: score + bias as order keys, each expert once, losers below all."""
    if bias is not None:
        scores = [s + b for s, b in zip(scores, experts.load_shared(bias), strict=True)]
    keys = experts.without_repeats([_order(score) for score in scores], CHOSEN)
    if num_groups > 1:
        keys = _lose_groups(keys, ids, experts, num_groups, top_groups, bias is not None)
    return keys


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
            chosen = experts.spread(experts.lowest_best(inside, ids)[1])
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


def _logits(logits: list[Array], experts: _Experts) -> list[Array]:
    return logits


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


SCORING = {
    "softmax": _softmax,
    "softmax_topk": _logits,
    "sigmoid": _sigmoid,
    "sqrtsoftplus": _sqrtsoftplus,
}

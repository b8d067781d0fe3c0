"""Tokens to the ranks that hold their experts, and results back: inside `shard_map`.

A row on the wire is a token in the format that the GEMMs read, so that what crosses is quantised
already, and behind it what its rank must know of it: scales, weights, experts' ids. One message
carries all of them. Rows that nobody sent arrive with ids of -1.

XLA's collectives in a call of the layer (`chunks` times as many); a is the axis of `ep`, b of `tp`:

    ep  tp  dp    "standard"                    the others
    a   -   -     all_reduce                    send, all_gather
    a   -   a     all_gather, reduce_scatter    send
    -   b   -     all_reduce
    -   b   b     all_gather, reduce_scatter
    a   b   -     all_reduce                    send, all_reduce, all_gather
    a   b   a,b   all_gather, reduce_scatter    send, all_gather, reduce_scatter
    a   b   a     2 all_gather, reduce_scatter  send, all_reduce
    a   b   b     2 all_gather, reduce_scatter  send, 2 all_gather, reduce_scatter

send: 2 all_to_all, there and back; 3 in "expanded", which sends what its rows are first; none in
"one_sided", which has two kernels in their place. So results are reduced once wherever they are
partial sums. `stats=True` over split tokens reduces its two counts besides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dgmoe_jax import backends, layouts
from dgmoe_jax.recipes import TILE, Format
from dgmoe_jax.types import Arrived

STEP = 8  # what `permute_index` aligns to
I32, F32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class Wire:
    """How a row is laid out: `width` values in `fmt`; then, in 32-bit words, scales, the shared
    experts' gate if tokens are `gated`, weights, and at the very end ids."""

    fmt: Format
    width: int
    top_k: int
    gated: bool
    backend: str

    @property
    def _fields(self) -> tuple[int, int, int, int]:
        """Words of scales, gate and weights, and of everything."""
        scales = 0 if self.fmt.group is None else self.fmt.scales_row(self.width)
        block = most_slots(self.fmt)
        return (
            scales,
            int(self.gated),
            self.top_k,
            -(-(scales + self.gated + 2 * self.top_k) // block) * block,
        )

    @property
    def row_bytes(self) -> int:
        return self.width * jnp.dtype(self.fmt.dtype).itemsize + 4 * self._fields[-1]

    def pack(self, tokens: Arrived) -> Array:
        """Tokens in bf16 -> [T, W] in `fmt`."""
        x, parts, columns = tokens.x, [], self.row_bytes // jnp.dtype(self.fmt.dtype).itemsize
        if self.fmt.group is None:
            x = jnp.pad(x, ((0, 0), (0, columns - self.width)))
        else:
            quant = backends.get("quant", self.backend)
            x, scales = quant(x, width=columns, **self.fmt.scaling)
            parts.append(scales[:, : x.shape[0]].T)
        parts += [tokens.shared_gate] if self.gated else []
        parts.append(tokens.topk_weights)
        parts = [_as(x, I32) for x in parts]
        room = self._fields[-1] - self.top_k - sum(part.shape[1] for part in parts)
        parts += [jnp.zeros((x.shape[0], room), I32), tokens.topk_ids]
        bits = _as(jnp.concatenate(parts, axis=1), _bits_of(x.dtype)).reshape(x.shape[0], -1)
        # In place: a concatenation would copy every row.
        return lax.dynamic_update_slice_in_dim(x, _as(bits, x.dtype), self.width, axis=1)

    def unpack(self, rows: Array) -> Arrived:
        """[N, W] -> tokens, their values where they are, their ids as they were sent."""
        *sizes, words = self._fields
        behind = _as(rows[:, self.width :], _bits_of(rows.dtype))
        behind = _as(behind.reshape(rows.shape[0], words, -1), I32)
        scales, gate, weights, _ = jnp.split(behind, np.cumsum(sizes), axis=1)
        if self.fmt.group is None:
            scales = None
        elif not self.fmt.packed_scales:
            scales = _as(scales, F32)
        ids, gate = behind[:, -self.top_k :], _as(gate, F32) if self.gated else None
        return Arrived(rows, scales, ids, _as(weights, F32), gate)


class WayBack(NamedTuple):
    """What a dispatcher remembers: to [T, j], rows that came from each token, -1: none; lost [T]
    int32, rows of it that were not sent; ranks [T, k] of its slots, -1: none, where needed."""

    to: Array
    lost: Array
    ranks: Array | None = None


def most_slots(fmt: Format) -> int:
    """Slots of a token whose ids fit in the last 128 elements of its row."""
    return TILE * jnp.dtype(fmt.dtype).itemsize // 4


_as = lax.bitcast_convert_type


def _bits_of(dtype) -> jnp.dtype:
    return {1: jnp.uint8, 2: jnp.uint16, 4: I32}[jnp.dtype(dtype).itemsize]


def as_bits(collective, x: Array) -> Array:
    """A collective that only moves: of bits, since not all of them know float8."""
    return _as(collective(_as(x, _bits_of(x.dtype))), x.dtype)


@dataclass(frozen=True)
class Dispatcher:
    """What all ways of exchanging rows share.

    axis: of the mesh, with `ranks` ranks of `num_experts` experts each. rows: that one rank can
    send to another (tokens, or for "expanded" assignments). distinct: no token names an expert
    twice.
    """

    axis: str | None
    ranks: int
    num_experts: int
    rows: int
    distinct: bool
    backend: str

    def _place(self, ids: Array, capacity: int) -> tuple[Array, Array]:
        """ids [T, j] of ranks or -1 -> rows in blocks of `capacity` a rank (-1: not sent), counts.

        In (token, slot) order within a block, so that sender and receiver count alike.
        """
        dst, _, _, counts = backends.get("permute_index", self.backend)(
            ids,
            num_experts=self.ranks,
            rows=self.ranks * capacity,
            alignment=STEP,
            capacity=capacity,
            tile=STEP,
            with_m_indices=False,
        )
        return dst, counts

    def _exchange(self, rows: Array, dst: Array, counts: Array) -> Array:
        """rows [N, W], dst [N, j] in blocks of `self.rows`, one a rank -> blocks received.

        What was not sent arrives with all bits set in its last 128 elements.
        """
        out = self._moved(rows, dst)
        tail = _as(out[:, -TILE:], _bits_of(out.dtype))
        sent = (jnp.arange(self.rows) < counts[:, None]).reshape(-1, 1)
        tail = _as(jnp.where(sent, tail, jnp.iinfo(tail.dtype).max), out.dtype)
        return self._swap(lax.dynamic_update_slice_in_dim(out, tail, out.shape[1] - TILE, 1))

    def _swap(self, blocks: Array) -> Array:
        """[ranks * n, W], a block for every rank -> one from every rank."""
        return as_bits(
            partial(lax.all_to_all, axis_name=self.axis, split_axis=0, concat_axis=0, tiled=True),
            blocks,
        )

    def _mine(self, ids: Array) -> Array:
        """Experts' ids counted from this rank's first one; -1 for those of others."""
        ids = ids - lax.axis_index(self.axis) * self.num_experts
        return jnp.where((ids >= 0) & (ids < self.num_experts), ids, -1)

    def _moved(self, rows: Array, to: Array) -> Array:
        """rows [N, W] to rows `to` [N, j] of blocks for all ranks."""
        move = backends.get("permute", self.backend)
        count = self.ranks * self.rows
        return move(rows, to, rows=count, slabs=1, group=None, ue8m0=False)[0]

    def _unpermute(self, rows, src2dst, weights=None, shared=None, scaling_factor=1.0) -> Array:
        if weights is None:
            weights = jnp.ones(src2dst.shape, F32)
        unpermute = backends.get("unpermute", self.backend)
        return unpermute(rows, src2dst, weights, shared, scaling_factor=scaling_factor)


class Standard(Dispatcher):
    """All tokens are here; those of other ranks' experts are left out, and the layer adds up what
    the ranks have: SGLang's StandardDispatcher."""

    def send(self, wire: Wire, tokens: Arrived, on_wire: Array | None) -> tuple[Arrived, WayBack]:
        """Tokens, and the same [T, W] on `wire` -> those for this rank's experts, and the way
        back."""
        if self.axis is not None:
            tokens = replace(tokens, topk_ids=self._mine(tokens.topk_ids))
        return tokens, WayBack(None, jnp.zeros(tokens.x.shape[0], I32))

    def bring_back(
        self,
        routed: Array,
        src2dst: Array,
        arrived: Arrived,
        way_back: WayBack,
        tokens: Arrived,
        shared: Array | None,
        scaling_factor: float,
    ) -> Array:
        """Experts' rows [M, H] -> as in `unpermute` [T, H] bf16, where the tokens came from."""
        return self._unpermute(routed, src2dst, tokens.topk_weights, shared, scaling_factor)


class AllToAll(Dispatcher):
    """A token goes once to each rank that holds one of its experts, and its rank's weighted sum
    comes back: DeepEP's normal mode. The source adds what ranks send, in their order, in f32."""

    def send(self, wire, tokens, on_wire):
        if wire.top_k > most_slots(wire.fmt):
            raise NotImplementedError(
                f"{wire.top_k} slots of a token: a row in {wire.fmt.name} has room for the ids of"
                f" {most_slots(wire.fmt)}; dispatch='standard' and 'expanded' take any number"
            )
        ids, each = tokens.topk_ids, jnp.arange(self.ranks, dtype=I32)
        ranks = jnp.where(ids >= 0, ids // self.num_experts, -1)
        goes = jnp.any(ranks[:, :, None] == each, axis=1)
        to, counts = self._place(jnp.where(goes, each, -1), self.rows)
        arrived = wire.unpack(self._exchange(on_wire, to, counts))
        arrived = replace(arrived, topk_ids=self._mine(arrived.topk_ids))
        return arrived, WayBack(to, jnp.sum(goes & (to < 0), axis=1, dtype=I32), ranks)

    def bring_back(self, routed, src2dst, arrived, way_back, tokens, shared, scaling_factor):
        sums = self._unpermute(routed, src2dst, arrived.topk_weights)
        sums = self._return(sums, arrived)
        return self._unpermute(sums, way_back.to, None, shared, scaling_factor)

    def _return(self, rows: Array, arrived: Arrived) -> Array:
        """Rows in the places of those that arrived, to where these came from."""
        return self._swap(rows)


class OneSided(AllToAll):
    """AllToAll by kernels that write into the peers' memory, and only what there is to send:
    FlashInfer's one-sided all-to-all. The emulator, which knows one memory, sends all of it."""

    @property
    def _alone(self) -> bool:
        return self.backend == "emulator" or self.ranks == 1

    def _exchange(self, rows, to, counts):
        if self._alone:
            return super()._exchange(rows, to, counts)
        return self._write(rows, to, counts)

    def _return(self, rows, arrived):
        if self._alone:
            return super()._return(rows, arrived)
        live = jnp.any(arrived.topk_ids >= 0, axis=1)
        to = jnp.where(live, jnp.arange(live.size, dtype=I32), -1)
        counts = jnp.sum(live.reshape(self.ranks, -1), axis=1, dtype=I32)
        return self._write(rows, to[:, None], counts)

    def _write(self, rows: Array, to: Array, counts: Array) -> Array:
        return backends.exchange()(
            *(rows, to, counts), axis_name=self.axis, ranks=self.ranks, capacity=self.rows
        )


class LowLatency(AllToAll):
    """Tokens travel as in AllToAll; each expert's row comes back, unweighted, and the source weighs
    and adds them in slot order, which are the bits of one device: DeepEP's low-latency mode."""

    def bring_back(self, routed, src2dst, arrived, way_back, tokens, shared, scaling_factor):
        top_k = src2dst.shape[1]
        most = self.rows * (min(top_k, self.num_experts) if self.distinct else top_k)
        most = -(-most // STEP) * STEP
        source = jnp.arange(src2dst.shape[0], dtype=I32)[:, None] // self.rows
        back, _ = self._place(jnp.where(arrived.topk_ids >= 0, source, -1), most)
        from_ = jnp.full(self.ranks * most, -1, I32)
        from_ = from_.at[jnp.where(back < 0, from_.size, back)].set(src2dst, mode="drop")
        rows = self._swap(self._unpermute(routed, from_[:, None]))
        to, _, ranks = way_back
        sent = jnp.take_along_axis(to, jnp.maximum(ranks, 0), axis=1) >= 0
        there, _ = self._place(jnp.where(sent, ranks, -1), most)
        return self._unpermute(rows, there, tokens.topk_weights, shared, scaling_factor)


class Expanded(Dispatcher):
    """A row for each (token, expert), sorted by expert, and prefix sums of each expert's rows; rows
    come back weighted: DeepEP v2, expanded. (Its variant that does not expand is AllToAll.)"""

    def send(self, wire, tokens, on_wire):
        to, psum, lost = self._sorted(tokens.topk_ids)
        weights = jnp.zeros(self.ranks * self.rows, F32)
        weights = weights.at[jnp.where(to < 0, weights.size, to)].set(
            tokens.topk_weights, mode="drop"
        )
        head = jnp.concatenate([psum, _as(weights.reshape(self.ranks, -1), I32)], axis=1)
        psum, weights = jnp.split(self._swap(head), [self.num_experts], axis=1)
        row = jnp.arange(self.rows, dtype=I32)[:, None]
        expert = jnp.sum(row >= psum[:, None], axis=-1, dtype=I32)
        expert = jnp.where(expert < self.num_experts, expert, -1)
        arrived = replace(
            wire.unpack(self._swap(self._moved(on_wire, to))),
            topk_ids=expert.reshape(-1, 1),
            topk_weights=_as(weights.reshape(-1, 1), F32),
        )
        return arrived, WayBack(to, lost)

    def _sorted(self, ids: Array) -> tuple[Array, Array, Array]:
        """ids [T, k] -> rows in blocks a rank [T, k], prefix sums [ranks, experts], lost [T]."""
        total = self.ranks * self.num_experts
        place, _, _, counts = backends.get("permute_index", self.backend)(
            ids,
            num_experts=total,
            rows=layouts.contiguous_rows(ids.size, total, STEP),
            alignment=STEP,
            capacity=None,
            tile=STEP,
            with_m_indices=False,
        )
        psum = jnp.cumsum(counts.reshape(self.ranks, -1), axis=1, dtype=I32)
        segments = -(-counts // STEP) * STEP
        # From an expert's start among aligned segments to the one within its rank's block.
        shift = (psum.reshape(-1) - counts) - (jnp.cumsum(segments) - segments)
        known = jnp.maximum(ids, 0)
        row = place + shift[known]
        fits = (place >= 0) & (row < self.rows)
        to = jnp.where(fits, known // self.num_experts * self.rows + row, -1)
        lost = jnp.sum((place >= 0) & ~fits, axis=1, dtype=I32)
        return to, jnp.minimum(psum, self.rows), lost

    def bring_back(self, routed, src2dst, arrived, way_back, tokens, shared, scaling_factor):
        weighted = self._unpermute(routed, src2dst, arrived.topk_weights)
        return self._unpermute(self._swap(weighted), way_back.to, None, shared, scaling_factor)


DISPATCHERS = {
    "standard": Standard,
    "all_to_all": AllToAll,
    "low_latency": LowLatency,
    "expanded": Expanded,
    "one_sided": OneSided,
}

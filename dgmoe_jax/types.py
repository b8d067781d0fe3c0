"""Containers that travel between the layer's steps (all pytrees)."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
from jax import Array

from dgmoe_jax.recipes import Format


def _pytree(cls):
    return jax.tree_util.register_dataclass(dataclass(frozen=True)(cls))


@_pytree
class Routing:
    """Where each token goes.

    topk_ids [T, k] int32: expert of each slot; -1 (padding, or an expert that lives elsewhere)
    contributes exactly zero. topk_weights [T, k] f32: without the router's scaling factor.
    """

    topk_ids: Array
    topk_weights: Array


@_pytree
class Arrived:
    """Tokens where their experts are, or on their way there.

    x [N, W]: bf16 or, where there are `scales` [N, G] (or packed, [N, ceil(G / 4)] int32), values
    in the activations' format; what came with a token may follow in the last columns. topk_ids
    [N, k] int32, -1: none; topk_weights [N, k] f32; shared_gate [N, 1] f32 or None.
    """

    x: Array
    scales: Array | None
    topk_ids: Array
    topk_weights: Array
    shared_gate: Array | None


@_pytree
class Scaled:
    """Values [..., N, K] in `format`, with scales [..., N / group rows, K / group columns] f32.

    An unscaled format has `scales=None`; a packed one stores K / packed elements a row. Where the
    format packs scales they are [..., ceil(K / group columns / 4), N rounded up to 4] int32.
    """

    values: Array
    scales: Array | None
    format: Format = field(metadata={"static": True})


@_pytree
class ExpertWeights:
    """w13 [E, 2I, H] (gate rows, then up rows) and w2 [E, H, I], sizes padded to 128."""

    w13: Scaled
    w2: Scaled


@dataclass(frozen=True)
class Split:
    """Ranks that params are split over: `ep` for experts, `tp` for their columns, `shared` for the
    shared experts' columns; and the expert in each slot, where slots are not the experts."""

    ep: int
    tp: int
    shared: int
    placement: tuple[int, ...] | None


@_pytree
class MoEParams:
    """Everything `moe_layer` reads, in the layout the GEMMs read; made by `prepare_params`.

    gate_weight [E, H] bf16 or f32; gate_bias [E] f32 (selection only) or None;
    experts: E, and after them the shared ones that the router fuses; shared: the others as one
    dense block (E = 1) or None; hash_table [vocab, k] int32 or None; shared_gate_weight [1, H]:
    the shared experts' own gate (Qwen2-MoE) or None. split: how `shard_params` split and ordered
    them, None: not at all.
    """

    gate_weight: Array
    gate_bias: Array | None
    experts: ExpertWeights
    shared: ExpertWeights | None
    hash_table: Array | None
    shared_gate_weight: Array | None = None
    split: Split | None = field(default=None, metadata={"static": True})


@_pytree
class Rows:
    """Rows that a grouped GEMM reads, in either layout (`dgmoe_jax.layouts`).

    values [M, K]; scales [slabs * K / group, S] f32 or None, S = M / slabs rounded up to 4, stored
    MN-major within a slab (what DeepGEMM reads through the transposed view); slabs is 1, or E in
    the masked layout. Packed UE8M0 scales are [slabs * ceil(K / group / 4), S] int32, the exponents
    of four groups in each, the first in the lowest byte (DeepGEMM's SM100 kernels). tiles [3, N]
    int32: expert, first row and live rows of each tile. m_indices [M] int32: expert of each row, -1
    for padding (contiguous, and where it is read). masked_m [E] int32: rows of each expert. What
    padding holds is unspecified and may be NaN.
    """

    values: Array
    scales: Array | None
    tiles: Array
    m_indices: Array | None
    masked_m: Array | None


@_pytree
class Stats:
    """What a call of the layer did, beside its result.

    expert_counts [E] int32: slots that named each expert (shared experts that the router fuses are
    E, E + 1, ...), of the tokens that this rank routed. dropped [] int32: rows that a bound on what
    ranks send one another kept back (`Parallel.capacity_factor`).
    """

    expert_counts: Array
    dropped: Array

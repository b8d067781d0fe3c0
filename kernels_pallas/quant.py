"""FP8 quantisation of bf16 rows: how it is done and stored, and the kernel that does only that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ._common import (
    BF16,
    F32,
    FP8,
    I32,
    Registers,
    launch,
    own_index,
    spread_groups,
    spread_rows,
    vector,
)

GROUP = 128  # values that a thread block takes side by side
GROUPS = (128, 32)
PACK = 4  # exponents in an int32
TILE = 32  # rows of a block of 128 columns; of a wider one fewer, as registers have room
E4M3_MAX = 448.0
FLOOR_BITS = int(np.float32(1e-10).view(np.int32))
INFINITY_BITS = 0x7F800000


class Rule(NamedTuple):
    """How rows are quantised; every kernel that quantises takes these as keywords.

    group:  128 or 32 neighbours share a scale.
    ue8m0:  scales are powers of two.
    packed: they are stored as exponents, the lowest byte first, of four groups in an int32 (what
            DeepGEMM's SM100 kernels read), instead of as f32.

    Scales of rows [M, K] are [slabs * G, S], MN-major within a slab: G = K / group, if packed
    ceil(K / group / 4), bytes of groups past the end being 0; S = M / slabs rounded up to 4, 16
    bytes, as the TMA wants it. Row r's lie in column r % (M / slabs) of slab r // (M / slabs);
    columns from M / slabs on are not written.
    """

    group: int = GROUP
    ue8m0: bool = False
    packed: bool = False

    @property
    def unit(self) -> int:
        """Groups of a row that are quantised at a time: 128 values, or those of a whole int32."""
        return max(GROUP // self.group, PACK if self.packed else 1)


def rule_of(group: int, ue8m0: bool, packed: bool) -> Rule:
    """The rule of these keywords.

    Raises NotImplementedError for another group, ValueError for f32 scales to be packed.
    """
    if group not in GROUPS:
        raise NotImplementedError(f"group={group}: the Pallas kernels quantise groups of {GROUPS}")
    if packed and not ue8m0:
        raise ValueError("packed=True, ue8m0=False; only powers of two have exponents to be packed")
    return Rule(group, ue8m0, packed)


def quant(
    x: Array,
    *,
    width: int | None = None,
    group: int = GROUP,
    ue8m0: bool = False,
    packed: bool = False,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """x [M, K] bf16 -> values [M, K] float8_e4m3fn, scales f32 or int32 as `Rule` says, one slab.

    With `width`, values are [M, width], their columns from K on unspecified: room for the caller.

    Per row and group: scale = max(amax, 1e-10) / 448, with `ue8m0` rounded up to a power of two
    (exponent 1..254); value = x / scale, IEEE division, rounded to nearest even. Inf or
    NaN in a group leaves NaN in its values, and exponent 255, UE8M0's NaN, in its packed scale.

    Raises ValueError for K or width that is no multiple of 128, and what `rule_of` does.
    """
    rule = rule_of(group, ue8m0, packed)
    if x.ndim != 2 or x.dtype != BF16 or x.shape[1] % GROUP:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; it must be bf16 [M, K], K % 128 == 0")
    m, k = x.shape
    width = k if width is None else width
    if width < k or width % GROUP:
        raise ValueError(f"width={width}; it must be a multiple of {GROUP}, and K={k} at least")
    out_type = quantized_type(m, k, rule)
    if m == 0:
        return jnp.zeros((m, width), FP8), jnp.zeros(out_type[1].shape, out_type[1].dtype)
    regs, units = Registers(interpret), Units(k, rule)
    tile = tile_rows(m, TILE // units.wide)

    def quantise(x_ref, values_ref, scales_ref):
        rows, unit = block_rows(own_index("m"), tile, m), own_index("u")

        def some(groups):
            at, layout = units.at(unit, groups), unit_layout(tile, groups, group)
            x = regs.load(x_ref.at[rows, at], layout).astype(F32)
            values_ref[rows, at], scales = quantize_tile(x, layout, rule, regs, groups)
            units.store_scales(scales_ref, 0, unit, rows, scales, regs)

        units.each(unit, some)

    values, scales = units.out_types(m)
    values, scales = launch(
        quantise,
        (values.update(shape=(m, width // GROUP, *units.view[1:])), scales),
        grid={"m": -(-m // tile), "u": units.count},
        interpret=interpret,
        barriers=False,
    )(x.reshape(m, *units.view))
    return values.reshape(m, width), scales.reshape(out_type[1].shape)


def quantized_type(
    m: int, k: int, rule: Rule, slabs: int = 1
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """values [M, K] and scales as `Rule` says."""
    per_row = k // rule.group
    per_row = -(-per_row // PACK) if rule.packed else per_row
    shape = slabs * per_row, -(-(m // slabs) // 4) * 4
    scales = jax.ShapeDtypeStruct(shape, I32 if rule.packed else F32)
    return jax.ShapeDtypeStruct((m, k), FP8), scales


class Units:
    """A row of K values as units of `rule.unit` groups, of which the last may have fewer.

    Kernels see rows as [M, *view]; `at` picks a unit there, [groups, group], or [group] if that is
    one group. A unit is `wide` times 128 values.
    """

    def __init__(self, k: int, rule: Rule):
        self.rule, self.wide = rule, rule.unit * rule.group // GROUP
        self.whole, rest = divmod(k // GROUP, self.wide)
        self.rest = rest * GROUP // rule.group  # groups of a unit that is not whole
        self.count = self.whole + (rest > 0)
        self.split = () if rule.group == GROUP else (GROUP // rule.group,)
        self.view = (k // GROUP, *self.split, rule.group)

    def at(self, unit: Array | pl.Slice, groups: int) -> Array | pl.Slice:
        """Where `groups` groups of a unit lie, or those of a slice of whole units."""
        if self.wide == 1:
            return unit
        if isinstance(unit, pl.Slice):
            return pl.ds(unit.start * groups, unit.size * groups)
        return unit * self.wide if groups == 1 else pl.ds(unit * self.wide, groups)

    def each(self, unit: Array, do: Callable[[int], None]) -> None:
        """do(groups of this unit)."""
        if not self.rest:
            do(self.rule.unit)
            return
        pl.when(unit == self.whole)(lambda: do(self.rest))
        if self.whole:
            pl.when(unit < self.whole)(lambda: do(self.rule.unit))

    def out_types(self, m: int, slabs: int = 1) -> tuple[jax.ShapeDtypeStruct, ...]:
        """`quantized_type` as kernels see it: scales [slabs, units, S], of f32 and several groups a
        unit [slabs, units, groups, S]."""
        values, scales = quantized_type(m, self.view[0] * GROUP, self.rule, slabs)
        split = () if self.rule.packed else self.split
        shape = slabs, self.count, *split, scales.shape[1]
        return values.update(shape=(m, *self.view)), scales.update(shape=shape)

    def store_scales(
        self,
        ref: object,
        slab: Array | int,
        unit: Array | pl.Slice,
        rows: Array | pl.Slice,
        scales: Array,
        regs: Registers,
    ) -> None:
        """Writes what `quantize_tile` says of one unit of some rows, or of units of one row."""
        if self.rule.packed or not self.split:
            ref[slab, unit, rows] = scales
        elif isinstance(unit, pl.Slice):
            ref[slab, unit, :, rows] = scales
        else:
            regs.store_transposed(ref.at[slab, unit, :, rows], scales)


def tile_rows(m: int, most: int) -> int:
    """Rows of a block: 1, or steps of the 8 rows that a load of the row layout covers."""
    return most if m >= most else 8 if m >= 8 else 1


def block_rows(block: Array, tile: int, m: int) -> Array | pl.Slice:
    """Index of a block's rows. The last block overlaps its neighbour rather than pass the end: both
    write equal bytes. A tile of one row is indexed without that dimension."""
    return block if tile == 1 else pl.ds(jnp.minimum(block * tile, m - tile), tile)


def unit_layout(rows: int, groups: int, group: int) -> plgpu.ParameterizedLayout:
    """[rows, groups, group] without dimensions of 1, with 16 bytes of bf16 a thread; one row alone
    is every warp's."""
    if groups > 1:
        return spread_groups(rows, group, 8)
    return spread_rows(rows, GROUP, 8) if rows > 1 else vector(GROUP, 4, warps=1)


def quantize_tile(
    x: Array, layout: plgpu.ParameterizedLayout, rule: Rule, regs: Registers, groups: int = 1
) -> tuple[Array, Array]:
    """x [rows, groups, group] f32 in `unit_layout` -> values FP8 and scales f32 [rows, groups] or
    packed int32 [rows], all without dimensions of 1.

    The largest magnitude is found on the bits, where NaN is above Inf and never dropped, as a float
    maximum may do (PTX `max`, XLA on a CPU). No clamp: |x / scale| is 448 and an ulp at most, which
    rounds to 448, and Inf / Inf is the NaN that has to show.
    """
    bits = lax.bitcast_convert_type(x, I32) & 0x7FFFFFFF
    amax = lax.bitcast_convert_type(jnp.maximum(jnp.max(bits, axis=-1), FLOOR_BITS), F32)
    scales = regs.divide(amax, E4M3_MAX)
    if not rule.ue8m0:
        return regs.divide_rows(x, scales, layout).astype(FP8), scales
    scales = round_up_to_pow2(scales)
    values = x * regs.along_rows(inverse_of_pow2(scales), x.shape, layout)
    return values.astype(FP8), pack(scales, layout, regs, groups) if rule.packed else scales


def round_up_to_pow2(scales: Array) -> Array:
    """Positive f32 -> the next power of two, exponent 1..254; Inf and NaN stay, to be seen."""
    bits = lax.bitcast_convert_type(scales, I32)
    exponent = jnp.right_shift(bits, 23)
    raised = exponent + jnp.where((bits & 0x7FFFFF) != 0, 1, 0)
    rounded = jnp.minimum(jnp.maximum(raised, 1), 254) << 23
    return lax.bitcast_convert_type(jnp.where(exponent == 255, bits, rounded), F32)


def inverse_of_pow2(scales: Array) -> Array:
    """1 / scales, exactly, so that multiplying by it is dividing. `scales` are 2^120 at most, which
    the largest f32 has, or Inf (to 0) or NaN."""
    bits = lax.bitcast_convert_type(scales, I32)
    inverse = lax.bitcast_convert_type((254 << 23) - bits, F32)
    return jnp.where(bits < INFINITY_BITS, inverse, 1.0 / scales)


def pack(scales: Array, layout: plgpu.ParameterizedLayout, regs: Registers, groups: int) -> Array:
    """Powers of two [rows, groups] -> their exponents in int32 [rows], the first in the lowest
    byte; the dimension of one group is not there. `layout` is that of the values."""
    exponents = jnp.right_shift(lax.bitcast_convert_type(scales, I32), 23)
    if groups == 1:
        return exponents
    place = regs.iota(exponents.shape, exponents.ndim - 1, layout.reduce(exponents.ndim))
    return jnp.sum(exponents << (place * 8), axis=-1, dtype=I32)

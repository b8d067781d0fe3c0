"""The Pallas kernels against NumPy, in Mosaic GPU interpret mode on a CPU and as they are on a GPU,
and their lowering for CUDA at the sizes they are made for."""

from __future__ import annotations

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import tanh_error
from dgmoe_jax.interop.scales import pack_ue8m0
from dgmoe_jax.kernels_pallas import _common
from dgmoe_jax.kernels_pallas import permute_index as index
from dgmoe_jax.kernels_pallas.act_quant import act, act_quant
from dgmoe_jax.kernels_pallas.permute import permute
from dgmoe_jax.kernels_pallas.permute_index import num_tiles, permute_index
from dgmoe_jax.kernels_pallas.quant import quant
from dgmoe_jax.kernels_pallas.route import route
from dgmoe_jax.kernels_pallas.unpermute import unpermute

from dgmoe_jax import xla

BF16, FP8, F32, I32 = jnp.bfloat16, jnp.float8_e4m3fn, jnp.float32, jnp.int32
LARGEST = np.finfo(np.float32).max
POISON = [np.nan, 3e38]
INTERPRET = jax.default_backend() != "gpu"


def f32(x):
    return np.asarray(x).astype(np.float32)


def random(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def custom_calls(fn, *shapes):
    """Kernels in the program that CUDA would get."""
    args = [None if s is None else jax.ShapeDtypeStruct(*s) for s in shapes]
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "callback" not in lowered
    return lowered.count("stablehlo.custom_call")


# --- quant


# (group, ue8m0, packed): every way to quantise.
RULES = [(g, *kind) for g in (128, 32) for kind in [(False, False), (True, False), (True, True)]]
every_rule = pytest.mark.parametrize("rule", RULES, ids=str)


def as_keywords(rule):
    return dict(zip(("group", "ue8m0", "packed"), rule, strict=True))


def quant_reference(x, rule=RULES[0]):
    """values [M, K], scales [M, G] f32 or [M, ceil(G / 4)] int32."""
    group, ue8m0, packed = rule
    groups = f32(x).reshape(x.shape[0], -1, group)
    with np.errstate(all="ignore"):
        scales = np.maximum(np.abs(groups).max(-1), np.float32(1e-10)) / np.float32(448)
        if ue8m0:
            bits = scales.view(np.int32)
            exponent = np.clip((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1, 254).astype(np.int32)
            rounded = (exponent << 23).view(np.float32)
            scales = np.where(np.isfinite(scales), rounded, scales)
        values = np.clip(groups / scales[..., None], np.float32(-448), np.float32(448))
    values = values.astype(ml_dtypes.float8_e4m3fn).reshape(x.shape)
    if not packed:
        return values, scales
    exponents = np.zeros((x.shape[0], -(-scales.shape[1] // 4) * 4), np.uint8)
    exponents[:, : scales.shape[1]] = np.where(
        np.isfinite(scales), np.frexp(scales)[1] + 126, 255
    )  # 2^-126 has exponent 1
    return values, exponents.view("<i4")


def row_scales(scales, slabs, rows):
    """[slabs * G, S] -> [rows, G]."""
    assert scales.shape[1] == -(-rows // slabs // 4) * 4
    scales = np.asarray(scales).reshape(slabs, -1, scales.shape[1])[:, :, : rows // slabs]
    return scales.transpose(0, 2, 1).reshape(rows, -1)


def assert_quantized(got, x, rule=RULES[0]):
    values, scales = got
    want_values, want_scales = quant_reference(x, rule)
    assert values.dtype == FP8 and scales.dtype == (I32 if rule[2] else F32)
    np.testing.assert_array_equal(row_scales(scales, 1, x.shape[0]), want_scales)
    np.testing.assert_array_equal(f32(values), f32(want_values))


@every_rule
@pytest.mark.parametrize(
    ("m", "k"), [(1, 384), (1, 1024), (3, 128), (17, 256), (33, 640), (9, 1408)]
)
def test_quant(m, k, rule):
    x = random(m, m, k) * np.exp(3 * random(1, m, 1))
    x[0, :128] = 0
    if m > 4:
        x[1, 5], x[2, 30], x[3, 7], x[4, :128] = np.nan, np.inf, 3e38, 1e-30
    x = jnp.asarray(x, BF16)
    got = quant(x, **as_keywords(rule), interpret=INTERPRET)
    assert_quantized(got, x, rule)
    first = np.asarray(got[1])[0, 0]
    assert (first & 0xFF > 0) if rule[2] else (np.isfinite(first) and first > 0)
    if m > 4:
        bad = np.isnan(f32(got[0])).any(axis=1)
        np.testing.assert_array_equal(np.flatnonzero(bad), [1, 2])


@pytest.mark.parametrize("run", [xla.quant, functools.partial(quant, interpret=INTERPRET)])
@pytest.mark.parametrize("group", [128, 32])
def test_packed_scales_are_what_the_bridge_packs(run, group):
    x = np.array(random(3, 7, 640))
    x[2, 600], x[3, 3] = np.nan, -np.inf
    plain, packed = (
        np.array(run(jnp.asarray(x, BF16), group=group, ue8m0=True, packed=packed)[1])[:, :7].T
        for packed in (False, True)
    )
    broken = ~np.isfinite(plain)
    assert broken.sum() == 2
    want = pack_ue8m0(jnp.asarray(np.where(broken, 1, plain)))
    assert packed.dtype == want.dtype and packed.shape[1] == want.shape[0]
    got, want = (
        np.ascontiguousarray(words).view(np.uint8) for words in (packed, np.asarray(want)[:, :7].T)
    )
    want[:, : broken.shape[1]][broken] = 255  # UE8M0's NaN, which the bridge makes of no f32
    np.testing.assert_array_equal(got, want)


def test_quant_rounds_ties_to_even_and_divides_exactly():
    # Quotients that lie on, and an ulp beside, the midpoints between two e4m3 values.
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = np.sort(grid[np.isfinite(grid) & (grid >= 0)])
    x = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    x = np.concatenate([x, np.full(-x.size % 127, 1, np.float32)]).reshape(-1, 127)
    x = np.concatenate([np.full((x.shape[0], 1), 448, np.float32), x], axis=1)
    x = jnp.asarray(np.concatenate([x * s for s in (1, 1.375, 0.0078)]), BF16)
    assert_quantized(quant(x, interpret=INTERPRET), x)


def test_quant_lowers_for_cuda():
    for m, k in [(1, 384), (127, 640), (65536, 7168)]:
        for rule in RULES:
            assert custom_calls(functools.partial(quant, **as_keywords(rule)), ((m, k), BF16)) == 1


def test_quant_refuses():
    with pytest.raises(ValueError, match="129"):
        quant(jnp.zeros((2, 129), BF16))
    with pytest.raises(NotImplementedError, match=r"group=64.*128, 32"):
        quant(jnp.zeros((2, 128), BF16), group=64)
    for run in (quant, xla.quant):
        with pytest.raises(ValueError, match="packed=True, ue8m0=False"):
            run(jnp.zeros((2, 128), BF16), packed=True)
        for width in (128, 300):
            with pytest.raises(ValueError, match=rf"width={width}.*128.*K=256"):
                run(jnp.zeros((2, 256), BF16), width=width)


def test_quant_leaves_room_where_asked():
    x = jnp.asarray(random(0, 5, 256), BF16)
    for run in (functools.partial(quant, interpret=INTERPRET), xla.quant):
        (wide, scales), (want, want_scales) = run(x, width=640), run(x)
        assert wide.shape == (5, 640)
        np.testing.assert_array_equal(f32(wide)[:, :256], f32(want))
        np.testing.assert_array_equal(np.asarray(scales)[:, :5], np.asarray(want_scales)[:, :5])


# --- act, act_quant

ACTIVATIONS = [
    ("silu", (None,)),
    ("silu", (2.0,)),
    ("oai_swiglu", (1.702, 7.0)),
    ("situ", (4.0, 8.0)),
]


def act_reference(gateup, activation, params):
    gate, up = np.split(f32(gateup).astype(np.float64), 2, axis=1)
    with np.errstate(all="ignore"):
        if activation == "situ":
            beta, linear = params
            return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * linear * np.tanh(up / linear)
        alpha, limit = (1.0, params[0]) if activation == "silu" else params
        if limit is not None:
            gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-alpha * gate)) * (up + (activation == "oai_swiglu"))


def assert_unwritten(rows):
    """In interpret mode, what no kernel wrote is NaN or the largest int."""
    if INTERPRET:
        rows = np.asarray(rows)
        unwritten = rows == np.iinfo(np.int32).max if rows.dtype == I32 else np.isnan(f32(rows))
        assert unwritten.all()


# Rows, alignment, tile, slabs, tiles: two experts with a gap of owned rows and one of others' rows,
# slabs, every row live and no whole step of them, a single row.
TILINGS = [
    (32, 8, 16, 1, [(0, 0, 16), (0, 16, 3), (3, 24, 5), (-1, 0, 0)]),
    (96, 16, 32, 3, [(0, 0, 9), (2, 64, 32), (-1, 0, 0)]),
    (20, 16, 16, 1, [(0, 0, 16), (0, 16, 4)]),
    (1, 8, 128, 1, [(0, 0, 1)]),
]


def act_arguments(tiling, width, poison):
    """gateup and tiles, the live rows, and those that the tiles own."""
    m, alignment, _, _, tiles = tiling
    live, owned = np.zeros(m, bool), np.zeros(m, bool)
    for _, first, count in tiles:
        live[first : first + count] = True
        owned[first : first + -(-count // alignment) * alignment] = True
    gateup = 4 * random(0, m, 2 * width)
    gateup[~live] = poison
    return (jnp.asarray(gateup, BF16), jnp.asarray(np.array(tiles, np.int32).T)), live, owned


def act_keywords(tiling, activation, params):
    _, alignment, tile, _, _ = tiling
    return {"tile": tile, "alignment": alignment, "activation": activation, "params": params}


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(
    ("tiling", "activation", "params"),
    [(TILINGS[0], *a) for a in ACTIVATIONS] + [(t, *ACTIVATIONS[0]) for t in TILINGS[1:]],
)
def test_act(tiling, activation, params, poison):
    args, live, owned = act_arguments(tiling, 256, poison)
    kwargs = act_keywords(tiling, activation, params)
    want = act_reference(args[0][live], activation, params)
    got = act(*args, **kwargs, interpret=INTERPRET)
    np.testing.assert_allclose(f32(got)[live], want, rtol=5e-3, atol=1e-30)
    assert_unwritten(got[~owned])


@pytest.mark.parametrize(
    ("tiling", "activation", "params", "rule"),
    [(TILINGS[0], *ACTIVATIONS[0], rule) for rule in RULES]
    + [(TILINGS[0], *a, RULES[n]) for a in ACTIVATIONS[1:] for n in (0, 5)]
    + [(t, *ACTIVATIONS[1], RULES[n]) for t in TILINGS[1:] for n in (2, 3, 5)],
)
def test_act_quant(tiling, activation, params, rule):
    m, slabs, width = tiling[0], tiling[3], 640
    group, _, packed = rule
    kwargs = act_keywords(tiling, activation, params) | as_keywords(rule) | {"slabs": slabs}
    for poison in POISON:
        args, live, owned = act_arguments(tiling, width, poison)
        values, scales = act_quant(*args, **kwargs, interpret=INTERPRET)
        assert values.dtype == FP8 and scales.dtype == (I32 if packed else F32)
        scales = row_scales(scales, slabs, m)
        assert_unwritten(values[~owned])
        assert_unwritten(scales[~owned])

        # Only f32 lies between these and the product in f64.
        want = act_reference(args[0][live], activation, params)
        want_scales = quant_reference(want, rule)[1]
        off = tanh_error(activation, "pallas")
        rtol = 0 if packed else 1e-5 + off
        np.testing.assert_allclose(scales[live], want_scales, rtol=rtol)
        scales = quant_reference(want, (*rule[:2], False))[1]
        back = f32(values)[live] * np.repeat(scales, group, axis=1)
        near = np.repeat(scales, group, axis=1) * 2**-9
        assert (np.abs(back - want) <= np.abs(want) * (2**-4 + 2 * off) + near).all()


@pytest.mark.parametrize(("activation", "params"), ACTIVATIONS)
@pytest.mark.parametrize("rule", [RULES[0], RULES[5]], ids=str)
def test_act_quant_of_a_rounded_product_is_act_then_quant(activation, params, rule):
    args, live, _ = act_arguments(TILINGS[0], 256, np.nan)
    kwargs = act_keywords(TILINGS[0], activation, params)
    product = np.asarray(act(*args, **kwargs, interpret=INTERPRET))[live]
    want = quant_reference(product, rule)
    got = act_quant(*args, **kwargs, **as_keywords(rule), keep_fp32=False, interpret=INTERPRET)
    np.testing.assert_array_equal(f32(got[0])[live], f32(want[0]))
    np.testing.assert_array_equal(row_scales(got[1], 1, len(live))[live], want[1])
    kept = act_quant(*args, **kwargs, **as_keywords(rule), interpret=INTERPRET)
    assert (f32(kept[0])[live] != f32(got[0])[live]).any()


def test_act_lowers_for_cuda():
    for activation, params in ACTIVATIONS:
        for m, width, alignment, tile, slabs in [
            (1, 128, 8, 8, 1),
            (40, 384, 8, 256, 1),
            (65536, 2048, 128, 128, 1),
            (65536, 2944, 16, 64, 4),
        ]:
            shapes = ((m, 2 * width), BF16), ((3, num_tiles(m, 4, tile)), I32)
            kwargs = {"tile": tile, "alignment": alignment}
            kwargs |= {"activation": activation, "params": params}
            assert custom_calls(functools.partial(act, **kwargs), *shapes) == 1
            kwargs |= {"slabs": slabs}
            for rule in RULES:
                fn = functools.partial(act_quant, **kwargs, **as_keywords(rule))
                assert custom_calls(fn, *shapes) == 1


def test_act_refuses():
    gateup, tiles = jnp.zeros((8, 256), BF16), jnp.zeros((3, 1), I32)
    kwargs = {"tile": 8, "alignment": 8, "activation": "silu", "params": (None,)}
    with pytest.raises(ValueError, match=r"'relu'.*silu"):
        act(gateup, tiles, **kwargs | {"activation": "relu"})
    with pytest.raises(ValueError, match=r"tiles is int32\[8\]"):
        act(gateup, jnp.zeros(8, I32), **kwargs)
    with pytest.raises(ValueError, match="tile=12"):
        act(gateup, tiles, **kwargs | {"tile": 12})
    with pytest.raises(ValueError, match="slabs=3"):
        act_quant(gateup, tiles, **kwargs, slabs=3)


# --- permute_index


def index_reference(ids, num_experts, rows, alignment, capacity, tile, with_m_indices):
    src2dst, m_indices = np.full(ids.shape, -1, np.int32), np.full(rows, -1, np.int32)
    tiles, masked_m, end = [], [], 0
    for expert in range(num_experts):
        first = end if capacity is None else expert * capacity
        assignments = np.argwhere(ids == expert)[:capacity]
        count = len(assignments)
        for row, (token, slot) in enumerate(assignments):
            src2dst[token, slot], m_indices[first + row] = first + row, expert
        tiles += [(expert, first + i, min(tile, count - i)) for i in range(0, count, tile)]
        masked_m.append(count)
        end = first + -(-count // alignment) * alignment
    assert end <= rows
    tiles += [(-1, 0, 0)] * (num_tiles(ids.size, num_experts, tile) - len(tiles))
    return src2dst, np.array(tiles).T, m_indices if with_m_indices else None, np.array(masked_m)


def assert_index(ids, num_experts, alignment, tile, capacity=None, m_indices=False, spare=0):
    rows = alignment * (num_tiles(ids.size, num_experts, alignment) + spare)
    kwargs = {"num_experts": num_experts, "alignment": alignment, "tile": tile}
    kwargs |= {"rows": num_experts * capacity if capacity else rows, "capacity": capacity}
    kwargs |= {"with_m_indices": m_indices}
    got = permute_index(jnp.asarray(ids, I32), **kwargs, interpret=INTERPRET)
    for g, w in zip(got, index_reference(ids, **kwargs), strict=True):
        assert w is not None or g is None
        if w is not None:
            assert g.dtype == I32
            np.testing.assert_array_equal(g, w)


def random_ids(t, k, num_experts):
    """Some ids are no expert's, and a token may name an expert twice."""
    return np.random.default_rng(t).integers(-1, num_experts + 1, (t, k))


def test_num_tiles():
    assert num_tiles(0, 4, 8) == 0 and num_tiles(3, 4, 8) == 3 and num_tiles(129, 4, 128) == 4


@pytest.mark.parametrize(
    ("t", "k", "num_experts", "alignment", "tile", "m_indices"),
    [
        (1, 1, 1, 8, 8, True),
        (3, 3, 5, 32, 64, True),
        (17, 2, 130, 8, 16, False),
        (129, 1, 2, 8, 8, False),
    ],
)
def test_permute_index_in_one_block(t, k, num_experts, alignment, tile, m_indices):
    ids = random_ids(t, k, num_experts)
    assert_index(ids, num_experts, alignment, tile, m_indices=m_indices, spare=2 * m_indices)


def test_permute_index_into_slabs():
    assert_index(random_ids(17, 2, 3), 3, 8, 16, capacity=24)
    assert_index(random_ids(17, 2, 3), 3, 8, 8, capacity=8)  # Some do not fit.


@pytest.mark.parametrize(("t", "k", "skewed"), [(23, 3, False), (16, 4, True)])
def test_permute_index_in_many_blocks(monkeypatch, t, k, skewed):
    # Two blocks count, each place several chunks; or they count and place one.
    for name, value in {"FEW": 16, "CHUNK": 16, "BLOCKS": 2, "FAR_UNROLL": 4}.items():
        monkeypatch.setattr(index, name, value)
    ids = np.full((t, k), 4) if skewed else random_ids(t, k, 5)
    assert_index(ids, 5, 24 if skewed else 8, 24, m_indices=True, spare=20)
    monkeypatch.setattr(index, "BLOCKS", 8)
    # Memory that nothing wrote holds legal ids.
    zeros = dataclasses.replace(_common.interpreter(), uninitialized_memory="zero")
    monkeypatch.setattr(_common, "interpreter", lambda: zeros)
    assert_index(ids, 5, 8, 8, capacity=16 if skewed else 72)


@pytest.mark.skipif(INTERPRET, reason="too slow in interpret mode")
@pytest.mark.parametrize(("t", "k", "num_experts"), [(4001, 8, 256), (3001, 16, 1024)])
def test_permute_index_of_many_tokens(t, k, num_experts):
    for ids in (random_ids(t, k, num_experts), np.full((t, k), num_experts - 1)):
        assert_index(ids, num_experts, 64, 64, m_indices=True)
        assert_index(ids, num_experts, 8, 128)
        assert_index(ids, num_experts, 128, 128, capacity=256)


def test_permute_index_lowers_for_cuda():
    for t, k, experts, alignment, capacity in [
        (1, 1, 4, 8, None),
        (32, 8, 60, 64, None),
        (33, 8, 256, 32, 64),
        (16384, 8, 256, 128, None),
        (65536, 16, 1024, 8, 65536),
    ]:
        rows = alignment * num_tiles(t * k, experts, alignment)
        fn = functools.partial(
            permute_index,
            num_experts=experts,
            rows=rows if capacity is None else experts * capacity,
            alignment=alignment,
            capacity=capacity,
            tile=128 if capacity is None else alignment,
            with_m_indices=capacity is None,
        )
        assert custom_calls(fn, ((t, k), I32)) == (1 if t * k <= index.FEW else 2)


def test_permute_index_refuses():
    ids = jnp.zeros((2, 2), I32)
    kwargs = {"num_experts": 4, "rows": 64, "alignment": 8, "capacity": None, "tile": 8}
    kwargs |= {"with_m_indices": True}
    with pytest.raises(ValueError, match="alignment=12"):
        permute_index(ids, **kwargs | {"alignment": 12})
    with pytest.raises(ValueError, match="capacity=9"):
        permute_index(ids, **kwargs | {"capacity": 9})
    with pytest.raises(ValueError, match="contiguous"):
        permute_index(ids, **kwargs | {"capacity": 16})


# --- permute

by_both = pytest.mark.parametrize(
    "run", [xla.permute, functools.partial(permute, interpret=INTERPRET)], ids=["xla", "pallas"]
)


def random_places(t, k, slabs):
    """rows, src2dst with some -1, and the tokens and rows of the others."""
    rows = -(-(t * k + 9) // slabs) * slabs
    rng = np.random.default_rng(t)
    src2dst = rng.permutation(rows)[: t * k].reshape(t, k).astype(np.int32)
    src2dst[1:][rng.random((t - 1, k)) < 0.3] = -1
    token, slot = np.nonzero(src2dst >= 0)
    return rows, src2dst, token, src2dst[token, slot]


@pytest.mark.parametrize(
    ("t", "k", "width", "slabs"),
    [(1, 1, 128, 1), (3, 2, 384, 4), (2, 16, 640, 1), (5, 3, 1152, 4), (3, 1, 6784, 1)],
)
@every_rule
def test_permute(t, k, width, slabs, rule):
    rows, src2dst, token, live = random_places(t, k, slabs)
    x = np.array(random(1, t, width))
    x[src2dst.max(1) < 0] = np.nan  # A token that no expert gets.
    if t > 2:
        x[0, 5], x[1, 7] = np.inf, 3e38
    x = jnp.asarray(x, BF16)
    others = np.setdiff1d(np.arange(rows), live)
    want_values, want_scales = quant_reference(x, rule)
    run = functools.partial(permute, x, jnp.asarray(src2dst), rows=rows, slabs=slabs)

    values, scales = run(**as_keywords(rule), interpret=INTERPRET)
    assert values.dtype == FP8 and scales.dtype == (I32 if rule[2] else F32)
    scales = row_scales(scales, slabs, rows)
    np.testing.assert_array_equal(f32(values)[live], f32(want_values)[token])
    np.testing.assert_array_equal(scales[live], want_scales[token])
    assert_unwritten(values[others])
    assert_unwritten(scales[others])


def random_bits(seed, dtype, *shape):
    """Every bit pattern, of NaN too."""
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256**size, shape, f"u{size}").view(dtype)


def bits(x):
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.itemsize}")


def poison_of(dtype, poison):
    """`poison`, or what stands for it: float8_e4m3fn ends at 448, exponents at 254."""
    if dtype == I32:
        return -1 if np.isnan(poison) else 0x7EFEFEFE
    return np.array(min(poison, 448.0) if dtype == FP8 else poison).astype(dtype)


@by_both
@pytest.mark.parametrize("rule", [None, *RULES], ids=str)
@pytest.mark.parametrize(
    ("t", "k", "slabs", "width", "wide"),
    [(1, 1, 1, 384, 384), (5, 2, 4, 640, 896), (3, 8, 2, 7168, 7424), (2, 1, 1, 128, 2048)],
)
def test_permute_moves_rows_that_are_quantised(run, t, k, slabs, width, wide, rule):
    rows, src2dst, token, live = random_places(t, k, slabs)
    others, by_kernel = np.setdiff1d(np.arange(rows), live), run is not xla.permute
    how = {"group": None} if rule is None else as_keywords(rule)
    run = jax.jit(functools.partial(run, rows=rows, slabs=slabs, width=width, **how))
    arrays = [random_bits(0, FP8, t, wide)]
    if rule is not None:
        words = -(-width // rule[0] // 4) if rule[2] else width // rule[0]
        arrays.append(random_bits(1, I32 if rule[2] else np.float32, t, words))
    values, scales = arrays[0][:, :width].copy(), arrays[-1].copy()
    for poison in POISON:
        arrays[0][:, width:] = poison_of(FP8, poison)
        for array in arrays:
            array[src2dst.max(1) < 0] = poison_of(array.dtype, poison)
        got = run(arrays[0], src2dst, scales=arrays[1] if rule else None)
        assert got[0].dtype == FP8 and got[0].shape == (rows, width)
        np.testing.assert_array_equal(bits(got[0])[live], bits(values)[token])
        moved = [got[0]]
        if rule is None:
            assert got[1] is None
        else:
            assert got[1].dtype == scales.dtype
            moved.append(row_scales(got[1], slabs, rows))
            np.testing.assert_array_equal(bits(moved[1])[live], bits(scales)[token])
        if by_kernel:
            for array in moved:
                assert_unwritten(array[others])


@by_both
@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float8_e5m2", "float8_e8m0fnu", "uint8", "int16"]
)
def test_permute_moves_any_bits(run, dtype):
    rows, src2dst, token, live = random_places(5, 3, 1)
    x = random_bits(0, jnp.dtype(dtype), 5, 1152)
    values, nothing = jax.jit(functools.partial(run, rows=rows, group=None))(x, src2dst)
    assert values.dtype == dtype and nothing is None
    np.testing.assert_array_equal(bits(values)[live], bits(x)[token])


@by_both
@every_rule
def test_permute_quantises_on_the_way_or_before_alike(run, rule):
    rows, src2dst, _, live = random_places(5, 3, 4)
    x = random(0, 5, 768)
    x[0, 5], x[1, 7], x[:, 640:] = np.inf, 3e38, np.nan
    x = jnp.asarray(x, BF16)
    quantise = xla.quant if run is xla.permute else functools.partial(quant, interpret=INTERPRET)
    run = functools.partial(run, rows=rows, slabs=4, width=640, **as_keywords(rule))
    values, scales = quantise(x[:, :640], **as_keywords(rule))
    wire = np.pad(np.asarray(values), ((0, 0), (0, 128)))
    before, on_the_way = run(jnp.asarray(wire), src2dst, scales=scales[:, :5].T), run(x, src2dst)
    for a, b in zip(before, on_the_way, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(*(bits(values)[live] for values, _ in (before, on_the_way)))
    before, on_the_way = (row_scales(scales, 4, rows) for _, scales in (before, on_the_way))
    np.testing.assert_array_equal(bits(before)[live], bits(on_the_way)[live])


def test_permute_lowers_for_cuda():
    for t, k, width in [(1, 1, 128), (5, 16, 1152), (3, 2, 2944), (16384, 8, 7168)]:
        for rule, slabs in [*((rule, slabs) for rule in RULES for slabs in (1, 4)), (None, 1)]:
            how = {"group": None} if rule is None else as_keywords(rule)
            fn = functools.partial(permute, rows=4 * (t * k + 8), slabs=slabs, **how)
            assert custom_calls(fn, ((t, width), BF16), ((t, k), I32)) == 1


def test_permute_of_rows_as_they_are_lowers_for_cuda():
    for t, k, width in [(1, 1, 128), (5, 16, 1152), (3, 2, 2944), (65536, 8, 7168)]:
        for rule in (None, *RULES):
            how = {"group": None} if rule is None else as_keywords(rule)
            how |= {"rows": 4 * (t * k + 8), "slabs": 4, "width": width}

            def move(x, src2dst, scales=None, how=how):
                return permute(x, src2dst, scales=scales, **how)

            for dtype in (BF16, FP8, jnp.uint8) if rule is None else (FP8,):
                shapes = [((t, width + 256), dtype), ((t, k), I32)]
                if rule is not None:
                    words = -(-width // rule[0] // 4) if rule[2] else width // rule[0]
                    shapes.append(((t, words), I32 if rule[2] else F32))
                assert custom_calls(move, *shapes) == 1


def test_permute_refuses():
    x, src2dst = jnp.zeros((3, 128), BF16), jnp.zeros((3, 2), I32)
    with pytest.raises(ValueError, match="float32"):
        permute(x.astype(F32), src2dst, rows=8)
    with pytest.raises(ValueError, match=r"int32 \[3, k\]"):
        permute(x, src2dst[:2], rows=8)
    with pytest.raises(ValueError, match="slabs=3"):
        permute(x, src2dst, rows=8, slabs=3)
    with pytest.raises(NotImplementedError, match="group=64"):
        permute(x, src2dst, rows=8, group=64)


@by_both
def test_permute_refuses_what_cannot_be_moved(run):
    src2dst, scales = jnp.zeros((3, 2), I32), jnp.ones((3, 2))
    x = jnp.zeros((3, 256), FP8)

    def refuses(match, x=x, **kwargs):
        with pytest.raises((ValueError, TypeError), match=match):
            run(x, src2dst, rows=8, **kwargs)

    refuses("x.*float8_e4m3fn.*must be (bf16|bfloat16)")
    refuses("x.*bfloat16.*must be float8_e4m3fn", x.astype(BF16), scales=scales)
    for dtype in (F32, bool, jnp.int4):
        refuses(f"x.*{jnp.dtype(dtype).name}.*8 or 16 bits", x.astype(dtype), group=None)
    for width in (64, 0, 384, -128):
        refuses(f"width={width}.*128.*256", group=None, width=width)
    refuses(r"scales.*3, 2.*\b3, 1", scales=scales, width=128)
    refuses(r"scales.*3, 2.*\b3, 8", scales=scales, group=32)
    refuses(r"scales.*3, 2.*\b3, 1", scales=scales, ue8m0=True, packed=True)
    refuses("scales.*int32.*float32", scales=scales.astype(I32))
    refuses("scales.*float32.*int32", scales=scales[:, :1], ue8m0=True, packed=True)
    refuses("packed=True, ue8m0=False", scales=scales, packed=True)
    refuses("scales.*group=None", scales=scales, group=None)


# --- unpermute


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(("t", "k", "h"), [(1, 1, 128), (3, 4, 384), (2, 16, 1152)])
def test_unpermute(t, k, h, poison):
    m = t * k + 5
    rng = np.random.default_rng(0)
    src2dst = rng.permutation(m)[: t * k].reshape(t, k).astype(np.int32)
    absent = rng.random((t, k)) < 0.3
    weights, shared = rng.random((t, k)).astype(np.float32), random(1, t, h)
    weights[absent] = poison
    src2dst[absent] = -1
    rows = np.full((m, h), poison, np.float32)
    rows[src2dst[~absent]] = random(2, t * k, h)[: (~absent).sum()]
    rows, shared = jnp.asarray(rows, BF16), jnp.asarray(shared, BF16)
    picked = np.where(absent[..., None], 0, f32(rows)[src2dst])
    want = 2.5 * np.einsum("tk,tkh->th", np.where(absent, 0, weights), picked)
    for extra in (None, shared):
        got = unpermute(rows, src2dst, weights, extra, scaling_factor=2.5, interpret=INTERPRET)
        total = want if extra is None else want + f32(shared)
        assert got.dtype == BF16
        np.testing.assert_allclose(f32(got), total, rtol=2**-8, atol=1e-5)


def test_unpermute_lowers_for_cuda():
    fn = functools.partial(unpermute, scaling_factor=1.0)
    for t, k, h in [(1, 1, 128), (5, 16, 3584), (16384, 8, 7168)]:
        for shared in (None, ((t, h), BF16)):
            shapes = ((t * k + 8, h), BF16), ((t, k), I32), ((t, k), F32), shared
            assert custom_calls(fn, *shapes) == 1


def test_unpermute_refuses():
    args = jnp.zeros((4, 100), BF16), jnp.zeros((2, 1), I32), jnp.zeros((2, 1)), None
    with pytest.raises(ValueError, match="100"):
        unpermute(*args, scaling_factor=1.0)


# --- route


def route_reference(logits, bias, scoring, top_k, num_groups, top_groups, renormalize):
    x = np.where(np.isnan(logits), -np.inf, np.minimum(logits, LARGEST)).astype(np.float64)
    with np.errstate(all="ignore"):
        if scoring == "softmax":
            top = x.max(-1, keepdims=True)
            e = np.exp(x - np.where(top == -np.inf, 0, top))
            scores = e / np.where(e.sum(-1, keepdims=True) > 0, e.sum(-1, keepdims=True), 1)
        elif scoring == "sigmoid":
            scores = 1 / (1 + np.exp(-x))
        else:
            scores = np.sqrt(np.logaddexp(x, 0).astype(np.float32))
    scores = scores.astype(np.float32)
    ids, weights = [], []
    for row in scores:
        key = row if bias is None else row + bias
        groups = key.reshape(num_groups, -1)
        best = np.sort(groups, axis=1)[:, ::-1][:, : 1 if bias is None else 2].sum(1)
        winners = np.argsort(-best, kind="stable")[:top_groups]
        lost = ~np.isin(np.arange(key.size) // groups.shape[1], winners)
        order = np.lexsort((np.arange(key.size), -key, lost))[:top_k]
        ids.append(order)
        weights.append(row[order] / (row[order].sum() + 1e-20) if renormalize else row[order])
    return np.array(ids), np.array(weights)


HOSTILE = np.zeros((6, 12), np.float32)
HOSTILE[0], HOSTILE[1], HOSTILE[2] = np.nan, -np.inf, -120
HOSTILE[3, ::2], HOSTILE[4, 7], HOSTILE[5, 0] = -0.0, np.inf, np.nan


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(
    ("logits", "biased", "top_k", "num_groups", "top_groups"),
    [
        (3 * random(0, 1, 8), False, 2, 1, 1),
        (3 * random(1, 5, 60), True, 6, 4, 2),
        (3 * random(2, 6, 64), False, 8, 8, 3),
        (HOSTILE, True, 3, 4, 2),
        (HOSTILE, False, 4, 1, 1),
    ],
)
def test_route(scoring, logits, biased, top_k, num_groups, top_groups):
    # A bias that makes every key negative: a masked group must lose to negative keys too.
    bias = random(9, logits.shape[1]) - 6 if biased else None
    kwargs = {
        "scoring": scoring,
        "top_k": top_k,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "renormalize": biased,
    }
    ids, weights = route(
        jnp.asarray(logits),
        None if bias is None else jnp.asarray(bias),
        **kwargs,
        interpret=INTERPRET,
    )
    want_ids, want_weights = route_reference(logits, bias, **kwargs)
    np.testing.assert_array_equal(ids, want_ids)
    np.testing.assert_allclose(weights, want_weights, rtol=2e-5, atol=1e-30)
    assert all(len(set(row)) == top_k for row in np.asarray(ids).tolist())


def test_route_of_a_row_ignores_other_rows():
    logits = 3 * random(0, 5, 16)
    kwargs = {
        "top_k": 4,
        "num_groups": 2,
        "top_groups": 1,
        "renormalize": True,
        "interpret": INTERPRET,
    }
    fn = jax.jit(functools.partial(route, bias=None, scoring="softmax", **kwargs))
    first = fn(jnp.asarray(logits))
    logits[1:] = 1e3 * random(1, 4, 16)
    logits[3] = np.nan
    second = fn(jnp.asarray(logits))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[0], np.asarray(b)[0])


def test_route_lowers_for_cuda():
    cases = [
        (16384, 256, 8, 8, 4, "sigmoid", True),
        (1, 256, 8, 8, 4, "sigmoid", True),
        (1, 256, 8, 8, 4, "softmax", False),
        (3, 60, 4, 4, 2, "sqrtsoftplus", True),
        (5, 60, 4, 1, 1, "softmax", True),
        (5, 4, 2, 1, 1, "sqrtsoftplus", False),
        (7, 1, 1, 1, 1, "softmax", True),
        (9, 1024, 16, 1, 1, "softmax", False),
    ]
    for t, e, top_k, num_groups, top_groups, scoring, biased in cases:
        kwargs = {"top_k": top_k, "num_groups": num_groups, "top_groups": top_groups}
        fn = functools.partial(route, scoring=scoring, renormalize=True, **kwargs)
        assert custom_calls(fn, ((t, e), F32), ((e,), F32) if biased else None) == 1


@pytest.mark.parametrize("t", [1, 3, 9])
@pytest.mark.parametrize("copies", [0, 1, 2])
@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize("by_hash", [False, True])
def test_route_lowers_for_cuda_with_every_option(t, copies, valid, by_hash):
    def fn(logits, token_ids, hash_table, valid, expert_map):
        kwargs = {"token_ids": token_ids, "hash_table": hash_table, "valid": valid}
        kwargs |= {"num_groups": 1, "top_groups": 1, "renormalize": True, "scoring": "sigmoid"}
        kwargs |= {"expert_map": expert_map, "fused_shared_experts": 2, "shared_weight": 0.4}
        return route(logits, None, top_k=4, **kwargs)

    shapes = [
        ((t, 60), F32),
        ((t,), I32) if by_hash else None,
        ((99, 4), I32) if by_hash else None,
        ((t,), jnp.bool_) if valid else None,
        ((copies, 62), I32) if copies else None,
    ]
    assert custom_calls(fn, *shapes) == 1


def test_route_refuses():
    kwargs = {"num_groups": 1, "top_groups": 1, "renormalize": True}
    with pytest.raises(ValueError, match=r"top_k=5.*4"):
        route(jnp.zeros((2, 4)), None, scoring="sigmoid", top_k=5, **kwargs)
    with pytest.raises(ValueError, match=r"'tanh'.*softmax"):
        route(jnp.zeros((2, 4)), None, scoring="tanh", top_k=2, **kwargs)


# --- all of them


def test_no_tokens():
    none = jnp.zeros((0, 2), I32)
    assert quant(jnp.zeros((0, 256), BF16))[0].shape == (0, 256)
    index = {"num_experts": 4, "rows": 16, "alignment": 8, "capacity": None, "tile": 8}
    _, tiles, m_indices, masked_m = permute_index(none, **index, with_m_indices=True)
    assert tiles.shape == (3, 0) and (m_indices == -1).all() and (masked_m == 0).all()
    for run in (permute, xla.permute):
        assert run(jnp.zeros((0, 128), BF16), none, rows=8)[1].shape == (1, 8)
        for t, places in ((0, none), (3, jnp.zeros((3, 0), I32))):
            wide = jnp.zeros((t, 384), FP8)
            values, scales = run(wide, places, rows=6, slabs=2, width=256, scales=jnp.ones((t, 2)))
            assert values.shape == (6, 256) and values.dtype == FP8 and scales.shape == (4, 4)
            values, nothing = run(wide, places, rows=6, group=None)
            assert values.shape == (6, 384) and nothing is None
    rows = jnp.zeros((8, 128), BF16)
    assert unpermute(rows, none, jnp.zeros((0, 2)), None, scaling_factor=1.0).shape == (0, 128)


@pytest.mark.skipif(not INTERPRET, reason="of interpret mode")
def test_missing_interpret_mode_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.pallas.mosaic_gpu.interpret.params", None)
    with pytest.raises(NotImplementedError, match=r"0\.10\.2 and 0\.11\.2"):
        quant(jnp.zeros((8, 128), BF16), interpret=INTERPRET)

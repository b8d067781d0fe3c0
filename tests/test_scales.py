"""Scales to DeepGEMM's layouts, and the emulator's reading of both wire formats.

Three sides that share no code: `scales` (jnp) packs, the emulator decodes from addresses and
strides, and the numpy functions here say what the bytes and the products should be.
"""

import importlib.util
import pathlib
import sys
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from conftest import ON_GPU
from dgmoe_jax.interop import deep_gemm, emulator, scales
from hypothesis import given
from hypothesis import strategies as st

import dgmoe_jax as dg

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
SMALLEST, LARGEST = 2.0**-126, 2.0**127  # UE8M0 exponents 1 and 254

round_up = jax.jit(lambda x: scales.pack_ue8m0(x, round_up=True))
transform = jax.jit(
    scales.transform_sf_into_required_layout,
    static_argnames=("mn", "k", "recipe", "num_groups", "is_sfa", "arch"),
)


# --- what the bytes should be


def up(scale):
    """The power of two that a scale is rounded up to; NaN for what is no scale."""
    if not 0 <= scale < np.inf:
        return np.nan
    mantissa, exponent = np.frexp(max(np.float64(scale), SMALLEST))
    return min(np.exp2(exponent - (mantissa == 0.5)), LARGEST)


def aligned(array):
    """[MN, G] -> [G, MN4]."""
    out = np.zeros((array.shape[1], -(-len(array) // 4) * 4), array.dtype)
    out[:, : len(array)] = array.T
    return out


def packed(powers):
    """[MN, G] powers of two -> [ceil(G / 4), MN4] int32, byte by byte."""
    mn, groups = powers.shape
    out = np.zeros((-(-groups // 4), -(-mn // 4) * 4, 4), np.uint8)
    for row in range(mn):
        for g in range(groups):
            out[g // 4, row, g % 4] = np.log2(powers[row, g]) + 127
    return out.view("<i4")[..., 0]


def random_powers(rng, *shape):
    return np.exp2(rng.integers(-4, 5, shape)).astype(np.float32)


# --- the emulator, called as the shim calls it

CODES = {
    np.dtype(E4M3): (10, 8),
    np.dtype(BF16): (4, 16),
    np.dtype(np.float32): (2, 32),
    np.dtype(np.int32): (0, 32),
    np.dtype(np.int8): (0, 8),
    np.dtype(np.uint8): (1, 8),
}


def integers(tensors, *numbers):
    flat = []
    for x in tensors:
        strides = [s // x.itemsize for s in x.strides]
        flat += [x.ctypes.data, *CODES[x.dtype], x.ndim, *x.shape, *strides]
    return [*flat, *numbers]


def seen_by_deep_gemm(stored, mn):
    """[.., K/g, MN4] -> the transposed view [.., MN, K/g]."""
    return np.asarray(stored).swapaxes(-1, -2)[..., :mn, :]


def contiguous(a, a_scales, b, b_scales, m_indices, *recipes, alignment=8):
    """a [M, K], b [E, N, K] and their scales as DeepGEMM sees them -> [M, N] f64."""
    d = np.full((len(a), b.shape[1]), 7.0, BF16)
    tensors = a, a_scales, b, b_scales, d, np.asarray(m_indices, np.int32)
    emulator.m_grouped_gemm_nt_contiguous(*integers(tensors, alignment, *recipes))
    return d.astype(np.float64)


def masked(a, a_scales, b, b_scales, masked_m, *recipes):
    """The same for a [E, M, K]: -> [E, M, N] f64."""
    d = np.full((*a.shape[:2], b.shape[1]), 7.0, BF16)
    tensors = a, a_scales, b, b_scales, d, np.asarray(masked_m, np.int32)
    emulator.m_grouped_gemm_nt_masked(*integers(tensors, 1, *recipes))
    return d.astype(np.float64)


def read_scales(stored, mn, groups, granularity):
    """[MN, groups] f64: the scales of a, by a GEMM of ones with one-hot weights."""
    depth = groups * granularity
    a = np.ones((mn, depth), E4M3)
    b = np.zeros((1, groups, depth), E4M3)
    b[0, np.arange(groups), np.arange(groups) * granularity] = 1
    ones = np.stack([packed(np.ones((groups, groups)))])
    view = seen_by_deep_gemm(stored, mn)
    recipes = granularity, granularity
    return contiguous(a, view, b, seen_by_deep_gemm(ones, groups), [0] * mn, *recipes)


# --- packing


@pytest.mark.parametrize("granularity", [32, 128])
@pytest.mark.parametrize(("mn", "groups"), [(1, 1), (5, 3), (8, 4), (3, 9)])
@given(data=st.data())
def test_a_packed_scale_reads_as_the_next_power_of_two(granularity, mn, groups, data):
    # The bits of any f32 without a sign, and in half the cases of a power of two or the next above.
    near_powers = st.builds(lambda e, above: (e << 23) + above, st.integers(0, 255), st.booleans())
    bits = st.lists(st.integers(0, 2**31 - 1) | near_powers, min_size=mn * groups)
    values = np.array(data.draw(bits)[: mn * groups], np.int32).view(np.float32)
    values = values.reshape(mn, groups)
    got = read_scales(round_up(values), mn, groups, granularity)
    want = np.array([up(x) for x in values.flat]).reshape(mn, groups)
    want[np.isnan(want).any(axis=1)] = np.nan  # NaN times zero spreads over its row
    np.testing.assert_array_equal(got, want)


NEXT = np.nextafter(np.float32(2**-10), np.float32(1))


@pytest.mark.parametrize(
    ("scale", "byte"),
    [
        (2.0**-10, 117),
        (NEXT, 118),
        (0.75, 127),
        (0.0, 1),
        (1e-40, 1),
        (2.0**-126, 1),
        (2.0**127, 254),
        (3.4e38, 254),
        (np.inf, 255),
        (np.nan, 255),
        (-1.0, 255),
        (-0.0, 255),
    ],
)
def test_rounding_up(scale, byte):
    word = round_up(np.full((1, 1), scale, np.float32))
    np.testing.assert_array_equal(word, [[byte, 0, 0, 0]])


@pytest.mark.parametrize(
    ("lead", "mn", "groups"), [((), 1, 1), ((2,), 4, 4), ((), 6, 5), ((2, 3), 13, 7), ((), 130, 20)]
)
def test_layouts_byte_for_byte(lead, mn, groups):
    powers = random_powers(np.random.default_rng(mn), *lead, mn, groups)
    flat = powers.reshape(-1, mn, groups)
    for function, expected in ((scales.mn_major_tma_aligned, aligned), (scales.pack_ue8m0, packed)):
        want = np.stack([expected(x) for x in flat])
        for f in (function, jax.jit(function)):
            got = np.asarray(f(powers))
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got, want.reshape(*lead, *want.shape[1:]))
    back = scales.unpack_ue8m0(scales.pack_ue8m0(powers), mn, groups)
    np.testing.assert_array_equal(back, powers)


def test_what_deep_gemms_kernel_accepts_is_packed_as_there():
    exact = np.array([[0.0, 2.0**-126, 1.0, np.inf]], np.float32)
    word = scales.pack_ue8m0(exact)
    np.testing.assert_array_equal(np.asarray(word).view(np.uint8)[0, :4], [0, 1, 127, 255])
    np.testing.assert_array_equal(scales.unpack_ue8m0(word, 1, 4), [[0, 2.0**-126, 1, np.nan]])
    assert read_scales(word[:, :1].repeat(4, axis=1), 1, 3, 128)[0, 0] == 2.0**-127


@pytest.mark.parametrize("scale", [0.75, 3.0, NEXT, 1e-40, -1.0, np.nan])
def test_a_scale_with_a_mantissa_is_refused_or_nan(scale):
    unrounded = np.array([[1.0, scale], [1.0, 2.0]], np.float32)
    with pytest.raises(ValueError, match=r"1 are not powers of two, .* the first.*round_up=True"):
        scales.pack_ue8m0(unrounded)
    with pytest.raises(ValueError, match="not powers of two"):
        scales.transform_sf_into_required_layout(unrounded, 2, 256, (1, 128), arch="sm100")
    # Values are unknown here, be they arguments or constants.
    words = jax.jit(scales.pack_ue8m0)(unrounded), jax.jit(lambda: scales.pack_ue8m0(unrounded))()
    for word in words:
        got = read_scales(word, 2, 2, 128)
        assert np.isnan(got[0]).all()
        np.testing.assert_array_equal(got[1], [1, 2])


# --- transform_sf_into_required_layout


@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(("mn", "k"), [(1, 128), (130, 640), (257, 512), (64, 576)])
@pytest.mark.parametrize("recipe", [(1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_transform(experts, mn, k, recipe, arch):
    lead = () if experts is None else (experts,)
    shape = *lead, -(-mn // recipe[0]), -(-k // recipe[1])
    sf = random_powers(np.random.default_rng(k), *shape)

    def transformed(x, recipe=recipe, is_sfa=None):
        return np.asarray(transform(x, mn, k, recipe, experts, is_sfa, arch=arch))

    if arch == "sm90" and recipe == (1, 32):
        with pytest.raises(NotImplementedError, match="1 x 32 need 'sm100'"):
            transformed(sf)
        return
    got = transformed(sf)
    per_row = sf[..., np.arange(mn) // recipe[0], :].reshape(-1, mn, shape[-1])
    if arch == "sm100":
        want = np.stack([packed(x) for x in per_row]).reshape(got.shape)
        np.testing.assert_array_equal(transformed(got, (1, recipe[1])), got)  # it is packed already
    elif recipe == (1, 128):
        want = np.stack([aligned(x) for x in per_row]).reshape(got.shape)
    else:
        want = sf
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    rows, columns = recipe
    np.testing.assert_array_equal(transformed(sf, (rows, 64, columns), True), want)
    np.testing.assert_array_equal(transformed(sf, (64, rows, columns), False), want)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(arch="sm80"), ValueError, "arch is 'sm80'.*'sm90' or 'sm100'"),
        (dict(recipe=(1, 64)), ValueError, "1 x 64 values; it must be 1 x 128, 128 x 128 or"),
        (dict(recipe=(1, 128, 128)), ValueError, r"is_sfa is None with recipe \(1, 128, 128\)"),
        (dict(is_sfa=True), ValueError, r"is_sfa is True with recipe \(1, 128\)"),
        (dict(mn=7), ValueError, r"sf has shape \(6, 2\); it must be \(7, 2\) for mn = 7"),
        (dict(k=640), ValueError, r"it must be \(6, 5\)"),
        (dict(num_groups=2), ValueError, r"it must be \(2, 6, 2\)"),
        (dict(sf=np.zeros((6, 2), BF16)), TypeError, "sf has dtype bfloat16.*float32"),
        (dict(sf=np.zeros((6, 1), np.int32)), ValueError, r"it must be \(1, 8\)"),
        (dict(sf=np.zeros((6, 2), np.int32), arch="sm90"), TypeError, "sf has dtype int32"),
    ],
)
def test_transform_names_what_came_and_what_is_allowed(change, error, text):
    given = dict(sf=np.ones((6, 2), np.float32), mn=6, k=256, recipe=(1, 128), arch="sm100")
    with pytest.raises(error, match=text):
        scales.transform_sf_into_required_layout(**{**given, **change})


def test_other_bad_arguments_are_named():
    with pytest.raises(TypeError, match="scales has dtype int32; it must be float32"):
        scales.pack_ue8m0(np.ones((4, 4), np.int32))
    with pytest.raises(ValueError, match=r"scales has shape \(4,\); it must be \[.., MN, K/g\]"):
        scales.mn_major_tma_aligned(np.ones(4, np.float32))
    with pytest.raises(TypeError, match="packed has dtype float32; it must be int32"):
        scales.unpack_ue8m0(np.ones((1, 4), np.float32), 4, 4)
    with pytest.raises(ValueError, match=r"packed has shape \(1, 4\); it must end in \(2, 8\)"):
        scales.unpack_ue8m0(np.ones((1, 4), np.int32), 5, 5)


# --- both wire formats through the emulator's entry points


def operand(rng, lead, mn, depth, recipe, *, packs, fp4=False, packed_already=True):
    """Values, their scales as DeepGEMM sees them, and the numbers [*lead, mn, depth] meant.

    Small integers or any E2M1 value, with a power of two per group. Not `packed_already`: scales
    as a quantiser makes them.
    """
    rows, columns = recipe
    sf = random_powers(rng, *lead, -(-mn // rows), -(-depth // columns))
    spread = sf[..., np.arange(mn) // rows, :][..., np.arange(depth) // columns].astype(np.float64)
    if fp4:
        codes = rng.integers(0, 16, (*lead, mn, depth))
        numbers = np.array(E2M1)[codes] * spread
        values = (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)
    else:
        integers = rng.integers(-4, 5, (*lead, mn, depth))
        numbers, values = integers * spread, integers.astype(E4M3)
    if not packed_already:
        return values, sf, numbers
    arch, experts = "sm100" if packs else "sm90", lead[0] if lead else None
    stored = np.asarray(transform(sf, mn, depth, recipe, experts, arch=arch))
    if rows == 1 or packs:
        stored = seen_by_deep_gemm(stored, mn)
    return values, stored, numbers


FORMATS = {  # recipes of a and b, whether scales are UE8M0, whether b is FP4
    "sm90 fp8_block": ((1, 128), (128, 128), False, False),
    "sm100 fp8_block": ((1, 128), (128, 128), True, False),
    "sm100 mxfp8": ((1, 32), (1, 32), True, False),
    "sm100 1x128 against 1x32": ((1, 128), (1, 32), True, False),
    "sm100 mxfp4": ((1, 128), (1, 32), True, True),
    "sm100 mxfp4 with 1x32": ((1, 32), (1, 32), True, True),
}
every_format = pytest.mark.parametrize("name", FORMATS)


def as_bf16(numbers):
    return numbers.astype(np.float32).astype(BF16).astype(np.float64)


@every_format
@pytest.mark.parametrize(
    ("counts", "columns", "depth"), [((3, 0, 8), 8, 128), ((9, 2, 1), 130, 640), ((5, 5), 24, 1024)]
)
def test_contiguous_formats(name, counts, columns, depth):
    recipe_a, recipe_b, packs, fp4 = FORMATS[name]
    rng = np.random.default_rng(depth)
    m_indices = np.concatenate([[e] * n + [-1] * (-n % 8) for e, n in enumerate(counts) if n])
    # Less than a whole block at the end: M is no multiple of 4 in two cases of three.
    m_indices = m_indices[: len(m_indices) - (-counts[-1] % 8)]
    a, a_scales, x = operand(rng, (), len(m_indices), depth, recipe_a, packs=packs)
    b, b_scales, w = operand(rng, (len(counts),), columns, depth, recipe_b, packs=packs, fp4=fp4)
    case = a, a_scales, b, b_scales, m_indices
    got = contiguous(*case, recipe_a[1], recipe_b[1])
    for row, expert in enumerate(m_indices):
        if expert >= 0:
            np.testing.assert_array_equal(got[row], as_bf16(w[expert] @ x[row]))
    # Dtypes and shapes say as much, except at K = 128 whether a group is 32 or 128 FP8 values.
    if depth > 128 or name in ("sm90 fp8_block", "sm100 fp8_block", "sm100 mxfp4"):
        np.testing.assert_array_equal(contiguous(*case), got)
    if fp4:
        case = a, a_scales, b.view(np.int8), b_scales, m_indices
        np.testing.assert_array_equal(contiguous(*case, recipe_a[1], recipe_b[1]), got)


@every_format
@pytest.mark.parametrize(
    ("masked_m", "capacity", "columns", "depth"), [((3, 0, 6), 6, 9, 640), ((8, 1), 8, 136, 256)]
)
def test_masked_formats(name, masked_m, capacity, columns, depth):
    recipe_a, recipe_b, packs, fp4 = FORMATS[name]
    rng, lead = np.random.default_rng(capacity), (len(masked_m),)
    a, a_scales, x = operand(rng, lead, capacity, depth, recipe_a, packs=packs)
    b, b_scales, w = operand(rng, lead, columns, depth, recipe_b, packs=packs, fp4=fp4)
    got = masked(a, a_scales, b, b_scales, masked_m)
    for e, rows in enumerate(masked_m):
        np.testing.assert_array_equal(got[e, :rows], as_bf16(x[e, :rows] @ w[e].T))


@pytest.mark.skipif(ON_GPU, reason="the emulator reads host memory")
@every_format
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("depth", [128, 640])
def test_through_the_shim(name, layout, depth):
    recipe_a, recipe_b, packs, fp4 = FORMATS[name]
    rng, experts, rows, columns, live = np.random.default_rng(depth), 2, 16, 24, 11
    lead = (experts,) if layout == "masked" else ()
    a, a_sf, x = operand(rng, lead, rows, depth, recipe_a, packs=packs, packed_already=False)
    b, b_sf, w = operand(
        rng, (experts,), columns, depth, recipe_b, packs=packs, fp4=fp4, packed_already=False
    )
    arch = "sm100" if packs else "sm90"
    # Packed scales of 128 x 128 blocks were repeated for every row.
    how = dict(recipe_a=recipe_a, recipe_b=(1, recipe_b[1]) if packs else recipe_b, emulate=True)

    @jax.jit
    def run(a, a_sf, b, b_sf, groups):
        f = scales.transform_sf_into_required_layout
        a_sf = f(a_sf, rows, depth, recipe_a, experts if lead else None, arch=arch)
        b_sf = f(b_sf, columns, depth, recipe_b, experts, arch=arch)
        if layout == "masked":
            return deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(
                (a, a_sf), (b, b_sf), groups, live, **how
            )
        return deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(
            (a, a_sf), (b, b_sf), groups, alignment=8, **how
        )

    if layout == "masked":
        got = run(a, a_sf, b, b_sf, np.array([live, 0], np.int32))[0, :live]
        want = x[0, :live] @ w[0].T
    else:
        got = run(a, a_sf, b, b_sf, np.repeat([1, 0], 8).astype(np.int32))
        want = np.concatenate([x[:8] @ w[1].T, x[8:] @ w[0].T])
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), as_bf16(want))


def test_every_group_has_its_own_scale():
    # Ones against ones: the result tells which two scales met, as no two pairs have one product.
    a_powers = np.exp2([[0.0, 8.0]]).astype(np.float32)  # two groups of 128
    b_powers = np.exp2(np.arange(8.0)[None]).astype(np.float32)  # eight groups of 32
    a, b = np.ones((1, 256), E4M3), np.full((1, 1, 128), 0x22, np.uint8)  # 0x2 is 1.0
    a_scales = seen_by_deep_gemm(scales.pack_ue8m0(a_powers), 1)
    b_scales = seen_by_deep_gemm(scales.pack_ue8m0(b_powers[None]), 1)
    for group in range(8):
        one_group = np.zeros_like(b)
        one_group[..., 16 * group : 16 * (group + 1)] = b[..., :16]
        want = 32 * a_powers[0, group // 4] * b_powers[0, group]
        assert contiguous(a, a_scales, one_group, b_scales, [0]) == want


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "fp4"])
def test_one_hot_positions_pick_their_weights(fp4):
    depth, columns = 256, 11
    rng = np.random.default_rng(1)
    b, b_scales, w = operand(rng, (2,), columns, depth, (1, 32), packs=True, fp4=fp4)
    a = np.eye(depth).astype(E4M3)
    a_scales = packed(np.ones((depth, depth // 128), np.float32))
    m_indices = np.repeat([1, 0], 128)
    got = contiguous(a, seen_by_deep_gemm(a_scales, depth), b, b_scales, m_indices)
    np.testing.assert_array_equal(got, np.concatenate([w[1, :, :128].T, w[0, :, 128:].T]))


def test_the_low_nibble_comes_first():
    a = np.eye(2, 128).astype(E4M3)
    b = np.zeros((1, 1, 64), np.uint8)
    b[0, 0, 0] = 0x21
    a_scales = np.full((1, 4), 127, np.int32)
    b_scales = np.full((1, 1, 4), 0x7F7F7F7F, np.int32)
    views = seen_by_deep_gemm(a_scales, 2), seen_by_deep_gemm(b_scales, 1)
    got = contiguous(a, views[0], b, views[1], [0, 0])
    np.testing.assert_array_equal(got[:, 0], [0.5, 1.0])


def test_values_are_divided_by_the_rounded_scale():
    # The raw scale is 640 / 448 = 1.43: rounded after the division, 448 * 2 = 896 would come back.
    one = dg.quantize(np.full((1, 128), 640.0, np.float32), "fp8_1x128", ue8m0=True)
    np.testing.assert_array_equal(np.asarray(one.values).astype(np.float32), 320)
    view = seen_by_deep_gemm(scales.pack_ue8m0(one.scales), 1)
    b, b_scales, _ = operand(np.random.default_rng(0), (1,), 1, 128, (128, 128), packs=True)
    b = np.eye(1, 128).astype(E4M3)[None]
    scale = b_scales.view(np.uint8).ravel()[0] - 127.0
    assert contiguous(np.asarray(one.values), view, b, b_scales, [0]) == 640 * np.exp2(scale)


def test_quantize_packs_without_rounding():
    quantize = jax.jit(dg.quantize, static_argnames=("spec", "ue8m0"))
    x = np.random.default_rng(2).standard_normal((5, 640)).astype(np.float32)
    scales.pack_ue8m0(quantize(x, "mxfp4_1x32").scales)  # would be refused
    scales.pack_ue8m0(quantize(x, "fp8_128x128", ue8m0=True).scales)
    with pytest.raises(ValueError, match="not powers of two"):
        scales.pack_ue8m0(quantize(x, "fp8_128x128").scales)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(a_scales=lambda s: np.ascontiguousarray(s)), ValueError, r"scales of a: .*\(2, 1\)"),
        (dict(b_scales=lambda s: np.ascontiguousarray(s)), ValueError, "scales of b: "),
        (dict(b_scales=lambda s: s[:, :, :1]), ValueError, r"of b: shape \(1, 8, 1\)"),
        (
            dict(a_scales=lambda s: s.view(np.float32)),
            TypeError,
            "with float32 scales, b uint8 with",
        ),
        (dict(b=lambda b: b[..., :224]), ValueError, "K is 448; FP4 needs a multiple of 128"),
    ],
)
def test_the_emulator_refuses_what_the_kernel_would_not_read(change, error, text):
    rng = np.random.default_rng(3)
    a, a_scales, _ = operand(rng, (), 8, 640, (1, 128), packs=True)
    b, b_scales, _ = operand(rng, (1,), 8, 640, (1, 32), packs=True, fp4=True)
    case = dict(a=a, a_scales=a_scales, b=b, b_scales=b_scales, m_indices=[0] * 8)
    with pytest.raises(error, match=text):
        contiguous(**{n: change.get(n, lambda x: x)(x) for n, x in case.items()})


# --- DeepGEMM's own Python, where the wheel is installed (nothing of it needs a GPU)


@pytest.fixture
def wheel(monkeypatch):
    """deep_gemm.utils.math and .layout of the wheel, without its compiled half."""
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None:
        pytest.skip("sgl-deep-gemm is not installed")
    pytest.importorskip("torch")
    core = types.SimpleNamespace(get_tma_aligned_size=lambda mn, size: -(-mn * size // 16) * 4)
    root = pathlib.Path(spec.origin).parent
    for name, folder in (("deep_gemm", root), ("deep_gemm.utils", root / "utils")):
        package = types.ModuleType(name)
        package.__path__, package._C = [str(folder)], core
        monkeypatch.setitem(sys.modules, name, package)
    for name in ("math", "layout"):
        monkeypatch.delitem(sys.modules, f"deep_gemm.utils.{name}", raising=False)
    modules = (importlib.import_module(f"deep_gemm.utils.{name}") for name in ("math", "layout"))
    yield types.SimpleNamespace(**{k: v for m in modules for k, v in vars(m).items()})
    for name in ("math", "layout"):
        sys.modules.pop(f"deep_gemm.utils.{name}", None)


def test_rounding_as_deep_gemm_rounds(wheel):
    import torch

    rng = np.random.default_rng(4)
    bits = rng.integers(0, 0x7F800000, (40, 12)).astype(np.int32)
    values = np.concatenate([bits.view(np.float32), np.zeros((1, 12), np.float32)])
    rounded = wheel.ceil_to_ue8m0(torch.from_numpy(values))
    want = wheel.pack_ue8m0_to_int(rounded).numpy()
    np.testing.assert_array_equal(seen_by_deep_gemm(round_up(values), 41), want)
    back = wheel.unpack_ue8m0_from_int(torch.from_numpy(want)).numpy()
    np.testing.assert_array_equal(scales.unpack_ue8m0(round_up(values), 41, 12), back)


@pytest.mark.parametrize(("mn", "groups"), [(1, 1), (6, 5), (130, 20)])
def test_packing_as_deep_gemm_packs(wheel, mn, groups):
    import torch

    powers = random_powers(np.random.default_rng(5), 3, mn, groups)
    want = wheel._pack_fp32_into_ue8m0_fallback(torch.from_numpy(powers))
    stored = np.asarray(scales.pack_ue8m0(powers))
    assert tuple(want.stride()) == tuple(s // 4 for s in seen_by_deep_gemm(stored, mn).strides)
    np.testing.assert_array_equal(seen_by_deep_gemm(stored, mn), want.numpy())


def test_fp4_as_deep_gemm_writes_it(wheel):
    import torch

    x = torch.from_numpy(np.random.default_rng(6).standard_normal((8, 256)).astype(np.float32))
    values, powers = wheel.per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32)
    want = wheel.cast_back_from_fp4(values, powers, gran_k=32).numpy()
    view = seen_by_deep_gemm(scales.pack_ue8m0(powers.numpy()[None]), 8)
    a_scales = seen_by_deep_gemm(packed(np.ones((256, 2), np.float32)), 256)
    got = contiguous(np.eye(256).astype(E4M3), a_scales, values.numpy()[None], view, [0] * 256)
    np.testing.assert_array_equal(got, want.T)


# --- DeepGEMM's layout kernels


@pytest.mark.skipif(not ON_GPU, reason="DeepGEMM's layout kernels need a GPU")
@pytest.mark.parametrize("experts", [None, 3])
@pytest.mark.parametrize(
    ("mn", "groups"), [(1, 1), (6, 5), (7, 4), (128, 56), (130, 20), (4096, 16)]
)
def test_the_bytes_of_deep_gemms_kernels(experts, mn, groups):
    import deep_gemm as library
    import torch

    lead = () if experts is None else (experts,)
    powers = random_powers(np.random.default_rng(7), *lead, mn, groups)
    any_f32 = np.random.default_rng(8).standard_normal(powers.shape).astype(np.float32)

    def same(theirs, ours):
        ours = seen_by_deep_gemm(ours, mn)
        assert tuple(theirs.stride()) == tuple(s // 4 for s in ours.strides)
        np.testing.assert_array_equal(theirs.cpu().numpy(), ours)

    sf, anything = torch.from_numpy(powers).cuda(), torch.from_numpy(any_f32).cuda()
    same(
        library.utils.layout.get_mn_major_tma_aligned_packed_ue8m0_tensor(sf),
        scales.pack_ue8m0(powers),
    )
    same(
        library.utils.layout.get_mn_major_tma_aligned_tensor(anything),
        scales.mn_major_tma_aligned(any_f32),
    )
    if torch.cuda.get_device_capability()[0] == 9:
        shape = mn, 128 * groups, (1, 128), experts
        same(
            library.transform_sf_into_required_layout(anything, *shape),
            scales.transform_sf_into_required_layout(any_f32, *shape, arch="sm90"),
        )
        # Blocks of 128 x 128 stay as they are.
        shape = 128 * mn, 128 * groups, (128, 128), experts
        theirs = library.transform_sf_into_required_layout(anything, *shape)
        ours = scales.transform_sf_into_required_layout(any_f32, *shape, arch="sm90")
        assert theirs.is_contiguous()
        np.testing.assert_array_equal(theirs.cpu().numpy(), ours)

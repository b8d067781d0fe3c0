"""The `quant` step on every backend, and `quantize` / `dequantize` of every format."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import ON_GPU, every_backend, f64, gaussian, run_step, same_bits
from hypothesis import given
from hypothesis import strategies as st

import dgmoe_jax as dg
from dgmoe_jax import reference

SPECS = ["fp8_1x128", "fp8_128x128", "mxfp8_1x32", "mxfp4_1x32"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
quantize = jax.jit(dg.quantize, static_argnames=("spec", "ue8m0"))


def quant(x, backend, ue8m0=False):
    values, scales = run_step(jnp.asarray(x), step="quant", backend=backend, group=128, ue8m0=ue8m0)
    rows = x.shape[0]
    assert values.shape == x.shape and values.dtype == ml_dtypes.float8_e4m3fn
    # Rows of scales start at multiples of 16 bytes: what DeepGEMM's copies need.
    assert scales.shape == (x.shape[1] // 128, -(-rows // 4) * 4) and scales.dtype == np.float32
    return np.asarray(values), np.asarray(scales)[:, :rows].T


def up_to_power_of_two(scales):
    """The smallest power of two that is no smaller, exponent field within 1..254."""
    mantissa, exponent = np.frexp(f64(scales))
    exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
    return np.exp2(np.clip(exponent, 1 - 127, 254 - 127))


def needs_exact_division(backend="xla"):
    if ON_GPU and backend == "xla":
        pytest.skip("XLA's own division on a GPU is an ulp off (dgmoe_jax.xla.divide)")


# --- the step


@every_backend
@pytest.mark.parametrize("shape", [(1, 128), (3, 384), (17, 256)])
def test_quant_is_bit_equal_to_the_reference(backend, shape):
    """IEEE division, not multiplication by a reciprocal: an ulp of the scale would show."""
    needs_exact_division(backend)
    rng = np.random.default_rng(0)
    x = f64(gaussian(rng, *shape)) * np.exp2(rng.integers(-30, 30, (shape[0], 1)))
    x = x.astype(ml_dtypes.bfloat16)
    values, scales = quant(x, backend)
    want_values, want_scales = reference.encode_fp8(x.astype(np.float32))
    same_bits(scales, want_scales)
    same_bits(values, want_values)


@every_backend
def test_quant_of_exact_data_is_exact(backend):
    """Integers up to 16 with 448 in each group: scale 1, and 2**n with all of it times 2**n."""
    x = np.random.default_rng(1).integers(-16, 17, (8, 256)).astype(float)
    x[:, ::128] = 448
    powers = np.exp2(np.arange(8) * 5 - 15)[:, None]
    for ue8m0 in (False, True):
        values, scales = quant((x * powers).astype(ml_dtypes.bfloat16), backend, ue8m0)
        np.testing.assert_array_equal(f64(values), x)
        np.testing.assert_array_equal(f64(scales), np.broadcast_to(powers, (8, 2)))


@every_backend
def test_quant_rounds_scales_up_to_powers_of_two_and_divides_by_those(backend):
    rng = np.random.default_rng(2)
    x = f64(gaussian(rng, 16, 128)) * np.exp2(rng.integers(-60, 100, (16, 1)))
    x[0], x[1], x[2] = 0, 1e-30, 3e38
    x[3, :] = 448 * (1 + 2**-7)  # the next bf16 above: the scale just passes 1
    x = x.astype(ml_dtypes.bfloat16)
    values, scales = quant(x, backend, ue8m0=True)
    amax = np.maximum(np.abs(x.astype(np.float32)).max(axis=1), np.float32(1e-10))
    want = up_to_power_of_two(amax / np.float32(448))
    np.testing.assert_array_equal(f64(scales)[:, 0], want)
    assert want[3] == 2
    same_bits(values, (f64(x) / want[:, None]).astype(ml_dtypes.float8_e4m3fn))


@every_backend
@pytest.mark.parametrize("ue8m0", [False, True])
def test_quant_shows_nan_and_inf_in_their_row_and_nowhere_else(backend, ue8m0):
    x = np.array(gaussian(np.random.default_rng(3), 8, 256))
    clean_values, clean_scales = quant(x, backend, ue8m0)
    x[1, 5], x[2, 200], x[3, 127] = np.nan, np.inf, -np.inf
    bad = np.isin(np.arange(8), (1, 2, 3))
    values, scales = quant(x, backend, ue8m0)
    assert np.isnan(f64(values)).any(axis=1)[bad].all()
    same_bits(values[~bad], clean_values[~bad])
    same_bits(scales[~bad], clean_scales[~bad])


@pytest.mark.skipif(ON_GPU, reason="XLA's own division on a GPU is an ulp off")
@given(st.data())
def test_quant_of_any_finite_bf16_is_the_reference(data):
    bits = st.integers(0, 2**16 - 1).filter(lambda b: (b & 0x7F80) != 0x7F80)
    row = st.lists(bits, min_size=128, max_size=128) | bits.map(lambda b: [b] * 128)
    x = np.asarray(data.draw(st.lists(row, min_size=4, max_size=4)), np.uint16)
    x = x.view(ml_dtypes.bfloat16)
    values, scales = quant(x, "xla")
    want_values, want_scales = reference.encode_fp8(x.astype(np.float32))
    same_bits(scales, want_scales)
    same_bits(values, want_values)


# --- quantize and dequantize


@pytest.mark.parametrize("spec", SPECS)
def test_quantize_of_a_constant_2_to_the_n_is_exact_in_every_format(spec):
    peak = 6 if "4" in spec.split("_")[0] else 448
    x = jnp.asarray(np.full((128, 256), peak * 0.25), jnp.bfloat16)
    scaled = quantize(x, spec)
    np.testing.assert_array_equal(dg.dequantize(scaled), f64(x))
    np.testing.assert_array_equal(scaled.scales, 0.25)


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("spec", ["fp8_1x128", "fp8_128x128"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_fp8_groups_have_the_scale_of_their_amax(spec, ue8m0, dtype):
    if not ue8m0:
        needs_exact_division()
    """Sizes that are no multiple of the group, and a leading axis."""
    x = jnp.asarray(np.random.default_rng(4).standard_normal((2, 130, 200)), dtype)
    scaled = quantize(x, spec, ue8m0=ue8m0)
    rows = 128 if spec == "fp8_128x128" else 1
    assert scaled.values.shape == x.shape and scaled.values.dtype == jnp.float8_e4m3fn
    assert scaled.scales.shape == (2, -(-130 // rows), 2) and scaled.scales.dtype == np.float32
    back = np.asarray(dg.dequantize(scaled))
    for b, r, c in np.ndindex(scaled.scales.shape):
        place = b, slice(r * rows, (r + 1) * rows), slice(c * 128, (c + 1) * 128)
        part = np.asarray(x, np.float32)[place]
        scale = np.abs(part).max() / np.float32(448)
        scale = up_to_power_of_two(scale) if ue8m0 else float(scale)
        assert float(scaled.scales[b, r, c]) == scale
        want = np.clip(part / np.float32(scale), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        same_bits(np.asarray(scaled.values)[place], want)
        np.testing.assert_array_equal(back[place], want.astype(np.float32) * np.float32(scale))


@pytest.mark.parametrize("spec", ["mxfp8_1x32", "mxfp4_1x32"])
def test_mx_formats_round_to_the_nearest_code_under_a_power_of_two(spec):
    x = jnp.asarray(np.random.default_rng(5).standard_normal((3, 128)), jnp.float32)
    scaled = quantize(x, spec)
    assert scaled.scales.shape == (3, 4)
    scales = np.repeat(f64(scaled.scales), 32, axis=1)
    amax = np.abs(f64(x)).reshape(3, 4, 32).max(axis=-1)
    peak = 448 if spec == "mxfp8_1x32" else 6
    np.testing.assert_array_equal(f64(scaled.scales), up_to_power_of_two(amax / peak))
    codes = np.abs(f64(dg.dequantize(scaled)) / scales)
    assert codes.max() <= peak
    if spec == "mxfp4_1x32":
        assert set(codes.ravel()) <= set(E2M1)
        assert scaled.values.shape == (3, 64) and scaled.values.dtype == np.uint8
        nearest = np.abs(np.abs(f64(x) / scales)[..., None] - E2M1).min(axis=-1)
        np.testing.assert_allclose(np.abs(np.abs(f64(x) / scales) - codes), nearest, atol=1e-6)
    else:
        assert scaled.values.shape == (3, 128)


def test_mxfp4_packs_two_values_a_byte_low_nibble_first():
    x = jnp.zeros((1, 32)).at[0, :6].set(jnp.asarray([6.0, -0.5, 1.0, 1.5, 0.0, -6.0]))
    packed = np.asarray(dg.quantize(x, "mxfp4_1x32").values)[0]
    # E2M1 codes: sign, then 0 .5 1 1.5 2 3 4 6.
    np.testing.assert_array_equal(packed[:4], [0x97, 0x32, 0xF0, 0x00])


def test_mxfp4_rounds_halfway_values_to_the_even_code():
    x = jnp.zeros((1, 32)).at[0, :6].set(jnp.asarray([6.0, 2.5, 3.5, 5.0, 1.25, 0.25]))
    back = dg.dequantize(dg.quantize(x, "mxfp4_1x32"))
    np.testing.assert_array_equal(back[0, :6], [6.0, 2.0, 4.0, 4.0, 1.0, 0.0])


@pytest.mark.parametrize("spec", SPECS)
def test_groups_of_zeros_nan_and_inf_keep_to_themselves(spec):
    rows = 128 if spec == "fp8_128x128" else 1
    x = np.random.default_rng(6).standard_normal((4 * rows, 128)).astype(np.float32)
    clean = f64(dg.dequantize(quantize(x, spec)))
    x[:rows], x[rows, 3], x[2 * rows, 100] = 0, np.nan, np.inf
    scaled = quantize(x, spec)
    back = f64(dg.dequantize(scaled))
    np.testing.assert_array_equal(back[:rows], 0.0)
    assert (f64(scaled.scales)[0] > 0).all() and np.isfinite(f64(scaled.scales)[0]).all()
    assert np.isnan(back[rows]).any() and not np.isfinite(back[2 * rows]).all()
    same_bits(back[3 * rows :], clean[3 * rows :])


def test_bf16_has_no_scales():
    x = jnp.asarray(np.random.default_rng(7).standard_normal((3, 100)), jnp.float32)
    scaled = dg.quantize(x, "bf16")
    assert scaled.scales is None and scaled.values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(dg.dequantize(scaled), x.astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("spec", SPECS)
def test_nothing_to_quantise_gives_nothing(spec):
    assert dg.dequantize(dg.quantize(jnp.zeros((0, 256)), spec)).shape == (0, 256)


@every_backend
def test_no_rows_quantise_to_no_rows(backend):
    quant(np.zeros((0, 256), ml_dtypes.bfloat16), backend)


@pytest.mark.parametrize(
    "kind, words, x, spec, ue8m0",
    [
        (ValueError, ["spec", "'fp7'", "fp8_128x128", "mxfp4_1x32"], (4, 128), "fp7", None),
        (ValueError, ["ue8m0=False", "mxfp8_1x32", "True"], (4, 128), "mxfp8_1x32", False),
        (ValueError, ["ue8m0=True", "bf16", "False"], (4, 128), "bf16", True),
        (ValueError, ["x", "(4, 33)", "mxfp4_1x32"], (4, 33), "mxfp4_1x32", None),
        (ValueError, ["x", "(128,)", "fp8_128x128"], (128,), "fp8_128x128", None),
        (ValueError, ["x", "()", "fp8_1x128"], (), "fp8_1x128", None),
    ],
)
def test_errors_name_the_value_and_what_is_allowed(kind, words, x, spec, ue8m0):
    with pytest.raises(kind) as caught:
        dg.quantize(jnp.zeros(x), spec, ue8m0=ue8m0)
    assert all(word in str(caught.value) for word in words), caught.value


def test_integers_are_refused():
    with pytest.raises(TypeError, match="x: dtype int32, must be a float"):
        dg.quantize(jnp.zeros((4, 128), jnp.int32), "fp8_1x128")

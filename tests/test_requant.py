"""Requantising FP8 slabs to one scale for all, after SGLang's kernel of that purpose."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import BACKENDS, every_backend, f64, same_bits

from dgmoe_jax import backends

FP8 = ml_dtypes.float8_e4m3fn
SENTINEL = 0.375  # of padding; results are multiples of 0.25
OUTPUT_SCALE = np.array([2], np.float32)


def call(backend, x, scales, masked_m, out, output_scale=OUTPUT_SCALE, mn_major=False):
    run = jax.jit(functools.partial(backends.get("requant", backend), mn_major=mn_major))
    return np.asarray(run(x, scales, masked_m, output_scale, out))


def slabs(experts, m, width, seed=0):
    """Integers and powers of two: every product is exact."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 9, (experts, m, width)).astype(FP8)
    scales = np.exp2(rng.integers(-1, 2, (experts, m, width // 128))).astype(np.float32)
    return x, scales, np.full(x.shape, SENTINEL).astype(FP8)


def mn_major(scales, columns):
    """[E, M, G] -> [E, G, columns], NaN past M."""
    experts, m, groups = scales.shape
    tail = np.full((experts, groups, columns - m), np.nan, np.float32)
    return np.concatenate([scales.swapaxes(1, 2), tail], axis=2)


@every_backend
@pytest.mark.parametrize("layout", ["row-major", "mn-major"])
@pytest.mark.parametrize("width", [7168, 3584, 1152, 128])
def test_live_rows_are_exact_and_the_others_untouched(backend, layout, width):
    """A whole number of 1024, two that are not, and less than one; NaN where nobody may look."""
    m = 48 if backend not in ("emulator",) or width == 1152 else 18
    masked_m = np.array([0, 1, 17, m], np.int32)
    x, scales, out = slabs(4, m, width)
    dead = np.arange(m) >= masked_m[:, None]
    x[dead], scales[dead] = np.nan, np.nan
    given = mn_major(scales, -(-m // 4) * 4 + 4) if layout == "mn-major" else scales
    got = call(backend, x, given, masked_m, out, mn_major=layout == "mn-major")
    want = np.array(out)
    exact = f64(x) * f64(scales).repeat(128, axis=2) / OUTPUT_SCALE
    want[~dead] = exact[~dead].astype(FP8)
    same_bits(got, want)


@every_backend
def test_values_saturate_round_to_even_and_keep_nan(backend):
    x, scales, out = slabs(1, 8, 128)
    x[0, 0, :4] = 448, -448, np.nan, 1
    scales[:] = 4
    scales[0, 1] = 2 * 17 / 16  # 8 becomes 8.5, between 8 and 9
    got = f64(call(backend, x, scales, np.array([8], np.int32), out))[0]
    np.testing.assert_array_equal(got[0, :4], [448, -448, np.nan, 2])
    want = (x[0, 1].astype(np.float32) * np.float32(17 / 16)).astype(FP8)
    np.testing.assert_array_equal(got[1], f64(want))
    assert (got[1][f64(x[0, 1]) == 8] == 8).all()


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_random_slabs_are_the_bits_of_jnp(backend):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((2, 11, 384)) * 100).astype(FP8)
    scales = rng.random((2, 11, 3)).astype(np.float32)
    out, masked_m = np.zeros(x.shape, FP8), np.array([11, 5], np.int32)
    scale = np.array(0.37, np.float32)
    got, want = (call(b, x, scales, masked_m, out, scale) for b in (backend, "xla"))
    same_bits(got, want)


def test_it_is_one_kernel_that_writes_into_a_donated_output():
    x, scales, out = slabs(2, 16, 1152)
    run = jax.jit(backends.get("requant", "pallas"), donate_argnums=4)
    traced = run.trace(x, scales, np.array([3, 16], np.int32), OUTPUT_SCALE, out)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"custom_call @(\w+?)(?:_v\d+)?\(", text) == ["mosaic_gpu"]
    assert "tf.aliasing_output" in text and "output_operand_alias" in text


@pytest.mark.parametrize(
    "kind, words, change",
    [
        (ValueError, ["x is", "[2, 16, 64]", "H % 128"], dict(x=jnp.zeros((2, 16, 64), FP8))),
        (ValueError, ["scales is [2, 16, 2]", "[2, 16, 1]"], dict(scales=jnp.ones((2, 16, 2)))),
        (TypeError, ["masked_m", "float32", "int32"], dict(masked_m=jnp.zeros(2))),
        (ValueError, ["out is [2, 8, 128]"], dict(out=jnp.zeros((2, 8, 128), FP8))),
        (ValueError, ["output_scale is [2]"], dict(output_scale=jnp.ones(2))),
    ],
)
def test_arrays_that_do_not_fit_are_refused(kind, words, change):
    x, scales, out = slabs(2, 16, 128)
    given = dict(x=x, scales=scales, masked_m=np.zeros(2, np.int32), output_scale=OUTPUT_SCALE)
    with pytest.raises(kind) as caught:
        backends.get("requant", "pallas")(**(given | dict(out=out) | change))
    assert all(word in str(caught.value) for word in words), caught.value

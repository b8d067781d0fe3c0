"""Each step on its own, by the flat signature that all backends share."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import (
    bf16,
    every_backend,
    every_recipe,
    f64,
    gaussian,
    random_layer,
    run_step,
    same_bits,
    tokens,
    walk,
)
from hypothesis import given
from hypothesis import strategies as st

from dgmoe_jax import backends, reference
from dgmoe_jax.layouts import Contiguous

# --- permute_index


def obvious_index(ids, experts, alignment, rows):
    src2dst = np.full(ids.shape, -1)
    dst2src, m_indices = np.full(rows, -1), np.full(rows, -1)
    row = 0
    for e in range(experts):
        for t in range(ids.shape[0]):
            for j in range(ids.shape[1]):
                if ids[t, j] == e:
                    src2dst[t, j], dst2src[row], m_indices[row] = row, t, e
                    row += 1
        row = -(-row // alignment) * alignment
    assert row <= rows
    return src2dst, dst2src, m_indices


def check_index(ids, experts, alignment, backend):
    ids = np.asarray(ids, np.int32)
    rows = Contiguous(alignment).rows(ids.size, experts)
    got = run_step(
        jnp.asarray(ids),
        step="permute_index",
        backend=backend,
        num_experts=experts,
        alignment=alignment,
        rows=rows,
    )
    for array, want in zip(got, obvious_index(ids, experts, alignment, rows), strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, want)


# tokens, k, experts, alignment
INDEX_SHAPES = [(1, 1, 4, 8), (3, 2, 4, 32), (17, 4, 60, 8), (40, 1, 3, 64)]


@given(st.data())
def test_permute_index_is_the_obvious_loop(data):
    count, top_k, experts, alignment = data.draw(st.sampled_from(INDEX_SHAPES))
    # Few distinct ids leave experts empty and others crowded; -1 and 99 are no expert's.
    pool = data.draw(st.lists(st.sampled_from([-1, 99, *range(experts)]), min_size=1, max_size=5))
    size = count * top_k
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    check_index(np.reshape(ids, (count, top_k)), experts, alignment, "xla")


@every_backend
def test_permute_index_of_crowded_empty_and_absent_experts(backend):
    ids = np.random.default_rng(0).integers(-1, 8, (19, 3))
    ids[ids == 5] = 2
    for crowd in (ids, np.full((19, 3), 7)):
        check_index(crowd, 8, 64, backend)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=80), st.sampled_from([8, 32, 128]))
def test_the_bound_on_rows_is_never_exceeded_and_is_reached(counts, alignment):
    assignments, experts = sum(counts), len(counts)
    bound = Contiguous(alignment).rows(assignments, experts)

    def rows(counts):
        return sum(-(-c // alignment) * alignment for c in counts)

    assert rows(counts) <= bound
    # The worst: a row for every expert that can have one, and the others fill whole segments.
    worst = [1] * min(assignments, experts) or [0]
    worst[0] += assignments - sum(worst)
    assert rows(worst) == bound


# --- permute_rows


@every_backend
@pytest.mark.parametrize("fp8", [False, True])
def test_permute_rows_moves_values_and_scales_of_live_rows_bit_for_bit(backend, fp8):
    """NaN and all other bit patterns included; scales have columns that no token owns."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 4, (5, 2)).astype(np.int32)
    src2dst, dst2src, _ = obvious_index(ids, 4, 32, 160)
    if fp8:
        values = rng.integers(0, 256, (5, 256), np.uint8).view(ml_dtypes.float8_e4m3fn)
        scales = rng.integers(0, 2**32, (2, 8), np.uint32).view(np.float32)
    else:
        values = rng.integers(0, 2**16, (5, 256), np.uint16).view(ml_dtypes.bfloat16)
        scales = None
    index = [jnp.asarray(a, jnp.int32) for a in (src2dst, dst2src)]
    moved, moved_scales = run_step(
        jnp.asarray(values),
        None if scales is None else jnp.asarray(scales),
        *index,
        step="permute_rows",
        backend=backend,
    )
    live = dst2src >= 0
    assert moved.shape == (160, 256) and moved.dtype == values.dtype
    same_bits(np.asarray(moved)[live], values[dst2src[live]])
    if fp8:
        assert moved_scales.shape == (2, 160)
        same_bits(np.asarray(moved_scales)[:, live], scales[:, dst2src[live]])
    else:
        assert moved_scales is None


# --- activations

ACTIVATIONS = [
    ("silu", (None,)),
    ("silu", (1.5,)),
    ("oai_swiglu", (1.702, 1.25)),
    ("situ", (1.5, 0.75)),
]
every_activation = pytest.mark.parametrize("kind, params", ACTIVATIONS)


def gate_and_up():
    """32 rows of 2 x 128; every third row is padding and NaN; row 0 has what saturates."""
    gateup = np.array(gaussian(np.random.default_rng(1), 32, 256, scale=2.0))
    gateup[0, :8], gateup[0, 128:136] = [3e4, -3e4, 90, -90, 0, -0.0, 1e-30, 3], 2
    m_indices = np.where(np.arange(32) % 3 == 2, -1, np.arange(32) // 8).astype(np.int32)
    gateup[m_indices < 0] = np.nan
    return gateup, m_indices


@every_backend
@every_activation
def test_act_is_the_reference_rounded_to_bf16(backend, kind, params):
    gateup, m_indices = gate_and_up()
    live = m_indices >= 0
    got = run_step(gateup, m_indices, step="act", backend=backend, activation=kind, params=params)
    want = reference.activate(f64(gateup[:, :128]), f64(gateup[:, 128:]), kind, params)[live]
    assert got.shape == (32, 128) and got.dtype == gateup.dtype
    # Half a unit in bf16's last place, and a little for f32 on the way. A sigmoid that f32 cannot
    # tell from 0 may be 0.
    np.testing.assert_allclose(f64(got)[live], want, rtol=2**-8 + 2**-16, atol=1e-34)


@every_backend
@every_activation
def test_act_quant_is_the_reference_quantised_without_a_rounding_between(backend, kind, params):
    gateup, m_indices = gate_and_up()
    live = m_indices >= 0
    values, scales = run_step(
        gateup,
        m_indices,
        step="act_quant",
        backend=backend,
        activation=kind,
        params=params,
        group=128,
        ue8m0=False,
    )
    assert values.shape == (32, 128) and scales.shape == (1, 32)
    want = reference.activate(f64(gateup[:, :128]), f64(gateup[:, 128:]), kind, params)[live]
    want_values, want_scales = reference.encode_fp8(want)
    # 1e-5: f32 arithmetic; had the product been rounded to bf16 first, 2e-3.
    np.testing.assert_allclose(f64(scales)[0, live], f64(want_scales)[:, 0], rtol=1e-5)
    same = f64(values)[live] == f64(want_values)
    assert same.mean() > 0.995
    back = f64(values)[live] * f64(scales)[0, live, None]
    # Half a unit in the last place of e4m3: 2**-4 of a normal value, 2**-10 of the scale below.
    bound = np.abs(want) * 2**-4 + f64(want_scales) * 2**-10
    assert (np.abs(back - want) <= bound * (1 + 1e-4)).all()


# --- unpermute


def unpermute(rows, src2dst, weights, shared, factor, backend):
    got = run_step(
        *(jnp.asarray(rows), jnp.asarray(src2dst, jnp.int32), jnp.asarray(weights, jnp.float32)),
        None if shared is None else jnp.asarray(shared),
        step="unpermute",
        backend=backend,
        scaling_factor=factor,
    )
    assert got.dtype == ml_dtypes.bfloat16
    return f64(got)


def constant_rows(values):
    return np.tile(np.asarray(values)[:, None], (1, 128)).astype(ml_dtypes.bfloat16)


@every_backend
@pytest.mark.parametrize("with_shared", [False, True])
def test_unpermute_of_integers_is_exact_and_never_reads_rows_without_an_expert(
    backend, with_shared
):
    rng = np.random.default_rng(2)
    rows = rng.integers(-8, 9, (48, 128)).astype(ml_dtypes.bfloat16)
    rows[40:], rows[0] = np.nan, np.inf
    src2dst = rng.integers(1, 40, (5, 3))
    src2dst[1, 1], src2dst[2], src2dst[3, :2] = -1, -1, -1
    weights = np.exp2(rng.integers(-2, 3, (5, 3)))
    weights[src2dst < 0] = np.nan
    shared = rng.integers(-8, 9, (5, 128)).astype(ml_dtypes.bfloat16) if with_shared else None
    want = np.zeros((5, 128)) if shared is None else f64(shared)
    for t in range(5):
        for j in range(3):
            if src2dst[t, j] >= 0:
                want[t] += 2.5 * weights[t, j] * f64(rows)[src2dst[t, j]]
    got = unpermute(rows, src2dst, weights, shared, 2.5, backend)
    np.testing.assert_array_equal(got, bf16(want))


@every_backend
def test_unpermute_sums_in_slot_order(backend):
    """2**24 swallows a 1 in f32, so the order of three rows shows in the sum."""
    rows = constant_rows([2.0**24, 1.0, -(2.0**24)])
    got = unpermute(rows, [[0, 1, 2], [0, 2, 1], [1, 0, 2]], np.ones((3, 3)), None, 1.0, backend)
    np.testing.assert_array_equal(got[:, 0], [0, 1, 0])


@every_backend
def test_unpermute_rounds_once_after_scaling_and_shared_experts(backend):
    """1 + 2**-8 is halfway and goes down to 1 if rounded; with 2**-16 more it goes up."""
    rows = constant_rows([0.5, 2.0**-9])
    args = rows, [[0, 1]], [[1.0, 1.0]]
    up = unpermute(*args, constant_rows([2.0**-16]), 2.0, backend)
    np.testing.assert_array_equal(up, 1 + 2.0**-7)
    np.testing.assert_array_equal(unpermute(*args, None, 2.0, backend), 1.0)


# --- all steps: nothing dead reaches anything alive


@every_backend
@every_recipe
def test_poison_in_all_that_no_step_may_read_changes_no_live_bit(backend, recipe):
    layer = random_layer(recipe=recipe, backend=backend)
    x, ids, weights = (
        tokens(3, 128),
        [[0, -1], [-1, -1], [3, 1]],
        [[1.0, 5.0], [2.0, 3.0], [0.5, 0.5]],
    )
    clean = walk(layer, x, ids, weights, backend)
    live = clean.index[-1] >= 0
    assert live.sum() == 3 and not live.all()
    same_bits(clean.y, layer(x, ids, weights))
    for poison in (np.nan, 3e38):
        got = walk(layer, x, ids, weights, backend, poison=poison)
        same_bits(got.y, clean.y)
        for name in ("gateup", "out"):
            same_bits(getattr(got, name)[live], getattr(clean, name)[live])
            assert not np.array_equal(getattr(got, name)[~live], getattr(clean, name)[~live])
        for name in ("rows", "inner"):
            (values, scales), (want, want_scales) = getattr(got, name), getattr(clean, name)
            same_bits(values[live], want[live])
            if scales is not None:
                same_bits(scales[:, : len(live)][:, live], want_scales[:, : len(live)][:, live])


# --- the registry


def test_unknown_steps_and_backends_without_a_step_are_refused():
    with pytest.raises(ValueError, match=r"step='combine': must be one of .*'route'.*'gemm'"):
        backends.get("combine", "xla")

"""Each step on its own, by the flat signature that all backends share."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import (
    bf16,
    error,
    every_backend,
    every_layout,
    every_recipe,
    f64,
    gaussian,
    live_rows,
    random_layer,
    row_scales,
    run_step,
    same_bits,
    tanh_error,
    tokens,
    walk,
)
from hypothesis import given
from hypothesis import strategies as st

import dgmoe_jax as dg
from dgmoe_jax import backends, recipes, reference
from dgmoe_jax.layouts import contiguous_rows, num_tiles
from dgmoe_jax.steps import experts
from dgmoe_jax.types import Rows

# --- permute_index


def obvious_index(ids, experts, rows, alignment, capacity, tile):
    src2dst, m_indices = np.full(ids.shape, -1), np.full(rows, -1)
    masked_m, tiles, row = np.zeros(experts, int), [], 0
    for e in range(experts):
        first = row = row if capacity is None else e * capacity
        for t in range(ids.shape[0]):
            for j in range(ids.shape[1]):
                if ids[t, j] == e and (capacity is None or row < first + capacity):
                    src2dst[t, j], m_indices[row] = row, e
                    row += 1
        masked_m[e] = row - first
        tiles += [[e, r, min(tile, row - r)] for r in range(first, row, tile)]
        row = -(-row // alignment) * alignment
    assert row <= rows
    bound = num_tiles(ids.size, experts, tile)
    assert len(tiles) <= bound
    tiles += [[-1, 0, 0]] * (bound - len(tiles))
    return src2dst, np.array(tiles).reshape(bound, 3).T, m_indices, masked_m


def check_index(ids, experts, alignment, tile, capacity, backend):
    ids = np.asarray(ids, np.int32)
    contiguous = capacity is None
    rows = contiguous_rows(ids.size, experts, alignment) if contiguous else experts * capacity
    where = dict(rows=rows, alignment=alignment, capacity=capacity, tile=tile)
    got = run_step(
        jnp.asarray(ids),
        step="permute_index",
        backend=backend,
        num_experts=experts,
        with_m_indices=contiguous,
        **where,
    )
    for array, want in zip(got, obvious_index(ids, experts, **where), strict=True):
        if array is None:
            assert not contiguous
            continue
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, want)


# tokens, k, experts, alignment, tile
INDEX_SHAPES = [(1, 1, 4, 8, 8), (3, 2, 4, 32, 32), (17, 4, 60, 8, 24), (40, 1, 3, 64, 64)]


@given(st.data())
def test_permute_index_is_the_obvious_loop(data):
    count, top_k, experts, alignment, tile = data.draw(st.sampled_from(INDEX_SHAPES))
    # Few distinct ids leave experts empty and others crowded; -1 and 99 are no expert's.
    pool = data.draw(st.lists(st.sampled_from([-1, 99, *range(experts)]), min_size=1, max_size=5))
    size = count * top_k
    ids = data.draw(st.lists(st.sampled_from(pool), min_size=size, max_size=size))
    capacity = data.draw(st.sampled_from([None, tile, -(-size // tile) * tile]))
    check_index(np.reshape(ids, (count, top_k)), experts, alignment, tile, capacity, "xla")


@every_backend
@pytest.mark.parametrize("capacity", [None, 64, 32])  # all rows; all; not those of the crowd
def test_permute_index_of_crowded_empty_and_absent_experts(backend, capacity):
    ids = np.random.default_rng(0).integers(-1, 8, (19, 3))
    ids[ids == 5] = 2
    for crowd in (ids, np.full((19, 3), 7)):
        check_index(crowd, 8, 16, 32, capacity, backend)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=80), st.sampled_from([8, 32, 128]))
def test_the_bound_on_rows_is_never_exceeded_and_is_reached(counts, alignment):
    assignments, experts = sum(counts), len(counts)
    bound = contiguous_rows(assignments, experts, alignment)

    def rows(counts):
        return sum(-(-c // alignment) * alignment for c in counts)

    assert rows(counts) <= bound
    # The worst: a row for every expert that can have one, and the others fill whole segments.
    worst = [1] * min(assignments, experts) or [0]
    worst[0] += assignments - sum(worst)
    assert rows(worst) == bound


# --- permute


@every_backend
@every_layout
@pytest.mark.parametrize("fp8", [False, True])
def test_permute_quantises_and_moves_live_rows_bit_for_bit(backend, layout, fp8):
    """NaN and all other bit patterns included."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-1, 4, (5, 2)).astype(np.int32)
    capacity = 32 if layout == "masked" else None
    slabs, rows = (1, 160) if capacity is None else (4, 128)
    src2dst, *_ = obvious_index(ids, 4, rows, 32, capacity, 32)
    x = rng.integers(0, 2**16, (5, 256), np.uint16).view(ml_dtypes.bfloat16)
    x[1:] = gaussian(rng, 4, 256)
    x[2, 7], x[3, 200] = np.nan, np.inf
    values, scales = run_step(
        jnp.asarray(x),
        jnp.asarray(src2dst, jnp.int32),
        step="permute",
        backend=backend,
        rows=rows,
        slabs=slabs,
        group=128 if fp8 else None,
        ue8m0=False,
    )
    want, want_scales = jnp.asarray(x), None
    if fp8:
        want, want_scales = run_step(want, step="quant", backend=backend, group=128, ue8m0=False)
    assert values.shape == (rows, 256) and values.dtype == want.dtype
    if fp8:
        assert scales.shape == (2 * slabs, rows // slabs)
    else:
        assert scales is None
    scales, want_scales = row_scales(scales, slabs, rows), row_scales(want_scales, 1, 5)
    for t, j in np.argwhere(src2dst >= 0):
        same_bits(values[src2dst[t, j]], want[t])
        if fp8:
            same_bits(scales[src2dst[t, j]], want_scales[t])


# --- activations

ACTIVATIONS = [
    ("silu", (None,)),
    ("silu", (1.5,)),
    ("oai_swiglu", (1.702, 1.25)),
    ("situ", (1.5, 0.75)),
]
every_activation = pytest.mark.parametrize("kind, params", ACTIVATIONS)


def gate_and_up():
    """64 rows of 2 x 128 in slabs of 32: 5 and 17 live ones; row 0 has what saturates."""
    gateup = np.array(gaussian(np.random.default_rng(1), 64, 256, scale=2.0))
    gateup[0, :8], gateup[0, 128:136] = [3e4, -3e4, 90, -90, 0, -0.0, 1e-30, 3], 2
    tiles = np.array([[0, 0, 5], [1, 32, 16], [1, 48, 1], [-1, 0, 0]], np.int32).T
    live = live_rows(tiles, 64) >= 0
    gateup[~live] = np.nan
    return jnp.asarray(gateup), jnp.asarray(tiles), live


@every_backend
@every_activation
def test_act_is_the_reference_rounded_to_bf16(backend, kind, params):
    gateup, tiles, live = gate_and_up()
    where = dict(tile=16, alignment=8)
    rule = dict(activation=kind, params=params)
    got = run_step(gateup, tiles, step="act", backend=backend, **where, **rule)
    gate, up = np.split(f64(gateup), 2, axis=1)
    want = reference.activate(gate, up, kind, params)[live]
    assert got.shape == (64, 128) and got.dtype == gateup.dtype
    # Half a unit in bf16's last place, and a little for f32 on the way. A sigmoid that f32 cannot
    # tell from 0 may be 0.
    rtol = 2**-8 + 2**-16 + tanh_error(kind, backend)
    np.testing.assert_allclose(f64(got)[live], want, rtol=rtol, atol=1e-34)


@every_backend
@every_activation
@pytest.mark.parametrize("slabs", [1, 2])
def test_act_quant_is_the_reference_quantised_without_a_rounding_between(
    backend, kind, params, slabs
):
    gateup, tiles, live = gate_and_up()
    values, scales = run_step(
        gateup,
        tiles,
        step="act_quant",
        backend=backend,
        tile=16,
        alignment=8,
        slabs=slabs,
        activation=kind,
        params=params,
        group=128,
        ue8m0=False,
    )
    assert values.shape == (64, 128) and scales.shape == (slabs, 64 // slabs)
    gate, up = np.split(f64(gateup), 2, axis=1)
    want = reference.activate(gate, up, kind, params)[live]
    want_values, want_scales = reference.encode_fp8(want)
    scales = f64(row_scales(scales, slabs, 64))[live]
    # 1e-5: f32 arithmetic; had the product been rounded to bf16 first, 2e-3.
    off = tanh_error(kind, backend)
    np.testing.assert_allclose(scales[:, 0], f64(want_scales)[:, 0], rtol=1e-5 + off)
    same = f64(values)[live] == f64(want_values)
    assert same.mean() > 0.995 - 16 * off  # a step of e4m3 is 2**-4 or more
    back = f64(values)[live] * scales
    # Half a unit in the last place of e4m3: 2**-4 of a normal value, 2**-10 of the scale below.
    bound = np.abs(want) * (2**-4 + 2 * off) + f64(want_scales) * 2**-10
    assert (np.abs(back - want) <= bound * (1 + 1e-4)).all()


# Gates and ups that are nothing, tiny, ordinary, at the limits, huge, infinite or no number.
SITU = [("situ", betas) for betas in ((0.5, 2e-3), (1e30, 1e-30), (1e30, 1e30))]
HOSTILE = [0, 1e-37, 1e-30, 1e-3, 0.75, 1.25, 7, 10, 20, 60, 85, 90, 200, 3e4, 3e38, np.inf]
HOSTILE = np.array([*HOSTILE, *(-x for x in HOSTILE), np.nan], ml_dtypes.bfloat16)


@every_backend
@pytest.mark.parametrize("kind, params", [*ACTIVATIONS, ("silu", (10.0,)), *SITU])
def test_activations_of_hostile_numbers_are_those_of_f64(backend, kind, params):
    pairs = np.stack(np.meshgrid(HOSTILE, HOSTILE)).reshape(2, -1)
    pairs = np.pad(pairs, ((0, 0), (0, -pairs.shape[1] % 1024))).reshape(2, -1, 128)
    gateup = jnp.asarray(np.concatenate(pairs, axis=1))
    rows = len(gateup)
    tiles = jnp.array([[0], [0], [rows]], jnp.int32)
    rule = dict(tile=rows, alignment=8, activation=kind, params=params)
    got = f64(run_step(gateup, tiles, step="act", backend=backend, **rule))
    gate, up = f64(pairs)
    with np.errstate(all="ignore"):
        want = reference.activate(gate, up, kind, params)
        # A sigmoid that f32 cannot tell from 0 may be 0, and no number then times an infinite up.
        vanishes = (params[0] if kind == "oai_swiglu" else 1) * gate < -85
        lost = vanishes & np.isinf(up) & np.isinf(want)
        want = np.where(np.abs(want) > 3.3895e38, np.sign(want) * np.inf, want)  # past bf16's end
        near = np.abs(want) * (2**-8 + 2**-16 + tanh_error(kind, backend)) + 2.0**-124
        near += np.where(vanishes, np.nan_to_num(np.abs(gate * up)) * 2.0**-122, 0)
        agrees = (got == want) | (np.abs(got - want) <= near) | np.isnan(want) & np.isnan(got)
    assert (agrees | lost).all()


@every_backend
def test_silu_has_the_values_of_deepseek_v4s_limit(backend):
    gateup = np.zeros((8, 256), ml_dtypes.bfloat16)
    gateup[:2, :128], gateup[:2, 128:] = [[20], [-20]], [[20], [-20]]
    tiles = jnp.array([[0], [0], [2]], jnp.int32)
    rule = dict(tile=8, alignment=8, activation="silu", slabs=1, group=128, ue8m0=False)
    for limit, want in ((10.0, [99.9955, 4.1223e-7]), (None, [400.0, 8.2446e-7])):
        values, scales = run_step(
            jnp.asarray(gateup), tiles, step="act_quant", backend=backend, params=(limit,), **rule
        )
        # A row of one number is 448 times its scale, exactly: f32 all the way.
        got = f64(values)[:2, 0] * f64(scales)[0, :2]
        np.testing.assert_allclose(got, want, rtol=1e-5)


@every_backend
@pytest.mark.parametrize("fmt", [recipes.FP8_1X128, recipes.MXFP8_1X32], ids=lambda f: f.name)
def test_a_product_that_is_not_kept_in_f32_is_activated_then_quantised(backend, fmt):
    gateup, tiles, live = gate_and_up()
    plan = dg.plan(random_layer(backend=backend).cfg, 32, arch="cpu")
    plan = dataclasses.replace(plan, rows=64, capacity=64, alignment=8, tile=16)
    rows = Rows(gateup, None, tiles, None, None)
    run = jax.jit(experts.activate, static_argnames=("activation", "fmt", "plan"))
    got = {
        keep: run(gateup, rows, activation=dg.SiLU(keep_fp32=keep), fmt=fmt, plan=plan)
        for keep in (True, False)
    }
    rounded = run(gateup, rows, activation=dg.SiLU(), fmt=recipes.BF16, plan=plan).values
    how = dict(group=fmt.group[1], ue8m0=fmt.ue8m0)
    values, scales = run_step(rounded, step="quant", backend=backend, **how)
    same_bits(got[False].values[live], values[live])
    same_bits(row_scales(got[False].scales, 1, 64)[live], row_scales(scales, 1, 64)[live])
    assert (f64(got[True].values)[live] != f64(got[False].values)[live]).any()


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
@every_layout
@every_recipe
def test_poison_in_all_that_no_step_may_read_changes_no_live_bit(backend, layout, recipe):
    layer = random_layer(recipe=recipe, backend=backend, layout=layout)
    x, ids, weights = (
        tokens(3, 128),
        [[0, -1], [-1, -1], [3, 1]],
        [[1.0, 5.0], [2.0, 3.0], [0.5, 0.5]],
    )
    clean = walk(layer, x, ids, weights, backend)
    live = clean.owner >= 0
    assert live.sum() == 3 and not live.all()
    same_bits(clean.y, layer(x, ids, weights))
    for poison in (np.nan, 3e38):
        got = walk(layer, x, ids, weights, backend, poison=poison)
        same_bits(got.y, clean.y)
        for name in ("gateup", "out"):
            same_bits(getattr(got, name)[live], getattr(clean, name)[live])
            assert not np.array_equal(getattr(got, name)[~live], getattr(clean, name)[~live])
        for name in ("rows", "inner"):
            for array, want in zip(getattr(got, name), getattr(clean, name), strict=True):
                if array is not None:
                    same_bits(array[live], want[live])


# --- grouped GEMM on slabs


@every_backend
@every_recipe
@pytest.mark.parametrize("capacity", [8, 16, 32, 128])
@pytest.mark.parametrize("full", [False, True])
def test_small_slabs_full_and_nearly_empty(backend, recipe, capacity, full):
    """E = 4; rows beyond masked_m, their scales and the weights of empty experts are poison."""
    if backend == "deep_gemm" and capacity < 128:
        pytest.skip("DeepGEMM stores whole blocks: test_bridge sees it refused")
    counts = [capacity] * 4 if full else [3, 0, 5, 0]
    experts = random_layer(recipe=recipe).params.experts
    rng, dead = np.random.default_rng(0), np.arange(capacity) >= np.array(counts)[:, None]
    x = gaussian(rng, 4 * capacity, 128)
    tiles = [[e, e * capacity, n] for e, n in enumerate(counts) if n]
    tiles = np.array(tiles + [[-1, 0, 0]] * (4 - len(tiles)), np.int32).T
    results = []
    for poison in (np.nan, 3e38):
        values, scales = jnp.asarray(x), None
        if recipe == "fp8_block":
            values, scales = run_step(values, step="quant", backend="xla", group=128, ue8m0=False)
            scales = np.array(scales).reshape(4, 1, capacity)
            scales[dead[:, None]] = poison
            scales = jnp.asarray(scales.reshape(4, capacity))
        values = np.array(values)
        values[dead.ravel()] = min(poison, 448.0) if scales is not None else poison
        weights, weights_scales = np.array(experts.w2.values), experts.w2.scales
        weights[np.array(counts) == 0] = np.nan
        out = run_step(
            jnp.asarray(values),
            scales,
            jnp.asarray(weights),
            weights_scales,
            jnp.asarray(tiles),
            None,
            jnp.asarray(counts, jnp.int32),
            step="gemm",
            backend=backend,
            alignment=8,
            tile=capacity,
            slabs=4,
            expected_m=4,
        )
        results.append(np.asarray(out)[~dead.ravel()])
    same_bits(*results)
    rows = f64(values)
    if scales is not None:
        rows = reference.decode_fp8(values, row_scales(scales, 4, len(values)))
    weights = f64(dg.dequantize(experts.w2))
    want = np.concatenate([rows[e * capacity :][:n] @ weights[e].T for e, n in enumerate(counts)])
    assert error(results[0], want) < 0.003


# --- the registry


def test_unknown_steps_and_backends_without_a_step_are_refused():
    with pytest.raises(ValueError, match=r"step='combine': must be one of .*'route'.*'gemm'"):
        backends.get("combine", "xla")

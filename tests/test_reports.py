"""Inputs from public bug reports of other mixture-of-experts layers, one test each."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    bf16,
    error,
    every_backend,
    every_recipe,
    exact_layer,
    exact_tokens,
    f64,
    random_ids,
    random_layer,
    rounded_oracle,
    run_step,
    same_bits,
    tokens,
    walk,
)

import dgmoe_jax as dg
from dgmoe_jax import reference


def route(logits, backend, **router):
    out = dg.route(jnp.asarray(logits, jnp.float32), dg.RouterConfig(**router), backend=backend)
    return np.asarray(out.topk_ids), np.asarray(out.topk_weights)


@every_backend
def test_a_logits_all_minus_120_give_distinct_ids_and_weights_zero(backend):
    ids, weights = route(np.full((1, 8), -120.0), backend, scoring="sigmoid", top_k=2)
    np.testing.assert_array_equal(ids, [[0, 1]])
    np.testing.assert_array_equal(weights, 0.0)


@every_backend
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_b_nan_and_infinite_logits_give_legal_ids_and_touch_no_other_row(backend, scoring):
    logits = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    logits[0], logits[1, 5], logits[2] = np.nan, np.nan, -np.inf
    ids, weights = route(logits, backend, scoring=scoring, top_k=3)
    for row in ids:
        assert len(set(row)) == 3 and set(row) <= set(range(8))
    assert np.isfinite(weights).all()
    # One NaN: the rest decides, by the plain order of the finite logits.
    np.testing.assert_array_equal(
        ids[1],
        np.argsort(-np.delete(logits[1], 5))[:3]
        + [0, 0, 0]
        + (np.argsort(-np.delete(logits[1], 5))[:3] >= 5),
    )
    alone = route(logits[3:], backend, scoring=scoring, top_k=3)
    same_bits(ids[3:], alone[0])
    same_bits(weights[3:], alone[1])


@every_backend
@every_recipe
def test_c_ids_of_minus_one_contribute_nothing_whatever_the_buffers_hold(backend, recipe):
    layer = random_layer(recipe=recipe, backend=backend)
    w2 = layer.params.experts.w2
    if recipe == "bf16":
        w2 = dataclasses.replace(w2, values=w2.values.at[3].multiply(1e4))
    else:
        w2 = dataclasses.replace(w2, scales=w2.scales.at[3].multiply(1e4))
    experts = dataclasses.replace(layer.params.experts, w2=w2)
    layer = dataclasses.replace(layer, params=dataclasses.replace(layer.params, experts=experts))
    x, ids = tokens(3, 128), [[0, -1], [-1, -1], [3, 1]]
    # A slot without an expert has a weight too, and it may be anything.
    weights = np.float32([[1.0, np.nan], [np.inf, 7.0], [0.5, 0.5]])
    y = layer(x, ids, weights)
    same_bits(walk(layer, x, ids, weights, backend, poison=np.nan).y, y)
    alone = layer(x, [[0, -1], [-1, -1], [-1, -1]], weights)
    same_bits(y[0], alone[0])
    assert error(y[:1], rounded_oracle(layer, x[:1], [[0]], [[1.0]])) < 0.006
    np.testing.assert_array_equal(f64(y[1]), 0.0)
    assert 1e3 < np.abs(f64(y[2])).max() < 1e5


@every_backend
def test_d_the_same_expert_twice_counts_twice(backend):
    layer, x = random_layer(recipe="fp8_block", backend=backend), tokens(1, 128)
    once = layer(x, [[2, -1]], [[1.0, 0.0]])
    same_bits(layer(x, [[2, 2]], [[0.25, 0.75]]), once)
    assert error(once, rounded_oracle(layer, x, [[2]], [[1.0]])) < 0.006


@every_backend
def test_d_all_slots_on_one_expert_make_32_rows_and_overrun_nothing(backend):
    ids = np.zeros((8, 4), np.int32)
    where = dict(num_experts=4, rows=64, alignment=32, capacity=None, tile=32)
    src2dst, tiles, m_indices, masked_m = run_step(
        ids, step="permute_index", backend=backend, with_m_indices=True, **where
    )
    np.testing.assert_array_equal(src2dst, np.arange(32).reshape(8, 4))
    np.testing.assert_array_equal(tiles[:, 0], [0, 0, 32])
    assert (np.asarray(tiles)[0, 1:] == -1).all()
    np.testing.assert_array_equal(m_indices, np.r_[np.zeros(32), np.full(32, -1)])
    np.testing.assert_array_equal(masked_m, [32, 0, 0, 0])
    layer, x = random_layer(backend=backend), tokens(8, 128)
    got = layer(x, ids, np.full((8, 4), 0.25))
    assert error(got, rounded_oracle(layer, x, np.zeros((8, 1), int), np.ones((8, 1)))) < 0.006


@every_backend
@every_recipe
def test_e_no_tokens_give_an_empty_result_and_tokens_of_no_expert_give_zeros(backend, recipe):
    layer = random_layer(recipe=recipe, backend=backend)
    x = tokens(0, 128)
    for empty in (layer(x), layer(x, np.zeros((0, 5))), layer(x, valid=jnp.zeros(0, bool))):
        assert empty.shape == (0, 128) and empty.dtype == x.dtype
    np.testing.assert_array_equal(f64(layer(tokens(3, 128), np.full((3, 2), -1))), 0.0)


@every_backend
def test_f_the_scaling_factor_scales_the_routed_part_alone(backend):
    """Exact data, so "exactly 2.5 times" can be: nothing is rounded before the one rounding."""
    plain = exact_layer(backend=backend)
    both = exact_layer(scaling_factor=2.5, shared=1, backend=backend)
    x, ids, weights = exact_tokens(17), random_ids(1, 17, 2, 4), np.full((17, 2), (0.5, 0.25))
    routed = plain.oracle(x, ids, weights, prepared=True, between=bf16, gemm_out=bf16)
    np.testing.assert_array_equal(f64(plain(x, ids, weights)), bf16(routed))
    shared = f64(both(x, np.full((17, 2), -1), weights))
    np.testing.assert_array_equal(f64(both(x, ids, weights)), bf16(2.5 * routed + shared))
    alone = np.zeros((17, 1), int)
    dense = reference.moe(
        f64(x), *both.decoded[2:], alone, alone + 1.0, between=bf16, gemm_out=bf16
    )
    np.testing.assert_array_equal(shared, dense)
    assert routed.any() and dense.any()


@every_backend
def test_g_a_group_of_zeros_gives_zeros_a_positive_scale_and_leaves_its_neighbour_alone(backend):
    x = np.array(tokens(1, 256))
    whole = run_step(jnp.asarray(x), step="quant", backend=backend, group=128, ue8m0=False)
    x[:, :128] = 0
    values, scales = run_step(jnp.asarray(x), step="quant", backend=backend, group=128, ue8m0=False)
    assert np.isfinite(scales[0, 0]) and scales[0, 0] > 0
    np.testing.assert_array_equal(f64(values[:, :128]), 0.0)
    same_bits(values[:, 128:], whole[0][:, 128:])
    same_bits(scales[1, :1], whole[1][1, :1])


@every_backend
@pytest.mark.parametrize("ue8m0", [False, True])
def test_h_values_at_and_past_the_range_quantise_without_nan(backend, ue8m0):
    x = np.zeros((1, 128), tokens(0, 1).dtype)
    x[0, :5] = [448, 464, 465, 1000, -1000]
    values, scales = run_step(jnp.asarray(x), step="quant", backend=backend, group=128, ue8m0=ue8m0)
    back = f64(values[0]) * float(scales[0, 0])
    assert np.isfinite(back).all()
    assert float(scales[0, 0]) == (4.0 if ue8m0 else np.float32(1000) / np.float32(448))
    # e4m3 keeps four significant bits: half a unit in the last place is 2**-4 of the value.
    np.testing.assert_allclose(back[:5], f64(x)[0, :5], rtol=2**-4)
    np.testing.assert_array_equal(back[5:], 0.0)

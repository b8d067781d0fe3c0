"""Inputs from public bug reports of other mixture-of-experts layers, one test each.

At the end: what the layer's bench reports, and what it refuses.
"""

import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
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
from typer.testing import CliRunner

import dgmoe_jax as dg
from dgmoe_jax import reference

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import _controls
import _plot
import _stages
import bench_layer


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


def bench(*options):
    app = typer.Typer()
    app.command()(bench_layer.main)
    return CliRunner().invoke(app, list(map(str, options)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


FIELDS = set(bench_layer.COLUMNS) - {"launches"} | {"bench", "gpu", "versions", "command"}
FIELDS |= {"E", "k", "H", "I", "control", "bytes_predicted", "bytes_measured", "copy_bytes_per_s"}


def test_bench_a_line_has_every_field_and_says_why_a_control_is_missing(tmp_path):
    out = tmp_path / "layer.jsonl"
    done = bench("--shape", "tiny", "--tokens", 1, "--backend", "xla", "--out", out)
    assert done.exit_code == 0, done.output
    (line,) = lines(out)
    assert set(line) >= FIELDS
    assert (
        line["us"] > 0 and line["layout"] == "contiguous" and str(tmp_path) not in line["command"]
    )
    assert line["ragged_dot_us"] is None and "bf16" in line["ragged_dot_skipped"]
    if _controls.unavailable():
        assert line["control_us"] is None and "skipped" in line["control"]
        assert line["gemms_us"] is line["budget_us"] is line["control_ratio"] is None
        assert "skipped" in line["gemms_layout"]


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="these backends run on a GPU")
def test_bench_a_failure_is_recorded_and_the_rest_goes_on(tmp_path):
    out = tmp_path / "layer.jsonl"
    options = ("--shape", "tiny", "--tokens", 1, "--controls", "", "--out", out)
    done = bench(*options, "--backend", "pallas,xla")
    assert done.exit_code == 1
    failed, fine = lines(out)
    assert "needs an NVIDIA GPU" in failed["failed"] and failed["backend"] == "pallas"
    assert fine["us"] > 0 and fine["control"] == "not asked for"
    for option in ("--stages", "--command-buffers"):
        refused = bench(*options, option)
        assert refused.exit_code == 2 and "needs a GPU" in refused.output
    assert "known" in bench("--shape", "huge").output
    with pytest.raises(RuntimeError, match="need a GPU"):
        _stages.stages(lambda: None)
    assert len(lines(out)) == 2


def test_bench_floor_and_budget_are_those_of_the_issue():
    s = bench_layer.SHAPES["deepseek_v3"]
    cfg = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe="fp8_block")
    ids = jnp.asarray([[[0, 1, 2, 3, 4, 5, 6, 7]], [[8, 9, 10, 11, 12, 13, 14, 14]]])
    limits = bench_layer.bounds(cfg, _controls.Work(None, ids, None))
    per_expert = 3 * 7168 * 2048
    assert limits["flops"] == 16 * per_expert and limits["weight_bytes"] == 7.5 * per_expert
    assert limits["floor_us"] == pytest.approx(7.5 * per_expert / 4.3e12 * 1e6)
    bf16 = dataclasses.replace(cfg, recipe="bf16")
    assert bench_layer.bounds(bf16, _controls.Work(None, ids, None))["weight_bytes"] == (
        15 * per_expert
    )
    # One token, FP8: x in and y out, 8 rows with scales out, 8 gate/up in, 8 act out, 8 rows in.
    moved = 2 * 2 * 7168 + 8 * (7168 + 224 + 4 * 2048 + 2048 + 64 + 2 * 7168)
    assert bench_layer.element_bytes(cfg, 1) == moved
    assert bench_layer.budget_us(100.0, 9 * 10**6, 1e12) == pytest.approx(100 + 10 + 12)
    assert bench_layer.budget_us(None, 1, 1.0) is None


def test_bench_rows_of_the_bare_gemms_start_aligned_and_pad_with_minus_one():
    got = _controls.m_indices(np.array([3, 0, 5]), 4, 16)
    np.testing.assert_array_equal(got, [0] * 3 + [-1] + [2] * 5 + [-1] * 7)
    assert _controls.gemm_layouts(4) == ["masked", "contiguous 32", "contiguous 128"]
    assert _controls.gemm_layouts(500) == ["masked", "contiguous 128"]
    assert _controls.best({"masked": "MemoryError", "contiguous 128": 7.0}) == "contiguous 128"
    assert _controls.best({"masked": "MemoryError"}) is None


def test_bench_stages_are_per_call_and_the_pauses_between_calls_are_no_gap():
    us = 1000
    events = []
    for call in range(3):
        start = call * 1000 * us
        events += [(start, 10 * us, "route"), (start + 12 * us, 100 * us, "gemm")]
        events += [(start + 113 * us, 50 * us, "gemm")]
    route, gemm = _stages.summary(events[::-1], 3)
    assert (gemm["kernel"], gemm["launches"], gemm["us"]) == ("gemm", 2, 150)
    assert (route["launches"], route["us"]) == (1, 10)
    assert gemm["gap_us"] == 3


def test_bench_plot_takes_each_last_line_and_the_fastest_configuration(tmp_path):
    head = {"bench": "layer", "shape": "tiny", "E": 8, "k": 2, "H": 256, "I": 128}
    head |= {"recipe": "fp8_block", "layout": "contiguous", "floor_us": 5.0, "control_us": 30.0}
    head["control"] = "SGLang 0.5.21"
    out = tmp_path / "layer.jsonl"
    found = [(1, "xla", 10.0), (1, "xla", 20.0), (1, "pallas", 15.0), (64, "pallas", 40.0)]
    for tokens_, backend, us in found:
        line = head | {"T": tokens_, "backend": backend, "us": us}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    with out.open("a") as file:
        file.write(json.dumps(head | {"T": 1, "backend": "xla", "failed": "OOM"}) + "\n")
    (curve,) = _plot.curves(lines(out)).values()
    times = {"floor_us": 5.0, "control_us": 30.0}
    assert curve == {1: {"us": 15.0, **times}, 64: {"us": 40.0, **times}}
    done = bench("--plot", "--out", out)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")

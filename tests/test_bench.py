"""What the layer's bench reports, and what it refuses."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import dgmoe_jax as dg

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import _controls
import _report
import _stages
import bench_interop
import bench_layer
import bench_quantizers


def bench(*options):
    app = typer.Typer()
    app.command()(bench_layer.main)
    return CliRunner().invoke(app, list(map(str, options)))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


FIELDS = set(bench_layer.COLUMNS) - {"launches"} | {"bench", "gpu", "versions", "command"}
FIELDS |= {"E", "k", "H", "I", "control", "bytes_predicted", "bytes_measured", "copy_bytes_per_s"}


def test_a_line_has_every_field_and_says_why_a_control_is_missing(tmp_path):
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
def test_a_failure_is_recorded_and_the_rest_goes_on(tmp_path):
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


def test_floor_and_budget_are_those_of_the_issue():
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


def test_rows_of_the_bare_gemms_start_aligned_and_pad_with_minus_one():
    got = _controls.m_indices(np.array([3, 0, 5]), 4, 16)
    np.testing.assert_array_equal(got, [0] * 3 + [-1] + [2] * 5 + [-1] * 7)
    assert _controls.gemm_layouts(4) == ["masked", "contiguous 32", "contiguous 128"]
    assert _controls.gemm_layouts(500) == ["masked", "contiguous 128"]
    assert _controls.best({"masked": "MemoryError", "contiguous 128": 7.0}) == "contiguous 128"
    assert _controls.best({"masked": "MemoryError"}) is None


def test_overlap_is_what_ran_beside_others():
    events = [(0, 100, "a"), (50, 100, "b"), (60, 20, "c"), (200, 10, "d"), (210, 10, "e")]
    assert _stages.overlap_us(events[::-1]) == (50 + 20) / 1e3
    assert _stages.overlap_us(events[:1]) == 0


def test_stages_are_per_call_and_the_pauses_between_calls_are_no_gap():
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


def test_plot_and_table_take_each_last_line_and_the_fastest_configuration(tmp_path):
    head = {"bench": "layer", "shape": "tiny", "E": 8, "k": 2, "H": 256, "I": 128}
    head |= {"recipe": "fp8_block", "layout": "contiguous", "floor_us": 5.0, "control_us": 30.0}
    head |= {"control": "SGLang 0.5.21", "one_call_us": 50.0, "layers": 32}
    out = tmp_path / "layer.jsonl"
    found = [(1, "xla", 10.0), (1, "xla", 20.0), (1, "pallas", 15.0), (64, "pallas", 40.0)]
    for tokens_, backend, us in found:
        line = head | {"T": tokens_, "backend": backend, "us": us}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")
    with out.open("a") as file:
        file.write(json.dumps(head | {"T": 1, "backend": "xla", "failed": "OOM"}) + "\n")
    ((curve,),) = [_report.fastest(lines(out)).values()]
    assert {t: record["us"] for t, record in curve.items()} == {1: 15.0, 64: 40.0}
    assert _report.sglang_us(curve[1]) == 30.0
    text = bench("--table", "--out", out).output.splitlines()
    assert text[2].split(" | ")[:5] == ["| 8, 2, 256, 128 (tiny)", "1", "**15**", "30", "0.50"]
    assert text[3].split(" | ")[2:5] == ["40", "**30**", "1.33"]
    first = {name: value for name, value in head.items() if name != "layers"}
    first |= {"T": 1, "backend": "xla", "us": 20.0}
    assert "| **20**\\* | 30 |" in _report.table([first], "fp8_block")
    done = bench("--plot", "--out", out)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_quantizers_are_measured_by_recipe_and_architecture(tmp_path):
    """Two cases whose errors are known, and a table and a plot of the committed lines."""
    weights = bench_quantizers.weights_of("gaussian")
    exact = bench_quantizers.measure(weights, "mxfp4", "sm90", "checkpoint")
    assert exact["max_error"] == exact["mse"] == 0 and exact["bits"] == pytest.approx(8, abs=0.01)
    lossy = bench_quantizers.measure(weights, "fp8_block", "sm100", "bf16")
    # Rounding to 3 bits of mantissa: 2^-4 / sqrt(3) of a power of two at most.
    assert 0.02 < lossy["relative_error"] < 2**-4 / 3**0.5
    assert lossy["mse"] == pytest.approx(
        (lossy["relative_error"] ** 2) * float(np.mean(weights["w2"] ** 2)), rel=1e-3
    )
    committed = Path(__file__).parents[1] / "bench/quantizers.jsonl"
    records = _report.read(committed)
    table = _report.quantizers_table(records).splitlines()
    assert len(table) == 2 + 13 and "outlier_channels" in table[0]
    assert any(
        row.startswith("| mxfp4 | sm90 | checkpoint |") and "| 0.00 % |" in row for row in table
    )
    for line in records:
        if (line["recipe"], line["arch"], line["source"]) == ("mxfp8", "sm90", "checkpoint"):
            assert 0.024 <= line["relative_error"] <= 0.0284  # as RUNS_ON says
    _report.draw_quantizers(committed, tmp_path / "q.png")
    assert (tmp_path / "q.png").read_bytes().startswith(b"\x89PNG")


def test_a_hand_over_costs_what_a_line_says(tmp_path):
    out = tmp_path / "interop.jsonl"
    app = typer.Typer()
    app.command()(bench_interop.main)
    options = ["--shape", "tiny", "--tokens", "3", "--recipe", "bf16", "--out", str(out)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 0, done.output
    (line,) = lines(out)
    assert line["bench"] == "interop" and line["T"] == 3
    times = {name: us for name, us in line.items() if name.endswith("_us")}
    assert len(times) == 9 and all(us > 0 for name, us in times.items() if name != "extra_us")
    assert line["extra_us"] == line["module_us"] - line["jitted_us"]
    unknown = CliRunner().invoke(app, ["--shape", "huge"])
    assert unknown.exit_code == 2


def test_the_layer_is_timed_over_experts_and_columns_at_once(tmp_path):
    out, command = tmp_path / "parallel.jsonl", [sys.executable, "scripts/bench_parallel.py"]
    command += ["--shape", "tiny", "--devices", "4", "--tokens", "8", "--out", str(out)]

    def run(*options):
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        root = Path(__file__).parents[1]
        return subprocess.run([*command, *options], cwd=root, env=env, capture_output=True)

    done = run("--dispatch", "all_to_all", "--split", "epxtp2")
    assert done.returncode == 0, done.stderr
    (line,) = lines(out)
    assert (line["bench"], line["split"], line["gpus"]) == ("layer", "epxtp2", 4)
    assert line["us"] > 0 and line["speedup"] > 0
    refused = run("--split", "epxtp3")
    assert refused.returncode == 2 and b"epxtp3" in refused.stderr

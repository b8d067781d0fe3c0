"""The model of dispatch times: what it says is sent, the layer sends; a fit finds the rates."""

import dataclasses
import itertools
import json
import math
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import random_layer
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from typer.testing import CliRunner

import dgmoe_jax as dg
from dgmoe_jax import network
from dgmoe_jax.__main__ import app
from dgmoe_jax.network import Network
from dgmoe_jax.types import Split

ROOT = Path(__file__).resolve().parents[1]
V3 = network.config(256, 8, 7168, 2048, "fp8_block")
RANKS = 4


def sent(closed, found=()):
    """Bytes that collectives send to other ranks, in order, from a traced program."""
    for eqn in closed.eqns:
        if eqn.primitive.name in ("all_to_all", "all_gather", "reduce_scatter"):
            (x,) = (v.aval for v in eqn.invars)
            peers = {"all_gather": RANKS - 1}.get(eqn.primitive.name, (RANKS - 1) / RANKS)
            found = (*found, x.size * x.dtype.itemsize * peers)
        for inner in jaxprs_in_params(eqn.params):
            found = sent(inner, found)
    return found


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
@pytest.mark.parametrize("tokens", [5, 32])
@pytest.mark.parametrize(
    "dispatch, capacity_factor",
    [
        ("standard", None),
        *itertools.product(("all_to_all", "low_latency", "expanded"), (None, 0.5)),
    ],
)
def test_what_is_sent_is_what_the_layer_sends(dispatch, capacity_factor, tokens, recipe):
    layer = random_layer(experts=8, router=dg.RouterConfig(top_k=3), recipe=recipe)
    parallel = dg.Parallel(
        ep="ep", dp="ep", dispatch=dispatch, capacity_factor=capacity_factor, strict=True
    )
    mine = jax.tree.map(lambda w: w[: 8 // RANKS], layer.params.experts)
    params = dataclasses.replace(layer.params, experts=mine, split=Split(RANKS, 1, 1, None))
    run = jax.shard_map(
        partial(dg.moe_layer, params=params, cfg=layer.cfg, parallel=parallel),
        mesh=AbstractMesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,)),
        in_specs=PartitionSpec("ep"),
        out_specs=PartitionSpec("ep"),
        check_vma=False,
    )
    traced = jax.make_jaxpr(run)(jnp.zeros((RANKS * tokens, 128), jnp.bfloat16))
    told = network.exchanges(
        layer.cfg, tokens, RANKS, dispatch, capacity_factor=capacity_factor, arch="cpu"
    )
    assert [e.nvlink_bytes for e in told] == list(sent(traced.jaxpr))
    assert all((e.network_bytes, e.network_peers) == (0, 0) for e in told)


def test_mean_rows_are_those_of_all_choices():
    cfg = network.config(6, 3, 128, 128, "bf16")
    choices = list(itertools.combinations(range(6), 3))
    on_a_rank = [len({0, 1} & set(choice)) for choice in choices]
    into, back = network.exchanges(cfg, 10, 3, "low_latency", ragged=True, arch="cpu")
    row = 2 * (128 + 128)  # bf16, and 128 elements for ids and weights
    assert into.nvlink_bytes == pytest.approx(2 * 10 * np.mean(np.minimum(on_a_rank, 1)) * row)
    assert back.nvlink_bytes == pytest.approx(2 * 10 * np.mean(on_a_rank) * 2 * 128)
    into, back = network.exchanges(cfg, 10, 3, "one_sided", arch="cpu")
    assert into.nvlink_bytes == pytest.approx(2 * 10 * np.mean(np.minimum(on_a_rank, 1)) * row)


def test_peers_beyond_the_domain_are_reached_over_the_network():
    (there, back), (near, _) = (
        network.exchanges(V3, 128, 32, "all_to_all", domain=domain) for domain in (8, 32)
    )
    assert (there.nvlink_peers, there.network_peers) == (7, 24)
    assert there.network_bytes == near.nvlink_bytes * 24 / 31
    standard = network.exchanges(V3, 128, 32, "standard", domain=8)[1]
    # All of 31 ranks' rows arrive, those of 24 of them once for 8 GPUs.
    assert standard.network_bytes == 24 * 128 * 7168 * 2 / 8
    assert standard.nvlink_bytes + standard.network_bytes == 31 * 128 * 7168 * 2
    links = Network(1e9, 1e8, 1.0, 0.5, 0.25, memory=1e7)
    slower = max(7 * 0.5 + there.nvlink_bytes / 1e9, 24 * 0.25 + there.network_bytes / 1e8)
    # A row of x in bf16, packed, moved to the blocks of the ranks that want it.
    row = 7168 + 384
    wanted = 32 * (1 - math.comb(248, 8) / math.comb(256, 8))
    passes = 128 * (2 * 7168 + row + row + row * wanted)
    assert there.memory_bytes == pytest.approx(passes)
    assert links.seconds([there]) == pytest.approx(1 + passes / 1e7 + slower)
    assert links.seconds([there, back]) > links.seconds([there])


def lines(truth, gpus=(2, 8), tokens=(1, 16, 1024), dispatches=("all_to_all", "low_latency")):
    for count, t, dispatch in itertools.product(gpus, tokens, dispatches):
        us = truth.seconds(network.exchanges(V3, t, count, dispatch, domain=count)) * 1e6
        line = {"bench": "dispatch", "gpu": "NVIDIA H200", "processes": 1, "gpus": count, "T": t}
        yield line | dict(dispatch=dispatch, us=us, recipe="fp8_block", E=256, k=8, H=7168, I=2048)


TRUTH = Network(nvlink=300e9, start=33e-6, nvlink_message=2e-6)


def test_a_fit_finds_the_numbers_that_made_the_times():
    found = network.fit(lines(TRUTH))
    for name in ("nvlink", "start", "nvlink_message", "network", "network_message"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-6), name
    assert set(found.fitted) == {"nvlink", "start", "nvlink_message"}
    assert "300 GB/s (fitted)" in str(found) and "50 GB/s a GPU (assumed)" in str(found)


def test_what_lines_do_not_tell_stays_assumed():
    assumed = dataclasses.replace(TRUTH, start=1.0, nvlink=1.0)
    found = network.fit(lines(TRUTH, gpus=(8,)), assumed)
    assert (found.nvlink, found.start) == (pytest.approx(300e9), pytest.approx(33e-6))
    assert found.nvlink_message == 2e-6 and "nvlink_message" not in found.fitted
    others = [{"bench": "layer"}, next(lines(TRUTH)) | {"failed": "RuntimeError"}]
    others.append(next(lines(TRUTH)) | {"gpu": "cpu"})
    assert network.fit(others) == Network()
    with pytest.raises(ValueError, match="do not determine"):
        network.fit(lines(TRUTH, (8,), (1,), ("all_to_all",)))


def test_of_the_same_sizes_the_last_line_counts_and_kernels_of_our_own_are_fitted_apart():
    wrong = [line | {"us": 1.0} for line in lines(TRUTH)]
    own = dataclasses.replace(TRUTH, start=5e-6)
    found = network.fits(wrong + list(lines(TRUTH)) + list(lines(own, dispatches=("one_sided",))))
    assert found["all_to_all"].start == pytest.approx(33e-6)
    assert found["one_sided"].start == pytest.approx(5e-6)


@pytest.mark.parametrize(
    "name, value", [("nvlink", 0), ("network", -1), ("start", -1e-6), ("start", math.nan)]
)
def test_impossible_numbers_are_refused(name, value):
    with pytest.raises(ValueError, match=f"Network.{name}={value}"):
        Network(**{name: value})


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"ranks=512.*256 experts"):
        network.exchanges(V3, 1, 512, "all_to_all")
    with pytest.raises(ValueError, match="num_tokens=0"):
        network.exchanges(V3, 0, 8, "all_to_all")
    with pytest.raises(NotImplementedError, match="NVLink joins 8"):
        network.exchanges(V3, 1, 16, "one_sided")


def run(*options):
    return CliRunner().invoke(app, ["network", *options], env={"COLUMNS": "200"})


def test_the_command_says_what_is_assumed_and_prints_measured_times_beside():
    text = run().output
    assert "Nothing measured: all of it is assumed." in text and "4096" in text
    assert run("--experts", "0").exit_code == 1


def test_the_command_fits(tmp_path):
    path = tmp_path / "parallel.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines(TRUTH)))
    text = run("--measured", str(path)).output
    assert "300 GB/s (fitted)" in text and text.count(" 1.00 ") == 12


@pytest.mark.parametrize(
    "text, told",
    [
        ("{", "line 2: no JSON"),
        ("[1]", "line 2: no measurement"),
        ('{"bench": "dispatch", "gpu": "x", "us": 1}', "line 2: ['dispatch', 'gpus'"),
        (next(lines(TRUTH)) | {"us": 0}, "line 2: us is 0"),
        (next(lines(TRUTH)) | {"device_us": math.nan}, "line 2: device_us is nan"),
    ],
)
def test_what_is_no_measurement_is_refused_with_its_line(tmp_path, text, told):
    path = tmp_path / "parallel.jsonl"
    path.write_text("\n" + (text if isinstance(text, str) else json.dumps(text)) + "\n")
    with pytest.raises(ValueError, match=re.escape(told)):
        network.read(path)
    assert run("--measured", str(path)).exit_code == 1
    path.write_text(json.dumps(next(lines(TRUTH))) + "\n\n")
    assert len(network.read(path)) == 1


def test_the_pages_table_is_the_models():
    measured = ROOT / "bench/parallel.jsonl"
    options = ["--measured", str(measured)] if measured.exists() else []
    assert run("--markdown", *options).output in (ROOT / "dgmoe_jax/PARALLEL.md").read_text()

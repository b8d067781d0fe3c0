"""The layer over a mesh: every dispatcher, split in every way, against one device."""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import parallel_cases
import pytest
from conftest import ON_GPU, random_layer, routing
from jax.sharding import AxisType, Mesh

import dgmoe_jax as dg
from dgmoe_jax.parallel import Ranks, share
from dgmoe_jax.steps import dispatch

SCRIPT = Path(parallel_cases.__file__)
CASE_SECONDS = 300
PROCESSES = {"cpu": 1, "gpu": 1, "2 processes": 2, "4 processes": 4, "2 GPU processes": 2}
MODES = ["gpu", "2 GPU processes"] if ON_GPU else ["cpu", "2 processes", "4 processes"]
# Results are rounded to bf16 (2^-9 of them at most) where ranks add them up, once a rank.
ALL, WORST = 0.006, 0.012


cases = parallel_cases.cases


def every(how):
    found = [(m, name) for m in MODES for name, case in cases(m).items() if case.how == how]
    return pytest.mark.parametrize("mode, name", found)


class Run:
    """The script in one mode, while it goes on."""

    def __init__(self, mode, names, logs):
        count, kind = PROCESSES[mode], mode.split()[-1]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        # On a GPU this process has most of the memory already.
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        self.lines, self.done, self.changed = {}, set(), threading.Condition()
        self.logs = [logs / f"{mode} {i}.log".replace(" ", "_") for i in range(count)]
        self.processes = []
        for i, log in enumerate(self.logs):
            command = [sys.executable, SCRIPT, "--mode", kind, "--process", i, "--port", port]
            command = [*map(str, command), "--processes", str(count), *names]
            command += ["--gpus"] * ("GPU" in mode)
            with log.open("w") as errors:
                out = subprocess.PIPE if i == 0 else subprocess.DEVNULL
                self.processes.append(
                    subprocess.Popen(command, stdout=out, stderr=errors, text=True, env=env)
                )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for text in self.processes[0].stdout:
            if not text.startswith("{"):  # gloo talks there
                continue
            line = json.loads(text)
            with self.changed:
                name = line.pop("case")
                if line.pop("done", False):
                    self.done.add(name)
                else:
                    self.lines.setdefault(name, []).append(line)
                self.changed.notify_all()
        with self.changed:
            self.done.add(None)
            self.changed.notify_all()

    def results(self, name):
        """The lines of a case, once it is done."""
        with self.changed:
            self.changed.wait_for(lambda: {name, None} & self.done, CASE_SECONDS)
            finished, lines = name in self.done, self.lines.get(name, [])
        told = "\n".join(log.read_text()[-2000:] for log in self.logs)
        assert finished, f"no result of {name!r}: {lines}\n{told}"
        assert lines and not any("failed" in line for line in lines), f"{lines}\n{told}"
        return lines

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
        self.reader.join()


@pytest.fixture(scope="session")
def run_of(request, tmp_path_factory):
    """mode -> its Run, of the cases that this session has tests for."""
    runs, wanted = {}, {}
    for item in request.session.items:
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if item.path.name == Path(__file__).name and "mode" in given:
            wanted.setdefault(given["mode"], []).append(given["name"])

    def start(mode):
        if "gpu" in mode.lower() and jax.device_count() < 2:
            pytest.skip("one GPU")
        if mode not in runs:
            runs[mode] = Run(mode, wanted[mode], tmp_path_factory.mktemp("runs"))
        return runs[mode]

    yield start
    for run in runs.values():
        run.stop()


def check_close(line):
    assert line["nan"], line
    assert line["error"] < ALL and line["worst"] < WORST, line


@every("whole")
def test_every_split_is_the_layer_on_one_device(run_of, mode, name):
    case = cases(mode)[name]
    (line,) = run_of(mode).results(name)
    if reason := line.get("unavailable"):
        pytest.skip(reason)
    assert line["shape"] == [case.tokens, parallel_cases.H]
    assert line["counts"] and line["dropped"] == 0
    assert line["bits"] or not line["exact"], line
    check_close(line)


@every("routed")
def test_every_routing_gives_the_sum_in_the_dispatchers_order_bit_for_bit(run_of, mode, name):
    """Uneven sends, ranks without tokens or work, repeated experts, padding, NaN: in numpy, from
    each expert's rows on one device, added and rounded in the order that the dispatcher has."""
    case = cases(mode)[name]
    lines = run_of(mode).results(name)
    assert tuple(line["input"] for line in lines) == parallel_cases.INPUTS
    for line in lines:
        assert line["counts"] and line["dropped"] == 0 and line["padding"], line
        assert line["bits"] or not line["exact"], line
        assert line["one_device"]["bits"] or not case.bit_for_bit, line
        check_close(line)
        check_close(line["one_device"])
        poisoned = [3, case.tokens - 2] if line["input"] == "poison" else []
        assert line["poisoned"] == poisoned, line


@every("bounded")
def test_exactly_the_rows_beyond_a_bound_are_lost_counted_and_nan_where_strict(run_of, mode, name):
    lines = run_of(mode).results(name)
    assert any(line["want"] for line in lines) and not all(line["want"] for line in lines)
    for line in lines:
        assert line["dropped"] == line["want"], line
        assert line["bits"] or not line["exact"], line
        check_close(line)


@every("callers")
def test_it_runs_in_the_callers_own_shard_map(run_of, mode, name):
    (line,) = run_of(mode).results(name)
    check_close(line)


@every("absent")
def test_nothing_of_a_token_is_read_for_an_id_of_no_expert(run_of, mode, name):
    (line,) = run_of(mode).results(name)
    assert line["bits"] and line["zero"]


@every("broken")
def test_a_token_that_breaks_the_promise_of_distinct_ids_is_nan_and_alone(run_of, mode, name):
    (line,) = run_of(mode).results(name)
    check_close(line)


@every("ids")
def test_ranks_choose_the_experts_that_one_device_chooses(run_of, mode, name):
    (line,) = run_of(mode).results(name)
    assert line["ids"] and line["weights"]


PAGE = {
    tuple(fields[:3]): fields[3:]
    for fields in (
        re.split(r" {2,}", row.strip())
        for row in re.findall(r"^    [a-] .*$", dispatch.__doc__, re.MULTILINE)
    )
}


def on_the_page(mesh, kind):
    """What `dispatch`'s docstring says: name -> number."""
    _, axes = parallel_cases.MESHES[mesh]
    named = [axes.get("ep"), axes.get("tp")]
    tokens = ",".join(a for a in named if a is not None and a in axes.get("dp", ()))
    if named == [None, None]:
        return {}
    standard, *others = PAGE[(*(a or "-" for a in named), tokens or "-")]
    listed = standard if kind == "standard" else others[0]
    found = re.findall(r"(?:(\d) )?([a-z_]+)", listed)
    counts = {name: int(number or 1) for number, name in found}
    sends = {"all_to_all": 2, "low_latency": 2, "expanded": 3, "one_sided": 0}
    if counts.pop("send", 0) and sends[kind]:
        counts["all_to_all"] = sends[kind]
    return counts


@every("collectives")
def test_the_program_has_the_collectives_that_the_page_names_and_no_other(run_of, mode, name):
    case = cases(mode)[name]
    (line,) = run_of(mode).results(name)
    chunks = dict(case.parallel).get("chunks", 1)
    want = {k: n * chunks for k, n in on_the_page(case.mesh, case.dispatch).items()}
    assert line["collectives"] == want
    _, axes = parallel_cases.MESHES[case.mesh]
    partial = "tp" in axes or ("ep" in axes and case.dispatch == "standard")
    reductions = ("all_reduce", "reduce_scatter")
    assert sum(line["collectives"].get(r, 0) for r in reductions) == partial * chunks


@every("cuda")
def test_for_a_gpu_it_is_one_program_of_the_same_collectives_without_the_host(run_of, mode, name):
    case = cases(mode)[name]
    (line,) = run_of(mode).results(name)
    assert line["collectives"] == on_the_page(case.mesh, case.dispatch)
    assert line["modules"] == 1 and line["host"] == []
    gemm = "dgmoe_m_grouped_fp8_fp4_gemm_nt_contiguous"
    deep_gemm = dict(case.layer)["backend"] == "deep_gemm"
    assert line["targets"] == [gemm] * deep_gemm + ["mosaic_gpu"]


@every("misused")
def test_params_that_were_split_otherwise_are_refused(run_of, mode, name):
    lines = run_of(mode).results(name)
    assert len(lines) == 5 and all("shard_params splits" in line["error"] for line in lines)


@every("refused")
def test_one_sided_on_a_cpu_is_refused_by_name(run_of, mode, name):
    (line,) = run_of(mode).results(name)
    assert re.search(r"dispatch='one_sided'.*GPU.*'all_to_all'", line["error"])


# --- In this process, on one device

MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
EP = dg.Parallel(ep="a", dispatch="all_to_all")
X = jnp.asarray(np.random.default_rng(0).standard_normal((5, 128)), jnp.bfloat16)


def one_by_one(layer, parallel, x=X, **given):
    params = dg.shard_params(layer.params, layer.cfg, MESH, parallel)
    run = jax.jit(
        lambda x, params, given: dg.sharded_moe_layer(x, params, layer.cfg, MESH, parallel, **given)
    )
    return np.asarray(run(x, params, given))


@pytest.mark.parametrize("recipe, room", [("fp8_block", 32), ("bf16", 64)])
def test_a_token_has_as_many_slots_as_its_row_has_room_for_ids(recipe, room):
    layer = random_layer(recipe=recipe)
    ids = np.random.default_rng(1).integers(-1, 4, (5, room + 1))
    weights = np.random.default_rng(2).integers(1, 9, ids.shape) / 64
    for kind in ("all_to_all", "expanded"):
        parallel, full = dataclasses.replace(EP, dispatch=kind), routing(ids, weights)
        if kind == "expanded":
            got = one_by_one(layer, parallel, routing=full)
            want = layer(X, ids, weights)
            np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=0.03, atol=0.03)
            continue
        with pytest.raises(NotImplementedError, match=rf"{room + 1} slots.*ids of {room};.*'exp"):
            one_by_one(layer, parallel, routing=full)
        got = one_by_one(layer, parallel, routing=routing(ids[:, :room], weights[:, :room]))
        want = layer(X, ids[:, :room], weights[:, :room])
        np.testing.assert_array_equal(got.astype(float), want.astype(float))


def test_copies_of_an_expert_share_its_tokens_and_every_slot_is_one_of_its_expert():
    layer = random_layer()
    placement = (0, 1, 2, 3, 0, -1, 1, 0)
    parallel = dg.Parallel(ep="a", placement=placement)
    ranks = Ranks(
        parallel, {"a": 4}, share(layer.cfg, parallel, {"a": 4}, layer.params.experts.w13.format), 4
    )
    ids = np.random.default_rng(0).integers(-1, 5, (600, 2)).astype(np.int32)
    slots = np.asarray(ranks.slots(jnp.asarray(ids)))
    unknown = (ids < 0) | (ids > 3)
    assert (slots[unknown] == -1).all()
    assert (np.array(placement)[slots[~unknown]] == ids[~unknown]).all()
    load = np.bincount(slots[~unknown], minlength=8)
    for expert in range(4):
        copies = load[np.array(placement) == expert]
        np.testing.assert_allclose(copies, copies.mean(), rtol=0.2)
    assert load[5] == 0


FIELDS = {
    "ep": (5, TypeError),
    "tp": (("b",), TypeError),
    "dp": (5, TypeError),
    "dp twice": (("a", "a"), ValueError),
    "dp no name": (("a", 1), ValueError),
    "dispatch": ("deepep", ValueError),
    "shared": ("split", ValueError),
    "capacity_factor": (0, ValueError),
    "capacity_factor inf": (float("inf"), ValueError),
    "capacity_factor bool": (True, ValueError),
    "strict": (1, TypeError),
    "chunks": (0, ValueError),
    "chunks float": (2.0, ValueError),
    "placement": ((0.5, 1), TypeError),
    "placement -2": ((0, -2), ValueError),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_bad_field_is_named_with_its_value(name):
    value, error = FIELDS[name]
    field = name.split()[0]
    with pytest.raises(error, match=rf"Parallel\.{field}=.*must be"):
        dg.Parallel(**dict(ep="a", dispatch="all_to_all") | {field: value})


COMBINATIONS = {
    "needs ep": dict(dispatch="low_latency"),
    "another axis than ep": dict(ep="a", tp="a"),
    "needs tp": dict(ep="a", dispatch="expanded", shared="sharded"),
    "sends no rows": dict(ep="a", capacity_factor=1.5),
    "without ep": dict(tp="a", placement=(0, 1)),
}


@pytest.mark.parametrize("said", COMBINATIONS)
def test_fields_that_do_not_go_together_are_refused(said):
    with pytest.raises(ValueError, match=said):
        dg.Parallel(**COMBINATIONS[said])


def test_a_list_of_axes_is_as_good_as_a_tuple():
    assert hash(dg.Parallel(dp=["a", "b"])) == hash(dg.Parallel(dp=("a", "b")))


def test_axes_that_are_not_there_are_named():
    layer = random_layer()
    parallel = dg.Parallel(ep="a", tp="experts", dp="rows")
    with pytest.raises(ValueError, match=r"\['experts', 'rows'\] are not in .*\('a', 'b'\)"):
        dg.shard_params(layer.params, layer.cfg, MESH, parallel)
    with pytest.raises(ValueError, match=r"\['experts', 'rows'\] are not in .*\('a', 'b'\)"):
        dg.sharded_moe_layer(X, layer.params, layer.cfg, MESH, parallel)
    with pytest.raises(ValueError, match=r"unbound axis name.*inside a shard_map"):
        dg.moe_layer(X, layer.params, layer.cfg, parallel=EP)


def test_a_placement_names_every_expert_on_every_rank_alike():
    layer = random_layer()
    for placement, said in (
        ((0, 1, 2), r"missing \[3\]"),
        ((0, 1, 2, 3, 7), r"unknown experts \[7\]"),
    ):
        with pytest.raises(ValueError, match=said):
            dg.shard_params(
                layer.params, layer.cfg, MESH, dataclasses.replace(EP, placement=placement)
            )
    with pytest.raises(ValueError, match="5 slots, must be a multiple of ep's 2"):
        share(
            layer.cfg,
            dg.Parallel(ep="a", placement=(0, 1, 2, 3, 0)),
            {"a": 2},
            layer.params.experts.w13.format,
        )


def test_a_bound_wants_its_losses_counted_or_marked():
    layer = random_layer()
    bound = dataclasses.replace(EP, capacity_factor=1.0)
    with pytest.raises(ValueError, match=r"capacity_factor=1.0.*stats=True.*strict=True"):
        one_by_one(layer, bound)
    assert one_by_one(layer, dataclasses.replace(bound, strict=True)).shape == X.shape

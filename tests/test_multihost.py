"""scripts/run_multihost.py: processes on this machine's CPU that agree, die, stop and hang."""

import os
import random
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import run_multihost

SCRIPT = Path(run_multihost.__file__)
TIMEOUT = 10
LAYER = ("--steps=2", "--hidden=128", "--experts=4", "--top-k=2", "--recipe=bf16", "--shared=0")
LAYER += ("--tokens=8", "--backend=xla", f"--timeout={TIMEOUT}", "--setup-timeout=90")

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 and SIGSTOP as Linux has them"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What one run compiles, the next one reads."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(*options, **env):
    return subprocess.Popen(
        [sys.executable, SCRIPT, *options],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    try:
        return process.communicate(timeout=110)[0], process.returncode
    finally:
        process.kill()


def run(*options, **env):
    return finish(start(*options, **env))


def in_process(*options):
    app = typer.Typer()
    app.command()(run_multihost.main)
    return CliRunner().invoke(app, options, env={"COLUMNS": "300"})


def test_two_groups_of_processes_with_addresses_of_their_own_agree(cache):
    groups = ("--processes=2", "--hosts=2", "--devices=2", "--tp=2", "--platform=cpu")
    text, status = run(*groups, *LAYER, **cache)
    assert status == 0, text
    lines = re.findall(r"process (\d) of 2 on .* rows ([\d, -]+) same", text)
    assert sorted(lines) == [("0", "0-7, 8-15"), ("1", "16-23, 24-31")], text
    assert "all processes: same" in text


FAULTS = {
    "kill": (0, "killed by SIGKILL"),
    "exit": (1, "status 1"),
    "stop": (1, "stopped or hanging, killed"),
    "hang": (0, "status 1"),
}


@pytest.fixture(scope="module")
def broken(cache):
    """A run with each fault, two at a time, since most of them is waiting."""

    def run_with(fault):
        options = (f"--fault={fault}", f"--faulty={FAULTS[fault][0]}", "--platform=cpu")
        return run("--processes=2", *options, *LAYER, **cache)

    with ThreadPoolExecutor(2) as pool:
        yield {fault: pool.submit(run_with, fault) for fault in FAULTS}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_fails_ends_the_others_in_time(broken, fault):
    faulty, how = FAULTS[fault]
    text, status = broken[fault].result()
    assert status == 1, text
    at = {
        event: float(seconds)
        for seconds, event in re.findall(r"([\d.]+) s  (process \d: .*?)\s*\n", text)
    }
    begun = at[f"process {faulty}: --fault {fault}"]
    assert f"process {faulty}: {how}" in at, text
    (other,) = (e for e in at if e.startswith(f"process {1 - faulty}: "))
    assert re.fullmatch(r"process \d: (status 1|killed by SIGABRT)", other), text
    assert at[other] - begun < TIMEOUT + 5, text
    assert at[f"process {faulty}: {how}"] - begun < 2 * TIMEOUT + 10, text
    # Nobody has shown a result as if all had one.
    assert " rows " not in text and "all processes" not in text


def slurm(processes):
    """The variables that SLURM sets, by which JAX takes a port."""
    for job in random.sample(range(4096), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("localhost", 65535 - 4095 + job)):
                break
    for number in range(processes):
        yield {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NTASKS": str(processes),
            "SLURM_PROCID": str(number),
            "SLURM_LOCALID": str(number),
            "JAX_PLATFORMS": "cpu",
        }


def test_the_shown_job_finds_its_ranks_in_slurms_variables(cache):
    text = in_process("--processes=4", "--hosts=2", *LAYER, "--show-job=slurm").output
    assert "--nodes=2 --ntasks-per-node=2 --gpus-per-node=2" in text
    command = shlex.split(text.splitlines()[-1])
    assert command[0] == "srun"
    options = command[command.index("scripts/run_multihost.py") + 1 :]
    assert {*LAYER, "--worker"} == set(options)
    started = [start(*options, **env, **cache) for env in slurm(2)]
    for number, (text, status) in enumerate([finish(process) for process in started]):
        assert status == 0 and f"process {number} of 2" in text, text


def test_the_shown_mpi_job_has_the_options_given():
    text = in_process("--processes=16", "--hosts=2", "--dispatch=expanded", "--show-job=mpi").output
    assert "mpirun -np 16 -ppn 8 python" in text and "--worker --dispatch=expanded" in text


@pytest.mark.parametrize(
    "options, message",
    [
        (("--processes=3", "--hosts=2"), "not a multiple of --hosts 2"),
        (("--tp=3", "--platform=cpu"), "must divide 2 devices"),
        (("--dispatch=all", "--platform=cpu"), "dispatch='all'"),
        (("--processes=999", "--platform=gpu"), "GPUs"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_started(options, message):
    done = in_process(*options)
    assert done.exit_code == 2 and message in done.output

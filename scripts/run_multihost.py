"""The layer over several processes: started here, or each by SLURM or MPI.

`python scripts/run_multihost.py --processes 4 --dispatch all_to_all` starts four processes on this
machine, with one GPU each, or one CPU device where there are no GPUs. Each makes the same layer,
keeps its part, and compares the rows that it owns with what the whole layer gives on one device.
Status 0: all agree; 1: a row differs, or a process died or hung.

`--show-job slurm` (or mpi) prints the few lines of a job; its program is this script, too.
"""

from __future__ import annotations

import collections
import enum
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Annotated

# JAX would take most of the GPU for itself, which those that compile beside it need.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import typer
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

import dgmoe_jax as dg

Platform = enum.StrEnum("Platform", ["cpu", "gpu"])
Fault = enum.StrEnum("Fault", ["kill", "exit", "stop", "hang"])
Job = enum.StrEnum("Job", ["slurm", "mpi"])

LIMIT = 2.0**-7
"""Relative error of a process's rows: ranks round what they add up to bf16, of 8 bits."""

JOBS = {
    Job.slurm: """#!/bin/bash
#SBATCH --nodes={hosts} --ntasks-per-node={each} --gpus-per-node={each} --exclusive
# jax.distributed.initialize() takes coordinator and ranks from SLURM's variables and, of the GPUs
# of a node, all of which a task must see, its own. The first process that fails ends the others.
srun --kill-on-bad-exit=1 python scripts/run_multihost.py {options}""",
    Job.mpi: """# MPICH and Intel MPI; Open MPI calls it --map-by ppr:{each}:node. Needs mpi4py.
mpirun -np {processes} -ppn {each} python scripts/run_multihost.py --cluster=mpi4py {options}""",
}


def _help(text: str, **more):
    return typer.Option(help=text, **more)


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def main(
    context: typer.Context,
    *,
    processes: Annotated[int, _help("Processes to start.", min=1)] = 2,
    devices: Annotated[int, _help("Devices of each process.", min=1)] = 1,
    hosts: Annotated[int, _help("Groups of processes that stand for hosts.", min=1)] = 1,
    platform: Annotated[Platform | None, _help("GPUs where there are any.")] = None,
    dispatch: Annotated[str, _help("How tokens reach experts: Parallel.dispatch.")] = "all_to_all",
    tp: Annotated[int, _help("Devices that share each expert.", min=1)] = 1,
    tokens: Annotated[int, _help("Tokens of each device.", min=1)] = 16,
    experts: Annotated[int, _help("Number of routed experts.")] = 16,
    hidden: Annotated[int, _help("Hidden size.")] = 256,
    intermediate: Annotated[int, _help("Intermediate size of an expert.")] = 128,
    top_k: Annotated[int, _help("Experts a token.")] = 4,
    shared: Annotated[int, _help("Number of shared experts.")] = 1,
    recipe: str = "fp8_block",
    backend: str = "auto",
    steps: Annotated[int, _help("Calls of the layer.", min=1)] = 4,
    timeout: Annotated[int, _help("Seconds for a step, or without a sign of life.", min=1)] = 30,
    setup_timeout: Annotated[int, _help("Seconds to start and to compile.", min=1)] = 600,
    fault: Annotated[Fault | None, _help("What a process does in its last step.")] = None,
    faulty: Annotated[int, _help("Which one.", min=0)] = 1,
    show_job: Annotated[Job | None, _help("Print such a job, and end.")] = None,
    worker: Annotated[bool, _help("Be one process of a job.")] = False,
    cluster: Annotated[
        str | None, _help("JAX's cluster_detection_method, where it must be told.")
    ] = None,
    coordinator: Annotated[str | None, _help("Its address, without SLURM or MPI.")] = None,
    process_id: Annotated[int, _help("This one's number, with --coordinator.", min=0)] = 0,
) -> None:
    if processes % hosts:
        raise typer.BadParameter(f"--processes {processes}: not a multiple of --hosts {hosts}")
    try:
        cfg = dg.MoEConfig(
            *(experts, hidden, intermediate),
            dg.RouterConfig(scoring="sigmoid", top_k=top_k, scaling_factor=2.5),
            recipe=recipe,
            num_shared_experts=shared,
            backend=backend,
        )
        axes = dict(ep="ep", tp="tp" if tp > 1 else None, dp=("ep", "tp"))
        parallel = dg.Parallel(**axes, dispatch=dispatch)
    except (ValueError, TypeError) as problem:
        raise typer.BadParameter(str(problem)) from None
    if show_job:
        # What was asked of the layer, in the words it was asked in.
        here = ("processes", "devices", "hosts", "platform", "show_job")
        asked = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in context.params.items()
            if name not in here and context.get_parameter_source(name).name == "COMMANDLINE"
        ]
        each = processes * devices // hosts
        words = dict(hosts=hosts, processes=each * hosts, each=each)
        print(JOBS[show_job].format(**words, options=" ".join(["--worker", *asked])))
        return
    if not worker:
        gpus = _gpus() if platform != Platform.cpu else 0
        if (platform == Platform.gpu or gpus) and processes * devices > gpus:
            raise typer.BadParameter(
                f"--processes {processes} of --devices {devices}: this machine has {gpus} GPUs;"
                " --platform cpu runs without"
            )
        if processes * devices % tp:
            raise typer.BadParameter(f"--tp {tp}: must divide {processes * devices} devices")
        limit = setup_timeout + (steps + 1) * timeout
        raise typer.Exit(launch(processes, devices, hosts, bool(gpus), steps, timeout, limit))
    where = dict(cluster_detection_method=cluster)
    if coordinator:
        mine = list(range(process_id * devices, (process_id + 1) * devices))
        where = dict(coordinator_address=coordinator, num_processes=processes)
        where |= dict(process_id=process_id, local_device_ids=mine)
    deadline(setup_timeout)
    try:
        # A process that no longer sends heartbeats is dead to the others after this time, and the
        # runtime ends them; `deadline` is for one that sends them and does nothing else.
        jax.distributed.initialize(
            **where,
            initialization_timeout=setup_timeout,
            heartbeat_timeout_seconds=timeout,
            shutdown_timeout_seconds=timeout,
        )
        if jax.process_index() != faulty:
            fault = None
        same = work(cfg, parallel, tp, tokens, steps, timeout, fault)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # Not through exit handlers: these wait for the other processes, which wait for this one.
        os._exit(1)
    raise typer.Exit(not same)


# --- One process


def deadline(seconds: int) -> None:
    """Ends this process with a traceback unless called again within `seconds`: from a thread that
    needs no GIL, since JAX waits in C++ for a peer that will not come."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def work(
    cfg: dg.MoEConfig,
    parallel: dg.Parallel,
    tp: int,
    tokens: int,
    steps: int,
    timeout: int,
    fault: Fault | None,
) -> bool:
    """This process's part, and whether its rows are those of one device."""
    me, count = jax.process_index(), jax.process_count()
    devices = np.array(jax.devices())
    if devices.size % tp:
        raise ValueError(f"--tp {tp}: must divide {devices.size} devices")
    mesh = Mesh(devices.reshape(-1, tp), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
    params = make_params(cfg)
    parts = dg.shard_params(params, cfg, mesh, parallel)
    whole = jax.jit(dg.moe_layer, static_argnames="cfg")
    layer = jax.jit(
        lambda x, parts: dg.sharded_moe_layer(x, parts, cfg, mesh, parallel, stats=True)
    )
    by_token = NamedSharding(mesh, PartitionSpec(parallel.dp))
    shape = (devices.size * tokens, cfg.hidden_size)
    worst, imbalance = 0.0, []
    for step in range(steps):
        # Every process makes all tokens, so that it can check its own rows alone.
        x = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), shape, jnp.bfloat16)
        split = jax.make_array_from_callback(shape, by_token, np.asarray(x).__getitem__)
        if fault is not None and step == steps - 1:
            commit(fault)
        y, stats = layer(split, parts)
        want = np.asarray(whole(x, params, cfg=cfg)).astype(np.float32)
        for shard in y.addressable_shards:
            rows, expected = np.asarray(shard.data).astype(np.float32), want[shard.index]
            error = np.linalg.norm(rows - expected) / np.linalg.norm(expected)
            worst = max(worst, float(np.nan_to_num(error, nan=np.inf)))
        of_rank = np.asarray(stats.expert_counts)
        of_rank = np.pad(of_rank, (0, -of_rank.size % mesh.shape["ep"]))
        of_rank = of_rank.reshape(mesh.shape["ep"], -1).sum(axis=1)
        imbalance.append(of_rank.max() / of_rank.mean())
        print(f"step {step}", flush=True)
        deadline(timeout)
    # Nobody has a result unless all have come to the end of it.
    all_same = bool(np.all(multihost_utils.process_allgather(np.float32(worst)) <= LIMIT))
    where = [by_token.devices_indices_map(shape)[d][0] for d in jax.local_devices()]
    rows = ", ".join(f"{s.start or 0}-{(s.stop or shape[0]) - 1}" for s in where)
    jax.distributed.shutdown()
    verdict = "same" if worst <= LIMIT else "DIFFERENT"
    print(
        f"process {me} of {count} on {socket.gethostname()}, {devices[0].device_kind}: rows {rows}"
        f" {verdict} (error {worst:.2g}, limit {LIMIT:.2g}); busiest rank"
        f" {max(imbalance):.2f} times the mean",
        flush=True,
    )
    if me == 0:
        print(f"all processes: {'same' if all_same else 'DIFFERENT'}", flush=True)
    return all_same


def make_params(cfg: dg.MoEConfig) -> dg.MoEParams:
    """Alike in every process."""
    hidden, inner, experts = cfg.hidden_size, cfg.intermediate_size, cfg.num_experts
    shapes = dict(
        gate_weight=(experts, hidden), w13=(experts, 2 * inner, hidden), w2=(experts, hidden, inner)
    )
    if shared := cfg.num_shared_experts * inner:
        shapes |= dict(shared_w13=(2 * shared, hidden), shared_w2=(hidden, shared))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    raw = {
        name: jax.random.normal(key, shape, jnp.bfloat16) * shape[-1] ** -0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return dg.prepare_params(raw, cfg)


def commit(fault: Fault) -> None:
    print(f"process {jax.process_index()}: --fault {fault}", flush=True)
    if fault == Fault.exit:
        raise RuntimeError("--fault exit")
    if fault == Fault.hang:
        time.sleep(1e6)  # heartbeats go on
    os.kill(os.getpid(), signal.SIGKILL if fault == Fault.kill else signal.SIGSTOP)


# --- Those that are started here


class Process:
    """One process started here; its lines are read by a thread until it has ended."""

    def __init__(self, number: int, env: dict[str, str], options: list[str], on_line):
        self.number, self.on_line = number, on_line
        self.status: int | None = None
        self.ended = 0.0
        self.tail = collections.deque(maxlen=20)
        self.child = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], *options],
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.child.stdout:
            self.on_line(line.rstrip())
            if not line.startswith("    @"):  # XLA's C++ frames
                self.tail.append(line.rstrip())
        status = self.child.wait()
        self.ended, self.status = time.monotonic(), status

    def how(self) -> str:
        if self.status < 0:
            return f"process {self.number}: killed by {signal.Signals(-self.status).name}"
        return f"process {self.number}: status {self.status}"


def launch(
    processes: int, devices: int, hosts: int, gpu: bool, steps: int, timeout: int, limit: int
) -> int:
    """Starts and watches them; status 0 if all of them ended with it."""
    console = Console(soft_wrap=True, highlight=False, markup=False)
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:6.1f} s  {text}")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` ends the children
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    started: list[Process] = []
    shown = Progress(*Progress.get_default_columns(), MofNCompleteColumn(), console=console)
    with shown:
        bar = shown.add_task(f"{processes} processes", total=processes * steps)

        def on_line(line: str) -> None:
            if line.startswith("step "):
                shown.advance(bar)
            elif line.startswith(("process ", "all processes")):
                say(line)

        try:
            for number in range(processes):
                host = number * hosts // processes
                # All of 127.0.0.0/8 is this machine (on Linux): each host has its own name for the
                # one coordinator.
                address = f"127.0.0.{1 if hosts == 1 else 2 + host}"
                env = dict(
                    JAX_PLATFORMS="cuda" if gpu else "cpu",
                    JAX_COORDINATOR_BIND_ADDRESS=f"{'0.0.0.0' if hosts > 1 else address}:{port}",
                )
                if not gpu:
                    env["JAX_NUM_CPU_DEVICES"] = str(devices)
                elif hosts > 1:  # NCCL then has NVLink within a group and sockets between them
                    interface = os.environ.get("NCCL_SOCKET_IFNAME", "lo")
                    env |= dict(NCCL_HOSTID=f"host{host}", NCCL_SOCKET_IFNAME=interface)
                options = ["--worker", f"--coordinator={address}:{port}", f"--process-id={number}"]
                started.append(Process(number, env, options, on_line))
            return watch(started, say, timeout, began + limit)
        finally:
            for process in started:
                process.child.kill()
            for process in started:
                process.reader.join()


def watch(started: list[Process], say: Callable[[str], None], timeout: int, until: float) -> int:
    """Once one has failed, the others have `timeout` to find out."""
    told: set[int] = set()
    while True:
        over = time.monotonic() > until
        running = [p for p in started if p.status is None]
        for process in sorted((p for p in started if p.status), key=lambda p: p.ended):
            if process.number not in told:
                told.add(process.number)
                say(process.how())
                until = min(until, process.ended + timeout + 5)
        if over or not running:
            break
        time.sleep(0.05)
    for process in running:
        say(f"process {process.number}: stopped or hanging, killed")
    for process in started:
        for line in process.tail if process.status else ():
            say(f"[{process.number}] {line}")
    return int(any(process.status != 0 for process in started))


if __name__ == "__main__":
    typer.run(main)

"""Times the layer over several GPUs, and its dispatch and combine alone: checks, then writes JSONL.

python scripts/bench_parallel.py                    # the GPUs of this process
python scripts/bench_parallel.py --shape tiny --devices 2 --tokens 8    # on a CPU, to try it out
python scripts/bench_parallel.py --processes 2      # a process for each GPU

Tokens are split over all GPUs, and so are experts ("ep"), every expert's columns ("tp"), or both
("epxtp2": columns over each 2 GPUs, experts over those pairs).
"""

from __future__ import annotations

import functools
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Before JAX starts.
if found := re.search(r"--devices[ =](\d+)", " ".join(sys.argv)):
    flag = f"--xla_force_host_platform_device_count={found[1]}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"

import _bench
import _stages
import jax
import jax.numpy as jnp
import numpy as np
import typer
from bench_layer import SHAPES, random_params
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

import dgmoe_jax as dg
from dgmoe_jax.parallel import Ranks
from dgmoe_jax.recipes import padded
from dgmoe_jax.steps import dispatch as steps

MOST_ERROR = 0.02
"""Beside one GPU, where sums are rounded in another order and tiles may differ."""
COLUMNS = {
    "bench": "what",
    **dict.fromkeys(("dispatch", "split", "chunks"), ""),
    "T": "T a GPU",
    "us": "us",
    "device_us": "of the GPU",
    "overlap_us": "overlap",
    "bytes_per_s": "bytes/s",
    "one_gpu_us": "one GPU",
    "speedup": "speed-up",
    "error": "error",
    "same_bits": "same bits",
    "failed": "failed",
}
COLUMNS |= {name: name for name, title in COLUMNS.items() if not title}


def mesh_of(split: str) -> Mesh:
    """All GPUs, with the axes that `split` names."""
    gpus = len(jax.devices())
    named = re.fullmatch(r"ep|tp|epxtp([1-9]\d*)", split)
    tp = named and int(named[1] or (1 if split == "ep" else gpus))
    if not tp or gpus % tp:
        raise typer.BadParameter(
            f"split={split!r}: must be 'ep', 'tp', or 'epxtpN' for N that divides {gpus} GPUs"
        )
    axes = {axis: size for axis, size in (("ep", gpus // tp), ("tp", tp)) if size > 1} or {"ep": 1}
    return Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))


def by_token(mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(mesh.axis_names)


def put(mesh: Mesh, x: np.ndarray) -> jax.Array:
    """An array that every process has, split over all GPUs."""
    sharding = NamedSharding(mesh, by_token(mesh))
    return jax.make_array_from_callback(x.shape, sharding, x.__getitem__, dtype=x.dtype)


def mine(y: jax.Array) -> np.ndarray:
    """This process's rows of an array that is split over all GPUs."""
    shards = sorted(y.addressable_shards, key=lambda s: s.index[0].start or 0)
    return np.concatenate([np.asarray(s.data) for s in shards])


def layers(cfg: dg.MoEConfig, mesh: Mesh, parallel: dg.Parallel) -> Callable:
    """Several layers in one program."""
    return one_by_one(lambda x, params: dg.sharded_moe_layer(x, params, cfg, mesh, parallel))


def one_by_one(layer: Callable) -> Callable:
    """(xs, params) -> ys: a layer's result is added to the next one's tokens, as in a model, so
    that nothing of two layers runs at once."""
    layer = jax.jit(layer)  # traced once for all of them

    def run(xs, params):
        ys = []
        for x in xs:
            ys.append(layer(x + ys[-1] if ys else x, params))
        return ys

    return jax.jit(run)


def exchanges(cfg: dg.MoEConfig, mesh: Mesh, parallel: dg.Parallel, params: dg.MoEParams):
    """Dispatch and combine of several layers in one program, without the experts between, and what
    makes the rows that go back in the place of theirs, from tokens [T, H]."""
    weights = params.experts.w13.format
    fmt = dg.recipes.run_of(cfg.recipe, weights).operands.activations
    top_k, width = cfg.router.top_k, padded(cfg.hidden_size)
    backend = dg.plan(cfg, 1).backend

    def dispatcher(x):
        return Ranks.of(cfg, parallel, weights).dispatcher(len(x), top_k, True, backend)

    def computed(x):
        d = dispatcher(x)
        return jnp.broadcast_to(x[:1], (d.ranks * d.rows, width))

    def local(xs, ids, weight, rows):
        d = dispatcher(xs[0])

        @jax.jit  # traced once for all of them
        def one(x, topk_ids, weight, rows):
            tokens = dg.types.Arrived(x, None, topk_ids, weight, None)
            wire = steps.Wire(fmt, width, top_k, False, backend)
            arrived, back = d.send(wire, tokens, wire.pack(tokens))
            # Which rows go back depends on what arrived, so that nothing can be left out.
            row = jnp.arange(len(rows), dtype=jnp.int32)[:, None]
            src2dst = jnp.where(arrived.topk_ids >= 0, row, -1)
            return d.bring_back(rows, src2dst, arrived, back, tokens, None, 1.0)

        ys = []
        for x, topk_ids in zip(xs, ids, strict=True):
            if ys:  # One after another; there is no NaN.
                topk_ids = topk_ids + jnp.isnan(ys[-1][:1, :1]).astype(jnp.int32)
            ys.append(one(x, topk_ids, weight, rows))
        return ys

    tokens = by_token(mesh)
    over_all = dict(mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    return [jax.jit(jax.shard_map(run, **over_all)) for run in (local, computed)]


def remote_rows(dispatch: str, ids: np.ndarray, ranks: int, experts: int) -> tuple[int, int]:
    """Rows that cross to or from the busiest GPU: on the way in, and on the way back. Those that
    must, whatever is sent beside them."""
    owner = ids.reshape(ranks, -1, ids.shape[1]) // -(-experts // ranks)
    by_slot = (owner[..., None] == np.arange(ranks)).sum(2)  # [from, token, to]
    by_token = np.minimum(by_slot, 1)
    into = by_slot if dispatch == "expanded" else by_token
    back = by_slot if dispatch in ("expanded", "low_latency") else by_token

    def busiest(rows):
        rows = rows.sum(1) * ~np.eye(ranks, dtype=bool)
        return int(max(rows.sum(0).max(), rows.sum(1).max()))

    return busiest(into), busiest(back)


class Run:
    """One shape on all GPUs: compiled side by side, checked, timed, and written down."""

    def __init__(self, shape: str, recipe: str, sizes: list[int], stages: bool, out: Path):
        s = self.shape = SHAPES[shape]
        self.cfg = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe=recipe)
        self.gpus, self.stages, self.out = len(jax.devices()), stages, out
        self.params = random_params(self.cfg, jax.random.key(0))
        self.head = _bench.environment() | {"gpus": self.gpus, "processes": jax.process_count()}
        self.head |= {"shape": shape, "E": s.E, "k": s.k, "H": s.H, "I": s.I, "recipe": recipe}
        self.start, self.console = time.monotonic(), Console(width=180)
        self.first = jax.process_index() == 0
        self.table = Table(*COLUMNS.values())
        rng = np.random.default_rng(0)
        self.xs, self.ids, self.wanted, self.single = {}, {}, {}, {}
        self.pool, self.sharded, self.failed = ThreadPoolExecutor(16), {}, 0
        for t in sizes:
            shape = (16 if t <= 128 else 8 if t <= 1024 else 4, self.gpus * t, s.H)
            self.xs[t] = rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)
            ids = np.tile(np.arange(s.E, dtype=np.int32), (self.gpus * t, 1))
            self.ids[t] = np.ascontiguousarray(rng.permuted(ids, axis=1)[:, : s.k])

    def note(self, text: str) -> None:
        if self.first:
            seconds = time.monotonic() - self.start
            self.console.print(f"{seconds:4.0f} s {text}", style="dim", highlight=False)

    def at(self, t: int, ways: list[tuple[str, str, int]], *, alone: bool, whole: bool) -> None:
        """All ways for `t` tokens a GPU: compiled side by side, then timed one by one."""
        self.one_gpu(t, timed=whole and self.first)
        jobs = []
        for dispatch, split, chunks in ways:
            mesh = mesh_of(split)
            axes = {axis: axis for axis in mesh.axis_names}
            parallel = dg.Parallel(**axes, dp=mesh.axis_names, dispatch=dispatch, chunks=chunks)
            if split not in self.sharded:
                self.sharded[split] = dg.shard_params(self.params, self.cfg, mesh, parallel)
                self.note(f"params over {split}")
            params, args = self.sharded[split], [put(mesh, x) for x in self.xs[t]]
            key = {"dispatch": dispatch, "split": split, "chunks": chunks, "T": t}
            if whole:
                run, given = layers(self.cfg, mesh, parallel), (args, params)
                jobs.append(("layer", key, self.compiled(run, given), given))
            if alone and dispatch != "standard" and chunks == 1 and parallel.tp is None:
                ids = self.ids[t]
                weights = put(mesh, np.full(ids.shape, 1 / self.shape.k, np.float32))
                run, computed = exchanges(self.cfg, mesh, parallel, params)
                given = args, [put(mesh, ids)] * len(args), weights, computed(args[0])
                jobs.append(("dispatch", key, self.compiled(run, given), given))
        self.note(f"{len(jobs)} programs of {t} tokens a GPU are lowered")
        wait([job for _, _, job, _ in jobs])  # compiling beside it would slow the host
        self.note("and compiled")
        for what, key, job, args in jobs:
            record = {"bench": what, **self.head, **key}
            try:
                record |= self.measured(what, key, job.result(), args)
            except Exception as problem:
                self.failed += 1
                record["failed"] = f"{type(problem).__name__}: {problem}"[:500]
            if self.first:
                _bench.append(self.out, record)
                cells = {column: cell(record.get(column)) for column in COLUMNS}
                self.note(" ".join(f"{k}={v}" for k, v in cells.items() if v != "-"))
                self.table.add_row(*cells.values())

    def compiled(self, run: Callable, given: tuple) -> Future:
        """Beside others, but lowered at once: that is Python's work."""
        try:
            return self.pool.submit(run.lower(*given).compile)
        except Exception as problem:
            (failed := Future()).set_exception(problem)
            return failed

    def one_gpu(self, t: int, timed: bool) -> None:
        """The results to compare with, and the same tokens' time on one GPU."""
        run = one_by_one(lambda x, params: dg.moe_layer(x, params, self.cfg))
        here = [jax.device_put(x, jax.local_devices()[0]) for x in self.xs[t]]
        self.wanted[t] = np.asarray(run(here, self.params)[0])
        if timed:
            us = _bench.median_us(functools.partial(run, here, self.params), repeats=10)
            self.single[t] = us / len(here)
            self.note(f"one GPU, {self.gpus} x {t} tokens: {self.single[t]:.1f} us a layer")

    def measured(self, what: str, key: dict, run: Callable, args: tuple) -> dict:
        t, y, found = key["T"], run(*args), {}
        if what == "layer":
            part, rows = mine(y[0]).astype(np.float32), self.gpus * t // jax.process_count()
            want = self.wanted[t][jax.process_index() * rows :][:rows].astype(np.float32)
            found["error"] = float(np.linalg.norm(part - want) / np.linalg.norm(want))
            found["same_bits"] = bool((part == want).all())
            if found["error"] > MOST_ERROR:
                raise ValueError(f"error {found['error']} beside one GPU, not timed")
        del y
        call = functools.partial(run, *args)
        us = _bench.median_us(call, repeats=10) / len(self.xs[t])
        found["us"] = us
        if jax.default_backend() == "gpu":
            calls, per_gpu = 5, jax.local_device_count() * len(self.xs[t])
            gpus = _stages.profile(call, calls)
            kernels = _stages.summary([event for gpu in gpus for event in gpu], calls)
            # Waiting for other GPUs included, the host's work not.
            found["device_us"] = sum(k["us"] for k in kernels) / per_gpu
            found["overlap_us"] = sum(map(_stages.overlap_us, gpus)) / calls / per_gpu
            for k in kernels if self.stages and self.first else []:
                line = f"{k['us'] / per_gpu:9.1f} us {k['launches'] / per_gpu:6.2f} x {k['kernel']}"
                self.console.print(line, no_wrap=True, highlight=False)
        if what == "layer":
            if t in self.single:
                found |= {"one_gpu_us": self.single[t], "speedup": self.single[t] / us}
            return found
        weights = self.sharded[key["split"]].experts.w13.format
        fmt = dg.recipes.run_of(self.cfg.recipe, weights).operands.activations
        wire = steps.Wire(fmt, padded(self.shape.H), self.shape.k, False, "xla").row_bytes
        there, back = remote_rows(key["dispatch"], self.ids[t], self.gpus, self.shape.E)
        found |= {"bytes_in": there * wire, "bytes_back": back * 2 * padded(self.shape.H)}
        rate = (found["bytes_in"] + found["bytes_back"]) / found.get("device_us", us) * 1e6
        return found | {"bytes_per_s": rate, "link_share": rate / _bench.LINK_BYTES}


def cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def start_processes(count: int) -> int:
    """This command in a process for each GPU; the worst of their exit statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    commands = [
        [sys.executable, __file__, *sys.argv[1:], "--worker", f"{address},{count},{i}"]
        for i in range(count)
    ]
    running = [subprocess.Popen(command) for command in commands]
    while any(status is None for status in [p.poll() for p in running]):
        if any(p.returncode for p in running):  # the others would wait for it
            for p in running:
                p.kill()
        time.sleep(0.2)
    return max(abs(p.returncode) for p in running)


def main(
    shape: str = "deepseek_v3",
    tokens: str = "1,16,128,1024,8192",
    dispatch: str = "all_to_all,low_latency,expanded,one_sided,standard",
    split: str = "ep",
    chunks: str = "1",
    recipe: str = "fp8_block",
    alone: bool = True,
    whole: bool = True,
    stages: bool = typer.Option(False, help="on GPUs: print a GPU's kernels of a layer"),
    devices: int = typer.Option(0, help="on a CPU: so many devices"),
    processes: int = typer.Option(0, help="so many processes, a GPU for each"),
    worker: str = typer.Option("", hidden=True),
    out: Path = Path("bench/parallel.jsonl"),
) -> None:
    """Every (tokens a GPU, dispatch, split): a line for the exchange alone, one for the layer.

    The layer is compared with one GPU's, which has all experts and all tokens.
    """
    if processes and not worker:
        raise typer.Exit(start_processes(processes))
    if worker:
        address, count, number = worker.split(",")
        jax.distributed.initialize(address, int(count), int(number), local_device_ids=[int(number)])
    sizes = [int(t) for t in tokens.split(",")]
    ways = [
        (way, how, pieces)
        for how in split.split(",")
        for way in dispatch.split(",")
        for pieces in map(int, chunks.split(","))
        if "ep" in mesh_of(how).axis_names or way == "standard"
    ]
    run = Run(shape, recipe, sizes, stages, out)
    for t in sizes:
        run.at(t, ways, alone=alone, whole=whole)
    if run.first:
        run.console.print(run.table)
    raise typer.Exit(min(run.failed, 1))


if __name__ == "__main__":
    typer.run(main)

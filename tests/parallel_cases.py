"""The layer over a mesh beside the layer on one device: a script, and the list of what it runs.

    python tests/parallel_cases.py --mode cpu --devices 8 [NAME ...]

Prints JSON lines: a case's results, and that it is done. Modes: "cpu" (forced CPU devices), "gpu"
(those of this process), "processes" (one CPU device each: --process i --processes n --port p). A
script, since the number of devices of a process is fixed when JAX starts; `test_parallel` starts it
and checks every line.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator

CPU_DISPATCHERS = ("standard", "all_to_all", "low_latency", "expanded")
DISPATCHERS = (*CPU_DISPATCHERS, "one_sided")
E, H, INNER, T = 8, 256, 384, 48

# name: mesh axes with their sizes, and what Parallel calls them. "standard" alone goes without ep.
MESHES = {
    "EP": (dict(a=4), dict(ep="a")),
    "EP x TP": (dict(a=2, b=2), dict(ep="a", tp="b")),
    "DP + EP": (dict(a=4), dict(ep="a", dp="a")),
    "DP + EP x TP": (dict(a=4, b=2), dict(ep="a", tp="b", dp=("a", "b"))),
    "TP": (dict(b=2), dict(tp="b")),
    "DP + TP": (dict(b=2), dict(tp="b", dp="b")),
    "tokens by EP, x TP": (dict(a=2, b=2), dict(ep="a", tp="b", dp="a")),
    "tokens by TP, x EP": (dict(a=2, b=2), dict(ep="a", tp="b", dp="b")),
    "tokens by another": (dict(a=2, b=2), dict(ep="a", dp="b")),
    "tokens by EP and another": (dict(a=2, b=2), dict(ep="a", dp=("b", "a"))),
    "DP": (dict(a=4), dict(dp="a")),
}
PRODUCT = tuple(MESHES)[:6]
ON_TWO = ("EP", "DP + EP", "TP", "DP + TP", "DP")


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer on a mesh. `layer` goes to MoEConfig, `router` to RouterConfig; `arch` to
    prepare_params; `how` says what runs it and what its line says."""

    mesh: str
    dispatch: str
    recipe: str = "fp8_block"
    tokens: int = T
    how: str = "whole"
    layer: tuple = ()
    router: tuple = ()
    parallel: tuple = ()
    arch: str | None = None
    shared: int = 1
    options: tuple = ()

    @property
    def bit_for_bit(self) -> bool:
        """The order of additions is that of one device."""
        _, axes = MESHES[self.mesh]
        if set(axes) == {"dp"}:
            return True
        return self.dispatch == "low_latency" and "tp" not in axes


def case(mesh, dispatch, *args, **kw) -> Case:
    kw = {k: tuple(v.items()) if isinstance(v, dict) else v for k, v in kw.items()}
    return Case(mesh, dispatch, *args, **kw)


def has(dispatch: str, mesh: str) -> bool:
    return dispatch == "standard" or "ep" in MESHES[mesh][1]


INPUTS = (
    "random",
    "uneven",
    "a rank without tokens",
    "a rank without work",
    "all to one rank",
    "all -1 on one rank",
    "padding anywhere",
    "an expert twice",
    "odd bits",
    "poison",
)


def cases(mode: str) -> dict[str, Case]:
    """What a mode runs: name -> case."""
    found: dict[str, Case] = {}
    if mode.endswith("processes"):
        for dispatch in DISPATCHERS if "GPU" in mode else CPU_DISPATCHERS:
            found[f"{dispatch}, DP + EP"] = case("DP + EP", dispatch, tokens=45)
        if mode.startswith("2"):
            found["low_latency, routed"] = case(
                "DP + EP", "low_latency", how="routed", router=dict(top_k=3), shared=0
            )
            found["standard, DP + TP"] = case("DP + TP", "standard", "bf16")
        return found
    dispatchers = DISPATCHERS if mode == "gpu" else CPU_DISPATCHERS
    meshes = ON_TWO if mode == "gpu" else PRODUCT
    for mesh in meshes:
        for dispatch in dispatchers:
            if has(dispatch, mesh) and mesh != "DP":
                for recipe, tokens, shared in (("bf16", 45, 0), ("fp8_block", T, 1)):
                    found[f"{dispatch}, {mesh}, {recipe}"] = case(
                        mesh, dispatch, recipe, tokens, shared=shared
                    )
    found["standard, DP"] = case("DP", "standard")
    for dispatch in dispatchers:
        for recipe, layout in (("bf16", "masked"), ("fp8_block", "contiguous")):
            found[f"{dispatch}, routed, {recipe}, {layout}"] = case(
                *("DP + EP", dispatch, recipe),
                how="routed",
                layer=dict(layout=layout),
                router=dict(top_k=3),
                shared=0,
            )
        found[f"{dispatch}, T 1"] = case(
            "EP" if dispatch in ("all_to_all", "expanded") else "DP + EP", dispatch, tokens=1
        )
        for mesh in ("EP", "DP + EP"):
            found[f"{dispatch}, {mesh}, T 0"] = case(mesh, dispatch, tokens=0)
    bounded = [d for d in dispatchers if d != "standard"]
    for dispatch in bounded:
        for strict in (False, True):
            found[f"{dispatch}, bounded{', strict' * strict}"] = case(
                *("DP + EP", dispatch),
                how="bounded",
                parallel=dict(capacity_factor=0.75, strict=strict),
                router=dict(top_k=3),
                shared=0,
            )
    if mode == "gpu":
        return found
    found["all_to_all, bounded, TP"] = case(
        *("DP + EP x TP", "all_to_all"),
        how="bounded",
        parallel=dict(capacity_factor=0.75),
        router=dict(top_k=3),
        shared=0,
    )
    for mesh, dispatch in (
        ("tokens by EP, x TP", "standard"),
        ("tokens by TP, x EP", "all_to_all"),
        ("tokens by another", "expanded"),
        ("tokens by EP and another", "low_latency"),
    ):
        found[f"{dispatch}, {mesh}"] = case(mesh, dispatch, tokens=46)
    odd = dict(num_experts=10, intermediate_size=576)
    found["sizes that do not divide, all_to_all"] = case(
        "DP + EP x TP", "all_to_all", tokens=45, layer=odd
    )
    found["sizes that do not divide, standard"] = case(
        "EP x TP", "standard", "bf16", tokens=45, layer=odd
    )
    found["sizes that do not divide, low_latency"] = case("EP", "low_latency", tokens=45, layer=odd)
    hashed = dict(selection="hash")
    found["hash, all_to_all"] = case("EP", "all_to_all", tokens=45, router=hashed)
    found["hash, standard"] = case("DP + EP", "standard", tokens=45, router=hashed)
    for dispatch, mesh, shared in (
        ("standard", "DP + EP", "replicated"),
        ("standard", "EP x TP", "sharded"),
        ("all_to_all", "DP + EP x TP", "sharded"),
        ("expanded", "EP x TP", "replicated"),
        ("low_latency", "EP", "replicated"),
    ):
        found[f"gated shared experts {shared}, {dispatch}, {mesh}"] = case(
            mesh, dispatch, parallel=dict(shared=shared), shared=2, options=("gate",)
        )
    fused = dict(fused_shared_experts=1)
    found["fused shared experts, low_latency"] = case("EP", "low_latency", router=fused)
    found["fused and gated shared experts, standard"] = case(
        "DP + EP", "standard", router=fused, options=("gate",)
    )
    found["chunks, low_latency"] = case("EP", "low_latency", tokens=45, parallel=dict(chunks=3))
    found["chunks, standard"] = case("DP + EP", "standard", parallel=dict(chunks=2))
    copies = dict(placement=(0, 1, 2, 3, 4, 5, 6, 7, 0, -1, 1, 0))
    found["copies, low_latency"] = case("DP + EP", "low_latency", parallel=copies)
    found["copies, standard"] = case("EP", "standard", parallel=copies)
    for recipe in ("fp8_block", "mxfp8", "mxfp4"):
        for mesh, dispatch in (("DP + EP", "low_latency"), ("DP + TP", "standard")):
            found[f"{recipe}, packed scales, {mesh}"] = case(mesh, dispatch, recipe, arch="sm100")
        if recipe != "fp8_block":
            found[f"{recipe}, EP x TP"] = case("EP x TP", "all_to_all", recipe)
    for mesh, dispatch, vma in (
        ("DP + EP x TP", "standard", True),
        ("DP + EP x TP", "all_to_all", True),
        ("DP + EP x TP", "expanded", False),
        ("EP", "low_latency", True),
        ("tokens by EP, x TP", "standard", True),
        ("tokens by TP, x EP", "all_to_all", True),
    ):
        found[f"in the caller's shard_map, {dispatch}, {mesh}, check_vma {vma}"] = case(
            mesh, dispatch, how="callers", options=("vma",) * vma
        )
    found["an id of no expert, on a rank with room for it"] = case(
        "DP + EP", "low_latency", how="absent", layer=dict(num_experts=10), shared=0
    )
    for dispatch, layout in zip(CPU_DISPATCHERS, ("contiguous", "masked") * 2, strict=True):
        found[f"a broken promise, {dispatch}, {layout}"] = case(
            *("DP + EP", dispatch),
            how="broken",
            layer=dict(num_experts=4, layout=layout),
            shared=0,
        )
    found["axes that are explicit"] = case(
        "DP + EP", "all_to_all", tokens=45, options=("explicit",)
    )
    for mesh in ("DP + EP", "DP + EP x TP"):
        found[f"ids, {mesh}"] = case(mesh, "standard", how="ids", options=("bias",))
    for mesh in MESHES:
        for dispatch in CPU_DISPATCHERS:
            if has(dispatch, mesh):
                found[f"collectives, {dispatch}, {mesh}"] = case(mesh, dispatch, how="collectives")
    found["collectives, chunks"] = case(
        "DP + EP", "all_to_all", how="collectives", parallel=dict(chunks=2)
    )
    for dispatch in DISPATCHERS:
        for backend in ("pallas", "deep_gemm"):
            found[f"for CUDA, {dispatch}, {backend}"] = case(
                "DP + EP", dispatch, how="cuda", layer=dict(backend=backend)
            )
    found["one_sided on a CPU"] = case("DP + EP", "one_sided", how="refused")
    found["params split for another"] = case(
        "EP x TP", "all_to_all", layer=dict(intermediate_size=256), how="misused"
    )
    for dispatch in ("low_latency", "one_sided"):
        found[f"emulator, {dispatch}"] = case(
            *("DP + EP", dispatch),
            tokens=8,
            layer=dict(backend="emulator", intermediate_size=128),
            options=("two",),
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=("cpu", "gpu", "processes"), required=True)
    parser.add_argument("--gpus", action="store_true", help="one for each process")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    if given.mode == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Compiling is nearly all of the time: half of it without LLVM's optimisations.
        os.environ["XLA_FLAGS"] = (
            f"--xla_force_host_platform_device_count={given.devices}"
            " --xla_backend_optimization_level=0"
        )
    if given.mode == "processes" and not given.gpus:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as in conftest
    several = given.mode == "processes"
    if several:
        if not given.gpus:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            f"localhost:{given.port}",
            given.processes,
            given.process,
            local_device_ids=[given.process] if given.gpus else None,
            initialization_timeout=60,
        )
    kind = f"{given.processes}{' GPU' * given.gpus} processes"
    runs = cases(kind if several else given.mode)
    for name in given.names or runs:
        try:
            for line in RUN[runs[name].how](runs[name]):
                print(json.dumps(dict(case=name) | line), flush=True)
        except Exception as error:
            told = dict(case=name, failed=f"{type(error).__name__}: {error}")
            print(json.dumps(told), flush=True)
            traceback.print_exc()
        print(json.dumps(dict(case=name, done=True)), flush=True)
    if several:
        jax.distributed.shutdown()


# --- What runs a case


def on_mesh(case: Case):
    """The mesh, on as many devices as there are where it is one axis, and Parallel."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    import dgmoe_jax as dg

    sizes, axes = MESHES[case.mesh]
    devices = jax.devices()
    if jax.process_count() > 1:
        sizes = {name: len(devices) for name in sizes}
    elif len(sizes) == 1:
        sizes = {name: min(size, len(devices)) for name, size in sizes.items()}
    if "two" in case.options:
        sizes = dict.fromkeys(sizes, 2)
    kind = AxisType.Explicit if "explicit" in case.options else AxisType.Auto
    grid = np.array(devices[: math.prod(sizes.values())]).reshape(*sizes.values())
    mesh = Mesh(grid, tuple(sizes), axis_types=(kind,) * len(sizes))
    return mesh, dg.Parallel(**axes, dispatch=case.dispatch, **dict(case.parallel))


@functools.cache
def layer_of(layer, router, recipe, arch, shared, options):
    import ml_dtypes
    import numpy as np

    import dgmoe_jax as dg

    router = dict(top_k=2, scaling_factor=2.0) | dict(router)
    sizes = dict(num_experts=E, hidden_size=H, intermediate_size=INNER) | dict(layer)
    num_experts, inner = sizes["num_experts"], sizes["intermediate_size"]
    cfg = dg.MoEConfig(
        **sizes, router=dg.RouterConfig(**router), recipe=recipe, num_shared_experts=shared
    )
    rng = np.random.default_rng(0)

    def normal(*shape):
        values = rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5
        return values.astype(ml_dtypes.bfloat16)

    raw = dict(
        gate_weight=normal(num_experts, H),
        w13=normal(num_experts, 2 * inner, H),
        w2=normal(num_experts, H, inner),
    )
    if shared:
        raw |= dict(shared_w13=normal(2 * shared * inner, H), shared_w2=normal(H, shared * inner))
    if "gate" in options:
        raw["shared_gate_weight"] = normal(1, H)
    if "bias" in options:
        raw["gate_bias"] = rng.standard_normal(num_experts).astype(np.float32) * 0.1
    if router.get("selection") == "hash":
        raw["hash_table"] = rng.integers(0, num_experts, (99, cfg.router.top_k), np.int32)
    return cfg, dg.prepare_params(raw, cfg, arch=arch)


def layer(case: Case):
    import jax

    options = tuple(o for o in case.options if o in ("gate", "bias"))
    cfg, params = layer_of(case.layer, case.router, case.recipe, case.arch, case.shared, options)
    return cfg, jax.device_get(params)


def tokens(case: Case):
    import ml_dtypes
    import numpy as np

    x = np.random.default_rng(1).standard_normal((case.tokens, H), np.float32)
    return x.astype(ml_dtypes.bfloat16)


@functools.cache
def alone():
    import jax

    import dgmoe_jax as dg

    return jax.jit(dg.moe_layer, static_argnames=("cfg", "stats"))


def whole_on_every_process(tree):
    """As numpy."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() > 1:
        return multihost_utils.process_allgather(tree, tiled=True)
    return jax.tree.map(np.asarray, tree)


def sharded(case: Case, mesh, parallel, cfg, params):
    """The layer over the mesh, jitted: (x, **given) -> (y, Stats) as numpy."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import dgmoe_jax as dg

    mine = dg.shard_params(params, cfg, mesh, parallel)
    run = jax.jit(
        lambda x, mine, given: dg.sharded_moe_layer(
            x, mine, cfg, mesh, parallel, **given, stats=True
        )
    )

    def call(x, **given):
        if "explicit" in case.options:
            x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
        return whole_on_every_process(run(x, mine, given))

    return call


def compare(got, want) -> dict:
    """Same bits but those of NaN, NaN in the same places, relative errors of all tokens and of the
    worst one."""
    import numpy as np

    got, want = np.asarray(got), np.asarray(want)
    one_nan = [
        np.where(np.isnan(a.astype(np.float32)), a.dtype.type(np.nan), a) for a in (got, want)
    ]
    bits = np.array_equal(*(a.view(np.uint16) for a in one_nan))
    got, want = got.astype(np.float64), want.astype(np.float64)
    nan = np.isnan(want)
    same_nan = got.shape == want.shape and np.array_equal(np.isnan(got), nan)
    if not same_nan:
        return dict(bits=bits, nan=False, error=None, worst=None)
    got, want = np.where(nan, 0, got), np.where(nan, 0, want)
    difference, size = (np.linalg.norm(a, axis=1) for a in (got - want, want))
    # A token that nothing of size contributes to is zero on both sides, or wrong.
    worst = np.max(difference / np.where(size == 0, 1e-30, size), initial=0.0)
    total = np.linalg.norm(difference) / max(np.linalg.norm(size), 1e-30)
    return dict(bits=bits, nan=True, error=float(total), worst=float(worst))


def whole(case: Case) -> Iterator[dict]:
    """By the layer's own router."""
    import jax
    import numpy as np

    from dgmoe_jax import backends

    mesh, parallel = on_mesh(case)
    several = jax.process_count() > 1 and case.dispatch == "one_sided"
    if several and (reason := backends.exchange_unavailable(mesh)):
        yield dict(unavailable=reason)
        return
    cfg, params = layer(case)
    x, given = tokens(case), {}
    if cfg.router.selection == "hash":
        # One token is outside the table.
        given["token_ids"] = (np.arange(len(x), dtype=np.int32) * 7) % 100
    y, stats = sharded(case, mesh, parallel, cfg, params)(x, **given)
    want, counted = alone()(x, params, cfg=cfg, **given, stats=True)
    counts = np.array_equal(stats.expert_counts, counted.expert_counts)
    yield compare(y, want) | dict(
        counts=bool(counts), dropped=int(stats.dropped), exact=case.bit_for_bit, shape=list(y.shape)
    )


def callers(case: Case) -> Iterator[dict]:
    """`moe_layer` in a shard_map of the caller's own."""
    import jax
    from jax.sharding import PartitionSpec

    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    parts = dg.shard_params(params, cfg, mesh, parallel)
    by_token = PartitionSpec(parallel.token_axes)
    run = jax.shard_map(
        lambda x, params: dg.moe_layer(x, params, cfg, parallel=parallel),
        mesh=mesh,
        in_specs=(by_token, jax.tree.map(lambda part: part.sharding.spec, parts)),
        out_specs=by_token,
        check_vma="vma" in case.options,
    )
    x = tokens(case)
    got = jax.jit(run)(x, parts)
    yield compare(whole_on_every_process(got), alone()(x, params, cfg=cfg)) | dict(exact=False)


def absent(case: Case) -> Iterator[dict]:
    """An id past the last expert: the row of its token, NaN, is read on no rank."""
    import numpy as np

    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    x, given = tokens(case), np.full((case.tokens, 2), (0, cfg.num_experts - 1), np.int32)
    x[7], given[7] = np.nan, cfg.num_experts
    routing = dg.Routing(given, np.ones(given.shape, np.float32))
    y, _ = sharded(case, mesh, parallel, cfg, params)(x, routing=routing)
    yield compare(y, alone()(x, params, cfg=cfg, routing=routing)) | dict(
        zero=bool((y[7].astype(np.float32) == 0).all())
    )


def broken(case: Case) -> Iterator[dict]:
    """Each rank has one expert, and the plan of all tokens room for one slot of each of them; some
    name it twice."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    parts = dg.shard_params(params, cfg, mesh, parallel)
    plan = dg.plan(cfg, case.tokens, ep_size=mesh.shape["a"], distinct_ids=True)
    given = np.tile(np.array([0, 1], np.int32), (case.tokens, 1))
    given[::3, 1] = 0
    routing = dg.Routing(given, np.ones(given.shape, np.float32))
    by_token = PartitionSpec("a")
    run = jax.shard_map(
        lambda x, routing, params: dg.moe_layer(
            x, params, cfg, routing=routing, plan=plan, parallel=parallel
        ),
        mesh=mesh,
        in_specs=(by_token, by_token, jax.tree.map(lambda part: part.sharding.spec, parts)),
        out_specs=by_token,
    )
    x = tokens(case)
    got = jax.jit(run)(x, routing, parts)
    got, want = (np.array(a) for a in (got, alone()(x, params, cfg=cfg, routing=routing)))
    want[::3] = np.nan
    yield compare(got, want)


def ids(case: Case) -> Iterator[dict]:
    """Every rank's own routing of its tokens, which is all that any dispatcher goes by."""
    import jax
    import numpy as np
    from jax.sharding import PartitionSpec

    from dgmoe_jax.layer import _routed

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    run = lambda x, params: _routed(x, None, None, None, params, cfg, "xla")[0]  # noqa: E731
    by_token = PartitionSpec(parallel.token_axes)
    split = jax.shard_map(
        run, mesh=mesh, in_specs=(by_token, PartitionSpec()), out_specs=by_token, check_vma=False
    )
    x = tokens(case)
    got, want = (jax.tree.map(np.asarray, jax.jit(f)(x, params)) for f in (split, run))
    yield dict(
        ids=bool((got.topk_ids == want.topk_ids).all()),
        weights=bool((got.topk_weights == want.topk_weights).all()),
    )


# --- Routing that the caller brings, against the order in which a dispatcher adds


def routings(ranks: int, num_experts: int, x, top_k: int) -> Iterator[tuple]:
    """name, x, topk_ids, topk_weights, valid. Weights have few bits, so that f32 products are exact
    and the order of additions alone decides the result; but in one input their low halves are what
    bf16 calls a signalling NaN, which must cross as it is."""
    import numpy as np

    rng = np.random.default_rng(2)
    count, each, part = len(x), num_experts // ranks, len(x) // ranks
    distinct = rng.random((count, num_experts)).argsort(axis=1)[:, :top_k].astype(np.int32)
    few_bits = (rng.integers(16, 32, distinct.shape) / np.float32(64)).astype(np.float32)
    everywhere = np.ones(count, bool)
    for name in INPUTS:
        own, ids, valid, weights = x.copy(), distinct.copy(), everywhere.copy(), few_bits
        if name == "uneven":  # rank r's tokens mostly to rank r + 1, and not all slots
            owner = np.arange(count) // part
            ids[:, 0] = (owner + 1) % ranks * each
            ids[:, 1] = np.where(rng.random(count) < 0.8, (owner + 1) % ranks * each + 1, -1)
            ids[:, 2:] = -1
        elif name == "a rank without tokens":
            valid[part : 2 * part] = False
        elif name == "a rank without work":  # the last
            ids = np.where(ids >= num_experts - each, -1, ids)
        elif name == "all to one rank":
            ids = np.tile(np.arange(top_k, dtype=np.int32) % each, (count, 1))
        elif name == "all -1 on one rank":
            ids[:part] = -1
        elif name == "padding anywhere":
            valid = rng.random(count) < 0.6
            own[~valid] = np.nan
        elif name == "an expert twice":
            ids[:, 1] = ids[:, 0]
            ids[::3, 2] = ids[::3, 0]
        elif name == "odd bits":
            weights = (few_bits.view(np.int32) | 0x7FA1).view(np.float32)
        elif name == "poison":
            own[3, 5], own[count - 2, 7] = np.nan, np.inf
        yield name, own, ids, weights, valid


def in_order(case, ranks, experts, rows, ids, weights, scaling, lost=None):
    """What the dispatcher's order of additions gives, in numpy: rows [T, k, H], of the expert in
    each slot. `experts`: of a rank; lost [T, k]: slots that do not arrive."""
    import ml_dtypes
    import numpy as np

    bf16 = lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float32)  # noqa: E731
    ids = ids if lost is None else np.where(lost, -1, ids)
    weighted = np.where((ids >= 0)[..., None], rows * weights[..., None], np.float32(0))
    owner = np.where(ids >= 0, ids // experts, -1)

    def added(parts):
        total = np.zeros_like(parts[0])
        for part in parts:
            total = total + part
        return total

    def of(rank):
        mine = (owner == rank)[..., None]
        return added(np.moveaxis(np.where(mine, weighted, np.float32(0)), 1, 0))

    slots = np.moveaxis(weighted, 1, 0)
    if case.dispatch == "standard":
        return bf16(added([bf16(of(rank) * scaling) for rank in range(ranks)]))
    if case.dispatch == "low_latency":
        return bf16(added(slots) * scaling)
    if case.dispatch == "expanded":
        return bf16(added([bf16(slot) for slot in slots]) * scaling)
    return bf16(added([bf16(of(rank)) for rank in range(ranks)]) * scaling)


def rows_of(case, cfg, params, x, ids):
    """[T, k, H] f32: the row of each slot's expert, by one device, a slot at a time."""
    import numpy as np

    import dgmoe_jax as dg

    cfg = dataclasses.replace(cfg, router=dataclasses.replace(cfg.router, scaling_factor=1.0))
    rows = []
    for slot in range(ids.shape[1]):
        routing = dg.Routing(ids[:, slot : slot + 1], np.ones((len(x), 1), np.float32))
        rows.append(np.asarray(alone()(x, params, cfg=cfg, routing=routing)).astype(np.float32))
    return np.stack(rows, axis=1)


def routed(case: Case) -> Iterator[dict]:
    import numpy as np

    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    run = sharded(case, mesh, parallel, cfg, params)
    ranks, top_k = mesh.shape["a"], cfg.router.top_k
    for name, x, ids, weights, valid in routings(ranks, cfg.num_experts, tokens(case), top_k):
        routing = dg.Routing(ids, weights)
        y, stats = run(x, routing=routing, valid=valid)
        live = np.where(valid[:, None], ids, -1)
        rows = rows_of(case, cfg, params, x, live)
        want = in_order(
            case, ranks, cfg.num_experts // ranks, rows, live, weights, cfg.router.scaling_factor
        )
        want = want.astype(y.dtype)
        near = np.asarray(alone()(x, params, cfg=cfg, routing=routing, valid=valid))
        counts = np.bincount(live[live >= 0], minlength=cfg.num_experts)
        # Ranks add up in an order of their own where there are more than two.
        exact = (case.dispatch != "standard" or ranks == 2) and name != "odd bits"
        yield compare(y, want) | dict(
            input=name,
            exact=exact,
            one_device=compare(y, near),
            counts=bool((stats.expert_counts == counts).all()),
            dropped=int(stats.dropped),
            padding=bool((y[~valid].astype(np.float32) == 0).all()),
            poisoned=np.flatnonzero(np.isnan(y.astype(np.float32)).any(1)).tolist(),
        )


def bounded(case: Case) -> Iterator[dict]:
    """Rows beyond a bound: which they are, in numpy."""
    import numpy as np

    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    run = sharded(case, mesh, parallel, cfg, params)
    ranks, top_k, each = mesh.shape["a"], cfg.router.top_k, cfg.num_experts // mesh.shape["a"]
    for name, x, ids, weights, valid in routings(ranks, cfg.num_experts, tokens(case), top_k):
        if name not in ("random", "all to one rank", "padding anywhere", "an expert twice"):
            continue
        live = np.where(valid[:, None], ids, -1)
        sources = live.reshape(ranks, -1, top_k)
        count = sources.shape[1]
        mean = count * top_k / ranks
        most = parallel.capacity_factor * (
            mean if case.dispatch == "expanded" else min(mean, count)
        )
        most = -(-math.ceil(most) // 8) * 8
        lost, rows_lost = np.zeros(sources.shape, bool), 0
        for source, those in enumerate(sources):
            for rank in range(ranks):
                mine = (those >= 0) & (those // each == rank)
                if case.dispatch == "expanded":
                    slots = np.argwhere(mine)
                    order = np.argsort(those[mine], kind="stable")  # by expert, then (token, slot)
                    late = slots[order][most:]
                    lost[source, late[:, 0], late[:, 1]] = True
                    rows_lost += len(late)
                else:
                    late = np.flatnonzero(mine.any(axis=1))[most:]
                    lost[source, late] |= mine[late]
                    rows_lost += len(late)
        lost = lost.reshape(ids.shape)
        routing = dg.Routing(ids, weights)
        y, stats = run(x, routing=routing, valid=valid)
        rows = rows_of(case, cfg, params, x, live)
        want = in_order(
            case, ranks, each, rows, live, weights, cfg.router.scaling_factor, lost
        ).astype(y.dtype)
        if parallel.strict:
            want[lost.any(axis=1)] = np.nan
        yield compare(y, want) | dict(
            input=name, exact=parallel.tp is None, want=rows_lost, dropped=int(stats.dropped)
        )


# --- What it is lowered to

COLLECTIVES = ("all_to_all", "all_gather", "all_reduce", "reduce_scatter")
ANY = (*COLLECTIVES, "collective_permute", "collective_broadcast", "send", "recv")


def lowered(case: Case, platform: str) -> str:
    import jax
    import jax.numpy as jnp

    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    mine = dg.shard_params(params, cfg, mesh, parallel)
    x = jax.ShapeDtypeStruct((case.tokens, H), jnp.bfloat16)
    run = jax.jit(lambda x, mine: dg.sharded_moe_layer(x, mine, cfg, mesh, parallel))
    return run.trace(x, mine).lower(lowering_platforms=(platform,)).as_text()


def count(text: str) -> dict[str, int]:
    """Of operations by name, those that are there."""
    found = {name: len(re.findall(rf"stablehlo\.{name}\b", text)) for name in ANY}
    return {name: number for name, number in found.items() if number}


def collectives(case: Case) -> Iterator[dict]:
    yield dict(collectives=count(lowered(case, "cpu")))


def cuda(case: Case) -> Iterator[dict]:
    text = lowered(case, "cuda")
    targets = re.findall(r"stablehlo\.custom_call @([\w.]+)", text)
    assert len(targets) == text.count("stablehlo.custom_call")
    yield dict(
        collectives=count(text),
        modules=text.count("module @"),
        targets=sorted({re.sub(r"_v\d+$", "", target) for target in targets}),
        host=re.findall(r"callback|infeed|outfeed", text),
    )


def refused(case: Case) -> Iterator[dict]:
    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    try:
        sharded(case, mesh, parallel, cfg, params)(tokens(case))
    except NotImplementedError as error:
        yield dict(error=str(error))


def misused(case: Case) -> Iterator[dict]:
    """Shapes fit in all of these, and the order of w13 in none."""
    import dgmoe_jax as dg

    mesh, parallel = on_mesh(case)
    cfg, params = layer(case)
    x, parts = tokens(case), dg.shard_params(params, cfg, mesh, parallel)
    for misuse in (
        lambda: dg.sharded_moe_layer(x, params, cfg, mesh, parallel),
        lambda: dg.sharded_moe_layer(x, parts, cfg, mesh, dataclasses.replace(parallel, tp=None)),
        lambda: dg.shard_params(parts, cfg, mesh, parallel),
        lambda: dg.moe_layer(x, parts, cfg),
        lambda: dg.save("never.safetensors", cfg, parts),
    ):
        try:
            misuse()
        except ValueError as error:
            yield dict(error=str(error))


RUN: dict[str, Callable[[Case], Iterator[dict]]] = {
    f.__name__: f
    for f in (
        whole,
        callers,
        absent,
        broken,
        ids,
        routed,
        bounded,
        collectives,
        cuda,
        refused,
        misused,
    )
}

if __name__ == "__main__":
    sys.exit(main())

"""Times the whole layer, router included, beside its controls: checks first, then writes JSONL.

python scripts/bench_layer.py --shape deepseek_v3 --tokens 1,16,128 --recipe fp8_block
python scripts/bench_layer.py --stages --shape qwen3_30b --tokens 64
python scripts/bench_layer.py --command-buffers
python scripts/bench_layer.py --plot
python scripts/bench_layer.py --table

What the controls need is in `interop/sglang.py` and `_controls.py`; what cannot run is skipped with
the reason in the line.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

# torch takes its share of the device's memory beside JAX.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import _bench
import _controls
import _report
import _stages
import jax
import jax.numpy as jnp
import numpy as np
import typer
from dgmoe_jax.interop import sglang
from rich.console import Console
from rich.table import Table

import dgmoe_jax as dg
from dgmoe_jax.quantize import stored
from dgmoe_jax.weights import paths

CONTROLS = ("sglang", "gemms", "ragged_dot")
DECODE_TOKENS = 64
SCANNED_TOKENS = DECODE_TOKENS
COMPILE_SECONDS = 200
COMMAND_BUFFER_TIMES = {
    "one_call_us": "one call",
    "scan_us": "in a scan",
    "fresh_us": "calls, fresh",
    "donated_us": "calls, donated",
}
COLUMNS = {
    "shape": "shape",
    "T": "T",
    "recipe": "recipe",
    "backend": "backend",
    "layout": "layout",
    "alignment": "align",
    "us": "us",
    "one_call_us": "one call",
    "floor_us": "floor",
    "budget_us": "budget",
    "gemms_us": "GEMMs",
    "control_us": "SGLang",
    "control_eager_us": "eager",
    "floor_share": "of floor",
    "control_ratio": "/ SGLang",
    "tflops": "TFLOP/s",
    "weight_gb_per_s": "GB/s",
    "launches": "launches",
}


@dataclass(frozen=True)
class Shape:
    E: int
    k: int
    H: int
    I: int  # noqa: E741
    tokens: tuple[int, ...]


SHAPES = {
    "deepseek_v3": Shape(256, 8, 7168, 2048, (1, 16, 128, 1024, 4096, 16384)),
    "deepseek_v3_ep8": Shape(32, 8, 7168, 2048, (128, 1024, 8192)),
    "qwen3_30b": Shape(128, 8, 2048, 768, (1, 64, 1024, 8192)),
    "tiny": Shape(8, 2, 256, 128, (1, 16)),
}


def operands(cfg: dg.MoEConfig) -> dg.recipes.Recipe:
    """What the layer multiplies on this device."""
    return dg.recipes.run_on(cfg.recipe, dg.backends.current_arch(), cfg.backend).operands


def random_params(cfg: dg.MoEConfig, key: jax.Array) -> dg.MoEParams:
    """Gaussian weights in the layer's formats, an expert at a time (no bf16 copy of all)."""
    fmt = operands(cfg).weights
    # FP4 is what a checkpoint holds, whatever becomes of it.
    source = dg.recipes.RECIPES[cfg.recipe].weights if cfg.recipe == "mxfp4" else fmt
    keys = jax.random.split(key, 3)

    def stack(key, n, k):
        def one(key):
            weight = jax.random.normal(key, (n, k), jnp.float32) * k**-0.5
            scaled = dg.quantize(weight.astype(jnp.bfloat16), source)
            if source == fmt:
                return scaled.values, scaled.scales
            values, scales, _ = paths.convert(scaled.values, scaled.scales, source, fmt)
            return values, stored(scales, fmt, n)

        values, scales = jax.jit(lambda keys: jax.lax.map(one, keys))(
            jax.random.split(key, cfg.num_experts)
        )
        return dg.Scaled(values, scales, fmt)

    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    gate = jax.random.normal(keys[0], (cfg.num_experts, hidden)) * hidden**-0.5
    experts = dg.ExpertWeights(stack(keys[1], 2 * inner, hidden), stack(keys[2], hidden, inner))
    return dg.MoEParams(gate.astype(jnp.bfloat16), None, experts, None, None)


@functools.partial(jax.jit, static_argnames="router")
def _work(xs: jax.Array, gate: jax.Array, router: dg.RouterConfig) -> _controls.Work:
    def routed(x):
        return dg.route(jnp.dot(x, gate.T, preferred_element_type=jnp.float32), router)

    routing = jax.lax.map(routed, xs)
    return routing.topk_ids, routing.topk_weights


def make_work(cfg: dg.MoEConfig, params: dg.MoEParams, num_tokens: int) -> _controls.Work:
    """Different tokens for as many layers as one program times, and where they go.

    Enough of them that the 0.1 to 0.2 ms from the host's call to its answer do not show.
    """
    layers = 32 if num_tokens <= SCANNED_TOKENS else 4
    shape = (layers, num_tokens, cfg.hidden_size)
    xs = jax.random.normal(jax.random.key(num_tokens), shape, jnp.bfloat16)
    return _controls.Work(xs, *_work(xs, params.gate_weight, cfg.router))


@jax.jit
def _expert(token: jax.Array, e: jax.Array, experts: dg.ExpertWeights) -> jax.Array:
    matvec = functools.partial(jnp.dot, precision="highest")

    def weight(scaled):
        scales = None if scaled.scales is None else scaled.scales[e]
        return dg.dequantize(dg.Scaled(scaled.values[e], scales, scaled.format))

    gate, up = jnp.split(matvec(weight(experts.w13), token.astype(jnp.float32)), 2)
    return matvec(weight(experts.w2), gate * jax.nn.sigmoid(gate) * up)


def relative_error(
    y: jax.Array, x: jax.Array, params: dg.MoEParams, router: dg.RouterConfig
) -> float:
    """Of a few tokens against unquantised activations and dequantised weights."""
    some = np.unique(np.linspace(0, x.shape[0] - 1, 4).astype(int))
    logits = np.asarray(x[some], np.float64) @ np.asarray(params.gate_weight, np.float64).T
    routing = dg.route(jnp.asarray(logits, jnp.float32), router)
    expected = np.zeros((some.size, x.shape[1]))
    for row, token in enumerate(some):
        for e, weight in zip(routing.topk_ids[row], routing.topk_weights[row], strict=True):
            expected[row] += float(weight) * np.asarray(_expert(x[token], e, params.experts))
    got = np.asarray(y[some], np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def bounds(cfg: dg.MoEConfig, work: _controls.Work) -> dict:
    """FLOPs, bytes of the weights that this routing touches (mean over layers), and the floor:
    max(FLOPs / peak, weight bytes / copy rate)."""
    _, tokens, top_k = work.ids.shape
    per_expert = 3 * cfg.hidden_size * cfg.intermediate_size
    flops = 2 * tokens * top_k * per_expert
    fmt = operands(cfg).weights
    width = np.prod(fmt.values_shape(128, 128)) * jnp.dtype(fmt.dtype).itemsize / 128**2
    active = np.mean([np.unique(ids).size for ids in np.asarray(work.ids)])
    weight_bytes = float(active) * per_expert * width
    floor = max(flops / _bench.PEAK_FLOPS[cfg.recipe], weight_bytes / _bench.PEAK_BYTES) * 1e6
    return {"flops": flops, "weight_bytes": weight_bytes, "floor_us": floor}


def element_bytes(cfg: dg.MoEConfig, num_tokens: int) -> int:
    """What permute + quantise, act + quantise and unpermute must read and write."""
    fmt = operands(cfg).activations
    assignments = num_tokens * cfg.router.top_k

    def row(width):
        return 2 * width if fmt.group is None else width + 4 * width // fmt.group[1]

    hidden, inner = cfg.hidden_size, cfg.intermediate_size
    permute = 2 * hidden * num_tokens + assignments * row(hidden)
    act = assignments * (4 * inner + row(inner))
    unpermute = assignments * 2 * hidden + 2 * hidden * num_tokens
    return permute + act + unpermute


def budget_us(gemms_us: float | None, num_bytes: int, copy_rate: float) -> float | None:
    """GEMM-only time, the element kernels' bytes at 90 % of the copy rate, and 12 us."""
    return None if gemms_us is None else gemms_us + num_bytes / (0.9 * copy_rate) * 1e6 + 12


@functools.partial(jax.jit, static_argnames="cfg")
def layer(x: jax.Array, params: dg.MoEParams, cfg: dg.MoEConfig) -> jax.Array:
    return dg.moe_layer(x, params, cfg)


@functools.partial(jax.jit, static_argnames="cfg")
def _scanned(xs: jax.Array, params: dg.MoEParams, cfg: dg.MoEConfig) -> jax.Array:
    step = lambda carry, x: (carry, dg.moe_layer(x, params, cfg))  # noqa: E731
    return jax.lax.scan(step, 0, xs, unroll=min(4, xs.shape[0]))[1]


@functools.partial(jax.jit, static_argnames="cfg")
def _apart(xs: list[jax.Array], params: dg.MoEParams, cfg: dg.MoEConfig) -> list[jax.Array]:
    return [layer(x, params, cfg) for x in xs]


def layers_us(cfg: dg.MoEConfig, params: dg.MoEParams, xs: jax.Array) -> float:
    """Device time of one layer: all of `xs` inside one program, a few programs in the queue.

    A scan keeps its buffers' addresses, as decoding does, but copies x and y of each layer, which
    shows once they are large: then each is an array of its own.
    """
    scanned, queued = xs.shape[1] <= SCANNED_TOKENS, _bench.programs_queued(xs.shape[1])
    run, args, repeats = (_scanned, xs, 20) if scanned else (_apart, list(xs), 5)
    call = lambda: [run(args, params, cfg) for _ in range(queued)]  # noqa: E731
    return _bench.median_us(call, repeats=repeats) / xs.shape[0] / queued


def measure(
    cfg: dg.MoEConfig, params: dg.MoEParams, work: _controls.Work, stages: bool
) -> tuple[dict, jax.Array]:
    """Check, then time, one configuration; also its result on the first tokens."""
    x = work.xs[0]
    compiled = layer.lower(x, params, cfg).compile()
    y = compiled(x, params)
    error = relative_error(y, x, params, cfg.router)
    # Scales that are powers of two leave more of FP8's range unused.
    low, high = {"bf16": (0.0, 0.006), "fp8_block": (0.04, 0.05)}.get(cfg.recipe, (0.035, 0.075))
    if not low <= error <= high:
        raise ValueError(f"relative error {error}, not timed")
    plan = dg.plan(cfg, x.shape[0])
    # Through jit as a user calls it, where its microseconds show and a second compilation is short.
    call = (
        (lambda: layer(x, params, cfg)) if len(x) <= DECODE_TOKENS else lambda: compiled(x, params)
    )
    found = {
        "backend": plan.backend,
        "layout": plan.layout,
        "alignment": plan.alignment,
        "capacity": plan.capacity,
        "rows": plan.rows,
        "layers": len(work.xs),
        "queued": _bench.programs_queued(len(x)),
        "us": layers_us(cfg, params, work.xs),
        "one_call_us": _bench.median_us(call),
        "error": error,
        "bytes_predicted": plan.workspace_bytes,
        "bytes_measured": compiled.memory_analysis().temp_size_in_bytes,
    }
    if stages:
        try:
            found["stages"] = _stages.stages(call)
            found["launches"] = sum(stage["launches"] for stage in found["stages"])
        except Exception as problem:
            found["stages_failed"] = _controls.why(problem)
    return found, y


def derived(found: dict, limits: dict, num_bytes: int, copy_rate: float) -> dict:
    """What follows from the times: rates, shares and the budget."""
    us, control = found["us"], found.get("control_us")
    return {
        "tflops": limits["flops"] / us / 1e6,
        "weight_gb_per_s": limits["weight_bytes"] / us / 1e3,
        "floor_us": limits["floor_us"],
        "floor_share": limits["floor_us"] / us,
        "control_ratio": us / control if control else None,
        "budget_us": budget_us(found.get("gemms_us"), num_bytes, copy_rate),
    }


def cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"
    return str(value)


class Bench:
    """One run: its configurations, the lines they gave, and whether any failed."""

    def __init__(self, out: Path, controls: Iterable[str], stages: bool):
        self.out, self.controls, self.stages = out, tuple(controls), stages
        self.console = Console(width=200)
        self.env = _bench.environment()
        copy = functools.partial(_bench.copy_bytes_per_s, 2**26)
        if not _controls.unavailable():
            copy = _controls.copy_bytes_per_s
        elif jax.default_backend() == "gpu":
            copy = _bench.copy_bytes_per_s
        self.copy_rate = copy()
        self.failed = 0
        self.start = time.monotonic()
        self.console.print(
            f"{self.env['gpu']}, copy {self.copy_rate / 1e12:.2f} TB/s, times in us",
            *COLUMNS.values(),
            sep=" | ",
            highlight=False,
        )

    def run(self, name: str, recipe: str, sizes: Iterable[int], configs: list[dict]) -> None:
        """Every number of tokens in every configuration (backend, layout) of one shape."""
        s = SHAPES[name]
        base = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe=recipe)
        made: dict[dg.recipes.Format, dg.MoEParams] = {}

        def params_of(cfg: dg.MoEConfig) -> dg.MoEParams:
            fmt = operands(cfg).weights
            if fmt not in made:
                made[fmt] = random_params(cfg, jax.random.key(0))
            return made[fmt]

        params = params_of(replace(base, **configs[0]))
        for num_tokens in sizes:
            head = {"bench": "layer", **self.env, "copy_bytes_per_s": self.copy_rate}
            head |= {"shape": name, "E": s.E, "k": s.k, "H": s.H, "I": s.I}
            head |= {"T": num_tokens, "recipe": recipe}
            work = make_work(base, params, num_tokens)
            controls = None
            for config in configs:
                cfg = replace(base, **config)
                try:
                    params = params_of(cfg)
                    found, y = measure(cfg, params, work, self.stages)
                    found["weights"] = params.experts.w13.format.name
                    self.note(f"{name}, T={num_tokens}: {found['us']:.1f} us; now controls")
                    # Once, beside the first layer that ran, whose result they are held against.
                    if dg.recipes.is_read_by("deep_gemm", recipe, params.experts.w13.format):
                        controls = controls or self.control(cfg, params, work, y)
                    found |= controls or {"control": "reads no such weights", "control_us": None}
                    limits = bounds(cfg, work)
                    found |= derived(found, limits, element_bytes(cfg, num_tokens), self.copy_rate)
                except Exception as problem:
                    self.failed += 1
                    found = {**config, "failed": f"{type(problem).__name__}: {problem}"}
                self.report(head | found)

    def control(self, cfg, params, work, y) -> dict:
        found = {"control": "not asked for", "control_us": None}
        if "sglang" in self.controls:
            found = _controls.sglang(cfg, params, work, y)
        if "gemms" in self.controls:
            found |= _controls.gemms(cfg, params, work)
        if "ragged_dot" in self.controls:
            found |= _controls.ragged_dot(cfg, params, work)
        return found

    def note(self, text: str) -> None:
        self.console.print(f"{time.monotonic() - self.start:4.0f} s {text}", style="dim")

    def report(self, record: dict) -> None:
        _bench.append(self.out, record)
        if "failed" in record:
            self.console.print(record["shape"], record["T"], record["failed"], style="red")
            return
        self.console.print(" | ".join(cell(record.get(c)) for c in COLUMNS), highlight=False)
        if not record["control_us"]:
            self.console.print(f"  {record['control']}", highlight=False)
        if "stages_failed" in record:
            self.console.print(f"  stages: {record['stages_failed']}", style="red")
        if "stages" in record:
            table = Table("kernel", "launches", "us", "gap before")
            for stage in record["stages"]:
                table.add_row(stage["kernel"][:110], *(cell(v) for v in [*stage.values()][1:]))
            self.console.print(table)


def compile_gemms(name: str, recipe: str, sizes: Iterable[int], layout: str) -> None:
    """DeepGEMM's kernels of one shape and layout, on weights that are zero."""
    s = SHAPES[name]
    cfg = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe=recipe)
    types = jax.eval_shape(functools.partial(random_params, cfg), jax.random.key(0))
    params = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), types)
    for num_tokens in sizes:
        if layout in _controls.gemm_layouts(num_tokens * s.k / s.E):
            try:
                _controls.compile_gemms(cfg, params, num_tokens, layout)
            except MemoryError:
                continue


def compile_all(names: list[str], recipes: list[str], tokens: str) -> None:
    """Compile for the controls side by side, before anything is timed.

    DeepGEMM takes some 10 s a kernel and compiles in one thread of a process only.
    """
    running = []
    for name, recipe in itertools.product(names, recipes):
        s, sizes = SHAPES[name], [int(t) for t in tokens.split(",") if t] or SHAPES[name].tokens
        for layout in sorted({f for t in sizes for f in _controls.gemm_layouts(t * s.k / s.E)}):
            command = [sys.executable, __file__, "--compile-gemms", layout, "--shape", name]
            command += ["--recipe", recipe, "--tokens", ",".join(map(str, sizes))]
            running.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    sglang.unavailable()
    for process in running:
        # What did not compile here does so on first use, which shows what is wrong.
        try:
            process.wait(COMPILE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def command_buffers(
    name: str, recipe: str, sizes: Iterable[int], config: dict[str, str], out: Path
) -> None:
    """The layer with and without XLA's command buffers: called once, in a scan, where buffers keep
    their addresses from layer to layer, and from call to call with new buffers or donated ones."""
    s, console = SHAPES[name], Console(width=200)
    cfg = dg.MoEConfig(s.E, s.H, s.I, dg.RouterConfig(top_k=s.k), recipe=recipe, **config)
    params = random_params(cfg, jax.random.key(0))
    calls = 32

    def block(x, params):
        # Normalised, with a residual: no layer's output may decide where all tokens go.
        x = (x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True))).astype(x.dtype)
        return x + dg.moe_layer(x, params, cfg)

    def scan(xs, params):
        return jax.lax.scan(lambda c, x: (c, dg.moe_layer(x, params, cfg)), 0, xs, unroll=4)[1]

    def chain(fn: Callable, x: jax.Array, keep: bool) -> list[jax.Array]:
        kept = [x + 0]
        for _ in range(calls):
            kept.append(fn(kept[-1], params))
        return kept if keep else kept[-1:]

    table = Table("shape", "T", "backend", "command buffers", *COMMAND_BUFFER_TIMES.values())
    for num_tokens, on in itertools.product(sizes, (True, False)):
        options = None if on else {"xla_gpu_enable_command_buffer": ""}
        jit = functools.partial(jax.jit, compiler_options=options)
        fresh, donating, scanned = jit(block), jit(block, donate_argnums=0), jit(scan)
        xs = make_work(cfg, params, num_tokens).xs
        x = xs[0]
        times = {
            "one_call_us": _bench.median_us(lambda x=x, f=fresh: f(x, params)),
            "scan_us": _bench.median_us(lambda xs=xs, f=scanned: f(xs, params)) / len(xs),
            "fresh_us": _bench.median_us(lambda x=x, f=fresh: chain(f, x, True)) / calls,
            "donated_us": _bench.median_us(lambda x=x, f=donating: chain(f, x, False)) / calls,
        }
        record = {"bench": "command_buffers", **_bench.environment(), "shape": name}
        record |= {"E": s.E, "k": s.k, "H": s.H, "I": s.I, "T": num_tokens, "recipe": recipe}
        record |= {"backend": dg.plan(cfg, num_tokens).backend, "command_buffers": on}
        _bench.append(out, record | times)
        row = (name, num_tokens, record["backend"], "on" if on else "off", *times.values())
        table.add_row(*map(cell, row))
    console.print(table)


def main(
    shape: str = "deepseek_v3,deepseek_v3_ep8,qwen3_30b",
    tokens: str = "",
    recipe: str = "fp8_block",
    backend: str = "auto",
    controls: str = ",".join(CONTROLS),
    stages: bool = False,
    buffers: bool = typer.Option(False, "--command-buffers"),
    compile_first: bool = True,
    compile_only: str = typer.Option("", "--compile-gemms", hidden=True),
    plot: bool = False,
    table: bool = False,
    out: Path = Path("bench/layer.jsonl"),
) -> None:
    """Every (shape, tokens, recipe, backend), each a comma-separated list; a line each.

    A backend may name its layout, as in deep_gemm/masked; without, the plan chooses.

    --stages adds time per kernel. --command-buffers compares only the layer with and without
    XLA's command buffers, at decode sizes; --plot only draws OUT, as a PNG beside it, and --table
    only prints it, as the README has it.
    """
    if table:
        for kind in recipe.split(","):
            print(_report.table(_report.read(out), kind))
        return
    if plot:
        _report.draw(out, out.with_suffix(".png"))
        print(out.with_suffix(".png"))
        return
    names, recipes = shape.split(","), recipe.split(",")
    asked = [c for c in controls.split(",") if c]
    for given, known, option in ((names, SHAPES, "--shape"), (asked, CONTROLS, "--controls")):
        unknown = set(given) - set(known)
        if unknown:
            raise typer.BadParameter(
                f"{sorted(unknown)}: known are {list(known)}", param_hint=option
            )
    if (stages or buffers) and jax.default_backend() != "gpu":
        option = "--stages" if stages else "--command-buffers"
        raise typer.BadParameter(
            f"needs a GPU; JAX runs on {jax.default_backend()}", param_hint=option
        )
    configs = [
        dict(zip(("backend", "layout"), choice.split("/"), strict=False))
        for choice in backend.split(",")
    ]
    work = [
        (name, kind, [int(t) for t in tokens.split(",") if t] or SHAPES[name].tokens)
        for name, kind in itertools.product(names, recipes)
    ]
    if compile_only:
        for one in work:
            compile_gemms(*one, compile_only)
        return
    if buffers:
        for (name, kind, sizes), config in itertools.product(work, configs):
            few = sizes if tokens else [t for t in sizes if t <= DECODE_TOKENS]
            command_buffers(name, kind, few, config, out)
        return
    if compile_first and {"sglang", "gemms"} & set(asked) and not _controls.unavailable():
        compile_all(names, recipes, tokens)
    bench = Bench(out, asked, stages)
    for one in work:
        bench.run(*one, configs)
    if bench.failed:
        print(f"{bench.failed} failed", file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

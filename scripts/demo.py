"""SmolLM2-135M-Instruct as a sparse model, its MLP blocks run by dgmoe_jax.

Every dense SwiGLU block is cut into 12 experts of 128 channels, the channels that add most to the
output first. All 12 at weight 1 are the dense block again, which is checked before anything is
measured. With fewer, a router per layer, fitted on the first half of the text, picks the experts
whose output it predicts to be largest. Perplexity is measured on the second half. Nothing is
trained, so the loss is that of leaving experts out.
"""

import math
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import smollm
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

import dgmoe_jax as dg

NUM_EXPERTS = 12
WINDOW = 512
STYLES = {"bf16": "o-", "fp8_block": "s--", "mxfp8": "^:", "mxfp4": "v-."}
# Relative, Frobenius. The layer rounds to bf16 (0.17 % rms) gate and up, their product, each
# expert's output and the sum; the float32 control does not.
BF16_TOLERANCE = 0.006
TITLE = f"SmolLM2-135M-Instruct on CPython {platform.python_version()}'s language reference"


def text_windows(tokenizer) -> np.ndarray:
    """CPython's language reference as token windows [N, WINDOW] int32.

    Topics repeat each other at length, so a paragraph counts once: otherwise the half that the
    routers are fitted on would hold parts of the half that is scored.
    """
    paragraphs = dict.fromkeys(
        p for name in sorted(topics) for p in re.split(r"\n\n+", topics[name].strip())
    )
    tokens = np.array(tokenizer.encode("\n\n".join(paragraphs)).ids, np.int32)
    return tokens[: len(tokens) // WINDOW * WINDOW].reshape(-1, WINDOW)


def spread(windows: np.ndarray, count: int) -> np.ndarray:
    """`count` of the windows, evenly spaced."""
    return windows[np.linspace(0, len(windows) - 1, count).astype(int)]


# --- from dense blocks to experts and their routers ---


def split_into_experts(mlp: dict, order: jax.Array) -> dict:
    """Dense gate, up [L, I, H] and down [L, H, I] -> w13 [L, E, 2I/E, H] and w2 [L, E, H, I/E].

    order [L, I]: each layer's channels, those of expert 0 first.
    """
    layers, inner, hidden = mlp["gate"].shape
    shape = (layers, NUM_EXPERTS, inner // NUM_EXPERTS, hidden)

    def ordered(channels):
        return jnp.take_along_axis(channels, order[..., None], axis=1).reshape(shape)

    gate, up, down = ordered(mlp["gate"]), ordered(mlp["up"]), ordered(mlp["down"].swapaxes(1, 2))
    return {"w13": jnp.concatenate([gate, up], axis=2), "w2": down.swapaxes(2, 3)}


def expert_norms(x: jax.Array, experts: dict) -> jax.Array:
    """x [T, H], the experts of one layer -> norm of each expert's output [T, E]."""

    def one(w13, w2):
        gate, up = jnp.split(x @ w13.T, 2, axis=1)
        return jnp.linalg.norm((jax.nn.silu(gate) * up) @ w2.T, axis=1)

    return jax.vmap(one, out_axes=1)(experts["w13"], experts["w2"])


def dense_and_channel_norms(x: jax.Array, mlp: dict) -> tuple[jax.Array, jax.Array]:
    """The dense block, and the mean norm of what each of its I channels adds to the output."""
    product = jax.nn.silu(x @ mlp["gate"].T) * (x @ mlp["up"].T)
    norms = jnp.mean(jnp.abs(product), axis=0) * jnp.linalg.norm(mlp["down"], axis=0)
    return product @ mlp["down"].T, norms


def dense_and_normal_equations(x: jax.Array, params: dict) -> tuple[jax.Array, tuple]:
    """The dense block, and A'A and A'B of the least squares A R = B, A = [x, 1], B = log norms.

    Logarithms, because a few tokens have norms a thousand times the others' and would be all that
    the fit sees; the order of the experts, which is what routing needs, is the same.
    """
    a = jnp.pad(x, ((0, 0), (0, 1)), constant_values=1)
    log_norms = jnp.log(expert_norms(x, params["experts"]) + 1e-6)
    return smollm.dense_mlp(x, params["dense"])[0], (a.T @ a, a.T @ log_norms)


def fit_routers(gram: np.ndarray, moment: np.ndarray, ridge: float = 1e-2) -> dict:
    """Ridge least squares: gram [L, H+1, H+1], moment [L, H+1, E] -> weight [L, E, H], bias."""
    level = ridge * np.trace(gram, axis1=1, axis2=2) / gram.shape[-1]
    solution = np.linalg.solve(gram + level[:, None, None] * np.eye(gram.shape[-1]), moment)
    solution = jnp.asarray(solution, jnp.float32).swapaxes(1, 2)
    return {"weight": solution[..., :-1], "bias": solution[..., -1]}


# --- the layer ---


def layer_config(model: smollm.LlamaConfig, recipe: str, k: int, backend: str) -> dg.MoEConfig:
    return dg.MoEConfig(
        num_experts=NUM_EXPERTS,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size // NUM_EXPERTS,
        router=dg.RouterConfig(top_k=k),
        recipe=recipe,
        backend=backend,
    )


def sparse_mlp(x: jax.Array, params: dict, cfg: dg.MoEConfig) -> tuple[jax.Array, None]:
    """The `top_k` experts with the largest predicted outputs, each at weight 1.

    The dense block is the plain sum of its experts, and the layer's own routers weigh them by
    their scores: hence a routing of our own.
    """
    predicted = x @ params["router"]["weight"].T + params["router"]["bias"]
    ids = jax.lax.top_k(predicted, cfg.router.top_k)[1]
    routing = dg.Routing(ids, jnp.ones(ids.shape))
    return dg.moe_layer(x.astype(jnp.bfloat16), params["moe"], cfg, routing=routing), None


def dense_and_error(x: jax.Array, params: dict, cfg: dg.MoEConfig) -> tuple[jax.Array, jax.Array]:
    """The dense block, and the relative difference that the layer has with every expert chosen.

    The control is float32 arithmetic on the same bf16 inputs and weights.
    """
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (x, params["dense"]))
    control, _ = smollm.dense_mlp(*jax.tree.map(lambda a: a.astype(jnp.float32), rounded))
    every = jnp.broadcast_to(jnp.arange(NUM_EXPERTS), (len(x), NUM_EXPERTS))
    routing = dg.Routing(every, jnp.ones(every.shape))
    y = dg.moe_layer(rounded[0], params["moe"], cfg, routing=routing)
    error = jnp.linalg.norm(y - control) / jnp.linalg.norm(control)
    return smollm.dense_mlp(x, params["dense"])[0], error


# --- measuring and showing ---


@partial(jax.jit, static_argnames=("model", "mlp"))
def collect(weights: dict, tokens: jax.Array, model: smollm.LlamaConfig, mlp, mlp_params):
    """What `mlp` collects in each layer over one window."""
    return smollm.forward(weights, tokens, model, mlp, mlp_params)[1]


@partial(jax.jit, static_argnames=("model", "mlp"))
def negative_log_likelihood(
    weights: dict, tokens: jax.Array, model: smollm.LlamaConfig, mlp, mlp_params
) -> jax.Array:
    logits, _ = smollm.forward(weights, tokens, model, mlp, mlp_params)
    log_p = jax.nn.log_softmax(logits[:-1])
    return -jnp.sum(jnp.take_along_axis(log_p, tokens[1:, None], axis=1))


@dataclass(frozen=True)
class Result:
    mlp: str
    k: int | None
    perplexity: float
    tokens_per_second: float
    plan: dg.Plan | None

    def __str__(self):
        experts = "" if self.k is None else f", {self.k} of {NUM_EXPERTS} experts"
        speed = f"{self.tokens_per_second:.0f} tokens/s"
        return f"{self.mlp}{experts}: perplexity {self.perplexity:.2f}, {speed}"


def measure(windows: np.ndarray, score: Callable, tick: Callable) -> tuple[float, float]:
    """Perplexity, and tokens/s without the first window, which pays for compilation."""
    total = 0.0
    for i, tokens in enumerate(windows):
        total += float(score(tokens))
        if i == 0:
            start = time.perf_counter()
        tick()
    seconds = time.perf_counter() - start
    return math.exp(total / windows[:, 1:].size), windows[1:].size / seconds


def table(results: list[Result]) -> Table:
    table = Table(title=TITLE)
    for column in ("MLP", "experts", "perplexity", "tokens/s", "layout", "rows"):
        table.add_column(column, justify="left" if column in ("MLP", "layout") else "right")
    for r in results:
        plan = (r.plan.layout, str(r.plan.rows)) if r.plan else ("", "")
        experts = f"{r.k} of {NUM_EXPERTS}" if r.k else ""
        table.add_row(r.mlp, experts, f"{r.perplexity:.2f}", f"{r.tokens_per_second:.0f}", *plan)
    return table


def plot(path: Path, dense: Result, sparse: list[Result]) -> None:
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    axes = figure.subplots(1, 2)
    figure.suptitle(TITLE)
    quantities = (("perplexity", "perplexity"), ("tokens_per_second", "tokens/s, whole model"))
    for axis, (quantity, label) in zip(axes, quantities, strict=True):
        baseline = getattr(dense, quantity)
        axis.axhline(baseline, color="black", linestyle=":", label=f"{dense.mlp}: {baseline:.4g}")
        for recipe, style in STYLES.items():
            series = sorted((r.k, getattr(r, quantity)) for r in sparse if r.mlp == recipe)
            axis.plot(*zip(*series, strict=True), style, label=recipe, alpha=0.8)
            # The others' points lie on these.
            labelled = quantity == "perplexity" and recipe in ("bf16", "mxfp4")
            for point in series if labelled else ():
                above = recipe == "mxfp4"
                axis.annotate(
                    f"{point[1]:.1f}",
                    point,
                    xytext=(6, 4) if above else (-6, -12),
                    textcoords="offset points",
                    ha="left" if above else "right",
                    color=axis.lines[-1].get_color(),
                )
        axis.set(xlabel=f"experts chosen per token, of {NUM_EXPERTS}", ylabel=label)
        axis.set_xticks(sorted({r.k for r in sparse}))
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter("{x:.0f}")
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    axes[0].margins(0.15)
    axes[1].set_ylim(bottom=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main(
    windows: Annotated[int, typer.Option(min=2, help=f"windows of {WINDOW} tokens to score")] = 4,
    calibration: Annotated[int, typer.Option(min=2, help="windows to fit the routers on")] = 16,
    k: Annotated[str, typer.Option(help="experts per token, comma-separated")] = "12,8,4",
    out: Annotated[Path, typer.Option(help="folder for the plot")] = Path("demo_out"),
    backend: Annotated[str, typer.Option(help="auto, xla, pallas or deep_gemm")] = "auto",
) -> None:
    """Perplexity of SmolLM2-135M, dense and as a mixture of experts in every recipe."""
    console = Console()
    columns = (*Progress.get_default_columns()[:-1], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def steps(what: str, count: int) -> Callable[[], None]:
            return partial(progress.advance, progress.add_task(what, total=count))

        tick = steps("reading model and text", 2)
        model, weights, tokenizer = smollm.load(smollm.packaged_gguf())
        weights = jax.device_put(weights)
        tick()
        try:
            ks = [int(part) for part in k.split(",")]
            cfgs = [layer_config(model, recipe, k, backend) for recipe in STYLES for k in ks]
            plans = [dg.plan(cfg, WINDOW) for cfg in cfgs]
        except (ValueError, NotImplementedError) as refused:
            raise typer.BadParameter(str(refused)) from refused
        text = text_windows(tokenizer)
        middle = len(text) // 2
        fit_on, score_on = spread(text[:middle], calibration), spread(text[middle:], windows)
        tick()

        tick = steps("ranking channels", len(fit_on[::4]))
        channel_norms = 0.0
        for tokens in fit_on[::4]:
            found = collect(weights, tokens, model, dense_and_channel_norms, weights["mlp"])
            channel_norms += np.asarray(found, np.float64)
            tick()
        experts = split_into_experts(weights["mlp"], jnp.argsort(-channel_norms, axis=1))

        tick = steps("fitting routers", len(fit_on))
        params = {"dense": weights["mlp"], "experts": experts}
        gram, moment = 0.0, 0.0
        for tokens in fit_on:
            found = collect(weights, tokens, model, dense_and_normal_equations, params)
            gram, moment = gram + np.asarray(found[0]), moment + np.asarray(found[1])
            tick()
        router = fit_routers(gram, moment)

        params, raw = {}, {"gate_weight": router["weight"], **experts}
        for recipe in STYLES:
            cfg = layer_config(model, recipe, NUM_EXPERTS, backend)
            moe = jax.vmap(partial(dg.prepare_params, cfg=cfg))(raw)  # over the model's layers
            params[recipe] = {"moe": moe, "router": router, "dense": weights["mlp"]}
            mlp = partial(dense_and_error, cfg=cfg)
            error = float(jnp.max(collect(weights, fit_on[0], model, mlp, params[recipe])))
            console.print(
                f"{recipe}: with all {NUM_EXPERTS} experts a layer is within {error:.2%}"
                " of its dense block"
            )
            if recipe == "bf16" and not error <= BF16_TOLERANCE:
                console.print(f"[red]that is more than {BF16_TOLERANCE:.2%}, rounding to bf16")
                raise typer.Exit(1)

        def run(name: str, k: int | None, plan, mlp: Callable, mlp_params: dict) -> Result:
            tick = steps(f"{name}, k={k}" if k else name, len(score_on))

            def score(tokens):
                return negative_log_likelihood(weights, tokens, model, mlp, mlp_params)

            result = Result(name, k, *measure(score_on, score, tick), plan)
            console.print(str(result))
            return result

        dense = run("dense, float32", None, None, smollm.dense_mlp, weights["mlp"])
        sparse = [
            run(
                cfg.recipe, cfg.router.top_k, plan, partial(sparse_mlp, cfg=cfg), params[cfg.recipe]
            )
            for cfg, plan in zip(cfgs, plans, strict=True)
        ]

    console.print(table([dense, *sparse]))
    for recipe in STYLES:
        first = next(r for r in sparse if r.mlp == recipe)
        console.print(f"plan for {first.k} of {NUM_EXPERTS}: {first.plan.why}", highlight=False)
    plot(out / "perplexity.png", dense, sparse)
    console.print(f"plot: {out / 'perplexity.png'}")


if __name__ == "__main__":
    typer.run(main)

"""Static decisions about one call of the layer, all in one place."""

from __future__ import annotations

import operator
import re
import warnings
from dataclasses import dataclass

from dgmoe_jax import backends
from dgmoe_jax.config import MoEConfig
from dgmoe_jax.layouts import Contiguous
from dgmoe_jax.recipes import RECIPES, RUNS_ON, TILE, Recipe, padded

PALLAS_BELOW_ROWS = {"bf16": 96, "fp8_block": 96}
"""Rows expected per expert below which our grouped GEMM beats DeepGEMM's on an H200."""


@dataclass(frozen=True)
class Plan:
    """What `moe_layer` will do for one number of tokens.

    layout "contiguous"; rows: static number of rows the GEMMs see; capacity: rows an expert may
    hold (equal to `rows` where experts share them); alignment: rows an expert's segment is padded
    to; workspace_bytes: predicted bytes of intermediates alive at once; why: one sentence.
    """

    layout: str
    rows: int
    capacity: int
    alignment: int
    workspace_bytes: int
    backend: str
    why: str

    def __post_init__(self):
        if self.layout != "contiguous":
            raise NotImplementedError(f"Plan.layout={self.layout!r}: 'contiguous' runs so far")
        if self.alignment < 8 or self.alignment % 8 or self.rows % 8:
            raise ValueError(
                f"Plan.alignment={self.alignment}, rows={self.rows}: must be multiples of 8"
            )


def plan(
    cfg: MoEConfig,
    num_tokens: int,
    *,
    arch: str | None = None,
    free_bytes: int | None = None,
    ep_size: int = 1,
    top_k: int | None = None,
) -> Plan:
    """Layout, sizes and backend for `num_tokens` tokens.

    A pure function of its arguments once `arch` is given ("cpu", "sm90", ...; None asks the
    default device, and whether DeepGEMM can run there). `free_bytes` bounds the workspace.
    `top_k` stands for the router's where `moe_layer(routing=...)` brings its own slots.

    Raises:
      ValueError: a negative `num_tokens`, or one whose rows overflow int32 indices.
      MemoryError: the workspace exceeds `free_bytes`.
      NotImplementedError: a layout, recipe or backend that is legal but not available here.
    """
    num_tokens = _count("num_tokens", num_tokens, 0)
    top_k = _count("top_k", cfg.router.top_k if top_k is None else top_k, 1)
    if ep_size != 1:
        raise NotImplementedError(f"ep_size={ep_size}: only one device (ep_size=1) runs so far")
    if cfg.layout == "masked":
        raise NotImplementedError("layout='masked' does not run yet; 'contiguous' does")
    asked = arch is None
    arch = arch or backends.current_arch()
    if not re.fullmatch(r"cpu|gpu|sm\d+", arch):
        raise ValueError(f"arch={arch!r}: must be 'cpu', 'gpu' or 'sm90', 'sm100', ...")
    if arch not in RUNS_ON[cfg.recipe]:
        runs = [name for name, archs in RUNS_ON.items() if arch in archs] or "none"
        raise NotImplementedError(f"recipe={cfg.recipe!r} does not run on {arch}; these do: {runs}")
    assignments = num_tokens * top_k
    expected_rows = assignments / cfg.num_experts
    backend, reason = _backend(cfg, arch, expected_rows, asked)
    alignment = alignment_for(expected_rows, backend)
    rows = Contiguous(alignment).rows(assignments, cfg.num_experts)
    # The kernels count 128-wide groups of all rows in int32.
    if rows * max(padded(cfg.hidden_size), 2 * padded(cfg.intermediate_size)) // TILE >= 2**31:
        raise ValueError(f"num_tokens={num_tokens}: {rows} rows overflow int32 indices; split them")
    workspace = _workspace_bytes(cfg, num_tokens, assignments, rows)
    if free_bytes is not None and workspace > free_bytes:
        raise MemoryError(
            f"num_tokens={num_tokens} needs {workspace} bytes of workspace, free_bytes={free_bytes}"
        )
    return Plan(
        layout="contiguous",
        rows=rows,
        capacity=rows,
        alignment=alignment,
        workspace_bytes=workspace,
        backend=backend,
        why=f"{reason}; {expected_rows:.4g} rows expected per expert: segments of {alignment}",
    )


def _count(name: str, value: int, least: int) -> int:
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: must be an int")
    try:
        value = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: must be an int, known when tracing") from None
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")
    return value


def alignment_for(expected_rows: float, backend: str) -> int:
    """Rows that a segment is padded to, from the rows an expert is expected to get.

    On a GPU the fastest of DeepGEMM's 32, 64 and 128 as measured on an H200 (FP8, w13 + w2;
    three shapes, 1 to 16384 tokens): small tiles until an expert fills half of the next one.
    The xla loop has no tiles: whole blocks per expert, within reason.
    """
    if backend == "xla":
        block = 8
        while block < min(expected_rows, 512):
            block *= 2
        return block
    return 32 if expected_rows < 16 else 64 if expected_rows < 64 else 128


def _backend(cfg: MoEConfig, arch: str, expected_rows: float, asked: bool) -> tuple[str, str]:
    if cfg.backend != "auto":
        _refuse(cfg.backend, cfg.recipe, arch)
        return cfg.backend, f"backend {cfg.backend!r} as asked"
    if arch != "sm90":
        return "xla", f"'xla' runs everywhere and {arch} is no sm90 GPU"
    if expected_rows < PALLAS_BELOW_ROWS[cfg.recipe]:
        return "pallas", "our grouped GEMM measured fastest with few rows per expert"
    missing = backends.deep_gemm_unavailable() if asked else None
    if missing:
        warnings.warn(f"backend='auto' uses 'pallas': {missing}", stacklevel=4)
        return "pallas", f"DeepGEMM would be faster but cannot run here ({missing})"
    return "deep_gemm", "DeepGEMM measured fastest with many rows per expert"


def _refuse(backend: str, recipe: str, arch: str) -> None:
    # "cpu" is not refused: a program may be lowered there for a GPU elsewhere, and lowering checks.
    if backend == "pallas" and arch not in ("cpu", "sm90"):
        raise NotImplementedError(
            f"backend='pallas' on {arch}: the grouped GEMM is a Hopper (sm90) kernel; 'xla' runs"
        )
    if (
        backend == "deep_gemm"
        and arch not in ("cpu", "sm90")
        and (arch, recipe) != ("sm100", "bf16")
    ):
        raise NotImplementedError(
            f"backend='deep_gemm' with recipe={recipe!r} on {arch}: DeepGEMM runs on sm90, and"
            " 'bf16' on sm100 (its FP8 kernels there read packed UE8M0 scales); 'xla' runs"
        )


def _workspace_bytes(cfg: MoEConfig, num_tokens: int, assignments: int, rows: int) -> int:
    recipe = RECIPES[cfg.recipe]
    hidden, inner = padded(cfg.hidden_size), padded(cfg.intermediate_size)
    index = 4 * (2 * assignments + 2 * rows)
    source = _row_bytes(recipe, hidden) * num_tokens if recipe.activations.group else 0
    source += 2 * hidden * num_tokens if cfg.num_shared_experts else 0
    w13_in, w13_out = _row_bytes(recipe, hidden), 4 * inner
    w2_in, w2_out = _row_bytes(recipe, inner), 2 * hidden
    widest = max(w13_in + w13_out, w13_out + w2_in, w2_in + w2_out)
    return index + source + rows * widest


def _row_bytes(recipe: Recipe, width: int) -> int:
    fmt = recipe.activations
    return 2 * width if fmt.group is None else width + 4 * width // fmt.group[1]

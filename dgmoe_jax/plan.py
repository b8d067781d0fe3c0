"""Static decisions about one call of the layer, all in one place."""

from __future__ import annotations

import math
import numbers
import warnings
from dataclasses import dataclass, replace

from dgmoe_jax import backends, checks, layouts
from dgmoe_jax.config import BACKENDS, MoEConfig
from dgmoe_jax.recipes import READS, TILE, Format, Recipe, is_read_by, padded, run_on

PALLAS_TO_ROWS, PALLAS_TO_HIDDEN = 96, 4096
"""Where `backend="auto"` takes our grouped GEMM on an H200: up to so many rows expected per expert,
and in FP8 at any number of rows up to this hidden size, where w13's activation, which we fuse,
takes a larger share of the time. FP4 that was prepared for "auto" no other reads.

bench/layer.jsonl, FP8, us, ours and DeepGEMM's: with H 7168, 2833 and 3079 at 32 rows an expert,
4727 and 4472 at 128, 897 and 889 at 256, 13518 and 13470 at 512; with H 2048, 259 and 286 at 64
rows, 876 and 963 at 512. The GEMMs alone, w13 with activation and w2, H 7168: 3073 us at 64 rows
and 3143 without activation, 3206 at 96 and 3120. Sizes between 2048 and 7168 were not measured."""

MASKED_FROM_ROWS = 0.5
"""Rows expected per expert from which DeepGEMM's masked GEMMs gain on its contiguous ones there.

Both at the static number of rows that a jitted program must have, w13 + w2, FP8 (bench/layer.jsonl,
`gemms_layouts`): 136 us against 96 at 0.03, 1187 against 1312 at 0.5, 175 against 171 at 4, 365
against 455 at 32, 199 against 252 at 64, 732 against 923 at 256, 646 against 699 at 512, 5085
against 5190 at 2048."""

MOST_SPARE = 1.25
"""Rows that a rank may get, for each that it is expected to, up to which `backend="auto"` takes
DeepGEMM's contiguous FP8 GEMMs. These load the operands of tiles without rows, too: with half of
147000 rows live (16384 tokens of two GPUs, E 128 of 256, H 7168, I 2048, an H200) both took 8370
us and the activation 160, and ours, which know which tiles have none, 5200 with it (profiled in a
trial). bf16 was not compared."""

MASKED_MULTIPLE = 128
"""DeepGEMM stores whole blocks, of 64 or 128 rows by its own choice: a slab must hold them, or the
next one is hit (seen on an H200; the bridge refuses other slabs)."""


@dataclass(frozen=True)
class Plan:
    """What `moe_layer` will do for one number of tokens.

    layout: "contiguous" or "masked" (`dgmoe_jax.layouts`). rows: static number of rows the GEMMs
    see. capacity: rows an expert may hold (equal to `rows` where experts share them). alignment:
    rows an expert's segment is padded to. tile: rows that a kernel takes at a time. fused: w13's
    GEMM activates and quantises its result ("pallas" only; the same bits). expected_m: mean rows of
    an expert, rounded up, by which DeepGEMM chooses its kernel. distinct_ids: the caller's promise
    that no token names an expert twice. workspace_bytes: predicted bytes of intermediates alive at
    once, on a GPU, without the blocks that ranks exchange. why: one sentence.
    """

    layout: str
    rows: int
    capacity: int
    alignment: int
    tile: int
    fused: bool
    expected_m: int
    distinct_ids: bool
    workspace_bytes: int
    backend: str
    why: str

    def __post_init__(self):
        if self.layout not in ("contiguous", "masked"):
            raise ValueError(f"Plan.layout={self.layout!r}: must be 'contiguous' or 'masked'")
        if self.backend not in BACKENDS:
            raise ValueError(f"Plan.backend={self.backend!r}: must be one of {BACKENDS}")
        for name in ("fused", "distinct_ids"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Plan.{name}={getattr(self, name)!r}: must be a bool")
        for name in ("rows", "capacity", "alignment", "tile", "expected_m", "workspace_bytes"):
            value = checks.count(f"Plan.{name}", getattr(self, name), 0)
            if name in ("alignment", "tile") and (value < 8 or value % 8):
                raise ValueError(f"Plan.{name}={value}: must be a positive multiple of 8")
        if self.fused and self.backend != "pallas":
            raise ValueError(f"Plan.fused=True: not with backend={self.backend!r}, only 'pallas'")
        if self.tile % self.alignment:
            raise ValueError(
                f"Plan.tile={self.tile}: must be a multiple of alignment={self.alignment}"
            )
        if self.layout == "masked" and (
            self.capacity % self.alignment or self.rows % max(1, self.capacity)
        ):
            raise ValueError(
                f"Plan.capacity={self.capacity}: must be a multiple of alignment={self.alignment}"
                f" and divide rows={self.rows}"
            )

    @property
    def slabs(self) -> int:
        """Segments of `capacity` rows: every expert's in the masked layout, else 1."""
        return self.rows // self.capacity if self.layout == "masked" and self.capacity else 1


@dataclass(frozen=True)
class Load:
    """What the experts of one rank may get from one call.

    expected: rows of an expert, on average over all routings; assignments: (token, slot) pairs at
    most; per_expert: rows of one expert at most; shared_tokens: that the shared experts see.
    """

    expected: float
    assignments: int
    per_expert: int
    shared_tokens: int


def load(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    experts: int,
    *,
    distinct: bool,
    received: tuple[int, int] | None = None,
    shared_tokens: int | None = None,
) -> Load:
    """Of `num_tokens` tokens, `top_k` slots each, for `num_experts` experts, of which this rank has
    `experts` and gets `received` (rows, slots of each) at most, some of which no token fills."""
    rows, slots = received or (num_tokens, top_k)
    each = lambda slots: min(slots, experts) if distinct else slots  # noqa: E731
    return Load(
        expected=num_tokens * top_k / num_experts,
        assignments=min(rows * each(slots), num_tokens * each(top_k)),
        per_expert=min(rows, num_tokens) * (1 if distinct else top_k),
        shared_tokens=num_tokens if shared_tokens is None else shared_tokens,
    )


def plan(
    cfg: MoEConfig,
    num_tokens: int,
    *,
    arch: str | None = None,
    free_bytes: int | None = None,
    ep_size: int = 1,
    tp_size: int = 1,
    top_k: int | None = None,
    distinct_ids: bool | None = None,
    masked_fraction: float = 0.25,
) -> Plan:
    """Layout, sizes and backend for `num_tokens` tokens.

    A pure function of its arguments once `arch` is given ("cpu", "sm90", ...; None asks the
    default device: what it is, whether DeepGEMM can run there, and how much of its memory is free
    where `free_bytes` is None). `free_bytes` bounds the workspace; `layout="auto"` gives slabs at
    most `masked_fraction` of it, and none where it is not known. `top_k` stands for the router's
    where `moe_layer(routing=...)` brings its own slots. `distinct_ids=True` promises that such a
    routing names no expert twice in a row: else it needs slabs `top_k` times as large (None: those
    of the layer's own router, whose choice by scores is distinct).

    With `ep_size` and `tp_size` the plan is one rank's, whose experts may get rows of all
    `num_tokens` tokens that these ranks have together.

    Raises:
      ValueError: a negative `num_tokens`, or one whose rows overflow int32 indices.
      MemoryError: the workspace exceeds `free_bytes`.
      NotImplementedError: a layout, recipe or backend that is legal but not available here.
    """
    cfg = cfg.as_grouped()
    num_tokens = checks.count("num_tokens", num_tokens, 0)
    top_k = checks.count("top_k", cfg.router.top_k if top_k is None else top_k, 1)
    ep_size, tp_size = checks.count("ep_size", ep_size, 1), checks.count("tp_size", tp_size, 1)
    if distinct_ids not in (None, True, False):
        raise TypeError(f"distinct_ids={distinct_ids!r}: must be a bool or None")
    # A hash table may name an expert twice.
    distinct = cfg.router.selection == "scores" if distinct_ids is None else distinct_ids
    experts = -(-cfg.num_experts // ep_size)
    most = load(num_tokens, top_k, cfg.num_experts, experts, distinct=distinct)
    return decide(
        cfg,
        num_tokens,
        most,
        experts=experts,
        inner=-(-cfg.intermediate_size // tp_size),
        arch=arch,
        free_bytes=free_bytes,
        distinct_ids=distinct_ids is True,
        masked_fraction=masked_fraction,
    )


def decide(
    cfg: MoEConfig,
    num_tokens: int,
    most: Load,
    *,
    experts: int,
    inner: int,
    arch: str | None = None,
    free_bytes: int | None = None,
    distinct_ids: bool = False,
    masked_fraction: float = 0.25,
) -> Plan:
    """`plan` for a rank that has `experts` experts of `inner` columns and gets `most` at most."""
    number = isinstance(masked_fraction, numbers.Real) and not isinstance(masked_fraction, bool)
    if not number or not 0 < masked_fraction <= 1:
        raise ValueError(f"masked_fraction={masked_fraction!r}: must be a number in (0, 1]")
    if free_bytes is not None:
        free_bytes = checks.count("free_bytes", free_bytes, 0)
    asked = arch is None
    arch = backends.current_arch() if asked else arch
    checks.arch(arch)
    run = run_on(cfg.recipe, arch, cfg.backend)
    backend, reason = _backend(cfg, arch, run.operands.weights, most.expected, asked)

    def laid_out(layout: str, backend: str = backend) -> Plan:
        return _laid_out(cfg, run.operands, most, experts, inner, layout, backend)

    if cfg.layout != "auto":
        chosen, why = laid_out(cfg.layout), "layout as asked"
    else:
        budget = backends.free_bytes() if asked and free_bytes is None else free_bytes
        chosen, why = _layout(cfg, backend, most.expected, laid_out, budget, masked_fraction)
    spare = most.assignments > MOST_SPARE * most.expected * experts and cfg.recipe != "bf16"
    if (cfg.backend, backend, chosen.layout) == ("auto", "deep_gemm", "contiguous") and spare:
        chosen, reason = laid_out("contiguous", "pallas"), "our grouped GEMM skips empty tiles"
    if _overflows(cfg, chosen):
        raise ValueError(
            f"num_tokens={num_tokens}: {chosen.rows} rows overflow int32 indices; split them"
        )
    if free_bytes is not None and chosen.workspace_bytes > free_bytes:
        raise MemoryError(
            f"num_tokens={num_tokens} needs {chosen.workspace_bytes} bytes of workspace"
            f" ({chosen.layout}), free_bytes={free_bytes}"
        )
    why = (
        f"{cfg.recipe} {run.how}; {reason}; {why}; {most.expected:.4g} rows expected per expert:"
        f" tiles of {chosen.tile}"
    )
    return replace(chosen, why=why, distinct_ids=distinct_ids)


def _overflows(cfg: MoEConfig, plan: Plan) -> bool:
    """The kernels count 128-wide groups of all rows in int32."""
    widest = max(padded(cfg.hidden_size), 2 * padded(cfg.intermediate_size))
    return plan.rows * widest // TILE >= 2**31


def _layout(cfg, backend, expected_rows, laid_out, budget, fraction) -> tuple[Plan, str]:
    """The faster of the two layouts that fits."""
    contiguous = laid_out("contiguous")
    if backend != "deep_gemm":
        return contiguous, "contiguous: this GEMM gains nothing from slabs"
    if expected_rows < MASKED_FROM_ROWS:
        return contiguous, "contiguous: slabs gain nothing with so few rows per expert"
    masked = laid_out("masked")
    if budget is None:
        return contiguous, "contiguous: how much memory slabs may take is not known (free_bytes)"
    if masked.workspace_bytes > fraction * budget or _overflows(cfg, masked):
        return contiguous, (
            f"contiguous: slabs would take {masked.workspace_bytes} bytes, more than {fraction:g}"
            f" of {budget} free ones"
        )
    return masked, "masked measured faster"


def _laid_out(cfg, operands, most, experts, inner, layout, backend) -> Plan:
    alignment, tile, fused = tiling(most.expected, backend, cfg.recipe)
    if layout == "masked":
        multiple = MASKED_MULTIPLE if backend in ("deep_gemm", "emulator") else tile
        capacity = -(-most.per_expert // multiple) * multiple
        rows = experts * capacity
    else:
        rows = capacity = layouts.contiguous_rows(most.assignments, experts, alignment)
    return Plan(
        layout=layout,
        rows=rows,
        capacity=capacity,
        alignment=alignment,
        tile=tile,
        fused=fused,
        expected_m=math.ceil(most.expected),
        distinct_ids=False,
        workspace_bytes=_workspace_bytes(
            cfg, operands, most, experts, inner, rows, tile, fused, backend, layout
        ),
        backend=backend,
        why="",
    )


def dense(plan: Plan, num_tokens: int, recipe: str) -> Plan:
    """`plan` for one expert that gets every token in its place: the shared experts."""
    alignment, tile, fused = tiling(num_tokens, plan.backend, recipe)
    # Our grouped GEMM writes whole steps of `alignment` rows.
    rows = -(-num_tokens // alignment) * alignment if plan.backend == "pallas" else num_tokens
    return replace(
        plan,
        layout="contiguous",
        rows=rows,
        capacity=rows,
        alignment=alignment,
        tile=tile,
        fused=fused,
        expected_m=num_tokens,
    )


def tiling(expected_rows: float, backend: str, recipe: str) -> tuple[int, int, bool]:
    """(alignment, tile, fused) from the rows an expert is expected to get.

    DeepGEMM's contiguous tiles are its alignment: the fastest of 32, 64 and 128 as measured on an
    H200 (FP8, w13 + w2; three shapes, 1 to 16384 tokens): small tiles until an expert fills half
    of the next one. Our GEMM knows its own. The xla loop has no tiles: whole blocks per expert,
    within reason.
    """
    if backend == "xla":
        block = 8
        while block < min(expected_rows, 512):
            block *= 2
        return block, block, False
    if backend == "pallas":
        return backends.pallas_tiling(expected_rows, fp8=recipe != "bf16")
    block = 32 if expected_rows < 16 else 64 if expected_rows < 64 else 128
    return block, block, False


def _backend(
    cfg: MoEConfig, arch: str, weights: Format, expected_rows: float, asked: bool
) -> tuple[str, str]:
    if cfg.backend != "auto":
        _refuse(cfg.backend, arch)
        return cfg.backend, f"backend {cfg.backend!r} as asked"
    if arch != "sm90":
        return "xla", f"'xla' runs everywhere and {arch} is no sm90 GPU"
    if not is_read_by("deep_gemm", cfg.recipe, weights):
        return "pallas", "our grouped GEMM alone reads what is prepared for 'auto'"
    if expected_rows <= PALLAS_TO_ROWS:
        return "pallas", "our grouped GEMM is expected fastest with so few rows per expert"
    if cfg.hidden_size <= PALLAS_TO_HIDDEN and cfg.recipe != "bf16":
        return "pallas", "our grouped GEMM is expected fastest with rows this narrow"
    missing = backends.deep_gemm_unavailable() if asked else None
    if missing:
        warnings.warn(f"backend='auto' uses 'pallas': {missing}", stacklevel=4)
        return "pallas", f"DeepGEMM would be faster but cannot run here ({missing})"
    return "deep_gemm", "DeepGEMM is expected fastest with so many rows per expert"


def _refuse(backend: str, arch: str) -> None:
    # "cpu" is not refused: a program may be lowered there for a GPU elsewhere, and lowering checks.
    if backend != "xla" and arch not in ("cpu", *READS[backend]):
        what = "our grouped GEMM" if backend == "pallas" else "DeepGEMM"
        raise NotImplementedError(
            f"backend={backend!r} on {arch}: {what} runs on {' and '.join(READS[backend])}; 'xla'"
            " runs"
        )


def _workspace_bytes(
    cfg: MoEConfig,
    operands: Recipe,
    most: Load,
    experts: int,
    inner: int,
    rows: int,
    tile: int,
    fused: bool,
    backend: str,
    layout: str,
) -> int:
    """Rows on their way through the experts, their index, and beside the shared experts' rows the
    routed result."""
    hidden = padded(cfg.hidden_size)

    def widest(inner: int, fused: bool) -> int:
        """Bytes of a row's input and output of the widest step."""
        w13_in, w13_out = _row_bytes(operands, hidden), 4 * inner
        w2_in, w2_out = _row_bytes(operands, inner), 2 * hidden
        steps = [(w2_in, w2_out)]
        steps += [(w13_in, w2_in)] if fused else [(w13_in, w13_out), (w13_out, w2_in)]
        return max(map(sum, steps))

    tiles = layouts.num_tiles(most.assignments, experts, tile)
    m_indices = rows if backend == "deep_gemm" and layout == "contiguous" else 0
    index = 4 * (2 * most.assignments + 3 * tiles + experts + m_indices)
    routed = rows * widest(padded(inner), fused)
    if not cfg.num_shared_experts:
        return index + routed
    tokens = most.shared_tokens
    inner = padded(cfg.num_shared_experts * inner)
    shared = tokens * widest(inner, tiling(tokens, backend, cfg.recipe)[2])
    return index + max(routed, rows * 2 * hidden + shared)


def _row_bytes(recipe: Recipe, width: int) -> int:
    fmt = recipe.activations
    if fmt.group is None:
        return 2 * width
    return width + (1 if fmt.packed_scales else 4) * width // fmt.group[1]

"""How a row of a matrix is encoded: formats and recipes as data.

A *format* says how one operand's numbers are stored; a *recipe* pairs the activations' format with
the weights'. Which rows are real is the layout's business (`dgmoe_jax.layouts`), never this one's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Format:
    """How one operand is stored.

    name:   spelling used by `quantize` and in error messages.
    dtype:  storage dtype of the values.
    group:  (rows, columns) that share one scale, or None for an unscaled format.
    peak:   largest magnitude the values can hold; scale = amax / peak.
    ue8m0:  scales are powers of two (rounded up) instead of any f32.
    packed: values stored in one element of `dtype` along K.
    packed_scales: every row's scales are stored as SM100's kernels read them: UE8M0 exponents, four
            along K in an int32, MN-major (`dgmoe_jax.interop.scales`).
    tile:   (rows, columns, *shape) where tiles of so many values are stored as arrays of `shape`,
            in an order of their own.
    """

    name: str
    dtype: str
    group: tuple[int, int] | None = None
    peak: float | None = None
    ue8m0: bool = False
    packed: int = 1
    packed_scales: bool = False
    tile: tuple[int, ...] | None = None

    @property
    def shares(self) -> tuple[int, int] | None:
        """(rows, columns) that share one *stored* scale: packed, each row has its own."""
        return (1, self.group[1]) if self.packed_scales else self.group

    @property
    def scales_dtype(self) -> str:
        return "int32" if self.packed_scales else "float32"

    @property
    def scaling(self) -> dict[str, object]:
        """What the steps that quantise rows to this format are told."""
        group = self.group and self.group[1]
        return dict(group=group, ue8m0=self.ue8m0, packed=self.packed_scales)

    def scales_row(self, k: int) -> int:
        """32-bit words of one row's scales, K = k values: packed or not, but not MN-major."""
        groups = -(-k // self.group[1])
        return -(-groups // 4) if self.packed_scales else groups

    def values_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Of [n, k] values, as they are stored."""
        if self.tile is None:
            return n, k // self.packed
        rows, columns, *shape = self.tile
        return n // rows, k // columns, *shape

    def scales_shape(self, n: int, k: int) -> tuple[int, int]:
        """Of the scales of [n, k] values; k counts values, not the elements they are packed in."""
        rows, columns = self.shares
        if self.packed_scales:
            return self.scales_row(k), -(-n // 4) * 4
        return -(-n // rows), -(-k // columns)


BF16 = Format("bf16", "bfloat16")
FP8_1X128 = Format("fp8_1x128", "float8_e4m3fn", (1, 128), 448.0)
FP8_128X128 = Format("fp8_128x128", "float8_e4m3fn", (128, 128), 448.0)
MXFP8_1X32 = Format("mxfp8_1x32", "float8_e4m3fn", (1, 32), 448.0, ue8m0=True)
MXFP4_1X32 = Format("mxfp4_1x32", "uint8", (1, 32), 6.0, ue8m0=True, packed=2)
# As our own GEMM reads it (`kernels_pallas.fp4`): scales of 32 are beside those of their block.
MXFP4_TILES = Format("mxfp4_tiles", "int32", (128, 128), ue8m0=True, tile=(64, 128, 17, 64))

FORMATS = {f.name: f for f in (BF16, FP8_1X128, FP8_128X128, MXFP8_1X32, MXFP4_1X32)}


def format_named(spec: str | Format, ue8m0: bool | None = None) -> Format:
    """The format `spec`, or the one called so, with power-of-two scales if `ue8m0`.

    Raises ValueError for an unknown name, and for `ue8m0=False` where the format has no choice.
    """
    if not isinstance(spec, Format) and spec not in FORMATS:
        raise ValueError(f"spec={spec!r}: must be one of {sorted(FORMATS)}")
    fmt = spec if isinstance(spec, Format) else FORMATS[spec]
    if ue8m0 is None or fmt.ue8m0 == ue8m0:
        return fmt
    if fmt.group is None or FORMATS.get(fmt.name, fmt).ue8m0:
        raise ValueError(f"ue8m0={ue8m0}: {fmt.name} always has ue8m0={fmt.ue8m0}")
    return replace(fmt, ue8m0=ue8m0)


@dataclass(frozen=True)
class Recipe:
    """Formats of the two operands of the expert GEMMs."""

    name: str
    activations: Format
    weights: Format


RECIPES = {
    r.name: r
    for r in (
        Recipe("bf16", BF16, BF16),
        Recipe("fp8_block", FP8_1X128, FP8_128X128),
        Recipe("mxfp8", MXFP8_1X32, MXFP8_1X32),
        # DeepGEMM has FP4 on SM100 only, where all scales are UE8M0.
        Recipe("mxfp4", replace(FP8_1X128, ue8m0=True), MXFP4_1X32),
    )
}


@dataclass(frozen=True)
class Run:
    """How an architecture computes a recipe: what its GEMMs multiply, and how weights get there."""

    operands: Recipe
    how: str


def _packed(recipe: Recipe) -> Recipe:
    """`recipe` as SM100 stores it: UE8M0 scales, packed."""
    a, w = (
        fmt if fmt.group is None else replace(fmt, ue8m0=True, packed_scales=True)
        for fmt in (recipe.activations, recipe.weights)
    )
    return Recipe(recipe.name, a, w)


_BLOCK = RECIPES["fp8_block"]

# Recipe -> architecture (as `plan` names it) -> how it runs there. "gpu" is one that does not say
# what it is. The loss is a relative error, by the kind of weights: bench/quantizers.jsonl.
RUNS_ON = {
    name: {
        "cpu": Run(recipe, "natively"),
        "gpu": Run(recipe, "natively"),
        "sm90": Run(recipe, "natively"),
        "sm100": Run(_packed(recipe), "natively, by contract: never run on such a GPU"),
    }
    for name, recipe in RECIPES.items()
}
RUNS_ON["mxfp8"]["sm90"] = Run(
    _BLOCK,
    "as fp8_block, since sm90 has no 1 x 32 scales: weights that are MXFP8 already are requantised"
    " to 128 x 128 when prepared, which costs 2.4 to 2.8 % of them, others are quantised so",
)
RUNS_ON["mxfp4"]["sm90"] = Run(
    _BLOCK,
    "as fp8_block, since sm90 has no FP4 but in our own GEMM: weights are widened to FP8 when"
    " prepared, lossless where the scales of a 128 x 128 block span at most 2^14",
)

_FP4_READ = Run(
    Recipe("mxfp4", FP8_1X128, MXFP4_TILES),
    "as FP4 weights that the GEMM widens to FP8 in registers, lossless where the scales of a"
    " 128 x 128 block span at most 2^14",
)
BY_BACKEND = {("mxfp4", "sm90", backend): _FP4_READ for backend in ("auto", "pallas")}
"""(recipe, architecture, the config's backend) -> how it runs there instead."""

BESIDE = {"mxfp4": "fp8_block"}
"""Recipe -> another that its shared experts may be stored in: DeepSeek-V4's FP8 beside FP4."""

READS = {
    "xla": ("cpu", "gpu", "sm90", "sm100"),
    "pallas": ("sm90",),
    "deep_gemm": ("sm90", "sm100"),
    "emulator": ("sm90", "sm100"),
}
"""Backend -> the architectures whose operands its GEMM reads; a CPU stands for the first."""


def target(arch: str, backend: str) -> str:
    """The architecture to lay weights out for: `arch`, "gpu" if it is none of those above, but on a
    CPU the one of a GPU backend that is named, whose program is lowered there for another machine,
    or emulated."""
    if arch == "cpu" and backend in READS:
        return READS[backend][0]
    return arch if arch in RUNS_ON["bf16"] else "gpu"


def run_on(recipe: str, arch: str, backend: str) -> Run:
    """How `recipe` runs on `arch` where the config names `backend`."""
    arch = target(arch, backend)
    run = BY_BACKEND.get((recipe, arch, backend))
    if run is None or (backend == "auto" and not _fp4_was_tried()):
        return RUNS_ON[recipe][arch]
    return run


def _fp4_was_tried() -> bool:
    """Our GEMM reads FP4 by parts of JAX that have no public name."""
    import jax

    from dgmoe_jax.kernels_pallas import _common

    return jax.__version__ in _common.TRIED


def runs_of(recipe: str) -> list[Run]:
    """All ways to run `recipe`."""
    special = [run for (name, *_), run in BY_BACKEND.items() if name == recipe]
    return [*RUNS_ON[recipe].values(), *special]


def run_of(recipe: str, weights: Format) -> Run | None:
    """The way to run `recipe` whose weights are stored so; None: there is none."""
    return next((run for run in runs_of(recipe) if run.operands.weights == weights), None)


def is_read_by(backend: str, recipe: str, weights: Format) -> bool:
    """Whether `backend`'s GEMM reads weights that are stored so; "xla" reads all."""
    if backend == "xla":
        return run_of(recipe, weights) is not None
    of = [(RUNS_ON[recipe][arch], run_on(recipe, arch, backend)) for arch in READS[backend]]
    return any(run.operands.weights == weights for runs in of for run in runs)


TILE = 128
"""Hidden and intermediate sizes are padded to a multiple of this inside the layer."""


def padded(size: int) -> int:
    """`size` rounded up to a whole number of 128-wide scale groups."""
    return -(-size // TILE) * TILE

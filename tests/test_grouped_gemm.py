"""The Pallas grouped GEMM against numpy: exact, poisoned, and lowered for CUDA in every variant."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dgmoe_jax.kernels_pallas import grouped_gemm
from dgmoe_jax.kernels_pallas.grouped_gemm import ALIGNMENTS, Tile, gemm, gemm_tiled

SHAPES = [(4096, 7168), (7168, 2048), (1536, 2048), (2048, 768), (256, 128), (1280, 640)]
DTYPES = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}
EXPERTS = 4
every_recipe = pytest.mark.parametrize("recipe", DTYPES)
needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="runs the compiled kernel: needs an SM90 GPU"
)


def layout(counts: dict[int, int], alignment: int, dead_blocks: int = 1) -> np.ndarray:
    """m_indices of a contiguous layout: expert -> rows, in order, then blocks of padding."""
    rows = []
    for expert, count in counts.items():
        rows += [expert] * count + [-1] * (-count % alignment)
    return np.array(rows + [-1] * (dead_blocks * alignment), np.int32)


def problem(recipe: str, m_indices: np.ndarray, n: int, k: int, *, exact: bool, seed: int = 0):
    """Operands on the host; padding rows and the experts without rows are NaN."""
    rng = np.random.default_rng(seed)
    m, dtype = len(m_indices), DTYPES[recipe]

    def draw(*shape):
        if exact:  # sums of integers below 2**24: no rounding but the last
            return rng.integers(-2, 3, shape).astype(np.float32)
        return rng.standard_normal(shape, np.float32)

    def powers(*shape):
        return np.exp2(rng.integers(-1, 2, shape)).astype(np.float32)

    a, b = draw(m, k).astype(dtype), draw(EXPERTS, n, k).astype(dtype)
    padding = m_indices < 0
    a[padding] = np.nan
    b[[e for e in range(EXPERTS) if e not in m_indices]] = np.nan
    if recipe == "bf16":
        return a, None, b, None, m_indices
    a_scales = powers(k // 128, -(-m // 4) * 4)
    a_scales[:, :m][:, padding] = np.nan
    a_scales[:, m:] = np.nan
    return a, a_scales, b, powers(EXPERTS, n // 128, k // 128), m_indices


def reference(a, a_scales, b, b_scales, m_indices) -> np.ndarray:
    """float64, one expert at a time; padding rows are 0."""
    out = np.zeros((a.shape[0], b.shape[1]))
    for expert in set(m_indices.tolist()) - {-1}:
        rows = m_indices == expert
        left, right = a[rows].astype(np.float64), b[expert].astype(np.float64)
        if a_scales is not None:
            left *= np.repeat(a_scales.T[: len(rows)][rows], 128, axis=1)
            right *= np.repeat(np.repeat(b_scales[expert], 128, axis=0), 128, axis=1)
        out[rows] = left @ right.T
    return out


def check(run, operands, *, exact: bool) -> None:
    live = operands[-1] >= 0
    got = np.asarray(run(*jax.tree.map(jnp.asarray, operands)))[live]
    want = reference(*operands)[live]
    if exact:
        np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))
    else:
        difference = np.linalg.norm(got.astype(np.float64) - want, axis=1)
        assert np.max(difference / np.linalg.norm(want, axis=1)) < 4e-3  # of rounding to bf16


@pytest.fixture
def few_sms(monkeypatch):
    """Blocks that walk several tiles; it makes interpret mode faster, too."""
    monkeypatch.setattr(grouped_gemm, "_SMS", 2)


# Interpret mode takes some 10 s a case. The ring of stages is short: it wraps within a tile and
# runs on into the next.
@pytest.mark.parametrize(
    ("recipe", "tile", "counts"),
    [
        ("fp8", Tile(128, 2, (8, 32), 2), {1: 33, 3: 2}),
        ("bf16", Tile(64, 1, (8,), 3), {0: 3}),
        ("fp8", Tile(256, 2, (32, 64), 3), {0: 40, 2: 5}),
    ],
)
def test_interpreted(recipe, tile, counts, few_sms):
    m_indices = layout(counts, tile.rows)[:-3]  # the last block is cut short, and dead
    run = functools.partial(gemm_tiled, tile=tile, interpret=True)
    n = max(128, tile.columns)
    check(run, problem(recipe, m_indices, n, 256, exact=True), exact=True)


def test_interpreted_default():
    m_indices = layout({2: 1}, 32, dead_blocks=0)
    run = functools.partial(gemm, alignment=32, interpret=True)
    check(run, problem("fp8", m_indices, 128, 128, exact=False), exact=False)


def shapes(recipe: str, m: int, n: int, k: int, experts: int = EXPERTS):
    struct, dtype = jax.ShapeDtypeStruct, DTYPES[recipe]
    a_scales = b_scales = None
    if recipe == "fp8":
        a_scales = struct((k // 128, -(-m // 4) * 4), jnp.float32)
        b_scales = struct((experts, n // 128, k // 128), jnp.float32)
    return (
        *(struct((m, k), dtype), a_scales),
        *(struct((experts, n, k), dtype), b_scales),
        struct((m,), jnp.int32),
    )


@every_recipe
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_lowers_for_cuda(recipe, alignment, n, k):
    # Enough blocks for the widest tile.
    assert mosaic_kernels(alignment, shapes(recipe, 64 * alignment, n, k)) == 1


@every_recipe
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_lowers_a_short_block_for_cuda(recipe, alignment):
    assert mosaic_kernels(alignment, shapes(recipe, alignment - 1, 256, 128)) == 1


def mosaic_kernels(alignment, operands) -> int:
    traced = jax.jit(functools.partial(gemm, alignment=alignment)).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("custom_call @mosaic_gpu")


@needs_gpu
@every_recipe
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("n", "k"), [(1280, 640), (1536, 2048)])
def test_every_alignment_on_gpu(recipe, alignment, n, k):
    m_indices = layout({0: alignment, 1: 1, 3: 2 * alignment + 3}, alignment)[:-1]
    run = functools.partial(gemm, alignment=alignment)
    check(run, problem(recipe, m_indices, n, k, exact=False), exact=False)


@needs_gpu
@every_recipe
@pytest.mark.parametrize(
    "tile",
    [
        Tile(64, 1, (32,), 12),
        Tile(128, 2, (8, 32), 10),
        Tile(256, 2, (8, 32), 5),
        Tile(256, 2, (128,), 3),
        Tile(256, 2, (32, 64, 128), 3),
    ],
)
def test_every_tile_on_gpu(recipe, tile):
    m_indices = layout({0: tile.rows, 1: 9, 3: 2 * tile.rows + 3}, tile.rows)
    run = functools.partial(gemm_tiled, tile=tile, interpret=False)
    check(run, problem(recipe, m_indices, 2048, 768, exact=True), exact=True)
    check(run, problem(recipe, m_indices, 2048, 768, exact=False), exact=False)


@needs_gpu
@every_recipe
def test_one_expert_takes_all_on_gpu(recipe):
    m_indices = layout({2: 2049}, 128)
    run = functools.partial(gemm, alignment=128)
    check(run, problem(recipe, m_indices, 2048, 1024, exact=False), exact=False)


@every_recipe
def test_no_rows(recipe):
    operands = [
        None if s is None else jnp.zeros(s.shape, s.dtype) for s in shapes(recipe, 0, 128, 128)
    ]
    out = gemm(*operands, alignment=32)
    assert out.shape == (0, 128)
    assert out.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"alignment": 48}, ValueError, "alignment is 48"),
        ({"a_scales": None}, ValueError, "both"),
        ({"n": 192}, ValueError, "multiples of 128"),
        ({"k": 192}, ValueError, "multiples of 128"),
        ({"a": jnp.bfloat16}, TypeError, "a has dtype bfloat16"),
        ({"m_indices": jnp.int16}, TypeError, "m_indices has dtype int16"),
        ({"b_scales": (4, 1, 2)}, ValueError, "b_scales has shape"),
    ],
)
def test_errors(change, error, text):
    n, k = change.pop("n", 128), change.pop("k", 128)
    names = ("a", "a_scales", "b", "b_scales", "m_indices")
    operands = dict(zip(names, shapes("fp8", 64, n, k), strict=True))
    alignment = change.pop("alignment", 32)
    for name, what in change.items():
        struct = operands[name]
        if what is None:
            operands[name] = None
        elif isinstance(what, tuple):
            operands[name] = struct.update(shape=what)
        else:
            operands[name] = struct.update(dtype=what)
    with pytest.raises(error, match=text):
        jax.eval_shape(functools.partial(gemm, alignment=alignment), *operands.values())

"""The Pallas grouped GEMM against numpy: exact, poisoned, and lowered for CUDA in every variant."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import same_bits
from dgmoe_jax.kernels_pallas import act_quant, fp4, grouped_gemm, grouped_gemm_wide
from dgmoe_jax.kernels_pallas._common import Registers
from dgmoe_jax.kernels_pallas.gemm import TILES, gemm, gemm_act_quant, tile_for
from dgmoe_jax.kernels_pallas.grouped_gemm import (
    Config,
    Fused,
    choose_config,
    grouped,
    most_stages,
)
from dgmoe_jax.kernels_pallas.quant import quantize_tile
from jax import lax

from dgmoe_jax.weights import paths

SHAPES = [(4096, 7168), (7168, 2048), (1536, 2048), (256, 128), (1280, 640)]
DTYPES = {"bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "fp4": jnp.float8_e4m3fn}  # of rows
EXPERTS = 4
SILU = Fused("silu", (None,), quantized=True)
every_recipe = pytest.mark.parametrize("recipe", DTYPES)
in_wide_kernel = pytest.mark.parametrize("recipe", ["bf16", "fp8"])
needs_gpu = pytest.mark.skipif(
    jax.default_backend() != "gpu", reason="runs the compiled kernel: needs an SM90 GPU"
)


class Layout:
    """Where `counts` rows of each expert lie: one after another, or in slabs of `capacity`."""

    def __init__(self, counts, tile: int, alignment: int, capacity: int | None = None):
        self.counts, self.tile, self.alignment = counts, tile, alignment
        self.slabs = len(counts) if capacity else 1
        tiles, end = [], 0
        for expert, count in enumerate(counts):
            first = expert * capacity if capacity else end
            tiles += [(expert, first + i, min(tile, count - i)) for i in range(0, count, tile)]
            end = first + (capacity or -(-count // alignment) * alignment)
        self.m = end if capacity else end + alignment
        self.tiles = np.array([*tiles, (-1, 0, 0), (-1, 0, 0)], np.int32).T
        self.expert, self.owned = np.full(self.m, -1), np.zeros(self.m, bool)
        for expert, first, count in tiles:
            self.expert[first : first + count] = expert
            self.owned[first : first + -(-count // alignment) * alignment] = True
        self.live = self.expert >= 0

    @property
    def keywords(self):
        return {"alignment": self.alignment, "slabs": self.slabs}


def problem(recipe, layout, n, k, *, exact, poison=np.nan, seed=0):
    """Operands on the host; rows that are not live and experts without rows are poison."""
    rng = np.random.default_rng(seed)
    m, dtype, slabs = layout.m, DTYPES[recipe], layout.slabs

    def draw(*shape):
        if exact:  # sums of integers below 2**24: no rounding but the last
            return rng.integers(-2, 3, shape).astype(np.float32)
        return rng.standard_normal(shape, np.float32)

    def powers(*shape):
        return np.exp2(rng.integers(-1, 2, shape)).astype(np.float32)

    a = draw(m, k).astype(dtype)
    if recipe == "fp4":
        codes = rng.choice([0, 2, 4, 10, 12] if exact else 16, (EXPERTS, n, k))
        low, high = (-1, 2) if exact else (-14, 7)
        b = tiles_of(codes, rng.integers(low, high, (EXPERTS, n, k // 32)))
        poisoned = -1
    else:
        b, poisoned = draw(EXPERTS, n, k).astype(dtype), np.nan
    a[~layout.live] = np.nan
    b[[e for e, count in enumerate(layout.counts) if not count]] = poisoned
    if recipe == "bf16":
        return a, None, b, None, layout.tiles
    rows = m // slabs
    a_scales = powers(slabs, k // 128, -(-rows // 4) * 4)
    a_scales[:, :, rows:] = poison
    a_scales[:, :, :rows].swapaxes(1, 2)[~layout.live.reshape(slabs, rows)] = poison
    b_scales = powers(EXPERTS, n // 128, k // 128)
    return a, a_scales.reshape(-1, a_scales.shape[2]), b, b_scales, layout.tiles


def tiles_of(codes, exponents) -> np.ndarray:
    """E2M1 codes [E, N, K], exponents [E, N, K / 32] -> as the GEMM reads FP4."""
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)
    return np.array(jax.vmap(fp4.pack)(packed, np.exp2(exponents).astype(np.float32)))


def reference(layout, a, a_scales, b, b_scales, tiles) -> np.ndarray:
    """float64, one expert at a time; rows that are not live are 0."""
    b = np.asarray(fp4.widen(b)) if b.dtype == np.int32 else b
    out = np.zeros((layout.m, b.shape[1]))
    if a_scales is not None:  # [slabs * G, S] -> [M, G]
        groups = a_scales.reshape(layout.slabs, b.shape[2] // 128, -1)
        groups = groups[:, :, : layout.m // layout.slabs].swapaxes(1, 2).reshape(layout.m, -1)
    for expert in set(layout.expert.tolist()) - {-1}:
        rows = layout.expert == expert
        left, right = a[rows].astype(np.float64), b[expert].astype(np.float64)
        if a_scales is not None:
            left *= np.repeat(groups[rows], 128, axis=1)
            right *= np.repeat(np.repeat(b_scales[expert], 128, axis=0), 128, axis=1)
        out[rows] = left @ right.T
    return out


def check(run, layout, operands, *, exact: bool) -> None:
    got = np.asarray(run(*jax.tree.map(jnp.asarray, operands)))[layout.live]
    want = reference(layout, *operands)[layout.live]
    if exact:
        np.testing.assert_array_equal(got, want.astype(ml_dtypes.bfloat16))
    else:
        difference = np.linalg.norm(got.astype(np.float64) - want, axis=1)
        assert np.max(difference / np.linalg.norm(want, axis=1)) < 4e-3  # of rounding to bf16


def by_slab_rows(scales, layout) -> np.ndarray:
    """[slabs * G, S] -> [M, G]."""
    scales = np.asarray(scales)
    slabs = scales.reshape(layout.slabs, -1, scales.shape[1])
    return slabs[:, :, : layout.m // layout.slabs].swapaxes(1, 2).reshape(layout.m, -1)


@pytest.fixture
def few_sms(monkeypatch):
    """Blocks that walk several tiles; it makes interpret mode faster, too."""
    monkeypatch.setattr(grouped_gemm, "_SMS", 2)
    monkeypatch.setattr(grouped_gemm_wide, "_SMS", 2)


# Interpret mode takes some seconds a case. The ring of stages is short: it wraps within a tile and
# runs on into the next.
@pytest.mark.parametrize(
    ("recipe", "config", "counts", "alignment", "capacity"),
    [
        ("fp8", Config(128, (8, 32), 2), [0, 33, 0, 2], 8, None),
        ("bf16", Config(128, (8,), 3), [3, 0, 0, 0], 8, None),
        ("fp8", Config(256, (32, 64), 3), [40, 0, 5, 0], 32, None),
        ("fp8", Config(128, (176,), 2), [0, 170, 0, 1], 16, None),  # in two parts
        ("fp8", Config(128, (8,), 2), [3, 0, 5, 0], 8, 8),
        ("fp8", Config(128, (16,), 2), [3, 0, 5, 0], 16, 16),
        ("bf16", Config(128, (32,), 2), [3, 0, 5, 0], 8, 32),
        ("fp4", Config(128, (8, 32), 2), [0, 33, 0, 2], 8, None),
        ("fp4", Config(256, (16,), 3), [3, 0, 5, 0], 8, 16),
        ("fp4", Config(256, (80,), 2), [0, 70, 0, 1], 16, None),  # in two parts
    ],
)
def test_interpreted(recipe, config, counts, alignment, capacity, few_sms):
    layout = Layout(counts, config.widths[-1], alignment, capacity)
    operands = problem(recipe, layout, config.columns, 256, exact=True, poison=3e38)
    run = functools.partial(grouped, **layout.keywords, config=config, interpret=True)
    check(lambda *args: run(*args)[0], layout, operands, exact=True)


def test_interpreted_default():
    layout = Layout([0, 0, 1, 0], 32, 8)
    run = functools.partial(gemm, tile=32, expected_m=1, interpret=True, **layout.keywords)
    operands = problem("fp8", layout, 128, 128, exact=False)
    check(lambda *args: run(*args, None, None), layout, operands, exact=False)


@pytest.mark.parametrize(
    ("recipe", "config", "counts", "alignment", "capacity", "fused"),
    [
        ("fp8", Config(256, (8,), 2), [3, 0, 5, 0], 8, 8, SILU),
        ("fp8", Config(256, (24, 48), 2), [17, 0, 0, 40], 16, 48, SILU._replace(ue8m0=True)),
        ("fp8", Config(256, (144,), 2), [0, 130, 0, 0], 8, None, SILU),
        ("bf16", Config(256, (16,), 2), [3, 0, 5, 0], 8, None, SILU._replace(quantized=False)),
        ("fp4", Config(256, (8,), 2), [3, 0, 5, 0], 8, 8, SILU),
        (
            "fp8",
            Config(256, (8,), 2),
            [3, 0, 0, 0],
            8,
            None,
            Fused("situ", (2.0, 3.0), quantized=True, keep_fp32=False),
        ),
    ],
)
def test_fused_interpreted(recipe, config, counts, alignment, capacity, fused, few_sms):
    layout = Layout(counts, config.widths[-1], alignment, capacity)
    operands = problem(recipe, layout, 256, 128, exact=True)
    run = functools.partial(grouped, **layout.keywords, config=config, fused=fused, interpret=True)
    got, *scales = run(*jax.tree.map(jnp.asarray, operands))
    gateup = jnp.asarray(reference(layout, *operands).astype(ml_dtypes.bfloat16))
    regs, activate = Registers(True), act_quant.ACTIVATIONS[fused.activation]

    @jax.jit
    def unfused(gateup):
        gate, up = jnp.split(gateup.astype(jnp.float32), 2, axis=1)
        product = activate(gate, up, *fused.params, inverse=regs.inverse(None))
        if not fused.keep_fp32:
            product = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
        if not fused.quantized:
            return product.astype(jnp.bfloat16), None
        return quantize_tile(product, None, fused.rule, regs)

    want, want_scales = map(np.asarray, unfused(gateup))
    live = layout.live
    np.testing.assert_array_equal(np.asarray(got)[live], want[live])
    if fused.quantized:
        np.testing.assert_array_equal(
            by_slab_rows(scales[0], layout)[live], want_scales[live, None]
        )


WIDE = grouped_gemm_wide.Config()
IN_BF16 = SILU._replace(quantized=False)


def both(layout, operands, fused=None, *, config=WIDE, tile_config=None, interpret=False):
    """What the wide kernel and `grouped` make of the same tiles of 128 rows."""
    keywords = {**layout.keywords, "fused": fused, "interpret": interpret}
    if tile_config is None:
        tile_config = choose_config(128, operands[2].shape[1], fused=fused is not None)
    operands = jax.tree.map(jnp.asarray, operands)
    got = grouped_gemm_wide.grouped(*operands, **keywords, config=config)
    want = grouped(*operands, **keywords, config=tile_config)
    return [[np.asarray(x) for x in out] for out in (got, want)]


def assert_same_rows(layout, got, want) -> None:
    same_bits(got[0][layout.live], want[0][layout.live])
    for got_scales, want_scales in zip(got[1:], want[1:], strict=True):
        rows = [by_slab_rows(scales, layout)[layout.live] for scales in (got_scales, want_scales)]
        same_bits(*rows)


def with_any_scales(operands, seed=1):
    """With scales that make every sum round, however exact the products are."""
    a, a_scales, b, b_scales, tiles = operands
    if a_scales is None:
        return operands
    rng = np.random.default_rng(seed)
    dead = ~(a_scales < 1e30)
    drawn = rng.standard_normal(a_scales.shape, np.float32)
    b_scales = rng.standard_normal(b_scales.shape, np.float32)
    return a, np.where(dead, a_scales, drawn), b, b_scales, tiles


# A pair of tiles of more than 64 rows of one expert shares its weights: 200 rows are one.
@pytest.mark.parametrize(
    ("recipe", "config", "counts", "alignment", "capacity", "fused"),
    [
        ("fp8", WIDE._replace(stages=2), [200, 0, 0, 70], 16, None, None),
        ("fp8", WIDE._replace(stages=3), [5, 0, 129, 0], 32, 256, None),
        ("fp8", WIDE._replace(stages=2, cluster=1), [0, 65, 3, 0], 8, None, None),
        ("bf16", WIDE._replace(stages=2), [200, 0, 3, 0], 128, 256, None),
        ("fp8", WIDE._replace(stages=2), [130, 200, 0, 5], 8, None, SILU),
        ("fp8", WIDE._replace(stages=3), [5, 129, 0, 0], 64, 256, SILU._replace(ue8m0=True)),
        ("bf16", WIDE._replace(stages=2), [70, 0, 0, 3], 32, None, IN_BF16),
    ],
)
def test_wide_interpreted(recipe, config, counts, alignment, capacity, fused, few_sms):
    layout = Layout(counts, 128, alignment, capacity)
    operands = problem(recipe, layout, 512, 256, exact=True, poison=3e38)
    tile_config = Config(256 if fused else 128, (128,), 2)
    got, want = both(
        layout,
        with_any_scales(operands),
        fused,
        **{"config": config, "tile_config": tile_config, "interpret": True},
    )
    assert_same_rows(layout, got, want)


@pytest.mark.parametrize("fused", [None, SILU])
def test_wide_writes_the_rows_it_owns(fused, few_sms):
    layout = Layout([3, 0, 72, 0], 128, 8, 136)
    a, *others = problem("fp8", layout, 512, 128, exact=True, poison=1.0)
    a = np.where(np.isnan(a.astype(np.float32)), 1, a).astype(a.dtype)
    run = functools.partial(grouped_gemm_wide.grouped, config=WIDE, fused=fused, interpret=True)
    out = run(*jax.tree.map(jnp.asarray, [a, *others]), **layout.keywords)
    values = np.asarray(out[0]).astype(np.float32)
    assert np.isfinite(values[layout.owned]).all()
    assert np.isnan(values[~layout.owned]).all()  # what memory reads as before it is written
    if fused:
        scales = by_slab_rows(out[1], layout)
        assert np.isfinite(scales[layout.owned]).all()
        assert np.isnan(scales[~layout.owned]).all()


def shapes(recipe: str, m: int, n: int, k: int, slabs: int = 1):
    struct, dtype = jax.ShapeDtypeStruct, DTYPES[recipe]
    a_scales = b_scales = None
    if recipe != "bf16":
        a_scales = struct((slabs * k // 128, -(-m // slabs // 4) * 4), jnp.float32)
        b_scales = struct((EXPERTS, n // 128, k // 128), jnp.float32)
    b = struct((EXPERTS, n, k), dtype)
    if recipe == "fp4":
        b = struct((EXPERTS, n // fp4.ROWS, k // fp4.COLUMNS, *fp4.WORDS), jnp.int32)
    return (
        *(struct((m, k), dtype), a_scales),
        *(b, b_scales),
        struct((3, 5), jnp.int32),
    )


def mosaic_kernels(run, operands) -> int:
    lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @mosaic_gpu")


@every_recipe
@pytest.mark.parametrize("tile", [*TILES, 160, 192, 256])
def test_every_tile_lowers_for_cuda(recipe, tile):
    run = functools.partial(gemm, alignment=8, tile=tile, slabs=1, expected_m=tile)
    assert mosaic_kernels(run, shapes(recipe, 4 * tile, 4096, 7168)) == 1


@every_recipe
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_shape_lowers_for_cuda(recipe, n, k):
    run = functools.partial(gemm, alignment=16, tile=64, slabs=4, expected_m=8)
    assert mosaic_kernels(run, shapes(recipe, 64, n, k, slabs=4)) == 1


@every_recipe
@pytest.mark.parametrize(
    ("activation", "params"),
    [("silu", (None,)), ("silu", (7.0,)), ("oai_swiglu", (1.7, 7.0)), ("situ", (2.0, 3.0))],
)
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("tile", [32, 128])
def test_fused_lowers_for_cuda(recipe, activation, params, group, tile):
    run = functools.partial(
        gemm_act_quant,
        **{"alignment": 8, "tile": tile, "slabs": 1, "expected_m": 4, "group": group},
        **{"activation": activation, "params": params},
    )
    # No rows to spare: the widest copy is larger than its array.
    assert mosaic_kernels(run, shapes(recipe, 8, 512, 256)) == 1


@in_wide_kernel
@pytest.mark.parametrize(("n", "k"), [(4096, 7168), (7168, 2048), (1536, 2048), (256, 128)])
def test_wide_lowers_for_cuda(recipe, n, k):
    config = grouped_gemm_wide.choose_config(n)
    for fused in (None, SILU, IN_BF16):
        run = functools.partial(
            grouped_gemm_wide.grouped,
            **{"alignment": 16, "slabs": 4, "config": config, "fused": fused, "interpret": False},
        )
        assert mosaic_kernels(run, shapes(recipe, 512, n, k, slabs=4)) == 1


def test_tiles_hold_balanced_experts():
    for rows in (0.5, 4, 32, 128, 500, 1e6):
        tile, alignment = tile_for(rows)
        assert tile % alignment == 0 and tile in TILES
        assert tile >= min(rows, TILES[-1])
        for n, fused, narrow in itertools.product((4096, 1280), (False, True), (False, True)):
            config = choose_config(tile, n, fused=fused, narrow=narrow)
            assert config.widths[-1] == tile and config.stages >= 2
            assert n % (config.columns * config.cluster) == 0


@needs_gpu
@every_recipe
@pytest.mark.parametrize("capacity", [None, 320])
@pytest.mark.parametrize("tile", [*TILES, 160, 192, 256])
@pytest.mark.parametrize(("n", "k"), [(1280, 640), (1536, 2048)])
def test_every_tile_on_gpu(recipe, n, k, tile, capacity):
    tile_alignment = 8 if tile == 32 else 16
    layout = Layout([tile, 1, 0, tile + 19], tile, tile_alignment, capacity)
    run = functools.partial(gemm, tile=tile, expected_m=tile, **layout.keywords)
    for exact in (True, False):
        check(run, layout, problem(recipe, layout, n, k, exact=exact), exact=exact)


@needs_gpu
@every_recipe
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(
    ("columns", "widths"), [(128, (32, 160)), (256, (16, 64)), (256, (128,)), (128, (192, 256))]
)
def test_every_config_on_gpu(recipe, cluster, columns, widths):
    config = Config(columns, widths, most_stages(columns, widths[-1]), cluster)
    layout = Layout([widths[-1], 9, 0, 2 * widths[-1] + 3], widths[-1], 16)
    run = functools.partial(grouped, **layout.keywords, config=config, interpret=False)
    for exact in (True, False):
        operands = problem(recipe, layout, 2048, 768, exact=exact, poison=3e38)
        check(lambda *args: run(*args)[0], layout, operands, exact=exact)


@needs_gpu
@every_recipe
def test_one_expert_takes_all_on_gpu(recipe):
    layout = Layout([0, 0, 2049, 0], 160, 16)
    run = functools.partial(gemm, tile=160, expected_m=2049, **layout.keywords)
    check(run, layout, problem(recipe, layout, 2048, 1024, exact=False), exact=False)


@needs_gpu
@every_recipe
@pytest.mark.parametrize("group", [128, None])
@pytest.mark.parametrize("capacity", [None, 320])
@pytest.mark.parametrize("tile", [32, 64, 128, 160])
@pytest.mark.parametrize(("inter", "k"), [(128, 384), (768, 2048)])  # the first: short K, one chunk
def test_fused_is_the_unfused_on_gpu(recipe, group, capacity, tile, inter, k):
    layout = Layout([tile, 1, 0, tile + 19], tile, 8 if tile == 32 else 16, capacity)
    operands = jax.tree.map(
        jnp.asarray, problem(recipe, layout, 2 * inter, k, exact=False, poison=3e38)
    )
    rule = {"activation": "silu", "params": (None,)}
    where = {"tile": tile, **layout.keywords}
    got = gemm_act_quant(*operands, expected_m=tile, **where, **rule, group=group)
    gateup = gemm(*operands, expected_m=tile, **where)
    if group is None:
        del where["slabs"]
        want = act_quant.act(gateup, operands[-1], **where, **rule)
        np.testing.assert_array_equal(
            np.asarray(got[0])[layout.live], np.asarray(want)[layout.live]
        )
        return
    want, want_scales = act_quant.act_quant(gateup, operands[-1], **where, **rule)
    np.testing.assert_array_equal(np.asarray(got[0])[layout.live], np.asarray(want)[layout.live])
    np.testing.assert_array_equal(
        by_slab_rows(got[1], layout)[layout.live], by_slab_rows(want_scales, layout)[layout.live]
    )


@needs_gpu
@in_wide_kernel
@pytest.mark.parametrize("fused", [None, SILU, IN_BF16])
@pytest.mark.parametrize(
    ("config", "counts", "alignment", "capacity"),
    [
        (WIDE, [200, 0, 64, 385], 8, None),
        (WIDE, [256, 65, 0, 300], 16, 384),
        (WIDE._replace(stages=3), [0, 128, 1, 256], 128, None),
        (WIDE, [0, 0, 1025, 0], 32, None),
        (WIDE._replace(cluster=1), [200, 63, 0, 7], 64, 256),
        (WIDE, [200, 64, 0, 1], 16, 256),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(1536, 2048), (512, 128)])
def test_wide_is_the_other_on_gpu(recipe, n, k, config, counts, alignment, capacity, fused):
    layout = Layout(counts, 128, alignment, capacity)
    operands = problem(recipe, layout, n, k, exact=False, poison=3e38)
    got, want = both(layout, with_any_scales(operands), fused, config=config)
    assert_same_rows(layout, got, want)


# --- FP4 weights


def every_code_with_every_exponent():
    """[E, 128, 128] codes, each in every group, whose exponents are all from -15 to 6."""
    rng = np.random.default_rng(0)
    codes = rng.permuted(np.tile(np.arange(16), (EXPERTS, 128, 4, 2)), axis=-1)
    exponents = rng.permutation(np.resize(np.arange(-15, 7), EXPERTS * 128 * 4))
    return codes.reshape(EXPERTS, 128, 128), exponents.reshape(EXPERTS, 128, 4)


def in_e4m3(codes, exponents) -> np.ndarray:
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.where(codes < 8, 1.0, -1.0) * magnitudes[codes & 7]
    values = values * np.exp2(exponents).repeat(32, -1)
    return values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn)


def test_fp4_widens_every_code_with_every_exponent():
    codes, exponents = every_code_with_every_exponent()
    same_bits(fp4.widen(tiles_of(codes, exponents)), in_e4m3(codes, exponents))


def test_fp4_tables_are_read_by_whole_rows():
    """And every exponent byte of `pack` is the start of one."""
    tiles = tiles_of(*every_code_with_every_exponent())
    starts = np.unique(np.ascontiguousarray(tiles[..., 16, :]).view(np.uint8))
    np.testing.assert_array_equal(starts, 8 * np.arange(20))
    assert fp4.TABLE.nbytes == 256


def test_fp4_kernel_widens_every_code_with_every_exponent(few_sms):
    """One-hot rows pick the columns of their expert's weights, which bf16 holds."""
    codes, exponents = every_code_with_every_exponent()
    layout = Layout([128, 0, 0, 128], 128, 128)
    ones = np.zeros((layout.m, 128), ml_dtypes.float8_e4m3fn)
    ones[layout.live] = np.tile(np.eye(128), (2, 1))
    scales = np.ones((1, layout.m), np.float32), np.ones((EXPERTS, 1, 1), np.float32)
    operands = ones, scales[0], tiles_of(codes, exponents), scales[1], layout.tiles
    out = grouped(
        *jax.tree.map(jnp.asarray, operands),
        **layout.keywords,
        config=Config(128, (128,), 2),
        interpret=jax.default_backend() != "gpu",
    )
    want = in_e4m3(codes, exponents)[[0, 3]].swapaxes(1, 2).reshape(256, 128)
    np.testing.assert_array_equal(np.asarray(out[0])[layout.live], want.astype(ml_dtypes.bfloat16))


def path_b(layout, n, k):
    """Operands with one checkpoint's FP4 weights, in tiles and as path B widens them when loaded;
    some scales are too far apart in a block for either to be exact."""
    rng = np.random.default_rng(1)
    a, a_scales, _, _, tiles = problem("fp8", layout, 128, k, exact=False, poison=3e38)
    values = rng.integers(0, 256, (EXPERTS, n, k // 2)).astype(np.uint8)
    scales = np.exp2(rng.integers(-40, -22, (EXPERTS, n, k // 32))).astype(np.float32)
    for path in (paths.fp4_to_tiles, paths.fp4_to_block_fp8):
        b, b_scales = map(np.array, jax.jit(jax.vmap(path))(values, scales))
        unused = [e for e, count in enumerate(layout.counts) if not count]
        b[unused], b_scales[unused] = -1 if b.dtype == np.int32 else np.nan, np.nan
        yield jax.tree.map(jnp.asarray, (a, a_scales, b, b_scales, tiles))


@pytest.mark.parametrize(
    ("config", "counts", "alignment", "capacity", "fused"),
    [
        (Config(128, (8,), 2), [3, 0, 5, 0], 8, None, None),
        (Config(256, (24, 48), 2), [17, 0, 0, 40], 16, 48, SILU),
    ],
)
def test_fp4_interpreted_is_path_b(config, counts, alignment, capacity, fused, few_sms):
    layout = Layout(counts, config.widths[-1], alignment, capacity)
    how = {**layout.keywords, "config": config, "fused": fused, "interpret": True}
    got, want = (
        [np.asarray(x) for x in grouped(*operands, **how)] for operands in path_b(layout, 256, 256)
    )
    assert_same_rows(layout, got, want)


@needs_gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("n", "k", "fused", "capacity"),
    [
        (4096, 7168, False, None),
        (4096, 7168, True, None),
        (7168, 2048, False, 320),
        (1536, 2048, True, 320),
        (384, 640, False, None),
    ],
)
def test_fp4_is_path_b_on_gpu(n, k, fused, capacity, tile):
    layout = Layout([tile, 1, 0, tile + 19], tile, 8 if tile == 32 else 16, capacity)
    how = {"tile": tile, "expected_m": tile, **layout.keywords}
    if fused:
        run = functools.partial(gemm_act_quant, **how, activation="silu", params=(None,))
    else:
        run = lambda *operands: [gemm(*operands, **how)]  # noqa: E731
    got, want = ([np.asarray(x) for x in run(*operands)] for operands in path_b(layout, n, k))
    assert_same_rows(layout, got, want)


@every_recipe
def test_no_rows(recipe):
    operands = [
        None if s is None else jnp.zeros(s.shape, s.dtype) for s in shapes(recipe, 0, 256, 128)
    ]
    where = {"alignment": 32, "tile": 32, "slabs": 1, "expected_m": 0}
    out = gemm(*operands, **where)
    assert out.shape == (0, 256)
    assert out.dtype == jnp.bfloat16
    values, scales = gemm_act_quant(*operands, **where, activation="silu", params=(None,))
    assert (values.shape, scales.shape) == ((0, 128), (1, 0))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"alignment": 48}, ValueError, "alignment is 48"),
        ({"tile": 48}, ValueError, "tile 48"),
        ({"tile": 288}, ValueError, "tile 288"),
        ({"slabs": 3}, ValueError, "64 rows in 3 slabs"),
        ({"a_scales": None}, ValueError, "both"),
        ({"n": 192}, ValueError, "multiples of 128"),
        ({"k": 192}, ValueError, "multiples of 128"),
        ({"a": jnp.bfloat16}, TypeError, "a has dtype bfloat16"),
        ({"tiles": jnp.int16}, TypeError, "tiles has dtype int16"),
        ({"tiles": (2, 5)}, ValueError, "tiles has shape"),
        ({"b_scales": (4, 1, 2)}, ValueError, "b_scales has shape"),
        ({"recipe": "fp4", "b": (4, 2, 1, 1088)}, ValueError, r"\[E, N / 64, K / 128, 17, 64\]"),
        ({"recipe": "fp4", "b": (4, 2, 1, 16, 64)}, ValueError, "b has shape"),
        ({"recipe": "fp4", "k": 256, "a": (64, 128)}, ValueError, "they must be"),
        ({"recipe": "fp4", "b": jnp.uint32}, ValueError, "they must be"),
    ],
)
def test_errors(change, error, text):
    recipe, n, k = change.pop("recipe", "fp8"), change.pop("n", 128), change.pop("k", 128)
    where = {"alignment": 32, "tile": 64, "slabs": 1, "expected_m": 1}
    where |= {name: change.pop(name) for name in tuple(change) if name in where}
    names = ("a", "a_scales", "b", "b_scales", "tiles")
    operands = dict(zip(names, shapes(recipe, 64, n, k), strict=True))
    for name, what in change.items():
        struct = operands[name]
        if what is None:
            operands[name] = None
        elif isinstance(what, tuple):
            operands[name] = struct.update(shape=what)
        else:
            operands[name] = struct.update(dtype=what)
    with pytest.raises(error, match=text):
        jax.eval_shape(functools.partial(gemm, **where), *operands.values())


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"activation": "gelu"}, ValueError, "activation='gelu'"),
        ({"group": 64}, NotImplementedError, "group=64"),
        ({"group": 32}, NotImplementedError, "group=32.*f32 scales of groups of 128"),
        ({"ue8m0": True, "packed": True}, NotImplementedError, "packed=True.*f32 scales"),
        ({"n": 384}, ValueError, "2I"),
    ],
)
def test_fused_errors(change, error, text):
    keywords = {"alignment": 32, "tile": 64, "slabs": 1, "expected_m": 1}
    operands = shapes("fp8", 64, change.pop("n", 256), 128)
    keywords |= {"activation": "silu", "params": (None,)} | change
    with pytest.raises(error, match=text):
        jax.eval_shape(functools.partial(gemm_act_quant, **keywords), *operands)

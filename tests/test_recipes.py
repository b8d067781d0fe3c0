"""The four recipes: from checkpoints to what each architecture's GEMMs read, and the layer."""

import dataclasses
import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import (
    BACKENDS,
    ON_GPU,
    TOP_2,
    error,
    every_layout,
    f64,
    gaussian,
    random_ids,
    random_layer,
    rounded_oracle,
    run_step,
    same_bits,
    tokens,
    within_0_3_percent_on_its_own_bytes,
)
from dgmoe_jax.interop import scales as deep_gemm_scales
from dgmoe_jax.kernels_pallas import _common, grouped_gemm

import dgmoe_jax as dg
from dgmoe_jax import backends, checks
from dgmoe_jax.recipes import (
    FP8_128X128,
    MXFP4_1X32,
    MXFP4_TILES,
    READS,
    RECIPES,
    RUNS_ON,
    padded,
    run_on,
)
from dgmoe_jax.weights import paths

needs_exact_division = pytest.mark.skipif(
    ON_GPU, reason="XLA's own division on a GPU is an ulp off (dgmoe_jax.xla.divide)"
)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def fp4(values) -> np.ndarray:
    """[.., K] of E2M1's numbers -> [.., K / 2] uint8, the low nibble first."""
    codes = np.abs(np.abs(values)[..., None] - E2M1[:8]).argmin(-1) | (np.signbit(values) << 3)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def read_fp4(values) -> np.ndarray:
    values = np.asarray(values).view(np.uint8)
    codes = np.stack([values & 15, values >> 4], -1)
    return E2M1[codes.reshape(*values.shape[:-1], -1)]


def raw_weights(recipe: str, experts=4, hidden=256, inner=128, seed=0, shared=0) -> dict:
    """A checkpoint in `recipe`, its scales within 2^3 of each other, as f32."""
    rng = np.random.default_rng(seed)
    raw = {"gate_weight": gaussian(rng, experts, hidden)}
    sizes = {"w13": (experts, 2 * inner, hidden), "w2": (experts, hidden, inner)}
    if shared:
        sizes |= {"shared_w13": (2 * shared * inner, hidden), "shared_w2": (hidden, shared * inner)}
    for name, (*lead, n, k) in sizes.items():
        if recipe == "bf16":
            raw[name] = gaussian(rng, *lead, n, k, scale=k**-0.5)
            continue
        if recipe == "mxfp4":
            raw[name] = rng.integers(0, 256, (*lead, n, k // 2)).astype(np.uint8)
        else:
            raw[name] = gaussian(rng, *lead, n, k, scale=4).astype(ml_dtypes.float8_e4m3fn)
        rows, columns = RECIPES[recipe].weights.group
        parts = 2 if name.endswith("w13") else 1  # gate and up have blocks of their own
        groups = (*lead, parts * -(-n // parts // rows), -(-k // columns))
        raw[f"{name}_scale"] = np.exp2(rng.integers(-7, -3, groups)).astype(np.float32)
    return raw


def config(recipe: str, hidden=256, inner=128, **kw) -> dg.MoEConfig:
    return dg.MoEConfig(4, hidden, inner, kw.pop("router", TOP_2), recipe=recipe, **kw)


def decoded(raw: dict, name: str, recipe: str) -> np.ndarray:
    """What the checkpoint says, f64."""
    if recipe == "bf16":
        return f64(raw[name])
    values = read_fp4(raw[name]) if recipe == "mxfp4" else f64(raw[name])
    scales = f64(raw[f"{name}_scale"])
    for axis, size in zip((-2, -1), RECIPES[recipe].weights.group, strict=True):
        scales = scales.repeat(size, axis=axis)
    return values * scales[..., : values.shape[-2], : values.shape[-1]]


# --- published cases, bit for bit; those of rounding scales are in test_scales


@pytest.mark.parametrize("spec", ["fp8_1x128", "mxfp8_1x32"])
def test_a_group_of_640_stores_320_under_scale_2(spec):
    """Its raw scale is 1.43."""
    scaled = dg.quantize(jnp.full((1, 128), 640.0), spec, ue8m0=True)
    np.testing.assert_array_equal(f64(scaled.values), 320)
    np.testing.assert_array_equal(scaled.scales, 2)
    np.testing.assert_array_equal(dg.dequantize(scaled), 640)


def test_byte_0x21_with_scale_byte_127_reads_a_half_and_one():
    scales = paths.ue8m0_to_f32("s", jnp.full((1, 1), 127, jnp.uint8))
    scaled = dg.Scaled(jnp.full((1, 16), 0x21, jnp.uint8), scales, MXFP4_1X32)
    np.testing.assert_array_equal(dg.dequantize(scaled)[0, :2], [0.5, 1.0])


GEMMS = BACKENDS if not ON_GPU else ("xla",)


@pytest.mark.parametrize("backend", GEMMS)
@pytest.mark.parametrize("group", [128, 32])
def test_fp4_gemm_with_a_scale_of_its_own_in_every_group(backend, group):
    """One-hot rows pick exactly their weights: activation groups of 128 or 32, weight groups of 32,
    no two scales in reach the same."""
    k, n = 256, 128
    rng = np.random.default_rng(0)
    weights = E2M1[rng.integers(0, 16, (1, n, k))]
    weight_exponents = rng.integers(-20, 20, (1, n, k // 32))
    weight_exponents[0, 0] = np.arange(k // 32)
    row_exponents = np.arange(k // group)[None] * 3 - rng.integers(0, 3, (k, 1))
    one_hot = np.eye(k)
    pack = deep_gemm_scales.pack_ue8m0
    y = run_step(
        jnp.asarray(one_hot, jnp.float8_e4m3fn),
        pack(jnp.asarray(np.exp2(row_exponents), jnp.float32)),
        jnp.asarray(fp4(weights)),
        pack(jnp.asarray(np.exp2(weight_exponents), jnp.float32)),
        jnp.array([[0], [0], [k]], jnp.int32),
        jnp.zeros(k, jnp.int32),
        None,
        step="gemm",
        backend=backend,
        recipe_a=(1, group),
        recipe_b=(1, 32),
        **dict(alignment=k, tile=k, slabs=1, expected_m=k),
    )
    scales = np.exp2(row_exponents).repeat(group, 1)[np.arange(k), np.arange(k)]
    want = (weights[0] * np.exp2(weight_exponents[0]).repeat(32, 1)).T * scales[:, None]
    np.testing.assert_array_equal(f64(y), want)


# --- path A: UE8M0 scales, however they come


@every_recipe
def test_ue8m0_scales_come_as_e8m0_bytes_or_f32(recipe):
    if recipe == "bf16":
        pytest.skip("has no scales")
    raw = raw_weights(recipe)
    want = dg.prepare_params(raw, config(recipe))
    for dtype in (ml_dtypes.float8_e8m0fnu, np.uint8):
        scales = {n: x for n, x in raw.items() if n.endswith("scale")}
        as_bytes = {n: x.astype(ml_dtypes.float8_e8m0fnu).view(dtype) for n, x in scales.items()}
        got = dg.prepare_params(raw | as_bytes, config(recipe))
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            same_bits(one, other)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp8", "mxfp4"])
def test_scales_are_what_deep_gemm_makes_of_them_for_sm100(recipe):
    """And values stay as they are: the scales are powers of two."""
    raw = raw_weights(recipe)
    experts = dg.prepare_params(raw, config(recipe), arch="sm100").experts
    for name, n, k in (("w13", 256, 256), ("w2", 256, 128)):
        want = deep_gemm_scales.transform_sf_into_required_layout(
            jnp.asarray(raw[f"{name}_scale"]),
            *(n, k, RECIPES[recipe].weights.group, 4),
            arch="sm100",
        )
        got = getattr(experts, name)
        same_bits(got.scales, want)
        same_bits(got.values, raw[name])
        np.testing.assert_array_equal(f64(dg.dequantize(got)), decoded(raw, name, recipe))


def test_signed_fp4_bytes_are_the_same_bytes():
    raw = raw_weights("mxfp4")
    signed = {n: x.view(np.int8) if x.dtype == np.uint8 else x for n, x in raw.items()}
    got, want = (dg.prepare_params(r, config("mxfp4")).experts for r in (signed, raw))
    for name in ("w13", "w2"):
        same_bits(getattr(got, name).values, getattr(want, name).values)


# --- path B: FP4 to block FP8


def published_cast(values, scales):
    """DeepSeek-V4's cast_e2m1fn_to_e4m3fn, in numpy: values [N, K] f64, scales [N, K / 32]."""
    n, k = values.shape
    blocks = scales.reshape(n // 128, 128, k // 128, 4)
    block = blocks.max(axis=(1, 3)) / 2.0**6
    offset = blocks / block[:, None, :, None]
    x = values * offset.reshape(n, k // 32).repeat(32, axis=1)
    return x.astype(np.float32).astype(ml_dtypes.float8_e4m3fn), block


@pytest.mark.parametrize("span", [0, 6, 14, 20])
def test_path_b_is_the_published_cast_and_lossless_to_a_span_of_2_to_14(span):
    rng = np.random.default_rng(span)
    values = E2M1[rng.integers(0, 16, (256, 256))]
    exponents = rng.integers(-span, 1, (256, 8))
    exponents.reshape(2, 128, 2, 4)[:, 0, :, 0] = 0
    exponents.reshape(2, 128, 2, 4)[:, 1, :, 1] = -span
    scales = np.exp2(exponents).astype(np.float32)
    got, block = paths.fp4_to_block_fp8(jnp.asarray(fp4(values)), jnp.asarray(scales))
    want, want_block = published_cast(values, f64(scales))
    same_bits(got, want)
    np.testing.assert_array_equal(f64(block), want_block)
    exact = values * f64(scales).repeat(32, axis=1)
    back = f64(dg.dequantize(dg.Scaled(got, block, FP8_128X128)))
    assert np.array_equal(back, exact) == (span <= 14)


def test_path_b_of_blocks_at_the_edge_and_of_the_smallest_scales():
    """130 x 64: blocks hang over; scale bytes 1 and 0, and the largest."""
    values = E2M1[np.random.default_rng(0).integers(0, 16, (130, 64))]
    for exponent in (1, 0, 254):
        scales = paths.ue8m0_to_f32("s", jnp.full((130, 2), exponent, jnp.uint8))
        got, block = paths.fp4_to_block_fp8(jnp.asarray(fp4(values)), scales)
        assert block.shape == (2, 1) and np.isfinite(block).all() and (np.asarray(block) > 0).all()
        want = values * f64(scales).repeat(32, axis=1)
        np.testing.assert_array_equal(f64(got) * f64(block)[[0] * 128 + [1] * 2], want)


def test_fp4_for_deep_gemm_on_sm90_is_block_fp8_without_a_warning_unless_it_lost_something():
    raw, cfg = raw_weights("mxfp4"), config("mxfp4", backend="deep_gemm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        experts = dg.prepare_params(raw, cfg, arch="sm90").experts
    for name in ("w13", "w2"):
        got = getattr(experts, name)
        assert got.format == FP8_128X128
        np.testing.assert_array_equal(f64(dg.dequantize(got)), decoded(raw, name, "mxfp4"))
    raw["w2_scale"][1, 0, 0] = 2.0**12  # the rest of the block: 2^-7 to 2^-4
    with pytest.warns(UserWarning, match=r"w2: converting mxfp4_1x32 .*1 of 4 experts.* error"):
        lossy = dg.prepare_params(raw, cfg, arch="sm90").experts.w2
    was, now = decoded(raw, "w2", "mxfp4"), f64(dg.dequantize(lossy))
    assert not np.array_equal(now[1], was[1]) and np.array_equal(now[[0, 2, 3]], was[[0, 2, 3]])


# --- FP4 that our own GEMM reads on Hopper


def test_fp4_for_our_own_gemm_is_what_path_b_makes_of_it():
    """In half the bytes, where it is exact and where it is not."""
    raw = raw_weights("mxfp4", shared=1)
    raw["w2_scale"][1, 0, 0] = 2.0**12
    pallas, other = (
        config("mxfp4", num_shared_experts=1, backend=b) for b in ("pallas", "deep_gemm")
    )
    with pytest.warns(UserWarning, match=r"w2: .* to mxfp4_tiles .*1 of 4 experts") as caught:
        params = dg.prepare_params(raw, pallas, arch="sm90")
    with pytest.warns(UserWarning) as of_path_b:
        want = dg.prepare_params(raw, other, arch="sm90")
    assert [str(w.message)[-8:] for w in caught] == [str(w.message)[-8:] for w in of_path_b]
    for block, by_path_b in ((params.experts, want.experts), (params.shared, want.shared)):
        for name in ("w13", "w2"):
            got, old = getattr(block, name), getattr(by_path_b, name)
            assert (got.format, old.format) == (MXFP4_TILES, FP8_128X128)
            assert got.values.nbytes / old.values.nbytes == 17 / 32
            same_bits(got.scales, old.scales)
            same_bits(dg.dequantize(got), dg.dequantize(old))
    checks.params(params, pallas)


def test_fp4_stays_fp4_on_sm90_unless_a_config_names_what_does_not_read_it(monkeypatch):
    raw, read = raw_weights("mxfp4"), {}
    for backend in ("auto", "pallas", "deep_gemm", "xla"):
        params = dg.prepare_params(raw, config("mxfp4", backend=backend), arch="sm90")
        read[backend] = params.experts.w13.format
    want = {b: MXFP4_TILES if b in ("auto", "pallas") else FP8_128X128 for b in read}
    assert read == want
    assert all(dg.plan(config("mxfp4"), t, arch="sm90").backend == "pallas" for t in (1, 2**16))
    with monkeypatch.context() as patched:  # what is newer than the versions tried
        patched.setattr(_common, "TRIED", ())
        params = dg.prepare_params(raw, config("mxfp4"), arch="sm90")
        assert params.experts.w13.format == FP8_128X128
        assert "as fp8_block" in dg.plan(config("mxfp4"), 16, arch="sm90").why
    for recipe in ("bf16", "fp8_block", "mxfp8"):
        assert run_on(recipe, "sm90", "pallas") == RUNS_ON[recipe]["sm90"]


@pytest.mark.skipif(ON_GPU, reason="a CPU stands for sm90 there")
def test_what_does_not_read_fp4_tiles_says_how_to_prepare_for_it():
    layer = random_layer(recipe="mxfp4", backend="pallas")
    for backend in ("deep_gemm", "emulator"):
        with pytest.raises(NotImplementedError, match=rf"'mxfp4_tiles'.*backend='{backend}'"):
            cfg = dataclasses.replace(layer.cfg, backend=backend)
            dg.moe_layer(jnp.asarray(tokens(3, 128)), layer.params, cfg)
    with pytest.raises(ValueError, match=r"mxfp4_tiles.*prepare_params"):
        dg.quantize(jnp.ones((128, 128)), MXFP4_TILES)


def test_fp4_tiles_are_saved_and_loaded(tmp_path):
    cfg = config("mxfp4", backend="pallas")
    params = dg.prepare_params(raw_weights("mxfp4"), cfg, arch="sm90")
    dg.save(tmp_path / "layer.safetensors", cfg, params)
    _, loaded = dg.load(tmp_path / "layer.safetensors", cfg)
    assert loaded.experts.w2.format == MXFP4_TILES
    for one, other in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        same_bits(one, other)


@pytest.mark.skipif(ON_GPU, reason="runs there as every backend does")
def test_the_layer_on_fp4_tiles_in_interpret_mode(monkeypatch):
    """Our own GEMM, which "emulator" leaves to DeepGEMM's, and what it fuses; jnp before it and
    after."""
    get, kernels = backends.get, ("gemm", "gemm_act_quant", "act_quant")

    def interpreted(step, backend):
        if step in kernels:
            return functools.partial(get(step, backend), interpret=True)
        return get(step, "xla")

    monkeypatch.setattr(backends, "get", interpreted)
    monkeypatch.setattr(backends, "only_where_it_runs", lambda x, *_: x)
    monkeypatch.setattr(grouped_gemm, "_SMS", 2)
    layer = random_layer(experts=3, recipe="mxfp4", backend="pallas")
    assert layer.params.experts.w13.format == MXFP4_TILES
    x, ids = tokens(3, 128), random_ids(0, 3, 2, 3)
    weights = np.random.default_rng(1).random((3, 2))
    y = layer(x, ids, weights)
    within_0_3_percent_on_its_own_bytes(layer, x, ids, weights, y, "pallas")


@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_weight_that_is_nan_stays_one_or_is_refused(recipe, arch):
    layer = random_layer(recipe="bf16", backend="xla")
    layer.raw["w13"][1, 2, 3] = np.nan
    if arch == "sm100" and recipe != "bf16":  # its scales are exponents, which have no NaN here
        with pytest.raises(ValueError, match="nan the first"):
            dg.prepare_params(layer.raw, config(recipe, 128), arch=arch)
        return
    params = dg.prepare_params(layer.raw, config(recipe, 128), arch=arch)
    assert np.isnan(f64(dg.dequantize(params.experts.w13))[1]).any()


# --- path C: block FP8 to powers of two


@needs_exact_division
def test_path_c_keeps_blocks_whose_scales_are_powers_of_two_and_quantises_the_others_again():
    rng = np.random.default_rng(0)
    values = gaussian(rng, 256, 384, scale=100).astype(ml_dtypes.float8_e4m3fn)
    scales = np.array([[0.25, 0.3, 2**-10], [1e-3, 1.0, 448.0]], np.float32)
    got, block = paths.block_fp8_to_ue8m0(jnp.asarray(values), jnp.asarray(scales))
    got, block = np.asarray(got), np.asarray(block)
    for r, c in np.ndindex(2, 3):
        at = np.s_[128 * r : 128 * r + 128, 128 * c : 128 * c + 128]
        if np.log2(scales[r, c]) % 1 == 0:
            same_bits(got[at], values[at])
            assert block[r, c] == scales[r, c]
            continue
        # DeepGEMM's per_block_cast_to_fp8(use_ue8m0=True) of the block, in f32.
        x = values[at].astype(np.float32) * scales[r, c]
        scale = 2.0 ** np.ceil(np.log2(f64(np.abs(x).max() / np.float32(448))))
        assert block[r, c] == scale
        same_bits(got[at], (x / np.float32(scale)).astype(ml_dtypes.float8_e4m3fn))


def test_path_c_says_what_it_cost():
    raw = raw_weights("fp8_block")
    raw["w13_scale"] *= 1.3
    with pytest.warns(UserWarning, match="w13: .*UE8M0.* 4 of 4 experts") as caught:
        got = dg.prepare_params(raw, config("fp8_block"), arch="sm100").experts.w13
    assert len(caught) == 1
    said = float(str(caught[0].message).split()[-1])
    was, now = decoded(raw, "w13", "fp8_block"), f64(dg.dequantize(got))
    assert 0.01 < said < 0.04
    assert abs(max(error(now[e], was[e]) for e in range(4)) - said) < 0.01 * said + 5e-4


# --- path D: MXFP8


def test_path_d_quantises_bf16_and_repacks_what_is_mxfp8():
    """Both to the same bytes."""
    raw = raw_weights("bf16")
    made = dg.prepare_params(raw, config("mxfp8"), arch="sm100").experts
    given = {"gate_weight": raw["gate_weight"]}
    for name in ("w13", "w2"):
        scaled = dg.quantize(jnp.asarray(raw[name]), "mxfp8_1x32")
        given |= {name: scaled.values, f"{name}_scale": scaled.scales}
    again = dg.prepare_params(given, config("mxfp8"), arch="sm100").experts
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        same_bits(one, other)


@needs_exact_division
def test_mxfp8_on_sm90_is_requantised_to_blocks_with_the_loss_stated():
    raw = raw_weights("mxfp8")
    with pytest.warns(UserWarning, match="mxfp8_1x32 to fp8_128x128") as caught:
        got = dg.prepare_params(raw, config("mxfp8"), arch="sm90").experts
    said = [float(str(w.message).split()[-1]) for w in caught]
    for name, loss in zip(("w13", "w2"), said, strict=True):
        want = dg.quantize(jnp.asarray(decoded(raw, name, "mxfp8"), jnp.float32), FP8_128X128)
        same_bits(getattr(got, name).values, want.values)
        was, now = decoded(raw, name, "mxfp8"), f64(dg.dequantize(getattr(got, name)))
        assert abs(max(error(now[e], was[e]) for e in range(4)) - loss) < 0.01 * loss + 5e-4


@needs_exact_division
@every_recipe
@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
def test_weights_that_are_quantised_here_are_quantised_once(recipe, arch):
    """Straight to what the GEMM reads, but for FP4, whose numbers the recipe means."""
    raw = raw_weights("bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = dg.prepare_params(raw, config(recipe), arch=arch).experts
    fmt = RUNS_ON[recipe][arch].operands.weights
    for name in ("w13", "w2"):
        want = dg.quantize(jnp.asarray(raw[name]), MXFP4_1X32 if recipe == "mxfp4" else fmt)
        np.testing.assert_array_equal(
            dg.dequantize(getattr(got, name)), dg.dequantize(want), err_msg=name
        )


# --- path E: one scale a tensor


@pytest.mark.parametrize("apart", [False, True])
def test_per_tensor_scales_become_blocks(apart):
    raw, rng = raw_weights("fp8_block", hidden=192, inner=192, shared=1), np.random.default_rng(1)
    scales = np.exp2(rng.integers(-9, 9, (4, 2) if apart else 4)).astype(np.float32)
    raw |= {"w13_scale": scales, "w2_scale": scales[..., 0] if apart else scales}
    raw |= {"shared_w13_scale": scales[0], "shared_w2_scale": raw["w2_scale"][0]}
    cfg = config("fp8_block", 192, 192, num_shared_experts=1)
    params = dg.prepare_params(raw, cfg)
    got = f64(dg.dequantize(params.experts.w13)).reshape(4, 2, 256, 256)[:, :, :192, :192]
    per_half = f64(scales if apart else np.stack([scales] * 2, -1))[..., None, None]
    np.testing.assert_array_equal(got, f64(raw["w13"]).reshape(4, 2, 192, 192) * per_half)
    got = f64(dg.dequantize(params.experts.w2))[:, :192, :192]
    np.testing.assert_array_equal(got, f64(raw["w2"]) * f64(raw["w2_scale"])[:, None, None])
    got = f64(dg.dequantize(params.shared.w13)).reshape(2, 256, 256)[:, :192, :192]
    np.testing.assert_array_equal(got, f64(raw["shared_w13"]).reshape(2, 192, 192) * per_half[0])


# --- prepared for the wrong thing


def refuses(kind, words, raw, recipe="mxfp4", **kw):
    with pytest.raises(kind) as caught:
        dg.prepare_params(raw, config(recipe), **kw)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    "kind, words, change",
    [
        (ValueError, ["w2_scale[1, 2, 3]=0.75", "1 such", "powers of two"], (1, 2, 3, 0.75)),
        (ValueError, ["w2_scale[0, 0, 0]=-1.0", "powers of two"], (0, 0, 0, -1)),
        (ValueError, ["w2_scale[3, 255, 3]=inf"], (3, 255, 3, np.inf)),
    ],
)
def test_scales_that_are_no_powers_of_two_are_named(kind, words, change):
    raw = raw_weights("mxfp4")
    raw["w2_scale"][change[:3]] = change[3]
    refuses(kind, words, raw)


def test_checkpoints_that_do_not_fit_are_named():
    raw = raw_weights("mxfp4")
    exponents = np.full((4, 256, 4), 120, np.uint8)
    exponents[2, 5, 1] = 255
    refuses(ValueError, ["w2_scale[2, 5, 1]=UE8M0 byte 255"], raw | {"w2_scale": exponents})
    refuses(ValueError, ["w2", "uint8 without w2_scale"], raw | {"w2_scale": None})
    narrow = {"w13": raw["w13"][..., :64]}
    refuses(ValueError, ["w13", "(4, 256, 64)", "(4, 256, 128)"], raw | narrow)
    short = {"w13_scale": raw["w13_scale"][:3]}
    refuses(ValueError, ["w13_scale", "(3, 256, 8)", "(4, 256, 8)"], raw | short)
    bf16 = {"w2_scale": raw["w2_scale"].astype(ml_dtypes.bfloat16)}
    refuses(TypeError, ["w2_scale", "bfloat16", "float8_e8m0fnu"], raw | bf16)
    refuses(TypeError, ["w13", "uint8", "bfloat16 or float16 or float32"], raw, "bf16")
    refuses(TypeError, ["w13", "uint8", "float8_e4m3fn"], raw, "mxfp8")
    with pytest.raises(ValueError, match=r"w2: 129 values a row, must be even"):
        odd = {"gate_weight": raw["gate_weight"], "w2": raw["w2"]}
        odd |= {"w13": np.zeros((4, 258, 128), np.uint8), "w13_scale": np.ones((4, 258, 8), "f4")}
        dg.prepare_params(odd, config("mxfp4", inner=129))


@pytest.mark.skipif(ON_GPU, reason="a CPU stands for sm90 there")
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4"])
def test_a_backend_that_does_not_read_the_params_says_how_to_prepare_them(recipe):
    layer, x = random_layer(recipe=recipe, backend="xla"), tokens(3, 128)
    other = dataclasses.replace(layer.cfg, backend="emulator")
    with pytest.raises(NotImplementedError, match=r"'emulator'.*f32 scales.*\('sm90', 'sm100'\)"):
        dg.moe_layer(jnp.asarray(x), layer.params, other)
    packed = dg.prepare_params(layer.raw, layer.cfg, arch="sm100")
    other = dataclasses.replace(layer.cfg, backend="pallas")
    with pytest.raises(NotImplementedError, match=r"'pallas'.*packed scales.*\('sm90',\)"):
        dg.moe_layer(jnp.asarray(x), packed, other)


def test_params_of_another_recipe_are_refused():
    layer = random_layer(recipe="mxfp4", backend="xla")
    stored = layer.params.experts.w13.format.name  # sm90 has another one
    with pytest.raises(ValueError, match=f"'{stored}', must be 'bf16' for recipe='bf16'"):
        dg.moe_layer(
            jnp.asarray(tokens(3, 128)), layer.params, dataclasses.replace(layer.cfg, recipe="bf16")
        )


def test_plan_says_by_which_path_a_recipe_runs():
    whys = {
        (recipe, arch): dg.plan(config(recipe), 16, arch=arch).why
        for recipe, arch in itertools.product(RECIPES, ("cpu", "sm90", "sm100"))
    }
    assert all(f"{recipe} " in why for (recipe, _), why in whys.items())
    assert "FP4 weights that the GEMM widens" in whys["mxfp4", "sm90"]
    assert "2.4 to 2.8 %" in whys["mxfp8", "sm90"]
    assert "never run" in whys["mxfp4", "sm100"] and "natively" in whys["mxfp4", "cpu"]
    # A GPU backend that is named on a CPU is lowered, or emulated, for Hopper.
    for arch, backend in itertools.product(("cpu", "sm90"), ("pallas", "deep_gemm")):
        why = dg.plan(config("mxfp4", backend=backend), 16, arch=arch).why
        assert ("since sm90" in why) == (backend == "deep_gemm")
        assert ("FP4 weights that the GEMM widens" in why) == (backend == "pallas")


def test_every_backend_reads_what_some_architecture_stores():
    for recipe, (backend, archs) in itertools.product(RECIPES, READS.items()):
        assert all(arch in RUNS_ON[recipe] for arch in archs), backend


# --- memory and progress


def test_progress_is_told_expert_by_expert_of_what_takes_time():
    told = []
    dg.prepare_params(
        raw_weights("mxfp4"),
        config("mxfp4"),
        arch="sm90",
        progress=lambda name, done, count: told.append((name, done, count)),
    )
    assert told == [(name, e + 1, 4) for name in ("w13", "w2") for e in range(4)]
    told.clear()
    dg.prepare_params(
        raw_weights("mxfp4"), config("mxfp4"), arch="cpu", progress=lambda *a: told.append(a)
    )
    assert not told  # nothing to do


@needs_exact_division
@every_recipe
def test_preparing_under_jit_gives_the_same_bits(recipe):
    raw = raw_weights("bf16", hidden=192, inner=64)
    cfg = config(recipe, 192, 64)
    prepare = functools.partial(dg.prepare_params, cfg=cfg)
    for got, want in zip(
        jax.tree.leaves(jax.jit(prepare)({n: jnp.asarray(x) for n, x in raw.items()})),
        jax.tree.leaves(prepare(raw)),
        strict=True,
    ):
        same_bits(got, want)


def test_fused_shared_experts_of_an_fp4_checkpoint_are_cut_with_their_scales():
    raw = raw_weights("mxfp4", shared=2)
    router = dg.RouterConfig(2, fused_shared_experts=2)
    cfg = config("mxfp4", router=router, num_shared_experts=2)
    experts = dg.prepare_params(raw, cfg, arch="sm100").experts
    whole13 = decoded(raw, "shared_w13", "mxfp4").reshape(2, 2, 128, 256)
    whole2 = decoded(raw, "shared_w2", "mxfp4")
    for s in range(2):
        got = f64(dg.dequantize(experts.w13))[4 + s].reshape(2, 128, 256)
        np.testing.assert_array_equal(got, whole13[:, s])
        got = f64(dg.dequantize(experts.w2))[4 + s]
        np.testing.assert_array_equal(got, whole2[:, 128 * s : 128 * (s + 1)])


# --- the layer

# What test_layer does not run: jnp on the formats of every architecture, and on a CPU the real
# bridge, with the emulator as Blackwell and as Hopper; on a GPU every recipe, as that GPU runs it.
RUNS = [("xla", "cpu", "mxfp8"), ("xla", "cpu", "mxfp4"), ("xla", "sm90", "mxfp4")]
RUNS += [("xla", "sm100", recipe) for recipe in RECIPES if recipe != "bf16"]
if ON_GPU:
    RUNS += [(backend, backends.current_arch(), r) for backend in BACKENDS[1:] for r in RECIPES]
else:
    RUNS += [("emulator", "sm100", recipe) for recipe in RECIPES if recipe != "bf16"]
    RUNS += [("emulator", "sm90", "mxfp4")]


@pytest.mark.parametrize("backend, arch, recipe", RUNS)
@every_layout
def test_the_layer_is_within_0_3_percent_on_its_own_bytes(backend, arch, recipe, layout):
    layer = random_layer(
        **dict(hidden=192, inner=64, shared=1, recipe=recipe, backend=backend, layout=layout),
        arch=arch,
    )
    x, ids = tokens(17, 192), random_ids(0, 17, 2, 4)
    weights = np.random.default_rng(1).random((17, 2))
    y = layer(x, ids, weights)
    within_0_3_percent_on_its_own_bytes(layer, x, ids, weights, y, backend)
    limit = 0.003 if recipe == "bf16" else 0.01
    assert error(y, rounded_oracle(layer, x, ids, weights)) < limit
    low, high = (0, 0.006) if recipe == "bf16" else (0.03, 0.06)
    assert low < error(y, layer.oracle(x, ids, weights, prepared=True)) < high


@every_recipe
@pytest.mark.parametrize("arch", ["cpu", "sm100"])
def test_the_layouts_agree_in_every_recipe(recipe, arch):
    contiguous, masked = (
        random_layer(recipe=recipe, backend="xla", layout=layout, shared=1, arch=arch)
        for layout in ("contiguous", "masked")
    )
    x, ids = tokens(17, 128), random_ids(3, 17, 2, 4)
    same_bits(masked(x, ids), contiguous(x, ids))


SIZES = [("cpu", 576, 2880), ("cpu", 1152, 1536), ("cpu", 2880, 768), ("cpu", 3584, 768)]
SIZES += [("sm90", 576, 2880), ("sm100", 576, 2880), ("sm100", 2880, 768)]


@pytest.mark.parametrize("arch, hidden, inner", SIZES)
@every_recipe
def test_sizes_that_are_padded_are_as_if_the_checkpoint_held_zeros(recipe, arch, hidden, inner):
    """To the last bit; and the width is the one asked for."""
    raw = raw_weights(recipe, experts=1, hidden=hidden, inner=inner)
    cfg = dg.MoEConfig(1, hidden, inner, dg.RouterConfig(1), recipe=recipe, backend="xla")
    wide_cfg = dataclasses.replace(cfg, hidden_size=padded(hidden), intermediate_size=padded(inner))
    group = RECIPES[recipe].weights.group or (1, 1)

    def widened(name, x):
        if name == "gate_weight":
            return np.pad(x, ((0, 0), (0, padded(hidden) - hidden)))
        n, k = (inner, hidden) if name.startswith("w13") else (hidden, inner)
        rows, columns = group if name.endswith("scale") else (1, RECIPES[recipe].weights.packed)
        parts = 2 if name.startswith("w13") else 1
        x = x.reshape(1, parts, -1, x.shape[-1])
        tails = [
            -(-padded(size) // g) - had
            for size, g, had in zip((n, k), (rows, columns), x.shape[2:], strict=True)
        ]
        x = np.pad(x, ((0, 0), (0, 0), (0, tails[0]), (0, tails[1])))
        return x.reshape(1, -1, x.shape[-1])

    wide_raw = {name: widened(name, x) for name, x in raw.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = dg.prepare_params(raw, cfg, arch=arch)
        wide = dg.prepare_params(wide_raw, wide_cfg, arch=arch)
    x = tokens(3, hidden)
    wide_x = np.pad(x, ((0, 0), (0, padded(hidden) - hidden)))
    routing = dg.Routing(jnp.array([[0], [-1], [0]]), jnp.ones((3, 1)))
    run = jax.jit(dg.moe_layer, static_argnames="cfg")
    got = run(jnp.asarray(x), params, cfg=cfg, routing=routing)
    want = run(jnp.asarray(wide_x), wide, cfg=wide_cfg, routing=routing)
    assert got.shape == (3, hidden)
    same_bits(got, np.asarray(want)[:, :hidden])
    np.testing.assert_array_equal(f64(want)[:, hidden:], 0)
    for block in (params.experts.w13, params.experts.w2):
        back = f64(dg.dequantize(block))
        assert np.isfinite(back).all()

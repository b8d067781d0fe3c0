"""The DeepGEMM bridge: its real shim in jit on the CPU emulator, against a float64 oracle."""

import ast
import ctypes
import functools
import importlib.util
import itertools
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dgmoe_jax.interop import bridge, deep_gemm, emulator
from jax.sharding import AxisType, PartitionSpec

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FP8_TARGET = "dgmoe_m_grouped_fp8_fp4_gemm_nt_contiguous"
BF16_TARGET = "dgmoe_m_grouped_bf16_gemm_nt_contiguous"
# The operand order of gemm, less alignment and emulate.
NAMES = ("a", "a_scales", "b", "b_scales", "m_indices")


def make_case(seed, m_indices, columns, depth, *, fp8, exact, poison=None, experts=3):
    """gemm's operands as numpy arrays; rows and scale columns that nobody may use are poisoned."""
    rng = np.random.default_rng(seed)
    m_indices = np.asarray(m_indices, np.int32)
    rows, groups, aligned = len(m_indices), depth // 128, -(-len(m_indices) // 4) * 4
    blocks = -(-columns // 128)

    def values(*shape):
        if exact:  # products and their sums are exact in f32 in any order
            return rng.integers(-4, 5, shape).astype(np.float64)
        return rng.standard_normal(shape)

    a, b = values(rows, depth), values(experts, columns, depth)
    padding = m_indices < 0
    if poison is not None:
        a[padding] = poison
    if not fp8:
        return a.astype(BF16), None, b.astype(BF16), None, m_indices

    def scales(*shape):
        if exact:
            return np.exp2(rng.integers(-2, 3, shape)).astype(np.float32)
        return rng.uniform(0.001, 2.0, shape).astype(np.float32)

    a_scales = scales(groups, aligned)
    a_scales[:, rows:] = np.nan
    if poison is not None:
        a_scales[:, :rows][:, padding] = poison
    return a.astype(E4M3), a_scales, b.astype(E4M3), scales(experts, blocks, groups), m_indices


def oracle(a, a_scales, b, b_scales, m_indices):
    """[M, N] float64; NaN where a row has no expert."""
    out = np.full((a.shape[0], b.shape[1]), np.nan)
    for r, expert in enumerate(m_indices):
        if expert < 0:
            continue
        for n in range(b.shape[1]):
            products = a[r].astype(np.float64) * b[expert, n].astype(np.float64)
            if a_scales is not None:
                sums = products.reshape(-1, 128).sum(axis=1)
                products = sums * a_scales[:, r].astype(np.float64) * b_scales[expert, n // 128]
            out[r, n] = products.sum()
    return out


def gemm(a, a_scales, b, b_scales, m_indices, *, alignment, emulate=False):
    """The layer's step in the contiguous layout."""
    where = dict(alignment=alignment, tile=alignment, slabs=1, expected_m=1)
    return deep_gemm.gemm(a, a_scales, b, b_scales, None, m_indices, None, **where, emulate=emulate)


def emulated(case, alignment):
    return np.asarray(jax.jit(lambda *c: gemm(*c, alignment=alignment, emulate=True))(*case))


def check(out, case, *, exact):
    live = case[-1] >= 0
    want = oracle(*case)[live]
    got = out[live].astype(np.float64)
    if exact:
        np.testing.assert_array_equal(got, want.astype(np.float32).astype(BF16).astype(np.float64))
    else:
        # One bf16 rounding, and sums that cancel.
        np.testing.assert_allclose(got, want, rtol=2**-8, atol=2**-8 * np.abs(want).mean())


def segments(alignment, counts, tail=0):
    """m_indices of the contiguous layout for ``counts`` rows of each expert."""
    m_indices = []
    for expert, count in enumerate(counts):
        m_indices += [expert] * count + [-1] * (-count % alignment)
    return m_indices + [-1] * tail


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
@pytest.mark.parametrize(
    ("alignment", "columns", "depth"),
    [(8, 8, 128), (32, 136, 384), (64, 128, 640), (128, 200, 128)],
)
def test_matches_the_oracle(fp8, exact, alignment, columns, depth):
    m_indices = segments(alignment, (alignment + 3, 0, 5), tail=alignment)
    case = make_case(1, m_indices, columns, depth, fp8=fp8, exact=exact)
    check(emulated(case, alignment), case, exact=exact)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("rows", [1, 3, 17, 130])
def test_rows_that_fill_no_block(fp8, rows):
    # 1, 3, 17 and 130 rows leave 3, 1, 3 and 2 columns of the scales that hold NaN.
    case = make_case(2, [1] * rows, 72, 256, fp8=fp8, exact=True)
    check(emulated(case, 128), case, exact=True)


def test_bf16_takes_depths_that_are_multiples_of_64():
    case = make_case(3, [0] * 8, 16, 576, fp8=False, exact=True)
    check(emulated(case, 8), case, exact=True)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("poison", [np.nan, 3e38])
def test_padding_reaches_no_live_row(fp8, poison):
    m_indices = [*segments(32, (5, 33, 1)), *[-1] * 32, *[2] * 32]
    clean, poisoned = (
        make_case(4, m_indices, 40, 256, fp8=fp8, exact=False, poison=p) for p in (None, poison)
    )
    live = clean[-1] >= 0
    outs = [emulated(case, 32)[live].view(np.uint16) for case in (clean, poisoned)]
    np.testing.assert_array_equal(*outs)
    check(emulated(poisoned, 32), poisoned, exact=False)


def test_two_calls_in_one_program():
    one = make_case(5, segments(8, (3, 9, 0)), 24, 128, fp8=True, exact=True)
    two = make_case(6, segments(64, (1, 0, 70)), 40, 384, fp8=False, exact=True)

    @jax.jit
    def both(one, two):
        return (
            gemm(*one, alignment=8, emulate=True),
            gemm(*two, alignment=64, emulate=True),
        )

    for out, case in zip(both(one, two), (one, two), strict=True):
        check(np.asarray(out), case, exact=True)


def test_a_chain_of_calls():
    # The second call reads what the first wrote, so its rows must be in memory by then.
    a, _, b, _, m_indices = make_case(7, [0] * 8 + [2] * 8, 128, 128, fp8=False, exact=True)
    b[:] = np.eye(128)[::-1]

    @jax.jit
    def reverse_twice(a):
        for _ in range(2):
            a = gemm(a, None, b, None, m_indices, alignment=8, emulate=True)
        return a

    np.testing.assert_array_equal(np.asarray(reverse_twice(a)), a)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_inside_scan(fp8):
    cases = [make_case(s, segments(8, (2, 8, 5)), 16, 256, fp8=fp8, exact=True) for s in (8, 9)]
    stacked = [None if xs[0] is None else np.stack(xs) for xs in zip(*cases, strict=True)]

    @jax.jit
    def layers(*stacked):
        def body(count, case):
            return count + 1, gemm(*case, alignment=8, emulate=True)

        return jax.lax.scan(body, 0, stacked)[1]

    for out, case in zip(np.asarray(layers(*stacked)), cases, strict=True):
        check(out, case, exact=True)


def device_mesh():
    return jax.make_mesh((jax.device_count(),), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_inside_shard_map(fp8):
    mesh = device_mesh()
    case = make_case(10, segments(8, (8, 3, 0)), 16, 128, fp8=fp8, exact=True)
    a, a_scales, b, b_scales, m_indices = case
    shards = mesh.size

    # Rows differ from shard to shard, weights do not: the call must reconcile the two.
    def per_shard(a, a_scales, m_indices):
        return gemm(a, a_scales, b, b_scales, m_indices, alignment=8, emulate=True)

    rows, columns = PartitionSpec("x"), PartitionSpec(None, "x")
    specs = (rows, columns if fp8 else None, rows)
    many = [np.concatenate([a] * shards), None, np.concatenate([m_indices] * shards)]
    if fp8:
        many[1] = np.concatenate([a_scales] * shards, axis=1)
    out = jax.jit(jax.shard_map(per_shard, mesh=mesh, in_specs=specs, out_specs=rows))(*many)
    for shard in np.split(np.asarray(out), shards):
        check(shard, case, exact=True)


def test_threads_share_the_bridge():
    cases = [
        make_case(20 + i, segments(8, (8, i, 3)), 16, 128, fp8=True, exact=True) for i in range(4)
    ]
    outs = [None] * len(cases)

    def work(i):
        outs[i] = [emulated(cases[i], 8) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for case, results in zip(cases, outs, strict=True):
        for out in results:
            check(out, case, exact=True)


def integers(*arrays, alignment):
    """What the shim hands to the emulator."""
    codes = {BF16: (4, 16), E4M3: (10, 8), np.float32: (2, 32), np.int32: (0, 32)}
    flat = []
    for x in arrays:
        strides = [s // x.itemsize for s in x.strides]
        flat += [x.ctypes.data, *codes[x.dtype.type], x.ndim, *x.shape, *strides]
    return [*flat, alignment]


def test_blocks_that_start_with_minus_one_are_left_alone():
    m_indices = [*[0] * 8, *[-1] * 8, *[1] * 8, -1, *[1] * 7]
    a, _, b, _, m_indices = make_case(11, m_indices, 16, 128, fp8=False, exact=True)
    d = np.full((32, 16), 7.0, BF16)
    emulator.m_grouped_gemm_nt_contiguous(*integers(a, b, d, m_indices, alignment=8))
    assert (d[8:16] == 7).all() and (d[24:] == 7).all()
    want = oracle(a, None, b, None, m_indices)
    np.testing.assert_array_equal(d[:8].astype(float), want[:8])
    np.testing.assert_array_equal(d[16:24].astype(float), want[16:24])


def test_fp8_skips_64_rows_that_start_with_minus_one():
    m_indices = [*[1] * 64, -1, *[1] * 63]
    a, a_scales, b, b_scales, m_indices = make_case(12, m_indices, 8, 128, fp8=True, exact=True)
    d = np.full((128, 8), 7.0, BF16)
    tensors = (a, a_scales.T[:128], b, b_scales, d, m_indices)
    emulator.m_grouped_gemm_nt_contiguous(*integers(*tensors, alignment=128))
    assert (d[64:] == 7).all() and not (d[:64] == 7).all()


def test_emulator_refuses_scales_that_the_kernel_would_not_read_in_place():
    a, a_scales, b, b_scales, m_indices = make_case(13, [0] * 8, 8, 256, fp8=True, exact=True)
    d = np.zeros((8, 8), BF16)
    tensors = (a, np.ascontiguousarray(a_scales.T), b, b_scales, d, m_indices)
    with pytest.raises(ValueError, match=r"strides \(2, 1\); the kernel reads"):
        emulator.m_grouped_gemm_nt_contiguous(*integers(*tensors, alignment=8))


def test_an_error_of_the_callee_is_an_exception_of_the_call():
    case = make_case(14, [3] * 8, 16, 128, fp8=False, exact=True)
    with pytest.raises(Exception, match=r"m_indices\[0\] = 3, but b holds 3 experts"):
        emulated(case, 8)
    # and the process is none the worse for it
    case = make_case(14, [2] * 8, 16, 128, fp8=False, exact=True)
    check(emulated(case, 8), case, exact=True)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_no_rows(fp8):
    case = make_case(15, [], 16, 128, fp8=fp8, exact=True)
    for emulate in (False, True):
        out = gemm(*case, alignment=128, emulate=emulate)
        assert out.shape == (0, 16) and out.dtype == jnp.bfloat16


def wrong(fp8, **changes):
    rows, columns, depth, experts = 16, 24, 256, 2
    arrays = dict(
        zip(
            NAMES,
            make_case(16, [0] * rows, columns, depth, fp8=fp8, exact=True, experts=experts),
            strict=True,
        )
    )
    return {**arrays, **changes}


@pytest.mark.parametrize(
    ("case", "error", "text"),
    [
        (wrong(False, a=np.zeros((16, 256), np.float32)), TypeError, "a has dtype float32; it mu"),
        (wrong(False, b=np.zeros((2, 24, 256), E4M3)), TypeError, "it must be bfloat16"),
        (wrong(False, b=np.zeros((2, 24, 128), BF16)), ValueError, r"it must be \(2, 24, 256\)"),
        (wrong(False, b=np.zeros((24, 256), BF16)), ValueError, r"b \[E, N, K\]"),
        (
            wrong(False, a=np.zeros((16, 96), BF16), b=np.zeros((2, 24, 96), BF16)),
            ValueError,
            "K is 96; it must be a positive multiple of 64",
        ),
        (wrong(False, b=np.zeros((2, 20, 256), BF16)), ValueError, "N = 20.*multiple of 8"),
        (wrong(False, b=np.zeros((0, 24, 256), BF16)), ValueError, "E = 0"),
        (wrong(False, m_indices=np.zeros(15, np.int32)), ValueError, r"\(15,\).*\(16,\)"),
        (wrong(False, m_indices=np.zeros(16, np.uint32)), TypeError, "uint32.*int32"),
        (wrong(False, alignment=12), ValueError, "alignment is 12.*multiples of 8"),
        (wrong(False, alignment=0), ValueError, "alignment is 0"),
        (wrong(False, alignment=16, emulate=False), ValueError, r"16.*\(32, 64, 128\)"),
        (wrong(True, b_scales=None), ValueError, "both"),
        (
            wrong(True, a=np.zeros((16, 192), E4M3), b=np.zeros((2, 24, 192), E4M3)),
            ValueError,
            "K is 192.*multiple of 128",
        ),
        (wrong(True, a_scales=np.zeros((2, 12), np.float32)), ValueError, r"it must be \(2, 16\)"),
        (wrong(True, a_scales=np.zeros((16, 2), np.float32)), ValueError, r"it must be \(2, 16\)"),
        (wrong(True, a_scales=np.zeros((2, 16), BF16)), TypeError, "scales of a.*float32"),
        (wrong(True, b_scales=np.zeros((2, 2, 1), np.float32)), ValueError, r"\(2, 1, 2\)"),
    ],
)
def test_bad_operands_are_named(case, error, text):
    options = {"alignment": 8, "emulate": True} | case
    with pytest.raises(error, match=text):
        gemm(**options)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("m_indices", "row"),
    [
        ([0] * 128 + [1] * 130 + [2] * 65, r"m_indices\[258\] is 2 after 1"),
        ([0] * 100 + [1] * 28, r"m_indices\[100\] is 1 after 0"),
        ([0] * 8 + [-1] * 8 + [0] * 8, r"m_indices\[16\] is 0 after -1"),
    ],
)
def test_groups_that_do_not_start_a_block_are_refused(fp8, m_indices, row):
    case = make_case(18, m_indices, 8, 128, fp8=fp8, exact=True)
    with pytest.raises(ValueError, match=row + ".*multiple of alignment = 128"):
        gemm(*case, alignment=128, emulate=True)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_block_of_padding_in_the_middle(fp8):
    m_indices = [0] * 128 + [-1] * 128 + [1] * 130 + [-1] * 126 + [2] * 65
    case = make_case(19, m_indices, 8, 128, fp8=fp8, exact=True, poison=np.nan)
    check(np.asarray(gemm(*case, alignment=128, emulate=True)), case, exact=True)


def shapes(fp8):
    case = make_case(17, [0] * 20, 136, 256, fp8=fp8, exact=True)
    return [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case]


def real(*case):
    return gemm(*case, alignment=64)


def scanned(*case):
    return jax.lax.scan(lambda count, _: (count, real(*case)), 0, length=2)[1]


def sharded(*case):
    everywhere = PartitionSpec()
    return jax.shard_map(real, mesh=device_mesh(), in_specs=everywhere, out_specs=everywhere)(*case)


@pytest.mark.parametrize("program", [real, scanned, sharded])
@pytest.mark.parametrize(("fp8", "target"), [(False, BF16_TARGET), (True, FP8_TARGET)])
def test_lowers_for_cuda_without_a_gpu(program, fp8, target):
    lowered = jax.jit(program).trace(*shapes(fp8)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    calls = [line for line in text.splitlines() if "custom_call" in line]
    calls = [line for line in calls if "@Sharding" not in line and "@SPMD" not in line]
    assert len(calls) == 1 and f"@{target}(" in calls[0], text
    assert "alignment = dense<64> : tensor<1xi64>" in calls[0]
    assert "callback" not in text


@pytest.mark.parametrize("program", [real, scanned, sharded])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_the_real_call_is_refused_on_a_cpu(program, fp8):
    with pytest.raises(NotImplementedError) as caught:
        jax.jit(program).lower(*shapes(fp8))
    for part in ("for cpu: DeepGEMM needs a GPU", "'xla' runs anywhere", "'emulator' runs"):
        assert part in str(caught.value)


def test_the_emulator_is_refused_on_a_gpu():
    traced = jax.jit(lambda *c: gemm(*c, alignment=8, emulate=True)).trace(*shapes(True))
    with pytest.raises(NotImplementedError, match="reads host memory"):
        traced.lower(lowering_platforms=("cuda",))


def test_availability_gives_a_reason_here():
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    assert deep_gemm.availability() == "DeepGEMM needs a GPU, and JAX's default backend is 'cpu'"


def test_missing_software_comes_with_the_install_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_tvm_ffi", None)
    monkeypatch.setattr(
        bridge.importlib.util,
        "find_spec",
        lambda name: None if name in ("torch", "deep_gemm") else object(),
    )
    reason = bridge._missing_software(bridge._PACKAGES)
    assert reason.endswith("needs torch, deep_gemm: pip install torch sgl-deep-gemm")
    monkeypatch.setattr(bridge.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no 'no-such-compiler'" in bridge._missing_software(bridge._PACKAGES)


def run_python(code, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_imports_and_lowers_with_none_of_the_libraries():
    code = """
import sys
for name in ("torch", "deep_gemm", "tvm_ffi", "jax_tvm_ffi", "ninja"):
    sys.modules[name] = None
import jax, jax.numpy as jnp
from dgmoe_jax.interop import deep_gemm
S = jax.ShapeDtypeStruct
args = S((32, 128), jnp.bfloat16), S((2, 8, 128), jnp.bfloat16), S((32,), jnp.int32)
f = lambda a, b, m: deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, m, alignment=32)
assert "custom_call" in jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
print("lowered")
"""
    process = run_python(code)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "lowered" in out, out


def test_two_processes_build_at_once(tmp_path):
    code = """
import numpy as np, ml_dtypes
from dgmoe_jax.interop import deep_gemm
a = np.ones((8, 64), ml_dtypes.bfloat16)
d = deep_gemm.m_grouped_bf16_gemm_nt_contiguous(
    a, a[None], np.zeros(8, np.int32), alignment=8, emulate=True
)
assert (np.asarray(d) == 64).all()
print("ran")
"""
    cache = tmp_path / "deeper" / "cache"
    processes = [run_python(code, DGMOE_JAX_CACHE_DIR=str(cache)) for _ in range(2)]
    outs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    left = [path.suffix for path in pathlib.Path(cache).iterdir()]
    assert left == [".so"]


# --- masked


def masked_case(seed, masked_m, capacity, columns, depth, *, fp8, exact, poison=np.nan):
    """a, a_scales, b, b_scales and masked_m, in DeepGEMM's shapes; dead rows hold `poison`."""
    experts = len(masked_m)
    owner = np.where(
        np.arange(capacity) < np.array(masked_m)[:, None], np.arange(experts)[:, None], -1
    )
    a, a_scales, b, b_scales, _ = make_case(
        seed, owner.ravel(), columns, depth, fp8=fp8, exact=exact, poison=poison, experts=experts
    )
    if fp8:
        a_scales = a_scales.reshape(-1, experts, capacity).transpose(1, 0, 2)
    a = a.reshape(experts, capacity, depth)
    return np.ascontiguousarray(a), a_scales, b, b_scales, np.array(masked_m, np.int32)


def masked_gemm(a, a_scales, b, b_scales, masked_m, *, expected_m=4, emulate=True):
    if a_scales is None:
        f = deep_gemm.m_grouped_bf16_gemm_nt_masked
        return f(a, b, masked_m, expected_m, emulate=emulate)
    f = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
    return f((a, a_scales), (b, b_scales), masked_m, expected_m, emulate=emulate)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
@pytest.mark.parametrize("poison", [np.nan, 3e38])
@pytest.mark.parametrize("capacity", [8, 16, 32, 136])
@pytest.mark.parametrize("full", [False, True])
def test_masked_matches_the_oracle(fp8, exact, poison, capacity, full):
    masked_m = [capacity] * 4 if full else [3, 0, 5, 0]
    case = masked_case(30, masked_m, capacity, 136, 256, fp8=fp8, exact=exact, poison=poison)
    a, a_scales, b, b_scales, _ = case
    out = np.asarray(jax.jit(masked_gemm)(*case)).astype(np.float64)
    for e, rows in enumerate(masked_m):
        scales = (a_scales[e, :, :rows], b_scales[e : e + 1]) if fp8 else (None, None)
        want = oracle(a[e, :rows], scales[0], b[e : e + 1], scales[1], np.zeros(rows, int))
        if exact:
            want = want.astype(np.float32).astype(BF16).astype(np.float64)
            np.testing.assert_array_equal(out[e, :rows], want)
        else:
            atol = 2**-8 * np.abs(want).mean() if rows else 0
            np.testing.assert_allclose(out[e, :rows], want, rtol=2**-8, atol=atol)


def test_the_masked_emulator_stores_whole_waves_and_nothing_beyond():
    a, _, b, _, masked_m = masked_case(31, [3, 0, 70], 128, 8, 64, fp8=False, exact=True)
    d = np.full((3, 128, 8), 7.0, BF16)
    emulator.m_grouped_gemm_nt_masked(*integers(a, b, d, masked_m, alignment=1))
    assert np.isnan(d[0, 3:64].astype(float)).all() and (d[0, 64:] == 7).all()
    assert (d[1] == 7).all() and np.isnan(d[2, 70:].astype(float)).all()


def test_a_count_beyond_the_slab_is_an_exception_of_the_call():
    *case, masked_m = masked_case(32, [8, 8], 8, 8, 128, fp8=True, exact=True)
    with pytest.raises(Exception, match=r"masked_m\[1\] = 9, but a slab holds 8 rows"):
        np.asarray(masked_gemm(*case, masked_m + np.array([0, 1], np.int32)))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (dict(masked_m=np.zeros(3, np.int32)), ValueError, r"masked_m has shape \(3,\).*\(2,\)"),
        (dict(masked_m=np.zeros(2, np.int64)), TypeError, "masked_m has dtype int64"),
        (dict(expected_m=2.5), TypeError, "expected_m is 2.5"),
        (dict(expected_m=-1), ValueError, "expected_m is -1"),
        (
            dict(a=np.zeros((2, 12, 128), E4M3)),
            ValueError,
            "M = 12 rows; M must be a multiple of 8",
        ),
        (dict(a=np.zeros((3, 8, 128), E4M3)), ValueError, r"a has shape \(3, 8, 128\)"),
        (dict(a_scales=np.zeros((2, 8, 1), np.float32)), ValueError, r"it must be \(2, 1, 8\)"),
        (dict(emulate=False), ValueError, "M = 8 rows; M must be a multiple of 128"),
    ],
)
def test_bad_masked_operands_are_named(change, error, text):
    names = ("a", "a_scales", "b", "b_scales", "masked_m")
    case = masked_case(33, [8, 0], 8, 8, 128, fp8=True, exact=True)
    with pytest.raises(error, match=text):
        masked_gemm(**{**dict(zip(names, case, strict=True)), **change})


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_masked_lowers_for_cuda_without_a_gpu(fp8):
    case = masked_case(34, [3, 0], 128, 136, 256, fp8=fp8, exact=True)
    shapes = [None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case]
    traced = jax.jit(lambda *c: masked_gemm(*c, expected_m=0, emulate=False)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    target = (FP8_TARGET if fp8 else BF16_TARGET).replace("contiguous", "masked")
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 1 and f"@{target}(" in calls[0], text
    assert "expected_m = 1 : i64" in calls[0]


# --- dense, weight gradients and SM100's format


def rounded(x, dtype=BF16):
    return x.astype(np.float32).astype(dtype).astype(np.float64)


def equal(got, want):
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), want)


def small(rng, *shape):
    """Integers whose products and sums are exact in f32, in any order."""
    return rng.integers(-4, 5, shape).astype(np.float64)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def ue8m0(rng, values, group, *, fp4=False):
    """A pair in SM100's format from values [..., MN, K], and the numbers that it stands for."""
    *stack, size, depth = values.shape
    groups = -(-depth // group)
    exponents = rng.integers(125, 130, (*stack, size, groups))
    numbers = values
    if fp4:
        codes = rng.integers(0, 16, values.shape)
        numbers = E2M1[codes & 7] * np.where(codes & 8, -1, 1)
        stored = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
    else:
        stored = values.astype(E4M3)
    # 255 is NaN: rows past MN, which a TMA reads and nobody may use, and exponents past K.
    grid = np.full((*stack, -(-groups // 4) * 4, -(-size // 4) * 4), 255, np.uint8)
    grid[..., :groups, :size] = np.swapaxes(exponents, -1, -2)
    words = np.moveaxis(grid.reshape(*stack, -1, 4, grid.shape[-1]), -2, -1)
    words = np.ascontiguousarray(words).view("<i4")[..., 0]
    scales = np.repeat(2.0 ** (exponents - 127), group, axis=-1)[..., :depth]
    return (stored, words), numbers * scales


@pytest.mark.parametrize("rows", [1, 3, 130])
@pytest.mark.parametrize("columns", [8, 136])
@pytest.mark.parametrize("depth", [512, 640])
def test_dense_fp8(rows, columns, depth):
    case = make_case(40, [0] * rows, columns, depth, fp8=True, exact=True, experts=1)
    a, a_scales, b, b_scales, _ = case
    f = jax.jit(lambda a, b: deep_gemm.gemm_nt_f8f8bf16(a, b, emulate=True))
    equal(f((a, a_scales), (b[0], b_scales[0])), rounded(oracle(*case)))


@pytest.mark.parametrize("rows", [1, 130])
@pytest.mark.parametrize("columns", [8, 136])
@pytest.mark.parametrize("depth", [64, 640])
def test_dense_bf16_in_f32(rows, columns, depth):
    rng = np.random.default_rng(41)
    a, b = small(rng, rows, depth) + 2.0**-7, small(rng, columns, depth)
    a, b = a.astype(BF16), b.astype(BF16)
    out = jax.jit(lambda a, b: deep_gemm.gemm_nt_bf16bf16f32(a, b, emulate=True))(a, b)
    assert out.dtype == jnp.float32
    equal(out, a.astype(np.float64) @ b.astype(np.float64).T)


FORMATS = [  # recipes, group of a, group of b, FP4 in b
    (dict(), 128, 128, False),
    (dict(recipe=(1, 1, 32)), 32, 32, False),
    (dict(recipe_a=(1, 32), recipe_b=(1, 32), disable_ue8m0_cast=True), 32, 32, False),
    (dict(recipe_a=(1, 128), recipe_b=(1, 32)), 128, 32, True),
    (dict(recipe_a=(1, 32), recipe_b=(1, 32)), 32, 32, True),
]


@pytest.mark.parametrize(("recipes", "group_a", "group_b", "fp4"), FORMATS)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 8, 128), (3, 136, 640), (130, 24, 512)])
@pytest.mark.parametrize("layout", ["dense", "contiguous", "masked"])
def test_sm100_formats(recipes, group_a, group_b, fp4, rows, columns, depth, layout):
    rng = np.random.default_rng(42)
    experts = 2
    stack = dict(dense=((), ()), contiguous=((), (experts,)), masked=((experts,), (experts,)))
    stack_a, stack_b = stack[layout]
    # The masked slabs are blocks of 8 rows, of which the last ones are not live.
    size = -(-rows // 8) * 8 if layout == "masked" else rows
    a, x = ue8m0(rng, small(rng, *stack_a, size, depth), group_a)
    b, w = ue8m0(rng, small(rng, *stack_b, columns, depth), group_b, fp4=fp4)
    how = dict(**recipes, emulate=True)
    if layout == "dense":
        out = jax.jit(lambda a, b: deep_gemm.gemm_nt_f8f8bf16(a, b, **how))(a, b)
        return equal(out, rounded(x @ w.T))
    if layout == "contiguous":
        index = np.ones(rows, np.int32)
        f = deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous
        out = jax.jit(lambda a, b, i: f(a, b, i, alignment=8, **how))(a, b, index)
        return equal(out, rounded(x @ w[1].T))
    f = deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked
    masked_m = np.array([rows, 0], np.int32)
    out = jax.jit(lambda a, b, m: f(a, b, m, 1, **how))(a, b, masked_m)
    equal(out[0, :rows], rounded(x[0, :rows] @ w[0].T))


def test_mxfp8_is_a_recipe():
    rng = np.random.default_rng(43)
    a, x = ue8m0(rng, small(rng, 17, 1024), 32)
    b, w = ue8m0(rng, small(rng, 40, 1024), 32)
    equal(deep_gemm.gemm_nt_mxfp8_f8f8bf16(a, b, emulate=True), rounded(x @ w.T))


@pytest.mark.parametrize("poison", [np.nan, 448.0])
def test_a_row_reaches_no_other(poison):
    rng = np.random.default_rng(44)
    values = small(rng, 5, 512)
    a, x = ue8m0(rng, values, 32)
    b, w = ue8m0(rng, small(rng, 24, 512), 32)
    a[0][3] = poison
    out = deep_gemm.gemm_nt_mxfp8_f8f8bf16(a, b, emulate=True)
    others = [0, 1, 2, 4]
    equal(out[np.array(others)], rounded(x[others] @ w.T))


@pytest.mark.parametrize("num_splits", [None, 1, 3, 10])
def test_prenorm(num_splits):
    rng = np.random.default_rng(45)
    a = small(rng, 130, 640).astype(BF16)
    # Tensor cores read 10 bits of the mantissa: a quarter of the last one is lost.
    w = rng.integers(1, 5, (24, 640)) * rng.choice([-1.0, 1.0], (24, 640))
    b = (w * (1 + 2.0**-12 * rng.integers(0, 2, w.shape))).astype(np.float32)
    f = functools.partial(deep_gemm.tf32_hc_prenorm_gemm, num_splits=num_splits, emulate=True)
    d, sqr_sum = jax.jit(f)(a, b)
    # Ten blocks of 64: the first parts have one more where they do not divide evenly.
    parts = np.array_split(np.arange(640).reshape(10, 64), num_splits or 1)
    x, parts = a.astype(np.float64), [part.ravel() for part in parts]
    want_d = np.stack([x[:, part] @ w[:, part].T for part in parts])
    want_sqr_sum = np.stack([(x[:, part] ** 2).sum(axis=1) for part in parts])
    for got, want in ((d, want_d), (sqr_sum, want_sqr_sum)):
        assert got.dtype == jnp.float32
        equal(got, want[0] if num_splits is None else want)


KS = (256, 0, 128, 384)


@pytest.mark.parametrize("kind", ["bf16_tn", "fp8_nt", "fp8_tn"])
@pytest.mark.parametrize(("rows", "columns"), [(16, 48), (208, 144)])
@pytest.mark.parametrize("donate", [False, True])
def test_weight_gradients(kind, rows, columns, donate):
    rng = np.random.default_rng(46)
    depth, ends = sum(KS), np.cumsum(KS)
    groups = [slice(end - k, end) for k, end in zip(KS, ends, strict=True)]
    c = small(rng, len(KS), rows, columns).astype(np.float32)
    operands, numbers = [], []
    for size in (rows, columns):
        values = small(rng, depth, size)
        if kind == "bf16_tn":
            pair, number = values.astype(BF16), values
        elif kind == "fp8_tn":
            (stored, words), number = ue8m0(rng, values.T, 32)
            pair, number = (np.ascontiguousarray(stored.T), words), number.T
        else:
            scales = np.exp2(rng.integers(-2, 3, (depth // 128, size))).astype(np.float32)
            number = values * scales.repeat(128, axis=0)
            pair = np.concatenate([values[g].T.ravel() for g in groups]).astype(E4M3), scales
        operands.append(pair)
        numbers.append(number)
    f = getattr(deep_gemm, "k_grouped_{}_gemm_{}_contiguous".format(*kind.split("_")))
    run = jax.jit(
        lambda a, b, c: f(a, b, KS, c, emulate=True), donate_argnums=(2,) if donate else ()
    )
    given = jnp.array(c)
    out = run(*operands, given)
    x, w = numbers
    equal(out, np.stack([c[i] + x[g].T @ w[g] for i, g in enumerate(groups)]))
    assert given.is_deleted() if donate else (np.asarray(given) == c).all()


def test_nothing_to_do():
    zeros = np.zeros
    pairs = [
        (zeros((rows, 128), E4M3), zeros((1, columns), np.int32))
        for rows, columns in ((0, 0), (8, 8))
    ]
    for emulate in (False, True):
        out = deep_gemm.gemm_nt_mxfp8_f8f8bf16(*pairs, emulate=emulate)
        assert out.shape == (0, 8) and out.dtype == jnp.bfloat16
        a = zeros((0, 64), BF16)
        out = deep_gemm.gemm_nt_bf16bf16f32(a, zeros((8, 64), BF16), emulate=emulate)
        assert out.shape == (0, 8) and out.dtype == jnp.float32
        b = zeros((8, 64), np.float32)
        d, sqr_sum = deep_gemm.tf32_hc_prenorm_gemm(a, b, num_splits=1, emulate=emulate)
        assert d.shape == (1, 0, 8) and sqr_sum.shape == (1, 0)
        c = np.ones((2, 8, 16), np.float32)
        a, b = zeros((0, 8), BF16), zeros((0, 16), BF16)
        f = deep_gemm.k_grouped_bf16_gemm_tn_contiguous
        equal(f(a, b, (0, 0), c, emulate=emulate), c)


def operands_of(name):
    """Shapes that the function takes, as keyword arguments."""

    def of(dtype):
        return lambda *shape: jax.ShapeDtypeStruct(shape, dtype)

    f8, f32, i32, bf16 = map(of, (jnp.float8_e4m3fn, jnp.float32, jnp.int32, jnp.bfloat16))
    return {
        "gemm_nt_f8f8bf16": dict(a=(f8(6, 256), f32(2, 8)), b=(f8(136, 256), f32(2, 2))),
        "gemm_nt_mxfp8_f8f8bf16": dict(a=(f8(6, 256), i32(2, 8)), b=(f8(24, 256), i32(2, 24))),
        "gemm_nt_bf16bf16f32": dict(a=bf16(6, 64), b=bf16(24, 64)),
        "tf32_hc_prenorm_gemm": dict(a=bf16(6, 128), b=f32(24, 128), num_splits=2),
        "k_grouped_fp8_gemm_nt_contiguous": dict(
            a=(f8(256 * 8), f32(2, 8)), b=(f8(256 * 4), f32(2, 4)), c=f32(2, 8, 4), ks=(128, 128)
        ),
        "k_grouped_fp8_gemm_tn_contiguous": dict(
            a=(f8(256, 16), i32(2, 16)), b=(f8(256, 32), i32(2, 32)), c=f32(1, 16, 32), ks=(256,)
        ),
        "k_grouped_bf16_gemm_tn_contiguous": dict(
            a=bf16(256, 8), b=bf16(256, 16), c=f32(1, 8, 16), ks=(256,)
        ),
        "m_grouped_fp8_fp4_gemm_nt_contiguous": dict(
            a=(f8(6, 256), i32(1, 8)),
            b=(of(jnp.int8)(2, 24, 128), i32(2, 2, 24)),
            m_indices=i32(6),
            recipe_a=(1, 128),
            recipe_b=(1, 32),
        ),
    }[name]


CALLED = {  # ours -> DeepGEMM's
    "gemm_nt_f8f8bf16": "fp8_fp4_gemm_nt",
    "gemm_nt_mxfp8_f8f8bf16": "fp8_fp4_gemm_nt",
    "gemm_nt_bf16bf16f32": "bf16_gemm_nt",
    **{
        name: name
        for name in (
            "tf32_hc_prenorm_gemm",
            "k_grouped_fp8_gemm_nt_contiguous",
            "k_grouped_fp8_gemm_tn_contiguous",
            "k_grouped_bf16_gemm_tn_contiguous",
            "m_grouped_fp8_fp4_gemm_nt_contiguous",
        )
    },
}


def traced(name, **changes):
    operands = operands_of(name) | changes
    static = {k: v for k, v in operands.items() if not jax.tree.leaves(v) or k in STATIC}
    arrays = {k: v for k, v in operands.items() if k not in static}
    return jax.jit(lambda **x: getattr(deep_gemm, name)(**x, **static)).trace(**arrays)


STATIC = {"ks", "recipe", "recipe_a", "recipe_b", "num_splits", "settings"}


@pytest.mark.parametrize("name", CALLED)
def test_all_lower_for_cuda_without_a_gpu(name):
    settings = deep_gemm.Settings(num_sms=120, pdl=True, block_size_multiple_of=(64, 32))
    text = traced(name, settings=settings).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert len(calls) == 1 and f"@dgmoe_{CALLED[name]}(" in calls[0], text
    for part in ("num_sms = dense<120>", "pdl = dense<1>", "multiple_of = dense<[64, 32]>"):
        assert part in calls[0]
    assert "callback" not in text


S, F8, I32, F32 = jax.ShapeDtypeStruct, jnp.float8_e4m3fn, jnp.int32, jnp.float32


@pytest.mark.parametrize(
    ("name", "changes", "error", "text"),
    [
        (
            "gemm_nt_f8f8bf16",
            dict(a=(S((6, 256), F8), S((6, 2), F32))),
            ValueError,
            r"scales of a has shape \(6, 2\); it must be \(2, 8\)",
        ),
        (
            "gemm_nt_f8f8bf16",
            dict(a=(S((6, 256), F8), S((1, 8), I32))),
            TypeError,
            "scales of a are int32, of b float32; they must be both",
        ),
        (
            "gemm_nt_f8f8bf16",
            dict(b=(S((136, 384), F8), S((2, 3), F32))),
            ValueError,
            r"b has shape \(136, 384\); it must be \(136, 256\)",
        ),
        (
            "gemm_nt_f8f8bf16",
            dict(b=(S((1, 136, 256), F8), S((1, 2, 2), F32))),
            ValueError,
            r"b has shape \(1, 136, 256\); it must be \[N, K\]",
        ),
        ("gemm_nt_f8f8bf16", dict(recipe=(1, 128)), TypeError, "recipe is .*tuple of 3 ints"),
        (
            "gemm_nt_f8f8bf16",
            dict(recipe=(1, 128, 64)),
            ValueError,
            r"recipe of a is \(1, 64\); with float32 scales it must be \(1, 128\)",
        ),
        (
            "gemm_nt_f8f8bf16",
            dict(recipe=(1, 1, 128)),
            ValueError,
            r"recipe of b is \(1, 128\); with float32 scales it must be \(128, 128\)",
        ),
        ("gemm_nt_f8f8bf16", dict(recipe_a=(1, 128)), ValueError, "give recipe, or recipe_a and"),
        (
            "gemm_nt_f8f8bf16",
            dict(recipe=(1, 128, 128), recipe_a=(1, 128), recipe_b=(128, 128)),
            ValueError,
            "give recipe, or recipe_a and",
        ),
        (
            "gemm_nt_f8f8bf16",
            dict(b=(S((136, 128), jnp.uint8), S((2, 2), F32))),
            TypeError,
            "FP4 values have int32 scales",
        ),
        ("gemm_nt_f8f8bf16", dict(settings={"num_sms": 1}), TypeError, "must be a deep_gemm.Sett"),
        (
            "gemm_nt_mxfp8_f8f8bf16",
            dict(b=(S((24, 256), F8), S((1, 24), I32))),
            ValueError,
            r"scales of b has shape \(1, 24\); it must be \(2, 24\)",
        ),
        (
            "gemm_nt_mxfp8_f8f8bf16",
            dict(a=(S((6, 256), F8), S((2, 8), F32))),
            TypeError,
            "scales of a has dtype float32; it must be int32",
        ),
        (
            "gemm_nt_bf16bf16f32",
            dict(b=S((20, 64), jnp.bfloat16)),
            ValueError,
            "N = 20.*multiple of 8",
        ),
        ("gemm_nt_bf16bf16f32", dict(a=S((6, 64), F32)), TypeError, "a has dtype float32"),
        ("tf32_hc_prenorm_gemm", dict(num_splits=0), ValueError, "num_splits is 0"),
        ("tf32_hc_prenorm_gemm", dict(num_splits=3), ValueError, "is 3; K = 128 has 2 parts"),
        ("tf32_hc_prenorm_gemm", dict(b=S((136, 128), F32)), ValueError, "N = 136; N must be"),
        (
            "tf32_hc_prenorm_gemm",
            dict(b=S((24, 128), jnp.bfloat16)),
            TypeError,
            "b has dtype bfloat16; it must be float32",
        ),
        ("k_grouped_bf16_gemm_tn_contiguous", dict(ks=(64,)), ValueError, r"ks is \(64,\)"),
        ("k_grouped_bf16_gemm_tn_contiguous", dict(ks=(128,)), ValueError, r"must be \(128, 8\)"),
        ("k_grouped_bf16_gemm_tn_contiguous", dict(ks=(0, 256)), TypeError, "tuple of 1 ints"),
        (
            "k_grouped_bf16_gemm_tn_contiguous",
            dict(c=S((1, 8, 12), F32)),
            ValueError,
            "multiples of 8",
        ),
        (
            "k_grouped_bf16_gemm_tn_contiguous",
            dict(c=S((1, 8, 16), jnp.bfloat16)),
            TypeError,
            "c has dtype bfloat16",
        ),
        (
            "k_grouped_fp8_gemm_nt_contiguous",
            dict(recipe=(1, 1, 32)),
            ValueError,
            r"must be \(1, 1, 128\)",
        ),
        (
            "k_grouped_fp8_gemm_nt_contiguous",
            dict(a=(S((256, 8), F8), S((2, 8), F32))),
            ValueError,
            r"a has shape \(256, 8\); it must be \(2048,\)",
        ),
        (
            "k_grouped_fp8_gemm_tn_contiguous",
            dict(recipe=(1, 1, 128)),
            ValueError,
            r"must be \(1, 1, 32\)",
        ),
        (
            "k_grouped_fp8_gemm_tn_contiguous",
            dict(b=(S((256, 32), F8), S((2, 32), F32))),
            TypeError,
            "scales of b has dtype float32; it must be int32",
        ),
    ],
)
def test_bad_operands_of_the_others_are_named(name, changes, error, text):
    with pytest.raises(error, match=text):
        traced(name, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (dict(num_sms=0), ValueError, "num_sms is 0; it must be at least 1"),
        (dict(num_sms=True), TypeError, "num_sms is True"),
        (dict(pdl=1), TypeError, "pdl is 1; it must be True, False or None"),
        (dict(block_size_multiple_of=(1, 2, 3)), TypeError, "tuple of 2 ints"),
        (dict(block_size_multiple_of=-8), ValueError, "-8; it must be at least 1"),
    ],
)
def test_bad_settings_are_named(changes, error, text):
    with pytest.raises(error, match=text):
        deep_gemm.Settings(**changes)


@pytest.mark.parametrize(
    ("capability", "name", "changes", "text"),
    [
        ("9.0", "gemm_nt_mxfp8_f8f8bf16", {}, r"10.x; this one has 9.0: it has no UE8M0.*128, 128"),
        ("9.0", "m_grouped_fp8_fp4_gemm_nt_contiguous", {}, "10.x.*FP4"),
        ("9.0", "k_grouped_fp8_gemm_tn_contiguous", {}, "k_grouped_fp8_gemm_nt_contiguous"),
        ("9.0", "tf32_hc_prenorm_gemm", dict(b=S((40, 128), F32)), "sm_90 takes N up to 32"),
        ("10.3", "gemm_nt_f8f8bf16", {}, "9.x; this one has 10.3.*int32"),
        ("10.0", "k_grouped_fp8_gemm_nt_contiguous", {}, "k_grouped_fp8_gemm_tn_contiguous"),
        ("12.0", "gemm_nt_bf16bf16f32", {}, "has capability 12.0"),
    ],
)
def test_another_gpu_is_told_what_it_has(monkeypatch, capability, name, changes, text):
    monkeypatch.setattr(bridge.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(bridge, "_capability", lambda: capability)
    monkeypatch.setattr(bridge, "_missing_software", lambda packages: None)
    with pytest.raises(NotImplementedError, match=text):
        traced(name, **changes)


# --- settings and devices, with stand-ins for the library


class StandIn:
    """A library that records what happens to it, in a copy of the shim that is its own."""

    count = itertools.count()

    def __init__(self, tmp_path, monkeypatch, *, without=()):
        jax.block_until_ready(deep_gemm.gemm_nt_bf16bf16f32(*self.operands(8), emulate=True))
        import tvm_ffi

        self.events, self.fails = [], False
        self.state = dict(alignment=128, num_sms=132, pdl=False, block_size_multiple_of=(1, 1))
        library = shutil.copy(bridge._build_shim("cpu"), tmp_path / "shim.so")
        self.shim = tvm_ffi.load_module(str(library))
        settings = []
        for name, (get, _, initial) in bridge._SETTINGS.items():
            get = get and tvm_ffi.convert(lambda name=name: self.state[name])
            set_ = None if name in without else tvm_ffi.convert(self.setter(name))
            settings.append((get, set_, initial))
        function = tvm_ffi.convert(self.launch)
        kernels = [(function, *bridge._numbered(f, f.tensors)) for f in bridge._FUNCTIONS.values()]
        self.library = kernels, settings
        self.shim.install(*self.library, -1)
        prefix = f"stand_in_{next(self.count)}_"
        bridge._register(self.shim, "cpu", prefix)
        monkeypatch.setattr(bridge, "_EMULATED_TARGET", prefix)

    def setter(self, name):
        def set_(*value):
            self.state[name] = value if len(value) > 1 else value[0]
            self.events.append((name, self.state[name]))

        return set_

    def launch(self, address, code, bits, ndim, rows, *_):
        self.events.append(("launch", rows, dict(self.state)))
        if self.fails:
            raise RuntimeError("no such kernel")

    @staticmethod
    def operands(rows):
        return np.zeros((rows, 64), BF16), np.zeros((8, 64), BF16)

    def run(self, rows=8, **settings):
        f = jax.jit(
            lambda a, b: deep_gemm.gemm_nt_bf16bf16f32(
                a, b, settings=deep_gemm.Settings(**settings), emulate=True
            )
        )
        return jax.block_until_ready(f(*self.operands(rows)))


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    return StandIn(tmp_path, monkeypatch)


def test_settings_hold_for_one_call(stand_in):
    before = dict(stand_in.state)
    stand_in.run(num_sms=120, pdl=True, block_size_multiple_of=64)
    during = before | dict(num_sms=120, pdl=1, block_size_multiple_of=(64, 64))
    assert stand_in.events == [
        ("num_sms", 120),
        ("pdl", 1),
        ("block_size_multiple_of", (64, 64)),
        ("launch", 8, during),
        ("block_size_multiple_of", (1, 1)),
        ("pdl", False),
        ("num_sms", 132),
    ]
    assert stand_in.state == before


def test_what_is_not_set_is_not_touched(stand_in):
    stand_in.state["num_sms"] = 100
    stand_in.run()
    assert [event[0] for event in stand_in.events] == ["launch"]
    stand_in.run(pdl=True)
    assert [event[0] for event in stand_in.events[1:]] == ["pdl", "launch", "pdl"]
    assert stand_in.events[2][2]["num_sms"] == 100


def test_settings_are_restored_when_the_launch_fails(stand_in):
    before, stand_in.fails = dict(stand_in.state), True
    with pytest.raises(Exception, match="no such kernel"):
        stand_in.run(num_sms=7, block_size_multiple_of=(16, 32))
    assert stand_in.state == before and len(stand_in.events) == 5


def test_a_setting_that_the_wheel_lacks(tmp_path, monkeypatch):
    stand_in = StandIn(tmp_path, monkeypatch, without=("block_size_multiple_of",))
    with pytest.raises(Exception, match="lacks a setting"):
        stand_in.run(num_sms=7, block_size_multiple_of=16)
    assert stand_in.state["num_sms"] == 132 and stand_in.events[-1] == ("num_sms", 132)


def test_threads_with_settings_of_their_own(stand_in):
    before, errors = dict(stand_in.state), []

    def work(rows, num_sms):
        try:
            for _ in range(30):
                stand_in.run(rows, num_sms=num_sms)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(r, r + 100)) for r in (8, 16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and stand_in.state == before
    launches = [event for event in stand_in.events if event[0] == "launch"]
    assert len(launches) == 60
    assert all(state["num_sms"] == rows + 100 for _, rows, state in launches)


def test_each_device_has_a_library_of_its_own(stand_in):
    shim = stand_in.shim
    for device in (3, 0):
        shim.install(*stand_in.library, device)
    assert [shim.library_index(device) for device in (0, 3, 0, 3)] == [2, 1, 2, 1]


def test_a_library_that_is_alone_takes_the_first_device(stand_in):
    shim = stand_in.shim
    assert [shim.library_index(3) for _ in range(2)] == [0, 0]
    with pytest.raises(RuntimeError, match="GPU 3 and cannot run on GPU 5: use one process per"):
        shim.library_index(5)


SHARED = {  # C++ of a variable -> whether copies of its library share it
    "namespace deep_gemm { inline int state; } int* state() { return &deep_gemm::state; }": True,
    "namespace deep_gemm { static int state; } int* state() { return &deep_gemm::state; }": False,
    "namespace deep_gemm { int state; } int* state() { return &deep_gemm::state; }": False,
}


@pytest.mark.parametrize("code", SHARED)
def test_what_copies_share_is_read_from_their_symbols(tmp_path, code):
    source, library = tmp_path / "a.cpp", tmp_path / "a.so"
    source.write_text(f'extern "C" {{ int* state(); }} {code}')
    compiler = os.environ.get("CXX", "c++").split()
    subprocess.run(
        [*compiler, "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    assert bridge._copies_share_state(library) == SHARED[code]
    # and so it is: the loader gives both copies the same variable, or not
    copy = shutil.copy(library, tmp_path / "b.so")
    addresses = set()
    for path in (library, copy):
        state = ctypes.CDLL(str(path)).state
        state.restype = ctypes.c_void_p
        addresses.add(state())
    assert len(addresses) == (1 if SHARED[code] else 2)


def test_a_library_that_cannot_be_read_counts_as_shared(tmp_path):
    path = tmp_path / "c.so"
    path.write_bytes(b"not an ELF file")
    assert bridge._copies_share_state(path)


def test_copies_are_made_where_they_are_independent(tmp_path, monkeypatch):
    import tvm_ffi

    loaded = []

    def load(path):
        loaded.append(pathlib.Path(path).read_bytes())
        return types.SimpleNamespace(init=lambda *given: loaded.append(given))

    monkeypatch.setenv("DGMOE_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tvm_ffi, "load_module", load)
    (tmp_path / "_C.so").write_bytes(b"code")
    wheel = types.SimpleNamespace(
        __file__=str(tmp_path / "__init__.py"),
        _C="the loaded one",
        cuda_helpers=types.SimpleNamespace(find_cuda_home=lambda: "/cuda"),
    )
    for shares, devices, count in ((True, 2, 1), (False, 1, 1), (False, 3, 3)):
        monkeypatch.setattr(bridge, "_copies_share_state", lambda path, shares=shares: shares)
        cores = bridge._cores(wheel, devices)
        assert len(cores) == count and cores[0] == "the loaded one"
    assert loaded == [b"code", (str(tmp_path), "/cuda")] * 2
    assert list((tmp_path / "cache").iterdir()) == []


# --- the installed wheel

# deep_gemm/__init__.py of sgl-deep-gemm 0.1.5, of the functions used.
WHEEL = """
def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', disable_ue8m0_cast=False, use_psum_layout=False, ensure_zero_padding=True, expected_m_for_psum_layout=None):
    _C.m_grouped_fp8_fp4_gemm_nt_contiguous(*a, *b, d, grouped_layout, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast, use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout)
def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims='nk', use_psum_layout=False, ensure_zero_padding=True, expected_m_for_psum_layout=None):
    _C.m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, compiled_dims, use_psum_layout, ensure_zero_padding, expected_m_for_psum_layout)
def m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='nk', disable_ue8m0_cast=False):
    _C.m_grouped_fp8_fp4_gemm_nt_masked(*a, *b, d, masked_m, expected_m, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)
def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims='nk'):
    _C.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims)
def fp8_fp4_gemm_nt(a, b, d, c=None, recipe=None, recipe_a=None, recipe_b=None, compiled_dims='', disable_ue8m0_cast=False):
    _C.fp8_fp4_gemm_nt(*a, *b, d, c, recipe, recipe_a, recipe_b, compiled_dims, disable_ue8m0_cast)
def bf16_gemm_nt(a, b, d, c=None, compiled_dims=''):
    _C.bf16_gemm_nt(a, b, d, c, compiled_dims)
def tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits=None):
    _C.tf32_hc_prenorm_gemm(a, b, d, sqr_sum, num_splits)
def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, grouped_layout, c=None, recipe=(1, 1, 128), compiled_dims='mn', use_psum_layout=False):
    _C.k_grouped_fp8_gemm_nt_contiguous(*a, *b, d, ks, grouped_layout, c, recipe, compiled_dims, use_psum_layout)
def k_grouped_fp8_gemm_tn_contiguous(a, b, d, ks, grouped_layout, c=None, recipe=(1, 1, 128), compiled_dims='mn', use_psum_layout=False):
    _C.k_grouped_fp8_gemm_tn_contiguous(*a, *b, d, ks, grouped_layout, c, recipe, compiled_dims, use_psum_layout)
def k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, grouped_layout, c=None, compiled_dims='mn', use_psum_layout=False):
    _C.k_grouped_bf16_gemm_tn_contiguous(a, b, d, ks, grouped_layout, c, compiled_dims, use_psum_layout)
"""  # noqa: E501
# 0.2.0 has a parameter more in four of them, the last one.
LATER = {
    "fp8_fp4_gemm_nt": ("alpha", None),
    "bf16_gemm_nt": ("alpha", None),
    "k_grouped_fp8_gemm_nt_contiguous": ("use_padded_sf_layout", False),
    "k_grouped_fp8_gemm_tn_contiguous": ("use_padded_sf_layout", False),
}


def wheel(source, setters=("set_num_sms",)):
    """A module with a wheel's functions; a loaded _C hands itself over by name."""
    core = types.SimpleNamespace(**dict.fromkeys((*bridge._FUNCTIONS, *setters), "loaded"))
    scope = {"_C": core, "_parse_tensor_or_tuple": tuple}
    exec(source, scope)
    return types.SimpleNamespace(**scope)


def later(source):
    for name, (parameter, default) in LATER.items():
        head, tail = source.split(f"def {name}(")
        signature, body, *rest = tail.split("\n")
        signature = signature.replace("):", f", {parameter}={default}):")
        body = body[:-1] + f", {parameter})"
        source = head + f"def {name}(" + "\n".join((signature, body, *rest))
    return source


@pytest.mark.parametrize("source", [WHEEL, later(WHEEL)], ids=["0.1.5", "0.2.0"])
def test_arguments_after_the_tensors_come_from_the_installed_wheel(monkeypatch, source):
    monkeypatch.setattr(bridge, "_refused", {})
    templates = bridge._templates(wheel(source))
    # Views are argument 0 of a call, so that its tensors are numbered from 1.
    want = {
        "m_grouped_bf16_gemm_nt_contiguous": (
            [1, 2, 4, 3, 0, 0, 0, 0],
            [None, None, None, None, "nk", False, True, None],
        ),
        "m_grouped_fp8_fp4_gemm_nt_masked": (
            [1, 2, 3, 4, 6, 5, 7, 8, 9, 10, 0, 11],
            [*[None] * 10, "nk", None],
        ),
        "fp8_fp4_gemm_nt": ([1, 2, 3, 4, 5, 0, 6, 7, 8, 0, 9], [*[None] * 9, "", None]),
        "tf32_hc_prenorm_gemm": ([1, 2, 3, 4, 5], [None] * 5),
        "k_grouped_fp8_gemm_nt_contiguous": (
            [1, 2, 3, 4, 7, 8, 5, 6, 9, 0, 0],
            [*[None] * 9, "mn", False],
        ),
    }
    for name, (sources, defaults) in want.items():
        if source != WHEEL and name in LATER:
            sources, defaults = [*sources, 0], [*defaults, LATER[name][1]]
        assert templates[name] == (sources, defaults)
    assert set(templates) == set(bridge._FUNCTIONS)
    assert set(bridge._refused) == {"alignment", "pdl", "block_size_multiple_of"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("_C.bf16_gemm_nt(a, b, d,", "_C.bf16_gemm_nt(a, d, b,"),
        ("_C.bf16_gemm_nt(a, b, d,", "_C.bf16_gemm_nt(a, b,"),
        ("_C.bf16_gemm_nt(a, b, d,", "_C.bf16_gemm(a, b, d,"),
        ("def bf16_gemm_nt(a, b, d,", "def bf16_gemm_nt(x, b, d,"),
        ("def bf16_gemm_nt(", "def another("),
    ],
)
def test_a_function_that_differs_is_refused_alone(monkeypatch, old, new):
    monkeypatch.setattr(bridge, "_refused", {})
    templates = bridge._templates(wheel(WHEEL.replace(old, new)))
    assert set(bridge._FUNCTIONS) - set(templates) == {"bf16_gemm_nt"}
    assert "bf16_gemm_nt" in bridge._refused["bf16_gemm_nt"]
    kernels, _ = bridge._library(wheel(WHEEL)._C, templates)
    assert kernels[list(bridge._FUNCTIONS).index("bf16_gemm_nt")] == (None, [], [])


def wheels():
    """Folders of deep_gemm: the installed one, and those named in DGMOE_TEST_WHEELS."""
    spec = importlib.util.find_spec("deep_gemm")
    installed = [spec.origin] if spec and spec.origin else []
    named = os.environ.get("DGMOE_TEST_WHEELS", "").split(os.pathsep)
    named = [f"{path}/deep_gemm/__init__.py" for path in named if path]
    return [pathlib.Path(path).parent for path in (*installed, *named)] or [None]


@pytest.mark.parametrize("folder", wheels())
def test_the_installed_wheel_is_as_described(monkeypatch, folder):
    if folder is None:
        pytest.skip("no wheel of sgl-deep-gemm here: the description stands in for it")
    tree = ast.parse((folder / "__init__.py").read_text())
    used = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name in bridge._FUNCTIONS
    ]
    library = (folder / "_C.so").read_bytes()
    has_blocks = b"set_block_size_multiple_of\0" in library
    description = later(WHEEL) if has_blocks else WHEEL
    monkeypatch.setattr(bridge, "_refused", {})
    assert bridge._templates(wheel("\n".join(used))) == bridge._templates(wheel(description))
    accessors = {name for get, set_, _ in bridge._SETTINGS.values() for name in (get, set_)}
    accessors -= {None} if has_blocks else {None, "set_block_size_multiple_of"}
    for name in (*bridge._FUNCTIONS, *accessors, "init"):
        assert f"__tvm_ffi_{name}\0".encode() in library, name
    # 0.2.0 keeps its state in variables that copies share, 0.1.5 does not.
    assert bridge._copies_share_state(folder / "_C.so") == has_blocks

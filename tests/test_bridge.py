"""The DeepGEMM bridge: its real shim in jit on the CPU emulator, against a float64 oracle."""

import os
import pathlib
import subprocess
import sys
import threading
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dgmoe_jax.interop import deep_gemm, emulator
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
    assert "alignment = 64 : i64" in calls[0]
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
        deep_gemm.importlib.util,
        "find_spec",
        lambda name: None if name in ("torch", "deep_gemm") else object(),
    )
    reason = deep_gemm._missing_software(deep_gemm._PACKAGES)
    assert reason.endswith("needs torch, deep_gemm: pip install torch sgl-deep-gemm")
    monkeypatch.setattr(deep_gemm.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no 'no-such-compiler'" in deep_gemm._missing_software(deep_gemm._PACKAGES)


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


def wheel(fp8, bf16):
    """A module with the given wrappers around ``_C``, as deep_gemm has them."""
    core = types.SimpleNamespace(
        m_grouped_fp8_fp4_gemm_nt_contiguous="fp8",
        m_grouped_bf16_gemm_nt_contiguous="bf16",
        m_grouped_fp8_fp4_gemm_nt_masked="fp8 masked",
        m_grouped_bf16_gemm_nt_masked="bf16 masked",
        get_mk_alignment_for_contiguous_layout="get",
        set_mk_alignment_for_contiguous_layout="set",
    )
    scope = {"_C": core}
    exec(
        f"""
def m_grouped_fp8_fp4_gemm_nt_contiguous(a, b, d, grouped_layout, {fp8[0]}):
    (a, sa), (b, sb) = a, b
    _C.m_grouped_fp8_fp4_gemm_nt_contiguous({fp8[1]})
def m_grouped_bf16_gemm_nt_contiguous(a, b, d, grouped_layout, {bf16[0]}):
    _C.m_grouped_bf16_gemm_nt_contiguous({bf16[1]})
def m_grouped_fp8_fp4_gemm_nt_masked(a, b, d, masked_m, expected_m, recipe=None):
    (a, sa), (b, sb) = a, b
    return _C.m_grouped_fp8_fp4_gemm_nt_masked(a, sa, b, sb, d, masked_m, expected_m, recipe)
def m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims='nk'):
    _C.m_grouped_bf16_gemm_nt_masked(a, b, d, masked_m, expected_m, compiled_dims)
""",
        scope,
    )
    return types.SimpleNamespace(**scope)


def test_arguments_after_the_tensors_come_from_the_installed_wheel():
    deep = wheel(
        (
            "recipe=None, compiled_dims='nk', psum=False",
            "a, sa, b, sb, d, grouped_layout, recipe, compiled_dims, psum",
        ),
        (
            "compiled_dims='nk', psum=False, padding=True",
            "a, b, d, grouped_layout, compiled_dims, psum, padding",
        ),
    )
    kernels, get, set_ = deep_gemm._deep_gemm_functions(deep)
    assert (get, set_) == ("get", "set")
    assert kernels == {
        "m_grouped_fp8_fp4_gemm_nt_contiguous": ("fp8", [None, "nk", False]),
        "m_grouped_bf16_gemm_nt_contiguous": ("bf16", ["nk", False, True]),
        "m_grouped_fp8_fp4_gemm_nt_masked": ("fp8 masked", [None]),
        "m_grouped_bf16_gemm_nt_masked": ("bf16 masked", ["nk"]),
    }
    other = wheel(("x=0", "a, sa, b, sb, grouped_layout, d"), ("x=0", "a, b, d, grouped_layout"))
    with pytest.raises(NotImplementedError, match="does not call _C the way"):
        deep_gemm._deep_gemm_functions(other)


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

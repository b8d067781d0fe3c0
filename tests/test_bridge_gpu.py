"""The DeepGEMM bridge on a GPU gives the bits of the same call from torch, on the same bytes."""

import os
import resource
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from dgmoe_jax.interop import deep_gemm

REASON = deep_gemm.availability()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FUNCTIONS = {  # of SM90: ours -> DeepGEMM's
    "m_grouped_fp8_fp4_gemm_nt_contiguous": "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous": "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked": "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_bf16_gemm_nt_masked": "m_grouped_bf16_gemm_nt_masked",
    "gemm_nt_f8f8bf16": "fp8_gemm_nt",
    "gemm_nt_bf16bf16f32": "bf16_gemm_nt",
    "tf32_hc_prenorm_gemm": "tf32_hc_prenorm_gemm",
    "k_grouped_fp8_gemm_nt_contiguous": "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_bf16_gemm_tn_contiguous": "k_grouped_bf16_gemm_tn_contiguous",
}
SM90_ONLY = [name for name in FUNCTIONS if "fp8" in name or "f8f8" in name]
EXPERTS = 3


def operands(name, columns, depth, *, rows=200, seed=0):
    """Ours, as numpy arrays and ints: positional arguments and keywords; and which rows are live.

    The rows fill no block of 128, and none of 4.
    """
    rng = np.random.default_rng(seed)
    rows += -rows % 128 if "masked" in name else rows % 4 == 0

    def values(*shape):
        return rng.standard_normal(shape).astype(E4M3 if name in SM90_ONLY else BF16)

    def scales(*shape):
        return rng.uniform(0.5, 2.0, shape).astype(np.float32)

    def pair(x, groups, size):
        *stack, _, _ = x.shape
        return (x, scales(*stack, groups, -(-size // 4) * 4))

    groups, blocks, live = depth // 128, -(-columns // 128), slice(None)
    if name.startswith("k_grouped"):
        ks = (depth, 0, depth + 128)
        c = rng.standard_normal((3, 256, columns)).astype(np.float32)
        sizes, total = (256, columns), sum(ks)
        if name in SM90_ONLY:
            ab = [(values(total * size), scales(total // 128, size)) for size in sizes]
        else:
            ab = [values(total, size) for size in sizes]
        return (*ab, ks, c), {}, live
    if name == "tf32_hc_prenorm_gemm":
        b = rng.standard_normal((24, depth)).astype(np.float32)
        return (values(rows, depth), b), dict(num_splits=4), live
    grouped = "grouped" in name
    a = values(*((EXPERTS,) if "masked" in name else ()), rows, depth)
    b = values(*((EXPERTS,) if grouped else ()), columns, depth)
    if name in SM90_ONLY:
        a = pair(a, groups, rows)
        b = b, scales(*((EXPERTS,) if grouped else ()), blocks, groups)
    if "masked" in name:
        masked_m = np.array([rows - 1, 0, 5], np.int32)
        return (a, b, masked_m, 64), {}, np.arange(rows) < masked_m[:, None]
    if grouped:
        m_indices = np.full(rows, 2, np.int32)
        m_indices[:128] = 0
        m_indices[100:128] = -1
        return (a, b, m_indices), {}, m_indices >= 0
    return (a, b), {}, live


def to_torch(x):
    import torch

    kinds = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
    as_bytes = torch.from_numpy(np.ascontiguousarray(x).view(np.uint8)).cuda()
    return as_bytes.view(kinds.get(x.dtype.name) or getattr(torch, x.dtype.name))


def prepared(name, given, keywords):
    """The same call by deep_gemm from torch, as a function of nothing, and the results it fills."""
    import deep_gemm as library
    import torch

    function = getattr(library, FUNCTIONS[name])
    a, b, *rest = jax.tree.map(lambda x: to_torch(x) if isinstance(x, np.ndarray) else x, given)
    x, w = (operand[0] if isinstance(operand, tuple) else operand for operand in (a, b))

    def mn_major(pair, size):
        return pair[0], pair[1].transpose(-1, -2)[..., :size, :]

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="cuda")

    if name.startswith("k_grouped"):
        ks, d = rest
        if isinstance(a, tuple):
            a, b = mn_major(a, d.shape[1]), mn_major(b, d.shape[2])
        layout = torch.tensor(ks, dtype=torch.int32, device="cuda")
        return lambda: function(a, b, d, list(ks), layout, d), (d,)
    if name == "tf32_hc_prenorm_gemm":
        shape = (keywords["num_splits"], len(a))
        d, s = empty(*shape, len(b), dtype=torch.float), empty(*shape, dtype=torch.float)
        return lambda: function(a, b, d, s, **keywords), (d, s)
    a = mn_major(a, x.shape[-2]) if isinstance(a, tuple) else a
    kind = torch.float32 if name.endswith("f32") else torch.bfloat16
    d = empty(*x.shape[:-1], w.shape[-2], dtype=kind)
    return lambda: function(a, b, d, *rest), (d,)


def direct(name, given, keywords):
    """What it fills, as bytes in numpy."""
    import torch

    call, results = prepared(name, given, keywords)
    call()
    torch.cuda.synchronize()
    return [d.cpu().contiguous().view(torch.uint8).numpy() for d in results]


def compiled(name, given, keywords, **more):
    """(our function in jit, its arrays): what is no array is static."""
    leaves, tree = jax.tree.flatten(given)
    arrays = [x for x in leaves if isinstance(x, np.ndarray)]

    @jax.jit
    def run(arrays):
        given, left = [], list(arrays)
        for x in leaves:
            given.append(left.pop(0) if isinstance(x, np.ndarray) else x)
        return getattr(deep_gemm, name)(*jax.tree.unflatten(tree, given), **keywords, **more)

    return run, arrays


def as_bytes(results):
    results = results if isinstance(results, (tuple, list)) else [results]
    return [np.asarray(d).view(np.uint8) for d in results]


def refused(name):
    capability = jax.local_devices()[0].compute_capability
    if name in SM90_ONLY and capability != "9.0":
        pytest.skip(f"f32 scales need SM90, and this GPU has {capability}")


@pytest.mark.parametrize("columns", [24, 136, 512])
@pytest.mark.parametrize("depth", [512, 640, 1024])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_of_a_direct_call(name, depth, columns):
    refused(name)
    given, keywords, live = operands(name, columns, depth)
    run, arrays = compiled(name, given, keywords)
    for ours, theirs in zip(as_bytes(run(arrays)), direct(name, given, keywords), strict=True):
        np.testing.assert_array_equal(ours[live], theirs[live])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_settings_change_no_bits_and_are_restored(name):
    import deep_gemm as library

    refused(name)
    given, keywords, live = operands(name, 512, 512)
    before = library.get_num_sms(), library.get_pdl()
    settings = deep_gemm.Settings(num_sms=64, pdl=True)
    outs = []
    for more in ({}, dict(settings=settings)):
        run, arrays = compiled(name, given, keywords, **more)
        outs.append(as_bytes(run(arrays)))
    for plain, limited in zip(*outs, strict=True):
        np.testing.assert_array_equal(plain[live], limited[live])
    assert (library.get_num_sms(), library.get_pdl()) == before


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_allocates_nothing(name):
    import torch

    refused(name)
    if name == "k_grouped_fp8_gemm_nt_contiguous":
        pytest.skip("DeepGEMM allocates its tensor maps with torch here")
    given, keywords, _ = operands(name, 512, 512)
    run, arrays = compiled(name, given, keywords)
    jax.block_until_ready(run(arrays))  # compiles

    def allocations():
        return torch.cuda.memory_stats().get("allocation.all.allocated", 0)

    before = allocations()
    for _ in range(10):
        jax.block_until_ready(run(arrays))
    assert allocations() == before


def test_a_shape_not_seen_before_after_ten_of_another():
    # With command buffers on, a program is captured after its first runs.
    name = "m_grouped_bf16_gemm_nt_masked"
    for rows, times in ((64, 10), (300, 3), (64, 2)):
        given, keywords, live = operands(name, 136, 512, rows=rows)
        run, arrays = compiled(name, given, keywords)
        theirs = direct(name, given, keywords)[0]
        for _ in range(times):
            np.testing.assert_array_equal(as_bytes(run(arrays))[0][live], theirs[live])


def test_ten_thousand_calls_keep_no_memory():
    given, keywords, _ = operands("gemm_nt_bf16bf16f32", 512, 512)
    run, arrays = compiled("gemm_nt_bf16bf16f32", given, keywords)
    arrays = jax.device_put(arrays)

    def calls(count):
        for _ in range(count):
            out = run(arrays)
        jax.block_until_ready(out)
        device = jax.local_devices()[0].memory_stats() or {}
        return device.get("bytes_in_use", 0), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    device, host = calls(1000)
    device_after, host_after = calls(10000)
    assert device_after <= device and host_after - host < 8 * 1024  # KiB


# Without donation, weight gradients are also the copy of what they are added to.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "k_grouped" not in name])
def test_takes_as_long_as_a_direct_call(name, capsys):
    """By device time: eight calls in a program, many programs in the queue, against torch's. Each
    call has arrays of its own in both: XLA would make one call of eight equal ones, and what is
    read again lies in the L2."""
    import torch

    refused(name)
    given, keywords, _ = operands(name, 4096, 7168, rows=2047)
    run, arrays = compiled(name, given, keywords)
    copies = [[jnp.asarray(array, copy=True) for array in arrays] for _ in range(8)]
    program = jax.jit(lambda copies: [run(arrays) for arrays in copies])
    calls = [prepared(name, given, keywords)[0] for _ in range(8)]
    graph = torch.cuda.CUDAGraph()
    calls[0]()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()

    def microseconds(call, wait):
        start = time.perf_counter()
        for _ in range(32):
            out = call()
        wait(out)
        return (time.perf_counter() - start) * 1e6 / 32 / 8

    # In turn, since a GPU that works for longer clocks lower.
    ways = {
        "torch": (graph.replay, lambda _: torch.cuda.synchronize()),
        "jit": (lambda: program(copies), jax.block_until_ready),
    }
    rounds = [{way: microseconds(*run) for way, run in ways.items()} for _ in range(12)][2:]
    theirs, ours = (float(np.median([found[way] for found in rounds])) for way in ways)
    with capsys.disabled():
        print(f"\n{name}: from torch {theirs:.1f} us, from jit {ours:.1f} us")
    assert ours <= 1.03 * theirs + 2


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two GPUs in one process")
def test_two_gpus_in_one_process():
    import torch

    # Kernels of this size are compiled here first, on both at once.
    name = "m_grouped_bf16_gemm_nt_contiguous"
    given, keywords, live = operands(name, 1096, 1088)
    run, arrays = compiled(name, given, keywords)
    outs, errors = {}, []

    def work(device):
        try:
            here = jax.device_put(arrays, device)
            outs[device] = [as_bytes(run(here))[0][live] for _ in range(100)]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(d,)) for d in jax.local_devices()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:  # a wheel whose copies share their state
        assert all("use one process per GPU" in str(error) for error in errors)
        assert len(errors) == len(threads) - 1
    with torch.cuda.device(0):  # JAX leaves another one current
        theirs = direct(name, given, keywords)[0][live]
    for steps in outs.values():
        for ours in steps:
            np.testing.assert_array_equal(ours, theirs)


RACE = """
import sys
import numpy as np
import test_bridge_gpu as here
name, seed = "m_grouped_bf16_gemm_nt_contiguous", int(sys.argv[1])
given, keywords, live = here.operands(name, 1160, 1152, seed=seed)
run, arrays = here.compiled(name, given, keywords)
outs = [here.as_bytes(run(arrays))[0][live] for _ in range(100)]
theirs = here.direct(name, given, keywords)[0][live]
assert all((out == theirs).all() for out in outs)
"""


@pytest.mark.skipif(jax.local_device_count() < 2, reason="needs two GPUs")
def test_a_process_for_each_gpu(tmp_path):
    """They find an empty cache and compile the same kernels at once."""
    caches = {name: str(tmp_path / name) for name in ("DG_JIT_CACHE_DIR", "DGMOE_JAX_CACHE_DIR")}
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    env = os.environ | caches | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(gpu)],
            env=env | {"CUDA_VISIBLE_DEVICES": str(gpu)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for gpu in range(jax.local_device_count())
    ]
    errors = [process.communicate(timeout=200)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), errors


def test_threads_with_settings_of_their_own():
    import deep_gemm as library

    name = "gemm_nt_bf16bf16f32"
    given, keywords, _ = operands(name, 512, 640)
    theirs, before, outs = direct(name, given, keywords)[0], library.get_num_sms(), []

    def work(num_sms):
        run, arrays = compiled(name, given, keywords, settings=deep_gemm.Settings(num_sms=num_sms))
        outs.extend(as_bytes(run(arrays))[0] for _ in range(50))

    threads = [threading.Thread(target=work, args=(n,)) for n in (32, 96)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outs) == 100 and library.get_num_sms() == before
    for ours in outs:
        np.testing.assert_array_equal(ours, theirs)

"""Warm-up, assert_warm and doctor, on a machine without a GPU.

DeepGEMM's place is taken by a stand-in that leaves on disk what DeepGEMM 0.1.5 leaves there.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
import uuid

import jax
import pytest
from dgmoe_jax.interop import kernel_cache
from typer.testing import CliRunner

import dgmoe_jax as dg
from dgmoe_jax import backends
from dgmoe_jax.__main__ import app, token_counts
from dgmoe_jax.plan import dense
from dgmoe_jax.recipes import RECIPES
from dgmoe_jax.warmup import Gemm, gemms

V3 = dg.MoEConfig(
    num_experts=256,
    hidden_size=7168,
    intermediate_size=2048,
    router=dg.RouterConfig(top_k=8),
    recipe="fp8_block",
    num_shared_experts=1,
)
SMALL = ("--experts", "8", "--hidden", "256", "--intermediate", "128", "--top-k", "2")
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what a CPU lacks")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of its own; warmup(cache_dir=) sets these for the process."""
    monkeypatch.setenv("DGMOE_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache/deep_gemm"))
    return tmp_path / "cache"


def python(*arguments, **env):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(*processes):
    """Standard output of each, once all have succeeded."""
    found = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), found
    return [out for out, _ in found]


def run(*arguments):
    return CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})


# --- Which GEMMs


def test_the_list_holds_what_the_plan_of_every_size_needs():
    found = gemms(V3, range(1, 16385), arch="sm90")
    assert found == sorted(set(found))
    weights = {(256, 4096, 7168), (256, 7168, 2048), (1, 4096, 7168), (1, 7168, 2048)}
    assert {(g.groups, g.n, g.k) for g in found} == weights
    layouts_seen = set()
    for num_tokens in (1, 16, 128, 1024, 1281, 4096, 10000, 16384):
        decision = dg.plan(V3, num_tokens, arch="sm90")
        if decision.backend != "deep_gemm":
            continue
        layouts_seen.add(decision.layout)
        alone = dense(decision, num_tokens, V3.recipe)
        for block, groups in ((decision, 256), (alone, 1)):
            masked = block.layout == "masked"
            m = block.expected_m if masked else block.rows
            alignment = 0 if masked else block.alignment
            for n, k in ((4096, 7168), (7168, 2048)):
                assert Gemm(block.layout, "fp8_block", groups, n, k, alignment, m) in found
    assert layouts_seen, "no size of this layer goes to DeepGEMM"


def test_where_the_plan_may_fall_back_for_want_of_memory_both_layouts_are_listed():
    auto = gemms(dataclasses.replace(V3, num_shared_experts=0), [4096], arch="sm90")
    assert {g.layout for g in auto} == {"contiguous", "masked"}
    cfg = dataclasses.replace(V3, num_shared_experts=0, layout="masked")
    assert {g.layout for g in gemms(cfg, [4096], arch="sm90")} == {"masked"}


def test_a_rank_of_several_needs_its_part_of_the_experts():
    cfg = dataclasses.replace(V3, num_shared_experts=0, backend="deep_gemm")
    found = gemms(cfg, [4096], arch="sm90", ep_size=8, tp_size=2)
    assert {(g.groups, g.n, g.k) for g in found} == {(32, 2048, 7168), (32, 7168, 1024)}


def test_one_size_changes_nothing_of_another():
    cfg = dataclasses.replace(V3, num_shared_experts=2, backend="deep_gemm")
    both, *each = (gemms(cfg, counts, arch="sm90") for counts in ([16, 4096], [16], [4096]))
    assert set(both) == {gemm for found in each for gemm in found}
    with pytest.raises(ValueError, match="ep_size=0"):
        gemms(cfg, [16], arch="sm90", ep_size=0)


def test_sizes_are_padded_as_the_layer_pads_them():
    cfg = dg.MoEConfig(8, 200, 130, dg.RouterConfig(top_k=2), backend="deep_gemm")
    assert {(g.n, g.k) for g in gemms(cfg, [16], arch="sm90")} == {(512, 256), (256, 256)}


@pytest.mark.parametrize("counts, backend", [([0], "deep_gemm"), ([], "auto"), ([64], "xla")])
def test_nothing_is_listed_where_deep_gemm_is_not_called(counts, backend):
    assert gemms(dataclasses.replace(V3, backend=backend), counts, arch="sm90") == []


def test_splitting_loses_nothing_and_keeps_neighbours_together():
    todo = [dataclasses.asdict(g) for g in gemms(V3, range(1, 16385, 7), arch="sm90")]
    shares = kernel_cache.split(todo, 8)
    assert sorted(g["m"] for share in shares for g in share) == sorted(g["m"] for g in todo)
    assert max(map(len, shares)) < 1.1 * min(map(len, shares))
    dense_runs = [[g["m"] for g in s if g["groups"] == 1 and g["n"] == 4096] for s in shares]
    assert all(run == sorted(run) and run[-1] - run[0] < 16384 / 6 for run in dense_runs)


# --- Warm-up


@on_cpu
@pytest.mark.parametrize("backend", ["auto", "xla"])
def test_xla_compiles_nothing_and_says_so(backend, cache):
    report = dg.warmup(dataclasses.replace(V3, backend=backend), [1, 16, 16384])
    assert (report.gemms, report.compiled, report.reused, report.shim_built) == (0, (), (), False)
    assert "nothing to compile" in report.why and not cache.exists()
    assert str(report).startswith("nothing to compile")


@on_cpu
def test_what_cannot_run_here_is_refused():
    with pytest.raises(NotImplementedError, match="DeepGEMM needs a GPU"):
        dg.warmup(dataclasses.replace(V3, backend="deep_gemm"), [16])
    with pytest.raises(NotImplementedError, match="DeepGEMM needs a GPU"):
        dg.warmup(V3, [16384], arch="sm90")
    with pytest.raises(ValueError, match="processes=0"):
        dg.warmup(V3, [16], processes=0)


def test_two_processes_build_the_shim_once(tmp_path):
    command = ("-m", "dgmoe_jax", "warmup", *SMALL, "--tokens", "1,16", "--backend", "emulator")
    command += ("--cache-dir", tmp_path / "shipped", "--json")
    reports = [json.loads(out) for out in outputs(python(*command), python(*command))]
    assert sorted(report["shim_built"] for report in reports) == [False, True]
    assert all(report["cache_bytes"] > 10_000 for report in reports)
    assert len(list((tmp_path / "shipped").glob("*.so"))) == 1
    assert list((tmp_path / "shipped").glob("*/")) == []


@pytest.mark.parametrize("progress", [True, False])
def test_the_report_says_what_was_compiled_and_reused(monkeypatch, cache, progress, capsys):
    needed = gemms(V3, [4096, 8192], arch="sm90")

    def compile_gemms(given, processes, advance):
        assert [Gemm(**gemm) for gemm in given] == needed and processes == 3
        advance(len(given))
        return {"kernel.a.0", "kernel.b.1"}, {"kernel.b.1"}

    monkeypatch.setattr(backends, "current_arch", lambda: "sm90")
    monkeypatch.setattr(backends, "deep_gemm_unavailable", lambda: None)
    monkeypatch.setattr(kernel_cache, "build_shim", lambda platform: platform == "gpu")
    monkeypatch.setattr(kernel_cache, "compile_gemms", compile_gemms)
    (cache / "elsewhere/deep_gemm").mkdir(parents=True)
    (cache / "elsewhere/deep_gemm/kernel").write_text("12345")
    where = cache / "elsewhere"
    report = dg.warmup(V3, [4096, 8192], cache_dir=where, processes=3, progress=progress)
    assert (report.compiled, report.reused) == (("kernel.b.1",), ("kernel.a.0",))
    assert (report.gemms, report.shim_built, report.cache_bytes) == (len(needed), True, 5)
    assert (f"{len(needed)}/{len(needed)}" in capsys.readouterr().out) == progress
    assert kernel_cache.directories() == (where, where / "deep_gemm")


STAND_IN = '''
"""DeepGEMM's Python side as the warm-up calls it, on a CPU: checks the operands, "compiles"."""
import os, pathlib, sys, time, uuid

if sys.argv[0].endswith("kernel_cache.py"):  # a worker, which is to make its tensors here
    import torch

    def here(make):
        return lambda *a, device, **k: make(*a, **k)

    torch.zeros, torch.empty, torch.full = map(here, (torch.zeros, torch.empty, torch.full))
    torch.cuda.synchronize = lambda: None
alignment, loaded = 128, set()
root = pathlib.Path(os.environ["DG_JIT_CACHE_DIR"])


def set_mk_alignment_for_contiguous_layout(value):
    global alignment
    alignment = value


def need(name, code):
    folder = root / "cache" / f"kernel.{name}.{code.encode().hex()}"
    if not folder.exists():
        scratch = root / "tmp" / uuid.uuid4().hex
        scratch.mkdir(parents=True)
        time.sleep(0.05)
        (scratch / "kernel.cu").write_text("reinterpret_cast<void*>(&%s_impl<%s>);" % (name, code))
        (scratch / "kernel.cubin").write_text("")
        folder.parent.mkdir(exist_ok=True)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first
            pass
    if folder not in loaded:
        loaded.add(folder)
        os.write(1, f"Load time ({folder}): 0.10 ms\\n".encode())


def operands(a, b, d, fp8):
    lead = a[0].shape[:-2] if fp8 else a.shape[:-2]
    if fp8:
        (a, sa), (b, sb) = a, b
        *_, m, k = a.shape
        wide = -(-m // 4) * 4
        assert sa.shape == (*lead, m, k // 128) and sa.stride()[-2:] == (1, wide), sa.stride()
        assert sb.shape == (b.shape[0], -(-b.shape[1] // 128), k // 128) and sb.is_contiguous()
        assert sa.dtype == sb.dtype == torch.float32
    assert a.dtype == b.dtype == (torch.float8_e4m3fn if fp8 else torch.bfloat16)
    assert d.shape == (*lead, a.shape[-2], b.shape[1]) and d.dtype == torch.bfloat16
    assert a.is_contiguous() and b.is_contiguous() and d.is_contiguous()
    if b.shape[1] == 666:
        raise RuntimeError("no kernel for N = 666")
    return a.shape[-2], b.shape


def contiguous(fp8):
    def call(a, b, d, m_indices):
        m, (e, n, k) = operands(a, b, d, fp8)
        assert m_indices.shape == (m,) and m_indices.dtype == torch.int32
        need("contiguous", f"{e}, {n}, {k}, {alignment}, {m > 1024}")
    return call


def masked(fp8):
    def call(a, b, d, masked_m, expected_m):
        m, (e, n, k) = operands(a, b, d, fp8)
        assert a[0].shape[0] == e and masked_m.shape == (e,) if fp8 else a.shape[0] == e
        need("masked", f"{e}, {n}, {k}, {expected_m > 64}")
    return call


m_grouped_fp8_fp4_gemm_nt_contiguous, m_grouped_bf16_gemm_nt_contiguous = map(contiguous, (1, 0))
m_grouped_fp8_fp4_gemm_nt_masked, m_grouped_bf16_gemm_nt_masked = map(masked, (1, 0))
'''

WARM = """
import json, sys
from dgmoe_jax.interop import kernel_cache
done = []
used, new = kernel_cache.compile_gemms(json.loads(sys.argv[1]), int(sys.argv[2]), done.append)
print(json.dumps({"used": sorted(used), "new": sorted(new), "done": sum(done)}))
"""


@pytest.fixture
def stand_in(tmp_path):
    """A folder for PYTHONPATH with a DeepGEMM that compiles on a CPU."""
    package, info = tmp_path / "site/deep_gemm", tmp_path / "site/sgl_deep_gemm-0.1.5.dist-info"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(STAND_IN)
    (package / "cuda_helpers.py").write_text("find_cuda_home = lambda: '/nowhere'")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sgl-deep-gemm\nVersion: 0.1.5\n")
    return tmp_path / "site"


def test_processes_that_come_at_once_compile_once_and_later_ones_nothing(stand_in, cache):
    pytest.importorskip("torch")
    base = dg.MoEConfig(4, 256, 128, dg.RouterConfig(top_k=2), backend="deep_gemm")
    todo = []
    for recipe in ("bf16", "fp8_block"):
        cfg = dataclasses.replace(base, recipe=recipe, num_shared_experts=1)
        todo += gemms(cfg, [1, 7, 64, 200, 999, 1030], arch="sm90")
    todo = sorted(todo)
    assert {g.layout for g in todo} == {"contiguous", "masked"}

    def warm(found, processes=2):
        given = json.dumps([dataclasses.asdict(gemm) for gemm in found])
        path = os.pathsep.join(filter(None, [str(stand_in), os.environ.get("PYTHONPATH")]))
        return python("-c", WARM, given, processes, PYTHONPATH=path)

    first, second = map(json.loads, outputs(warm(todo), warm(todo)))
    if second["new"]:
        first, second = second, first
    assert first["new"] == first["used"] == second["used"] and second["new"] == []
    assert {name.split(".")[1] for name in first["new"]} == {"contiguous", "masked"}
    assert first["done"] == second["done"] == len(todo)
    assert len(kernel_cache.kernels()) == len(first["new"])

    lost = first["new"][0]
    shutil.rmtree(cache / "deep_gemm/cache" / lost)  # then nothing noted is trusted
    process = warm([*todo, dataclasses.replace(todo[-1], n=666)], processes=1)
    _, problem = process.communicate(timeout=100)
    assert process.returncode and "no kernel for N = 666" in problem
    assert lost in kernel_cache.kernels()


# --- assert_warm


def compile_as_deep_gemm(cache, name="sm90_bf16_gemm", nvcc=None):
    """Leaves what DeepGEMM leaves when it compiles, and fails as it does."""
    scratch = cache / "deep_gemm/tmp" / uuid.uuid4().hex
    scratch.mkdir(parents=True)
    text = f"""
        template <int N> __global__ void {name}_impl() {{}}
        static void __instantiate_kernel() {{
            auto ptr = reinterpret_cast<void*>(&{name}_impl<
                4096>);
        }};"""
    (scratch / "kernel.cu").write_text(text)
    command = [nvcc or "true", "kernel.cu", "-cubin", "-o", "kernel.cubin", "-arch=sm_90"]
    if subprocess.run(command, cwd=scratch, capture_output=True).returncode:
        raise RuntimeError("Assertion error: NVCC compilation failed")
    (cache / "deep_gemm/cache").mkdir(exist_ok=True)
    scratch.rename(cache / f"deep_gemm/cache/kernel.{name}.{scratch.name}")


def test_assert_warm_is_silent_when_nothing_compiles(cache):
    with dg.assert_warm():
        pass
    compile_as_deep_gemm(cache)
    with dg.assert_warm():
        pass


def test_assert_warm_names_what_was_compiled(cache):
    compile_as_deep_gemm(cache, "sm90_known")
    message = r"had to compile sm90_new_impl< 4096>"
    with pytest.raises(RuntimeError, match=message), dg.assert_warm():
        compile_as_deep_gemm(cache, "sm90_new")


def test_assert_warm_leaves_other_errors_alone():
    with pytest.raises(KeyError), dg.assert_warm():
        raise KeyError("mine")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize("flags", [None, "-DMINE"])
def test_nvcc_refuses_within_assert_warm(cache, flags, monkeypatch):
    monkeypatch.delenv("NVCC_APPEND_FLAGS", raising=False)
    if flags:
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
    message = "had to compile sm90_cold_impl"
    with pytest.raises(RuntimeError, match=message) as caught, dg.assert_warm():
        # DeepGEMM asks for the version when it starts, warm or not.
        assert subprocess.run(["nvcc", "--version"], capture_output=True).returncode == 0
        compile_as_deep_gemm(cache, "sm90_cold", nvcc="nvcc")
    assert "NVCC compilation failed" in str(caught.value.__cause__)
    assert kernel_cache.kernels() == set()
    assert os.environ.get("NVCC_APPEND_FLAGS") == flags
    compile_as_deep_gemm(cache, "sm90_cold", nvcc="nvcc")
    assert len(kernel_cache.kernels()) == 1


# --- The command line


@on_cpu
def test_doctor_says_what_runs_here_and_why_not_the_rest():
    found = json.loads(run("doctor", "--json").stdout)
    assert found["ok"] and found["machine"]["jax"] == jax.__version__
    runs = {(r["recipe"], r["backend"], r["layout"]): r["why_not"] for r in found["runs"]}
    assert len(runs) == len(RECIPES) * 4 * 2
    assert runs["bf16", "xla", "contiguous"] is None
    assert "needs an NVIDIA GPU" in runs["fp8_block", "deep_gemm", "masked"]
    assert "needs an NVIDIA GPU" in runs["bf16", "pallas", "masked"]
    assert runs["mxfp4", "xla", "masked"] is None


@on_cpu
def test_doctor_as_text():
    done = run("doctor")
    assert done.exit_code == 0
    for part in (jax.__version__, "fp8_block", "no (1)", "(1) ", "The layer runs here."):
        assert part in done.stdout, done.stdout


@on_cpu
def test_doctor_says_how_to_install_what_is_missing(monkeypatch):
    from dgmoe_jax import doctor

    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda p: None if p == "ninja" else version(p))
    found = doctor.examine()
    assert found["install"] == "pip install ninja" and found["machine"]["ninja"] is None
    monkeypatch.setattr(doctor, "_output", lambda *command: ["head", "NVIDIA H200, 580, 9.0"])
    assert "jax[cuda13]" in doctor.examine()["install"]


def test_doctor_fails_where_jax_has_no_device(monkeypatch):
    from dgmoe_jax import doctor

    def no_device(*_):
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", no_device)
    monkeypatch.setattr(doctor, "_output", lambda *command: ["head", "NVIDIA H200, 580, 9.0"])
    done = run("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and not found["ok"]
    assert "Unable to initialize" in found["machine"]["devices of JAX"]
    assert "jax[cuda13]" in found["install"]


@on_cpu
def test_warmup_on_the_command_line():
    done = run("warmup", *SMALL, "--tokens", "1,16-18", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["gemms"] == 0
    wrong = run("warmup", *SMALL, "--tokens", "1", "--layout", "mask")
    assert wrong.exit_code == 1
    assert run("warmup", *SMALL, "--tokens", "1,x").exit_code == 2
    assert token_counts("1,16-18") == [1, 16, 17, 18]


WITHOUT = """
import sys
for name in {names!r}:
    sys.modules[name] = None
import dgmoe_jax as dg
cfg = dg.MoEConfig(8, 256, 128, dg.RouterConfig(top_k=2), backend="xla")
assert "nothing to compile" in str(dg.warmup(cfg, [1, 16]))
import runpy
sys.argv = ["dgmoe_jax", "doctor"]
runpy.run_module("dgmoe_jax", run_name="__main__")
"""


def test_without_the_extras_it_imports_and_the_command_line_says_what_to_install():
    names = ["torch", "deep_gemm", "tvm_ffi", "jax_tvm_ffi", "rich", "typer"]
    process = python("-c", textwrap.dedent(WITHOUT).format(names=names))
    _, problem = process.communicate(timeout=100)
    assert process.returncode == 1
    assert problem.strip().splitlines()[-1].endswith("needs typer: pip install 'dgmoe_jax[cli]'")

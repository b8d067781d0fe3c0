"""The package installs as a wheel and editable, each into a fresh virtual environment."""

import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]

PROBE = """
import sys, time
import jax
start = time.perf_counter()
import dgmoe_jax as dg
took = time.perf_counter() - start
assert took < 1.0, f"import dgmoe_jax took {took:.2f} s beyond jax"
assert not {"torch", "deep_gemm", "tvm_ffi", "jax_tvm_ffi"} & set(sys.modules), "heavy imports"

from pathlib import Path
import dgmoe_jax.interop.deep_gemm as bridge
import dgmoe_jax.kernels_pallas.quant
assert (Path(bridge.__file__).parent / "shim.cpp").exists(), "the shim's source is not packaged"
for name in ("py.typed", "PARALLEL.md"):
    assert Path(dg.__file__).with_name(name).exists(), name

import jax.numpy as jnp
cfg = dg.MoEConfig(num_experts=2, hidden_size=128, intermediate_size=128,
                   router=dg.RouterConfig(top_k=1))
ones = lambda *shape: jnp.ones(shape, jnp.bfloat16)
params = dg.prepare_params(
    {"gate_weight": ones(2, 128), "w13": ones(2, 256, 128), "w2": ones(2, 128, 128)}, cfg)
assert dg.moe_layer(ones(3, 128), params, cfg).shape == (3, 128)
print("at", dg.__file__)
"""


def _run(*command, cwd):
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installs_and_runs_in_a_fresh_environment(tmp_path, kind):
    _run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    # Python 3.11 brings a setuptools older than pyproject.toml asks for; the newer one is below.
    _run(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools", cwd=tmp_path)
    site = Path(
        _run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=tmp_path).strip()
    )
    # jax and numpy come from the environment that runs the tests; its own .pth files, the
    # editable install of this package among them, are not read from there.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    # A copy, since setuptools puts what an earlier build left in build/ into the next wheel.
    source = tmp_path / "source"
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=REPO, capture_output=True, text=True
    ).stdout.split() or [str(p.relative_to(REPO)) for p in REPO.rglob("*") if p.is_file()]
    for name in names:
        if (REPO / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, source / name)
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    if kind == "wheel":
        _run(*pip, source, cwd=tmp_path)
        shutil.rmtree(source)
    else:
        _run(*pip, "-e", source, cwd=tmp_path)
    where = _run(python, "-c", textwrap.dedent(PROBE), cwd=tmp_path).strip()
    assert where.startswith(f"at {site if kind == 'wheel' else source}"), where

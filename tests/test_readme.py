"""The README's example runs as it stands there, and its numbers are the measured ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import _report

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PARALLEL = ROOT / "dgmoe_jax/PARALLEL.md"


def test_the_usage_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks, "README.md has no python example"
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})


def test_the_example_of_a_sharded_model_runs():
    (block,) = re.findall(r"```python\n(.*?)```", PARALLEL.read_text(), re.S)
    # As many devices as a process has are settled when it starts.
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    checks = "assert y.shape == x.shape and y.sharding == x.sharding and not jnp.isnan(y).any()\n"
    checks += "dg.shard_params(params, cfg, mesh, balanced)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", block + checks],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_the_tables_are_those_of_the_committed_measurements():
    records = _report.read(ROOT / "bench/layer.jsonl")
    for recipe, text in (("fp8_block", README), ("bf16", ROOT / "bench/README.md")):
        assert _report.table(records, recipe) in text.read_text()
    records = _report.read(ROOT / "bench/parallel.jsonl")
    assert _report.parallel_table(records) in (ROOT / "bench/README.md").read_text()

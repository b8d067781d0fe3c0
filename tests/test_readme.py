"""The README's example runs as it stands there, and its numbers are the measured ones."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import _report

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def test_the_usage_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks, "README.md has no python example"
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})


@pytest.mark.parametrize("recipe", ["fp8_block", "bf16"])
def test_the_tables_are_those_of_the_committed_measurements(recipe):
    assert _report.table(_report.read(ROOT / "bench/layer.jsonl"), recipe) in README.read_text()

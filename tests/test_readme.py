"""The README's example runs as it stands there, and its numbers are the measured ones."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import _report

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"


def test_the_usage_example_runs():
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    assert blocks, "README.md has no python example"
    for block in blocks:
        exec(compile(block, str(README), "exec"), {})


def test_the_tables_are_those_of_the_committed_measurements():
    records = _report.read(ROOT / "bench/layer.jsonl")
    for recipe, text in (("fp8_block", README), ("bf16", ROOT / "bench/README.md")):
        assert _report.table(records, recipe) in text.read_text()

"""Who may import whom: the arrows between the package's parts, read from the source."""

import ast
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
FOLDERS = {
    "dgmoe_jax": "dgmoe_jax",
    "interop": "dgmoe_jax.interop",
    "kernels_pallas": "dgmoe_jax.kernels_pallas",
}

# Parts of ours that each part may import at module level (itself always; "*" any).
ALLOWED = {
    "config": {"recipes"},
    "recipes": set(),
    "layouts": set(),
    "checks": {"layouts", "recipes"},
    "types": {"recipes"},
    "platforms": set(),
    "progress": set(),
    "tracing": set(),
    "backends": {"config", "platforms"},
    "xla": {"checks", "interop", "kernels_pallas", "layouts", "tracing"},
    "reference": set(),
    "plan": {"backends", "checks", "config", "layouts", "recipes"},
    "quantize": {"interop", "recipes", "types", "xla"},
    "steps": {"backends", "config", "layouts", "plan", "recipes", "types"},
    "routing": {"backends", "checks", "config", "steps", "types"},
    "weights": {
        *("backends", "checks", "config", "kernels_pallas", "progress", "quantize", "recipes"),
        *("types", "xla"),
    },
    "layer": {
        "tracing",
        "backends",
        "checks",
        "config",
        "parallel",
        "plan",
        "recipes",
        "routing",
        "steps",
        "types",
    },
    "parallel": {"checks", "config", "plan", "recipes", "steps", "types"},
    "network": {"config", "parallel", "plan", "recipes", "steps"},
    "sharding": {"backends", "checks", "config", "layer", "parallel", "plan", "types"},
    "warmup": {"backends", "checks", "config", "plan", "progress", "recipes"},
    "doctor": {"backends", "config", "plan", "recipes"},
    "interop": {"platforms", "tracing"},
    # For torch's users: above the layer, and imported by name or by the command line alone.
    "torch": {"*"},
    "kernels_pallas": set(),
    "__init__": {"*"},
    "__main__": {"*"},
}
TORCH = {"interop/torch_moe", "interop/parity"}  # may import torch at module level
HEAVY = {"torch", "deep_gemm", "tvm_ffi", "jax_tvm_ffi", "transformers"}


def _sources():
    for folder, package in FOLDERS.items():
        for path in sorted((REPO / folder).rglob("*.py")):
            inside = path.relative_to(REPO / folder).with_suffix("")
            part = inside.parts[0] if package == "dgmoe_jax" else package.split(".")[1]
            name = f"{folder}/{inside}"
            yield pytest.param(path, "torch" if name in TORCH else part, id=name)


def _imported(node):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        if node.level:  # a neighbour in the same folder
            assert node.level == 1, f"line {node.lineno}: import from a folder above"
            return []
        if node.module == "dgmoe_jax":
            return [f"dgmoe_jax.{alias.name}" for alias in node.names]
        return [node.module]
    return []


def _part_of(module):
    return module.split(".")[1] if module.startswith("dgmoe_jax.") else None


@pytest.mark.parametrize("path,part", list(_sources()))
def test_a_part_imports_only_what_lies_below_it(path, part):
    tree = ast.parse(path.read_text())
    never_run = lambda n: isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"  # noqa: E731
    outside = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) or never_run(n)]
    lazy = {id(n) for f in outside for n in ast.walk(f)}
    for node in ast.walk(tree):
        for module in _imported(node):
            if id(node) not in lazy:
                heavy = HEAVY - {"torch"} if part == "torch" else HEAVY
                assert module.split(".")[0] not in heavy, f"{module} at module level"
                part_of = _part_of(module)
                allowed = ALLOWED[part] | {part}
                assert part_of is None or "*" in allowed or part_of in allowed, module
            if part not in ("interop", "torch"):
                assert module.split(".")[0] not in HEAVY, f"{module} outside interop"


def test_a_step_does_not_import_another_step():
    for path in (REPO / "dgmoe_jax/steps").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not any(m.startswith("dgmoe_jax.steps") for m in _imported(node)), path

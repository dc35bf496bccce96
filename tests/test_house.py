"""Rules of the house that a machine can check: imports go one way, sizes, examples in docstrings, a bare import."""

from __future__ import annotations

import ast
import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import fused_grad_optimizer

ROOT = Path(fused_grad_optimizer.__file__).parent
LAYERS = [
    ("_messages",),
    ("rules", "storage"),
    ("kernels",),
    ("ops",),
    (
        "_applied_grad",
        "_copies",
        "_factors",
        "_folding",
        "_foreach",
        "_locks",
        "_no_memory",
        "factored_grad",
        "modules",
    ),
    ("_backward_pass", "_flags", "_hooks", "_parameters", "_plans", "_small", "_state_io", "memory", "optimizer"),
    ("manager", "convert", "explain"),
    ("distributed", "integrations"),
    ("cli",),
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(ROOT.rglob("*.py"))


def imports_at_module_level(tree: ast.Module):
    nodes = list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fused_grad_optimizer"):
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            nodes.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    for name in imports_at_module_level(ast.parse(path.read_text())):
        if name in LEVEL:
            assert LEVEL[name] <= LEVEL[part], f"{part} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[1] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body[0]
            length = node.end_lineno - first.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_imports_with_neither_triton_nor_transformers():
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['transformers'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda n, *a: None if n.split('.')[0] == 'triton' else find(n, *a)\n"
        "import torch, fused_grad_optimizer as f\n"
        "m = torch.nn.Linear(4, 4); o = f.fuse(m, lr=1e-2)\n"
        "w = m.weight.detach().clone(); m(torch.ones(2, 4)).sum().backward(); o.step()\n"
        "assert not torch.equal(w, m.weight); print('trained')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "trained", result.stderr


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages([str(ROOT)], "fused_grad_optimizer.")
                                  if ".cli" not in m.name and "conv1d" not in m.name])  # fmt: skip
def test_docstring_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"nn": __import__("torch").nn, "torch": __import__("torch")})
    assert result.failed == 0

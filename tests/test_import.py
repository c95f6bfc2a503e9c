"""Importing the package is quick and brings neither an engine nor a device library along."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Container
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import kimi_k3_npu

HEAVY = ("transformers", "sglang", "vllm", "torch_npu")

PROBE = """
import json, sys, time
import torch
start = time.process_time()
{code}
seconds = time.process_time() - start
print(json.dumps({{"seconds": seconds, "heavy": [name for name in {names!r} if name in sys.modules]}}))
"""


def probe(code: str) -> dict:
    """What CPU time `code` takes beyond `import torch`, and which of HEAVY it imports, in a fresh process."""
    script = PROBE.format(code=code, names=HEAVY)
    return json.loads(subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout)


@pytest.mark.parametrize(
    "code",
    [
        "import kimi_k3_npu",
        "import kimi_k3_npu; [getattr(kimi_k3_npu, name) for name in kimi_k3_npu.__all__]",
        "import kimi_k3_npu.cli",
    ],
)
def test_light(code: str) -> None:
    found = probe(code)
    assert not found["heavy"]
    assert found["seconds"] < 3


@pytest.mark.parametrize("module", ["kimi_k3_npu", "kimi_k3_npu.cli"])
def test_no_torch(module: str) -> None:
    """`--help`, `--version` and an engine that looks for plugins do not wait for torch."""
    script = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        kimi_k3_npu.load_modle  # noqa: B018


def test_no_import_cycle() -> None:
    """Nor one that imports inside of functions hide: `TopologicalSorter` names the modules of the first."""
    root = Path(kimi_k3_npu.__file__).parents[1]
    files = {module_of(path.relative_to(root)): path for path in (root / "kimi_k3_npu").rglob("*.py")}
    graph = {module: imported_by(path, files) - {module} for module, path in files.items()}
    assert "kimi_k3_npu.engines.sglang.model" in graph["kimi_k3_npu.engines.sglang.hooks"], "inside of a function"
    TopologicalSorter(graph).prepare()


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported_by(path: Path, modules: Container[str]) -> set[str]:
    """The modules that a file imports anywhere, a package itself only for a name that is no module of it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules}

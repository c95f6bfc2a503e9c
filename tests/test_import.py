"""Importing the package is quick and brings neither an engine nor a device library along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
    import kimi_k3_npu

    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        kimi_k3_npu.load_modle  # noqa: B018

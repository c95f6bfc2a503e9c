"""`kimi-k3-npu doctor sglang` on this environment, whole and with the plugin left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.engines.sglang.harness import environment
from tests.patience import PATIENCE


def doctor(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kimi_k3_npu", "doctor", "sglang"]
    return subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_an_installation_that_works(tmp_path: Path) -> None:
    result = doctor(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in (
        "ok       SGLang 0.5.23, the tested version",
        "ok       SGLang loads the plugin kimi_k3_npu",
        "ok       a launch that asks for the plugin is refused when SGLang does not run it",
        "ok       SGLang applies the plugin's hooks",
        "note     torch_npu is not installed; needed on Ascend",
        "  KIMI_K3_NPU_SGLANG_EXPERT_DISPATCH",
        "no problems",
    ):
        assert line in result.stdout


def test_a_plugin_that_is_left_out(tmp_path: Path) -> None:
    result = doctor(tmp_path, SGLANG_PLUGINS="other", SGLANG_PLATFORM="cpu_platform", KIMI_K3_NPU_TYPO="1")
    assert result.returncode == 1
    assert "problem  SGLANG_PLUGINS=other leaves the plugin out" in result.stdout
    assert "unknown environment variable KIMI_K3_NPU_TYPO" in result.stdout

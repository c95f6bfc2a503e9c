"""The guard at the top of site-packages: what it costs, what it sees, and that it leaves everything else alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.sglang.harness import environment
from tests.patience import PATIENCE


def python(code: str, folder: Path, *options: str, **env: str) -> str:
    command = [sys.executable, *options, "-c", code]
    result = subprocess.run(
        command, cwd=folder, env=environment(**env), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_it_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    """What Python itself counts for importing the guard, in the first of some starts that nothing else disturbs."""
    counted = (
        int(line.split("|")[1])
        for _ in range(50)
        for line in python("", tmp_path, "-X", "importtime").splitlines()
        if line.endswith("_kimi_k3_npu_guard")
    )
    assert any(microseconds < 1000 for microseconds in counted)


def test_it_brings_nothing_along(tmp_path: Path) -> None:
    names = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    with_it, without = (set(json.loads(python(names, tmp_path, *options))) for options in ([], ["-S"]))
    ours = {name for name in with_it - without if "kimi" in name}
    assert ours == {"_kimi_k3_npu_guard"}
    assert not {"torch", "sglang", "importlib.metadata", "traceback"} & with_it


FAKE = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/plugins/__init__.py": "_plugins_loaded = True",
    "sglang/srt/configs/__init__.py": "",
    "sglang/srt/configs/model_config.py": """
class ModelConfig:
    def __init__(self, model_impl, is_draft_model=False):
        self.model_impl, self.is_draft_model = model_impl, is_draft_model
""",
    "sglang/srt/model_loader/__init__.py": "",
    "sglang/srt/model_loader/utils.py": "def get_model_architecture(model_config): return 'theirs'",
}

REFUSED = """
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.utils import get_model_architecture
import sglang.srt.plugins
loaded = {loaded}
sglang.srt.plugins._plugins_loaded = loaded
for impl, draft in (("auto", False), ("kimi_k3_npu", True), ("other", False)):
    assert get_model_architecture(ModelConfig(impl, draft)) == "theirs"
try:
    get_model_architecture(ModelConfig("kimi_k3_npu"))
except RuntimeError as error:
    print(error)
else:
    raise SystemExit("not refused")
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    """A package that has only what the guard looks at, found before the real one."""
    for name, code in FAKE.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return tmp_path


@pytest.mark.parametrize(
    ("loaded", "env", "reason"),
    [
        (True, {"SGLANG_PLUGINS": "a, b"}, "SGLANG_PLUGINS=a, b leaves the plugin out"),
        (True, {}, "the plugin fails to register"),  # this SGLang has no registry
        (False, {}, "the plugin fails to register"),
    ],
)
def test_it_refuses_only_ours_and_says_why(fake: Path, loaded: bool, env: dict[str, Any], reason: str) -> None:
    said = python(REFUSED.format(loaded=loaded), fake, PYTHONPATH=str(fake), **env)
    assert reason in said
    assert "kimi-k3-npu doctor sglang" in said


def test_a_function_that_is_gone_is_no_error(fake: Path) -> None:
    (fake / "sglang/srt/model_loader/utils.py").write_text("")
    (fake / "sglang/srt/configs/model_config.py").write_text("")
    code = "import sglang.srt.model_loader.utils, sglang.srt.configs.model_config"
    assert python(code, fake, PYTHONPATH=str(fake)) == ""

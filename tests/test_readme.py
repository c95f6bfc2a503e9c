"""Every command in the README works as written. `make demo`, `make test` and `pip install .` are run by `.ci/run`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k3_npu.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.partition("   #")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
OURS = [command for command in COMMANDS if command.startswith("kimi-k3-npu ")]
ELSEWHERE = {"make demo", "make test", "pip install ."}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder that has the weights of a checkout."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "weights").symlink_to(ROOT / "weights")
    return folder


def test_no_command_is_left_out() -> None:
    assert set(COMMANDS) - set(OURS) == ELSEWHERE
    assert len(OURS) >= 8


@pytest.mark.parametrize("command", OURS)
def test_command(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        main(shlex.split(command)[1:])
    out, err = capfd.readouterr()
    assert not end.value.code, err
    assert out.strip()


def test_the_python_example(folder: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    check = "\nassert [list(x.shape) for x in logits] == [[2, 272], [3, 272]]"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", example + check], cwd=folder, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_what_it_names_is_there() -> None:
    paths = re.findall(r"`((?:kimi_k3_npu|engines|recipes|weights|tests|benchmarks|docs)/[\w./-]*)`", README)
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists() and not (ROOT / "kimi_k3_npu" / path).exists()] == []

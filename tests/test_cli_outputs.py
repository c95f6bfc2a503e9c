"""Where to write is checked before the work, by every command that is told where."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.checkpoint.checksums import Checksums
from kimi_k3_npu.cli import main

FILES = ("weights checksum in --out", "eval gsm --model in --out", "batch --model in --prompts in --out")
FOLDERS = ("weights tiny", "weights convert in --to bf16")


@pytest.fixture
def refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[[str, str], str]:
    """Run a command with an output, in a folder with a file and one that may not be written; returns the message."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "frozen").mkdir()
    access = os.access

    def may(path: Any, mode: int, **options: Any) -> bool:  # the tests may run as one who may do everything
        return not (mode & os.W_OK and "frozen" in str(path)) and access(path, mode, **options)

    def work(*_: object, **__: object) -> Any:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(os, "access", may)
    monkeypatch.setattr(Checksums, "of", work)
    for name in ("checkpoint.convert.convert", "tiny.write_tiny", "evaluation.gsm.read_problems"):
        monkeypatch.setattr(f"kimi_k3_npu.{name}", work)
    monkeypatch.setattr("kimi_k3_npu.config.KimiK3Config.from_pretrained", work)
    monkeypatch.chdir(tmp_path)

    def refuses(command: str, out: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(SystemExit) as end:
            main([*command.split(), out])
        assert end.value.code == 2, command
        assert sorted(tmp_path.rglob("*")) == before
        shown = capsys.readouterr().err
        return " ".join("".join(char for char in shown if char not in "│─╭╮╰╯").split())

    return refuses


@pytest.mark.parametrize("command", FILES)
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder", "folder: is a folder; give a file to write"),
        ("file/x", "file/x: file is no folder"),
        ("frozen/x", "frozen/x: in folder frozen nothing may be written"),
        ("9" * 400, "File name too long"),
    ],
)
def test_a_file(refuses: Callable[[str, str], str], command: str, out: str, message: str) -> None:
    assert message in refuses(command, out)


def test_a_file_in_no_folder(refuses: Callable[[str, str], str]) -> None:
    shown = refuses("weights checksum in --out", "nonexistent/x")
    assert "nonexistent/x: there is no folder nonexistent; make it, or write elsewhere" in shown
    assert "--out" in shown
    for command in FILES[1:]:  # these make folders on the way
        assert "frozen/new/x: in folder frozen nothing may be written" in refuses(command, "frozen/new/x")


@pytest.mark.parametrize("command", FOLDERS)
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("file", "file: is a file; give a folder to make"),
        ("file/x/y", "file/x/y: file is no folder"),
        ("frozen/x/y", "frozen/x/y: in folder frozen nothing may be written"),
        ("frozen", "frozen: in folder frozen nothing may be written"),
        ("9" * 400, "File name too long"),
    ],
)
def test_a_folder(refuses: Callable[[str, str], str], command: str, out: str, message: str) -> None:
    assert message in refuses(command, out)


def test_a_device(tmp_path: Path) -> None:
    """It is written to, and not replaced by a file."""
    (tmp_path / "null").symlink_to("/dev/null")
    Checksums({}, {}).write(tmp_path / "null")
    assert (tmp_path / "null").is_symlink()
    assert not (tmp_path / "null").is_file()

"""What is written to an output has one writer: a second is refused, and a writer that has been killed is in no way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kimi_k3_npu import tiny
from kimi_k3_npu.checkpoint.checksums import Checksums
from kimi_k3_npu.checkpoint.convert import convert
from kimi_k3_npu.checkpoint.export import write_checkpoint
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.cli import evaluate, main
from kimi_k3_npu.errors import CheckpointError, KimiK3Error
from kimi_k3_npu.locks import LOCK, writing_to
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.conftest import Oracle


def refusal(output: Path, what: str, process: int | None = None) -> str:
    """What a second writer is told."""
    holder = re.escape(f"{output}: another {what} is writing to it (process {process or os.getpid()} on ")
    return holder + r".+\); wait until it has ended, or write elsewhere"


def test_two_conversions(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    source, out, refused = oracle("k3-mxfp4").folder, tmp_path / "out", list[str]()

    def again(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(CheckpointError, match=refusal(out, "conversion")) as error:
                convert(source, out, "bf16")
            refused.append(str(error.value))

    convert(source, out, "bf16", progress=again)
    assert len(refused) == 1
    assert not verify(out).faults
    convert(source, tmp_path / "alone", "bf16")
    assert [(f.name, f.read_bytes()) for f in sorted(out.iterdir())] == [
        (f.name, f.read_bytes()) for f in sorted((tmp_path / "alone").iterdir())
    ]


def test_two_exports(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.zeros(2)
        with pytest.raises(KimiK3Error, match=refusal(tmp_path, "export")):
            write_checkpoint([("b", torch.ones(3))], tmp_path)
        yield "c", torch.ones(4)

    write_checkpoint(tensors(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "model-00001-of-000001.safetensors",
        "model.safetensors.index.json",
    ]


def test_two_tiny_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, make = tmp_path / "new", tiny._random_model

    def model(*arguments: Any) -> Any:
        monkeypatch.setattr(tiny, "_random_model", make)
        with pytest.raises(KimiK3Error, match=refusal(out, "tiny checkpoint")):
            tiny.write_tiny(out)
        return make(*arguments)

    monkeypatch.setattr(tiny, "_random_model", model)
    tiny.write_tiny(out)
    assert not verify(out).faults


def test_two_files_of_checksums(
    oracle: Callable[[str], Oracle],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, read = tmp_path / "sums.json", Checksums.of
    command = ["weights", "checksum", str(oracle("k3").folder), "--out", str(file)]
    codes = []

    def of(*arguments: Any, **options: Any) -> Checksums:
        monkeypatch.setattr(Checksums, "of", read)
        with pytest.raises(SystemExit) as end:
            main(command)
        codes.append(end.value.code)
        return read(*arguments, **options)

    monkeypatch.setattr(Checksums, "of", of)
    with pytest.raises(SystemExit) as end:
        main(command)
    assert (codes, end.value.code) == ([1], 0)
    assert re.match("error: " + refusal(file, "checksum"), capsys.readouterr().err)
    assert [found.name for found in tmp_path.iterdir()] == ["sums.json"]


def test_two_evaluations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "marks.jsonl"
    file.write_text("before\n")

    def start() -> int | str | None:
        with pytest.raises(SystemExit) as end:
            main(["eval", "gsm", "--model", "m", "--out", str(file)])
        return end.value.code

    def opened(*_: Any) -> Any:
        monkeypatch.setattr(evaluate, "_open", lambda *_: pytest.fail("two write"))
        assert start() == 1
        raise KimiK3Error("no engine")

    monkeypatch.setattr(evaluate, "_open", opened)
    assert start() == 1
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch("error: " + refusal(file, "evaluation"), first)
    assert second == "error: no engine"
    assert file.read_text() == "before\n"


def test_a_killed_writer(tmp_path: Path) -> None:
    """Its lock is refused as long as it lives, by its number, and is nobody's from then on."""
    script = (
        "import sys, time; from pathlib import Path; from kimi_k3_npu.locks import writing_to\n"
        "with writing_to(Path(sys.argv[1]), 'export'): print('has it', flush=True); time.sleep(1e6)"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "has it\n"
        with pytest.raises(KimiK3Error, match=refusal(tmp_path, "export", other.pid)):
            write_checkpoint([], tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait(PATIENCE)
    assert [file.name for file in tmp_path.iterdir()] == [LOCK]
    write_checkpoint([("a", torch.zeros(2))], tmp_path)
    assert not (tmp_path / LOCK).exists()


def test_a_file_by_another_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with (
        writing_to(tmp_path / "file", "batch"),
        pytest.raises(KimiK3Error, match="another batch"),
        writing_to(tmp_path / "link", "batch"),
    ):
        pass
    with writing_to(tmp_path / "one", "batch"), writing_to(tmp_path / "two", "batch"):
        pass


def test_the_lock_is_given_back(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError), writing_to(tmp_path, "export"):
            raise RuntimeError
    with writing_to(Path("/dev/null"), "batch"), writing_to(Path("/dev/null"), "batch"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_lock_that_was_removed_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the one before removes the file: a lock on it would keep nobody away."""
    import fcntl

    lock, calls = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if not calls:
            (tmp_path / LOCK).unlink()
        calls.append(fd)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with writing_to(tmp_path, "export"):
        assert len(calls) == 2
        with pytest.raises(KimiK3Error, match="another export"), writing_to(tmp_path, "export"):
            pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import fcntl

    def flock(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\); let nothing else write to it"):
        write_checkpoint([("a", torch.zeros(2))], tmp_path)
    assert not (tmp_path / LOCK).exists()

"""An export over an older one, stopped at any step: what is left is the old one, the new one, or is refused."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kimi_k3_npu.checkpoint import writer
from kimi_k3_npu.checkpoint.export import INDEX, export_tensors, write_checkpoint
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.tiny import tiny_config

#: What an export asks of the file system.
CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir", "chmod")


class Died(BaseException):
    """The process ends here."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[list[str]]:
    """Call number `at` of CALLS, and every one after it, does nothing: a dead process cleans nothing up."""
    made = list[str]()

    def dead(name: str, real: Callable) -> Callable:
        def call(*arguments: object, **options: object) -> object:
            made.append(name)
            if len(made) > at:
                raise Died
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, dead(name, getattr(os, name)))
        patch.setattr(writer, "save_file", dead("save_file", writer.save_file))
        yield made


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list]]:
    """Two small models of one configuration: the folder of an export, and the tensors, of each."""
    raw = copy.deepcopy(tiny_config("fp32"))
    raw["vision_config"] = None
    raw["text_config"] |= {"num_hidden_layers": 2, "num_experts": 4}
    raw["text_config"]["linear_attn_config"] |= {"kda_layers": [1], "full_attn_layers": [2]}
    made = []
    for value in (0.25, 0.5):
        model = KimiK3ForCausalLM(KimiK3Config.from_hf(raw), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        folder, tensors = tmp_path_factory.mktemp("export"), list(export_tensors(model))
        (folder / "config.json").write_text(json.dumps(raw))
        write_checkpoint(tensors, folder, shard_bytes=half(tensors))
        made.append((folder, tensors))
    return made


def half(tensors: list) -> int:
    return -(-sum(tensor.nbytes for _, tensor in tensors) // 2)


def values(folder: Path) -> set[float]:
    """Of the checkpoint in `folder`, of every matrix: a norm may be all ones whatever the model."""
    checkpoint = Checkpoint.open(folder)
    return {checkpoint.read(name).view(-1)[0].item() for name in checkpoint.entries if "proj" in name}


@pytest.mark.parametrize("old", ["as many shards", "more shards", "no index", "none"])
def test_stopped_at_every_step(exports: list, old: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (before, old_tensors), (_, tensors) = exports
    folder, found, at = tmp_path / "out", list[str](), 0
    while True:
        shutil.copytree(before, folder)
        if old == "more shards":
            write_checkpoint(old_tensors, folder, shard_bytes=half(old_tensors) // 2)
        elif old == "no index":
            (folder / INDEX).unlink()
        elif old == "none":
            for file in folder.glob("model*"):
                file.unlink()
        try:
            with dying(monkeypatch, at) as made:
                write_checkpoint(tensors, folder, shard_bytes=half(tensors))
        except Died:
            pass
        else:
            break
        faults = verify(folder).faults
        if faults:
            assert {fault.kind for fault in faults} <= {"missing shard", "unreadable"}, faults
            assert all("it is not in the folder" in f.detail or "no safetensors checkpoint" in f.detail for f in faults)
        found.append("refused" if faults else {(0.25,): "old", (0.5,): "new"}[tuple(values(folder))])
        write_checkpoint(tensors, folder, shard_bytes=half(tensors))
        assert is_whole(folder, before)
        shutil.rmtree(folder)
        at += 1
    assert is_whole(folder, before)
    assert len(made) > 15
    # The new one is whole where it was made; then its shards are on the way; then it is where it belongs.
    states = [state for state, _ in itertools.groupby(found)]
    assert states == ["refused" if old == "none" else "old", "new", "refused", "new"]


def is_whole(folder: Path, like: Path) -> bool:
    """Whether `folder` is the new export and has nothing of another, nor of work."""
    names = {file.name for file in folder.iterdir()}
    return values(folder) == {0.5} and names == {file.name for file in like.iterdir()}


def test_writing_again_does_not_lose_what_a_stopped_export_had_finished(
    exports: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards were written and the first was on its way; then an export fails before it has written any."""
    (before, _), (_, tensors) = exports
    at = 0
    while True:
        folder = tmp_path / str(at)
        shutil.copytree(before, folder)
        with pytest.raises(Died), dying(monkeypatch, at):
            write_checkpoint(tensors, folder, shard_bytes=half(tensors))
        if verify(folder).faults:
            break
        at += 1

    def broken() -> Iterator:
        raise RuntimeError("disk full")
        yield

    with pytest.raises(RuntimeError, match="disk full"):
        write_checkpoint(broken(), folder)
    assert is_whole(folder, before)

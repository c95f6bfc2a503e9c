"""Reading holds little beside the weights themselves, in every format and in whatever order tensors lie in files."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_k3_npu.checkpoint import reader, stream
from kimi_k3_npu.checkpoint.convert import convert
from kimi_k3_npu.checkpoint.load import empty_model
from kimi_k3_npu.checkpoint.plan import plan_loading
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import read_storage
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.config import KimiK3Config

if TYPE_CHECKING:
    from tests.conftest import Oracle

#: Small beside the tiny checkpoints, as the real ones are beside the full size.
WAITING = READ = 16 << 10


@pytest.fixture(scope="module")
def folder(oracle: Callable[[str], Oracle], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {"mxfp4": oracle("k3-mxfp4").folder, "published w4a8": oracle("k3-w4a8").folder}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("stream") / name
            if name == "int4x2, codes first":
                codes_first(find("int4x2"), made[name])
            else:
                convert(made["mxfp4"], made[name], name)
        return made[name]

    return find


def codes_first(folder: Path, out: Path) -> None:
    """Write the shards again as folders of former versions have them: all tensors of larger elements first."""
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            save_file(load_file(file), out / file.name, {"format": "pt"})
        else:
            (out / file.name).symlink_to(file)


FORMS = ["mxfp4", "published w4a8", "bf16", "w4a8", "int4x2", "int4x2, codes first"]


@pytest.mark.parametrize("form", FORMS)
def test_reading_holds_little(form: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "WAITING", WAITING)
    monkeypatch.setattr(reader, "MAX_READ", READ)
    checkpoint, config = Checkpoint.open(folder(form)), KimiK3Config.from_pretrained(folder(form))
    with torch.device("meta"):
        plan = plan_loading(
            empty_model(config, checkpoint), checkpoint.entries, read_storage(checkpoint, config).names()
        )
    held = most = 0

    def came(name: str, tensor: Tensor) -> None:
        nonlocal held, most
        held += tensor.nbytes
        most = max(most, held)
        weakref.finalize(tensor, gone, tensor.nbytes)

    def gone(nbytes: int) -> None:
        nonlocal held
        held -= nbytes

    largest, weights, faults = 0, 0, []
    for _, tensors in stream.read_weights(checkpoint, plan.assignments, faults, on_tensor=came):
        largest, weights = max(largest, sum(tensor.nbytes for tensor in tensors.values())), weights + 1
        del tensors
    assert not faults
    assert weights == len({assignment.target.weight for assignment in plan.assignments})
    assert most <= WAITING + READ + 2 * largest < checkpoint.total_bytes / 4


@pytest.mark.parametrize("form", ["w4a8", "int4x2"])
def test_what_is_converted_lies_by_weight(form: str, folder: Callable[[str], Path]) -> None:
    """So a whole shard is read in one go, however large."""
    for file in folder(form).glob("*.safetensors"):
        header = Checkpoint.open(folder(form)).entries
        entries = sorted((entry for entry in header.values() if entry.file == file), key=lambda entry: entry.offset)
        stems = [entry.name.rpartition(".")[0] for entry in entries if ".experts." in entry.name]
        runs = [stem for i, stem in enumerate(stems) if i == 0 or stem != stems[i - 1]]
        assert len(runs) == len(set(runs)) > 1
        assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries)


def test_folders_of_the_former_order_load_and_verify(folder: Callable[[str], Path]) -> None:
    former, now = Checkpoint.open(folder("int4x2, codes first")), Checkpoint.open(folder("int4x2"))
    assert former.entries.keys() == now.entries.keys()
    assert verify(former.folder).faults == []

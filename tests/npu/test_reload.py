"""Other weights in a running engine: what captured graphs read must stay where it is, or they are captured again.

SGLang is not installed beside torch_npu here, so what `engines.sglang.reload` asks of it is stood in for.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3_npu import load_model
from kimi_k3_npu.engines import weights
from kimi_k3_npu.engines.sglang import symbols
from kimi_k3_npu.engines.sglang.reload import reload
from kimi_k3_npu.ops.device import assume
from kimi_k3_npu.parallel import shard
from tests.npu.on_cpu import on_cpu
from tests.npu.test_layouts import A3, emulated

__all__ = ["emulated"]


class Loader:
    def __init__(self, config: object) -> None: ...

    def _prepare_weights(self, path: str, revision: None, fall_back_to_pt: bool) -> tuple[str, list[str], bool]:
        if not Path(path).is_dir():
            raise OSError(f"401 for {path}")
        return path, [], True


class Served:
    """An engine with the W4A8 oracle laid out for an A3, from a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.captures, self.loads, self.device = folder, 0, 0, "npu"
        self.network = load_model(folder)
        self.model_config = SimpleNamespace(model_path=str(folder))
        self.settings = SimpleNamespace(model_path=str(folder), revision=None, download_dir=None)
        self.first = self.state()

    def get_model(self) -> Served:
        return self

    def load(self, source: weights.Source) -> None:
        self.loads += 1
        weights.load(self.network, source)

    def update_model_fields(self, model: Served, *, model_path: str, **others: object) -> None:
        self.settings.model_path = model_path

    def recapture_cuda_graph(self) -> None:
        self.captures += 1

    def state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.network.state_dict().items()}

    def places(self) -> dict[str, int]:
        return {name: tensor.data_ptr() for name, tensor in self.network.state_dict().items()}

    def is_as_at_first(self) -> bool:
        return all(torch.equal(self.first[name], tensor) for name, tensor in self.network.state_dict().items())


@pytest.fixture
def served(oracle: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    folder = shutil.copytree(oracle("k3-w4a8").folder, tmp_path / "served")
    with on_cpu(), assume(A3):
        served = Served(folder)
        group = SimpleNamespace(world_size=1)
        graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full")))
        for name, value in {
            "get_model": lambda: served.settings,
            "get_parallel": lambda: SimpleNamespace(pp_size=1, tp_group=group),
            "get_exec": lambda: SimpleNamespace(graph=graphs),
            "LoadConfig": SimpleNamespace,
            "DefaultModelLoader": Loader,
        }.items():
            monkeypatch.setitem(vars(symbols), name, value)
        yield served


def rewritten(folder: Path, new: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> str:
    """A copy of a checkpoint whose tensors `change` has changed."""
    shutil.copytree(folder, new)
    for file in new.glob("*weights*.safetensors"):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})
    (index,) = new.glob("*.index.json")
    names = {name: file.name for file in new.glob("*weights*.safetensors") for name in load_file(file)}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return str(new)


def test_new_weights_lie_where_the_old_ones_lay(served: Served, tmp_path: Path) -> None:
    places = served.places()
    experts = served.network.layers["2"].mlp.experts
    assert experts.w13.dtype == torch.int32  # laid out

    def double(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if ".experts." in name and name.endswith(("weight_scale", "scale_bias")):
                tensors[name] = 2 * tensors[name]

    other = rewritten(served.folder, tmp_path / "other", double)
    assert reload(served, other, "auto") == (True, "Succeeded to update model weights.")
    assert served.places() == places
    assert served.captures == 0
    wanted = load_model(other).state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in served.network.state_dict().items())
    assert not served.is_as_at_first()
    assert served.settings.model_path == other
    assert reload(served, str(served.folder), "auto", recapture_cuda_graph=True)[0]
    assert (served.places(), served.captures) == (places, 1)
    assert served.is_as_at_first()


def test_graphs_are_captured_again_where_weights_cannot_stay(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "overwrite", lambda kept, values: False)
    places = served.places()
    assert reload(served, str(served.folder), "auto")[0]
    assert served.places() != places
    assert served.captures == 1
    assert served.is_as_at_first()


def test_a_mistyped_path_changes_nothing(served: Served) -> None:
    """Nor is the folder of what is served read again: it may be gone by now."""
    shutil.rmtree(served.folder)
    places = served.places()
    for path, reason in {
        "/weights/k3-mistyped": "is not a folder on this machine, nor the name of a model on a hub",
        "moonshotai/Kimi-K33": "SGLang's loader finds no weights there: 401 for moonshotai/Kimi-K33",
    }.items():
        done, message = reload(served, path, "auto")
        assert not done
        assert message.startswith(path)
        assert reason in message
        assert message.endswith(f"Nothing was changed; still serving {served.folder}.")
    assert (served.loads, served.captures, served.places()) == (0, 0, places)
    assert served.is_as_at_first()


def test_what_a_folder_lacks_is_said_before_anything_changes(served: Served, tmp_path: Path) -> None:
    norm = "language_model.model.norm.weight"

    other = rewritten(served.folder, tmp_path / "other", lambda tensors: tensors.pop(norm, None))
    done, message = reload(served, other, "auto")
    assert not done
    assert "missing tensor" in message
    assert norm in message
    assert "Nothing was changed" in message
    assert served.loads == 0
    assert served.is_as_at_first()


def test_what_shows_only_while_reading_ends_with_what_was_served(served: Served, tmp_path: Path) -> None:
    places = served.places()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith(("w1.weight_scale", "q_b_proj.weight")):
                tensors[name].view(-1)[0] = torch.nan

    other = rewritten(served.folder, tmp_path / "other", spoil)
    done, message = reload(served, other, "auto")
    assert not done
    assert "not finite" in message
    assert message.endswith(f"Still serving {served.folder}.")
    assert served.loads == 2
    assert (served.places(), served.captures) == (places, 0)
    assert served.is_as_at_first()

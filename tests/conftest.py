"""What the tests share: the oracle checkpoints of tests/oracle, loaded once, and the numbers expected of them.

torch and the package are imported inside the fixtures: suites that need an engine or an NPU prepare the process first.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from torch import Tensor

    from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

# A busy machine is no fault of the code.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

ORACLES = Path(__file__).with_name("oracle")


@dataclass(frozen=True)
class Expected:
    """What the published code computes: of each prompt [T] the logits [T, vocab] and the 8 greedy tokens after it."""

    prompts: list[Tensor]
    logits: list[Tensor]
    greedy8: list[Tensor]


@dataclass(frozen=True)
class Oracle:
    """A checkpoint folder with expected numbers. Tests share its model and change it through `monkeypatch` only."""

    name: str
    folder: Path
    load: Callable[..., KimiK3ForCausalLM]

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All of expected.safetensors."""
        from safetensors.torch import load_file

        return load_file(self.folder / "expected.safetensors")

    @cached_property
    def expected(self) -> Expected:
        count = sum(name.endswith(".greedy8") for name in self.tensors)
        parts = (
            [self.tensors[f"prompt{i}.{part}"] for i in range(count)] for part in ("input_ids", "logits", "greedy8")
        )
        return Expected(*parts)

    @property
    def model(self) -> KimiK3ForCausalLM:
        return self.load(self.folder)


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """The oracle of a name, as in `oracle("k3")`; `oracle("k3").load(folder, expert_weights="bf16")` caches too."""
    from kimi_k3_npu import load_model

    load = cache(load_model)

    @cache
    def find(name: str) -> Oracle:
        folder = ORACLES / name
        if name == "kimi-linear-flat":
            folder = _write_flat(folder, tmp_path_factory.mktemp("oracle") / name)
        return Oracle(name, folder, load)

    return find


def _write_flat(published: Path, folder: Path) -> Path:
    """Add the weights, which are those of kimi-linear under flat names, so that git holds them once."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(published, folder)
    nested: dict[str, Any] = {}
    for shard in sorted((published.parent / "kimi-linear").glob("model-*.safetensors")):
        nested |= load_file(shard)
    flat = {name.removeprefix("language_model."): tensor for name, tensor in nested.items()}
    flat = {name: tensor.view(1, 1, -1, 1) if name.endswith("A_log") else tensor for name, tensor in flat.items()}
    save_file(flat, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    """One thread, which is the fastest for tensors this small, and fixed seeds."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)

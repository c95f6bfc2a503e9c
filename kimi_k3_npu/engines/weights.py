"""The checkpoint of a launch: its config, and its weights read by our loader."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from kimi_k3_npu import envs
from kimi_k3_npu.checkpoint.load import VISION_PREFIXES, check_weights, empty_model, load_weights
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import AUTO, Storage, expert_options, read_storage
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.formats import FORMATS, PLAIN
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.mesh import Mesh

#: A repository of a hub. More or fewer slashes, or a first dot, make a path.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_log = logging.getLogger(__name__)


def published_config(model: str, revision: str | None, changes: Mapping[str, Any]) -> KimiK3Config:
    """The config.json of `model` (a folder, or a name on a hub) as it was published, with `changes` over it.

    Engines' own config classes fill in what a config.json lacks, and cannot say so. A mapping in `changes` is laid over
    the one it changes, anything else takes its place.
    """
    raw, _ = PreTrainedConfig.get_config_dict(model, revision=revision)
    for key, value in changes.items():
        old = raw.get(key)
        raw[key] = {**old, **value} if isinstance(value, dict) and isinstance(old, dict) else value
    return KimiK3Config.from_hf(raw)


def folder_of(model: str, engine: str, download: Callable[[str], str]) -> Path:
    """Where the files of `model` lie: itself, or where `engine` puts what its loader downloads.

    Raises LaunchError if it is neither a folder nor the name of a model that can be had.
    """
    if not Path(model).is_dir() and not _HUB_NAME.fullmatch(model):
        raise LaunchError(f"{model} is not a folder on this machine, nor the name of a model on a hub (owner/name)")
    try:
        return Path(download(model))
    except Exception as error:  # whatever the hub's client raises
        raise LaunchError(f"{model}: {engine}'s loader finds no weights there: {error}") from error


def expert_weights(variable: str) -> str:
    """How the launch wants experts kept: the value of an environment variable of ours. Raises LaunchError."""
    return envs.one_of(variable, expert_options()) or AUTO


@dataclass(frozen=True)
class Source:
    """A folder that weights are read from, and how the launch wants experts kept."""

    checkpoint: Checkpoint
    storage: Storage
    expert_weights: str = AUTO

    @classmethod
    def open(cls, folder: Path, config: KimiK3Config, expert_weights: str = AUTO) -> Source:
        """Raises CheckpointError with all faults found so far."""
        checkpoint = Checkpoint.open(folder)
        return cls(checkpoint, read_storage(checkpoint, config), expert_weights)

    @classmethod
    def of_config(cls, folder: Path, config: KimiK3Config, expert_weights: str = AUTO) -> Source:
        """For a launch with dummy weights, which need not be there: how they would be stored counts."""
        format = FORMATS[config.quantization or PLAIN.name]
        storage = Storage(format.folder, format, folder=folder)
        return cls(Checkpoint(folder, {}, {}, ()), storage, expert_weights)

    @property
    def experts(self) -> str:
        """The name of the format in which a rank keeps its experts."""
        return self.storage.keep_experts(self.expert_weights).name


def empty_network(
    config: KimiK3Config, source: Source, mesh: Mesh, *, dtype: torch.dtype, vision: bool
) -> KimiK3ForCausalLM:
    """The network that `source` fills. Raises LayoutError when `mesh` cannot split it."""
    stored = source.storage.experts
    if dtype in stored.too_narrow:
        narrow = str(dtype).removeprefix("torch.")
        raise LaunchError(f"{stored.title} experts do not expand to {narrow}; use --dtype bfloat16")
    mesh.layout.check(config.text, expert_group=stored.group)
    return empty_model(config, source.checkpoint, mesh, dtype=dtype, experts=source.experts, vision=vision)


def check(network: KimiK3ForCausalLM, source: Source) -> None:
    """Raise CheckpointError with every fault that shows before weights are read. Changes nothing."""
    check_weights(network, source.checkpoint, source.storage, skip=_left_out(network))


def load(network: KimiK3ForCausalLM, source: Source) -> None:
    """Fill `network`, reading only what this rank holds. Raises CheckpointError with every fault."""
    start, read = time.perf_counter(), 0

    def count(done: int, total: int) -> None:
        nonlocal read
        read = done

    load_weights(network, source.checkpoint, source.storage, count, skip=_left_out(network))
    seconds, total = time.perf_counter() - start, source.checkpoint.total_bytes
    _log.info("read %d of %d bytes of %s in %.1f s", read, total, source.checkpoint.folder, seconds)


def _left_out(network: KimiK3ForCausalLM) -> tuple[str, ...]:
    """Images are not taken by every launch, nor by every pipeline stage."""
    return VISION_PREFIXES if network.vision_tower is None else ()

"""The checkpoint of an SGLang launch: its config, and its weights read by our loader."""

from __future__ import annotations

import json
import logging
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from transformers import PreTrainedConfig

from kimi_k3_npu import envs
from kimi_k3_npu.checkpoint.folder import has_weights
from kimi_k3_npu.checkpoint.forms import INT4X2, MXFP4, PLAIN
from kimi_k3_npu.checkpoint.load import VISION_PREFIXES, ExpertWeights, check_weights, empty_model, load_weights
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import Storage, read_storage
from kimi_k3_npu.config import MXFP4_GROUP, KimiK3Config
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.experts import ExpertForm
from kimi_k3_npu.parallel.mesh import Mesh

#: `--load-format`s whose files our loader reads, and the one that reads none.
LOAD_FORMATS = ("auto", "safetensors", "dummy")

#: A repository of a hub. More or fewer slashes, or a first dot, make a path.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_log = logging.getLogger(__name__)


def launched_config(hf_config: Any) -> KimiK3Config:
    """The config.json of the launched model, as it was published: SGLang's config classes fill in what it lacks.

    `--json-model-override-args` is applied as SGLang applies it.
    """
    settings = engine.get_model()
    if load_format() not in LOAD_FORMATS:
        raise LaunchError(
            f"--load-format {load_format()} is not implemented by this model, which reads the slices that a rank needs "
            f"from safetensors files; choices: {', '.join(LOAD_FORMATS)}"
        )
    raw, _ = PreTrainedConfig.get_config_dict(hf_config._name_or_path, revision=settings.revision)
    for key, value in json.loads(settings.json_model_override_args or "{}").items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            raw[key] = {**raw[key], **value}
        else:
            raw[key] = value
    return KimiK3Config.from_hf(raw)


def load_format() -> str:
    value = engine.get_model().load_format
    return str(getattr(value, "value", value))


@dataclass(frozen=True)
class Source:
    """A folder that weights are read from."""

    checkpoint: Checkpoint
    storage: Storage

    @classmethod
    def open(cls, path: str, config: KimiK3Config) -> Source:
        """`path` is a folder or the name of a model on a hub. Raises CheckpointError with all faults found so far."""
        checkpoint = Checkpoint.open(_folder(path))
        return cls(checkpoint, read_storage(checkpoint, config))

    @property
    def experts(self) -> ExpertForm:
        """How a rank keeps its experts."""
        choice = envs.one_of(envs.SGLANG_EXPERT_WEIGHTS, get_args(ExpertWeights)) or "auto"
        return self.storage.expert_form(cast(ExpertWeights, choice))


def launched_source(config: KimiK3Config) -> Source:
    """The weights of the launch. With `--load-format dummy` they need not be there: how they would be stored counts."""
    path = engine.get_model().model_path
    if load_format() == "dummy" and not has_weights(Path(path)):
        form = {"mxfp4": MXFP4, "int4x2": INT4X2}.get(config.quantization or "", PLAIN)
        storage = Storage(config.quantization or "plain", form, folder=Path(path))
        return Source(Checkpoint(Path(path), {}, {}, ()), storage)
    return Source.open(path, config)


def _folder(path: str) -> Path:
    """What SGLang's own loader would read for `path`: itself, or where a hub's files have been downloaded to.

    Raises LaunchError if it is neither a folder nor the name of a model that can be had.
    """
    if not Path(path).is_dir() and not _HUB_NAME.fullmatch(path):
        raise LaunchError(f"{path} is not a folder on this machine, nor the name of a model on a hub (owner/name)")
    settings = engine.get_model()
    config = engine.LoadConfig(load_format="safetensors", download_dir=settings.download_dir)
    try:
        folder, _, _ = engine.DefaultModelLoader(config)._prepare_weights(
            path, settings.revision, fall_back_to_pt=False
        )
    except Exception as error:  # whatever the hub's client raises
        raise LaunchError(f"{path}: SGLang's loader finds no weights there: {error}") from error
    return Path(folder)


def empty_network(
    config: KimiK3Config, source: Source, mesh: Mesh, *, dtype: torch.dtype, vision: bool
) -> KimiK3ForCausalLM:
    """The network that `source` fills. Raises LayoutError when `mesh` cannot split it."""
    in_groups = source.storage.experts in (MXFP4, INT4X2)
    if in_groups and dtype == torch.float16:
        raise LaunchError(f"{source.storage.experts.name} experts do not expand to float16; use --dtype bfloat16")
    mesh.layout.check(config.text, expert_group=MXFP4_GROUP if in_groups else 1)
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

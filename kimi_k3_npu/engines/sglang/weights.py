"""The checkpoint of an SGLang launch: its config, and its weights read by our loader."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from kimi_k3_npu import envs
from kimi_k3_npu.checkpoint.load import VISION_PREFIXES, ExpertWeights, load_weights, name_map
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

#: `--load-format`s whose files our loader reads, and the one that reads none.
LOAD_FORMATS = ("auto", "safetensors", "dummy")

_log = logging.getLogger(__name__)


def launched_config(hf_config: Any) -> KimiK3Config:
    """The config.json of the launched model, as it was published: SGLang's config classes fill in what it lacks.

    `--json-model-override-args` is applied as SGLang applies it.
    """
    settings = engine.get_model()
    load_format = str(getattr(settings.load_format, "value", settings.load_format))
    if load_format not in LOAD_FORMATS:
        raise LaunchError(
            f"--load-format {load_format} is not implemented by this model, which reads the slices that a rank needs "
            f"from safetensors files; choices: {', '.join(LOAD_FORMATS)}"
        )
    raw, _ = PreTrainedConfig.get_config_dict(hf_config._name_or_path, revision=settings.revision)
    for key, value in json.loads(settings.json_model_override_args or "{}").items():
        if isinstance(value, dict) and isinstance(raw.get(key), dict):
            raw[key] = {**raw[key], **value}
        else:
            raw[key] = value
    return KimiK3Config.from_hf(raw)


def packed_in_memory(config: KimiK3Config) -> bool:
    """Whether routed experts stay MXFP4 in memory."""
    choice = cast(ExpertWeights, envs.one_of(envs.SGLANG_EXPERT_WEIGHTS, ("auto", "packed", "bf16")) or "auto")
    if choice == "packed" and config.quantization != "mxfp4":
        raise LaunchError(f"{envs.SGLANG_EXPERT_WEIGHTS}=packed, but this checkpoint's experts are not MXFP4")
    return config.quantization == "mxfp4" and choice != "bf16"


def checkpoint_folder(path: str) -> Path:
    """The folder that SGLang's own loader would read for `path`: itself, or where a hub's files have been downloaded
    to."""
    settings = engine.get_model()
    config = engine.LoadConfig(load_format="safetensors", download_dir=settings.download_dir)
    folder, _, _ = engine.DefaultModelLoader(config)._prepare_weights(path, settings.revision, fall_back_to_pt=False)
    return Path(folder)


def load(network: KimiK3ForCausalLM, folder: Path) -> None:
    """Fill `network` from `folder`, reading only what this rank holds. Raises CheckpointError with every fault."""
    start, read = time.perf_counter(), 0

    def count(done: int, total: int) -> None:
        nonlocal read
        read = done

    checkpoint = without_vision(Checkpoint.open(folder))
    packed = network.config.quantization == "mxfp4"
    load_weights(network, checkpoint, name_map(packed, holds_packed(network)), count)
    seconds = time.perf_counter() - start
    _log.info("read %d of %d bytes of %s in %.1f s", read, checkpoint.total_bytes, folder, seconds)


def without_vision(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint's text model: images are not served here yet."""
    text = {name: entry for name, entry in checkpoint.entries.items() if not name.startswith(VISION_PREFIXES)}
    return Checkpoint(checkpoint.folder, text, checkpoint.metadata, checkpoint.unindexed_files)


def holds_packed(network: nn.Module) -> bool:
    return any(parameter.dtype == torch.uint8 for parameter in network.parameters())

"""The checkpoint that SGLang was launched with, or is told to change to: its settings as our loader takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kimi_k3_npu import envs
from kimi_k3_npu.checkpoint.folder import has_weights
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines import weights
from kimi_k3_npu.engines.sglang import options
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.weights import Source


def launched_config(hf_config: Any) -> KimiK3Config:
    """The config.json of the launched model. `--json-model-override-args` is applied as SGLang applies it."""
    options.LOAD_FORMAT.check(options.value_of(options.LOAD_FORMAT))
    settings = engine.get_model()
    changes = json.loads(settings.json_model_override_args or "{}")
    return weights.published_config(hf_config._name_or_path, settings.revision, changes)


def launched_source(config: KimiK3Config) -> Source:
    """The weights of the launch; `--load-format dummy` needs none."""
    path = engine.get_model().model_path
    if options.value_of(options.LOAD_FORMAT) == "dummy" and not has_weights(Path(path)):
        return Source.of_config(Path(path), config, weights.expert_weights(envs.SGLANG_EXPERT_WEIGHTS))
    return open_source(path, config)


def open_source(path: str, config: KimiK3Config) -> Source:
    """`path` is a folder or the name of a model on a hub. Raises CheckpointError with all faults found so far."""
    return Source.open(
        weights.folder_of(path, engine.SGLANG.name, _download),
        config,
        weights.expert_weights(envs.SGLANG_EXPERT_WEIGHTS),
    )


def _download(path: str) -> str:
    """What SGLang's own loader would read for `path`."""
    settings = engine.get_model()
    loader = engine.DefaultModelLoader(engine.LoadConfig(load_format="safetensors", download_dir=settings.download_dir))
    folder, _, _ = loader._prepare_weights(path, settings.revision, fall_back_to_pt=False)
    return folder

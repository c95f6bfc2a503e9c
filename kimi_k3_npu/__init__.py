"""Kimi-K3 for Ascend NPUs: an exact, engine-neutral PyTorch implementation, its checkpoints, and plugins for
engines."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_k3_npu.checkpoint.load import load_model
    from kimi_k3_npu.config import KimiK3Config, TextConfig, VisionConfig
    from kimi_k3_npu.errors import CheckpointError, ConfigError, KimiK3Error
    from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

__version__ = "0.1.0"

_PUBLIC = {
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "KimiK3Config": "config",
    "KimiK3Error": "errors",
    "KimiK3ForCausalLM": "model.causal_lm",
    "TextConfig": "config",
    "VisionConfig": "config",
    "load_model": "checkpoint.load",
}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "KimiK3Config",
    "KimiK3Error",
    "KimiK3ForCausalLM",
    "TextConfig",
    "VisionConfig",
    "load_model",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that importing the package costs nothing."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)

"""The configuration of the full-size Kimi-K3, which comes with this package."""

from __future__ import annotations

import json

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.resources import resource_path


def published_config() -> KimiK3Config:
    """As weights/manifests has it."""
    file = resource_path("weights", "manifests", "kimi-k3-config.json")
    return KimiK3Config.from_hf(json.loads(file.read_text(encoding="utf-8")))

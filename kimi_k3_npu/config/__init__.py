"""What a checkpoint's `config.json` says about the network, checked once and then frozen.

Two kinds of file are read: `kimi_k3` (nested: the text model under `text_config`, the vision tower under
`vision_config`) and `kimi_linear` (flat: Kimi-Linear). Field names are the published ones. A key that changes the
maths has no default in a `kimi_k3` file: absent is an error, null is a value. Kimi-Linear files predate K3's
features, so there the keys of those features may be absent and mean "off".
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kimi_k3_npu.config.quantization import (
    MXFP4_GROUP,
    OWN_QUANT_METHOD,
    Quantization,
    check_expert_groups,
    read_quantization,
)
from kimi_k3_npu.config.reader import read_text
from kimi_k3_npu.config.text import LayerKind, TextConfig
from kimi_k3_npu.config.values import CONFIG_FILE, check_token_ids, frozen, read_json_object, shown, wrong
from kimi_k3_npu.config.vision import VisionConfig, check_vision, read_vision
from kimi_k3_npu.errors import ConfigError

__all__ = [
    "MXFP4_GROUP",
    "OWN_QUANT_METHOD",
    "KimiK3Config",
    "LayerKind",
    "Quantization",
    "TextConfig",
    "VisionConfig",
    "read_config_file",
]

MODEL_TYPES = ("kimi_k3", "kimi_linear")


@dataclass(frozen=True, kw_only=True)
class KimiK3Config:
    """A whole checkpoint: text, vision when the file has it, token ids, and how the file says its weights are
    stored."""

    model_type: Literal["kimi_k3", "kimi_linear"]
    text: TextConfig
    vision: VisionConfig | None
    #: Name of the torch dtype the weights were published in.
    dtype: str
    quantization: Quantization | None
    bos_token_id: int | None
    eos_token_id: int | tuple[int, ...] | None
    pad_token_id: int | None
    media_placeholder_token_id: int | None

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> KimiK3Config:
        """Read `folder/config.json`. Raises ConfigError when it is missing, is not JSON, or cannot be this model."""
        return cls.from_hf(read_config_file(folder))

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | Any) -> KimiK3Config:
        """Read a parsed `config.json` or a Hugging Face config object (anything with `to_dict()`)."""
        raw = dict(source if isinstance(source, Mapping) else source.to_dict())
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(
                f"config.json: model_type is {shown(model_type)}; this package serves {' and '.join(MODEL_TYPES)}"
            )
        nested = raw.get("text_config")
        if model_type == "kimi_k3" and not isinstance(nested, Mapping):
            raise ConfigError("config.json: a kimi_k3 config needs the text model's settings under text_config")
        text = dict(nested or {}) if model_type == "kimi_k3" else raw
        vision = raw.get("vision_config")
        if vision is not None and not isinstance(vision, Mapping):
            raise wrong("vision_config", vision, "expected an object or null")
        ids = {name: frozen(raw.get(name, text.get(name))) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        ids["media_placeholder_token_id"] = raw.get("media_placeholder_token_id")
        config = cls(
            model_type=model_type,
            text=read_text(text, lenient=model_type == "kimi_linear"),
            vision=read_vision(vision) if vision else None,
            dtype=_read_dtype(raw, text),
            quantization=read_quantization(raw.get("quantization_config"), text.get("quantization_config")),
            **ids,
        )
        for name, value in ids.items():
            is_used = config.vision is not None or name != "media_placeholder_token_id"
            size = config.text.vocab_size if is_used else sys.maxsize
            check_token_ids(name, value, size, several=name == "eos_token_id")
        if config.quantization:
            check_expert_groups(config.text, config.quantization)
        if config.vision:
            check_vision(config.vision, config.text)
        return config

    def with_text(self, **changes: Any) -> KimiK3Config:
        """A copy with fields of the text config replaced, checked again."""
        return replace(self, text=replace(self.text, **changes))


def read_config_file(folder: str | Path) -> dict[str, Any]:
    """The parsed `folder/config.json`. Raises ConfigError naming what is missing or where the JSON breaks."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the folder that holds config.json and the safetensors files")
    return read_json_object(folder / CONFIG_FILE)


def _read_dtype(raw: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The dtype by either of its names, which the text model's settings may have instead of the file."""
    names = (source.get(name) for source in (raw, text) for name in ("dtype", "torch_dtype"))
    name = next((name for name in names if name is not None), "bfloat16")
    if type(name).__module__ == "torch":  # a torch.dtype, in the config objects of some engines
        name = str(name)
    if not isinstance(name, str):
        raise wrong("dtype", name, "expected the name of a torch dtype, such as bfloat16")
    return name.removeprefix("torch.")

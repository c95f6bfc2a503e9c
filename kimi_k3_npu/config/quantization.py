"""How `config.json` says that the weights are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kimi_k3_npu.config.text import TextConfig
from kimi_k3_npu.config.values import shown
from kimi_k3_npu.errors import ConfigError

#: Inputs of a packed expert (MXFP4, int4x2) that share a scale.
MXFP4_GROUP = 32

Quantization = Literal["mxfp4", "int4x2"]
#: The quant_method of what `weights convert --to int4x2` writes.
OWN_QUANT_METHOD = "kimi-k3-npu"


def read_quantization(*sources: Mapping[str, Any] | None) -> Quantization | None:
    for source in sources:
        if not source:
            continue
        if not isinstance(source, Mapping):
            raise ConfigError(f"config.json: quantization_config is {shown(source)}, expected an object")
        method, layout = source.get("quant_method"), source.get("format")
        if (method, layout) == (OWN_QUANT_METHOD, "int4x2"):
            return "int4x2"
        if method != "compressed-tensors" or layout != "mxfp4-pack-quantized":
            raise ConfigError(
                f"config.json: quantization_config has quant_method {shown(method)}, format {shown(layout)}; "
                f"supported: compressed-tensors, mxfp4-pack-quantized; {OWN_QUANT_METHOD}, int4x2 (ModelSlim W4A8 "
                "folders have none, but a quant_model_description.json)"
            )
        _check_published(source.get("config_groups") or {})
        return "mxfp4"
    return None


def _check_published(groups: Any) -> None:
    """Raises ConfigError unless each of the published groups is MXFP4."""
    if not isinstance(groups, Mapping):
        raise ConfigError(f"config.json: quantization_config.config_groups is {shown(groups)}, expected an object")
    wanted = {"num_bits": 4, "type": "float", "group_size": MXFP4_GROUP}
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else {}
        if any(weights.get(key) != value for key, value in wanted.items()):
            found = ", ".join(f"{key!r}: {shown(weights.get(key))}" for key in wanted)
            raise ConfigError(
                f"config.json: quantization_config {name} has {{{found}}}; MXFP4 is 4 bits, 'float', {MXFP4_GROUP}"
            )


def check_expert_groups(text: TextConfig, form: Quantization) -> None:
    for name, size in (
        ("expert input", text.expert_hidden_size),
        ("moe_intermediate_size", text.moe_intermediate_size),
    ):
        if size % MXFP4_GROUP:
            label = {"mxfp4": "MXFP4", "int4x2": "int4x2"}[form]
            raise ConfigError(f"config.json: {label} experts need {name} = {size} to be a multiple of {MXFP4_GROUP}")

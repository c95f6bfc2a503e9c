"""The settings of the vision tower and of the projector into the text model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kimi_k3_npu.config.text import TextConfig
from kimi_k3_npu.config.values import check_value, frozen, shown, wrong
from kimi_k3_npu.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """The vision tower and the projector into the text model, with the published field names."""

    patch_size: int
    vt_hidden_size: int
    vt_intermediate_size: int
    vt_num_attention_heads: int
    vt_num_hidden_layers: int
    qkv_hidden_size: int
    init_pos_emb_height: int
    init_pos_emb_width: int
    init_pos_emb_time: int
    merge_kernel_size: tuple[int, int]
    mm_hidden_size: int
    projector_ln_eps: float
    text_hidden_size: int


def read_vision(raw: Mapping[str, Any]) -> VisionConfig:
    names = [field.name for field in fields(VisionConfig)]
    if missing := [name for name in names if name not in raw]:
        raise ConfigError(f"config.json: vision_config is missing {', '.join(missing)}")
    expected = {
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "projector_hidden_act": "gelu",
    }
    for name, value in expected.items():
        if raw.get(name, value) != value:
            raise ConfigError(f"config.json: vision_config.{name} is {shown(raw[name])}; this package knows {value!r}")
    config = VisionConfig(**{name: frozen(raw[name]) for name in names})
    for field in fields(config):
        check_value(f"vision_config.{field.name}", str(field.type), getattr(config, field.name))
    merge = config.merge_kernel_size
    if not isinstance(merge, tuple) or len(merge) != 2 or not all(type(n) is int and 0 < n <= 64 for n in merge):
        raise wrong("vision_config.merge_kernel_size", raw["merge_kernel_size"], "expected two sizes in 1..64")
    return config


def check_vision(vision: VisionConfig, text: TextConfig) -> None:
    heads, width = vision.vt_num_attention_heads, vision.qkv_hidden_size
    if width % heads or width // heads % 4:
        raise ConfigError(
            f"config.json: vision_config.qkv_hidden_size = {width} over vt_num_attention_heads = {heads}: a head's "
            "width must be whole, and a multiple of 4 for its rotation by row and column"
        )
    if vision.text_hidden_size != text.hidden_size:
        raise ConfigError(
            f"config.json: vision_config.text_hidden_size is {vision.text_hidden_size}, but the text model has "
            f"hidden_size = {text.hidden_size}"
        )
    if vision.mm_hidden_size != vision.vt_hidden_size:
        raise ConfigError(
            f"config.json: vision_config.mm_hidden_size is {vision.mm_hidden_size}, but the tower it reads from has "
            f"vt_hidden_size = {vision.vt_hidden_size}"
        )

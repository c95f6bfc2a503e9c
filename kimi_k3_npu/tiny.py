"""A checkpoint of a few megabytes with random weights: everything that a published one has, but for the knowledge.

The configuration is the published one made small, the tensors have the published names, and the tokenizer has one token
a byte and K3's control tokens. For tests and demonstrations; what it generates means nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from kimi_k3_npu.checkpoint.export import export_tensors, replace_checkpoint
from kimi_k3_npu.checkpoint.folder import contents
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.locks import writing_to
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tokenizer import PUBLISHED_NAMES, VISIBLE_CONTROL_TOKENS, byte_alphabet

TinyFormat = Literal["mxfp4", "bf16", "fp32"]

#: K3's named control tokens in the order of their published ids; here they follow the 256 bytes without gaps.
CONTROL_TOKENS = tuple(PUBLISHED_NAMES.values())

_NUM_BYTES = 256
_PRINTABLE = slice(0x20, 0x7F)

_TEXT: dict[str, Any] = {
    "vocab_size": _NUM_BYTES + len(CONTROL_TOKENS),
    "hidden_size": 128,
    "num_hidden_layers": 9,
    "attn_res_block_size": 4,
    "intermediate_size": 256,
    "linear_attn_config": {
        "num_heads": 8,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8, 9],
    },
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "max_position_embeddings": 8192,
}
_VISION: dict[str, Any] = {
    "vt_hidden_size": 64,
    "qkv_hidden_size": 64,
    "vt_num_attention_heads": 4,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 128,
    "init_pos_emb_height": 8,
    "init_pos_emb_width": 8,
    "mm_hidden_size": 64,
    "text_hidden_size": _TEXT["hidden_size"],
}
_DTYPES: dict[TinyFormat, str] = {"mxfp4": "bfloat16", "bf16": "bfloat16", "fp32": "float32"}


def write_tiny(folder: Path, *, seed: int = 0, storage: TinyFormat = "mxfp4") -> None:
    """Write a whole checkpoint folder. The same seed gives the same files.

    Args:
        storage: "mxfp4" packs the routed experts as published, the rest being bf16; "bf16" and "fp32" pack nothing.

    Raises:
        KimiK3Error: `folder` is a file, has something in it, or is being written to.
    """
    if folder.exists() and not folder.is_dir():
        raise KimiK3Error(f"{folder}: is a file; give a folder to make")
    folder.mkdir(parents=True, exist_ok=True)
    with writing_to(folder, "tiny checkpoint"):
        if contents(folder):
            raise KimiK3Error(f"{folder}: not empty, and nothing is overwritten; give a new folder")
        raw = tiny_config(storage)
        _write_weights(folder, _random_model(raw, seed), storage == "mxfp4")
        write_settings(folder, raw)


def write_weights(folder: Path, model: KimiK3ForCausalLM, *, mxfp4_experts: bool = True) -> None:
    """Write the weights of a small model in two shards and their index. The folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    with writing_to(folder, "tiny checkpoint"):
        _write_weights(folder, model, mxfp4_experts)


def _write_weights(folder: Path, model: KimiK3ForCausalLM, mxfp4_experts: bool) -> None:
    tensors = list(export_tensors(model, experts=FORMATS["mxfp4"] if mxfp4_experts else None))
    replace_checkpoint(tensors, folder, shard_bytes=-(-sum(tensor.nbytes for _, tensor in tensors) // 2))


def write_settings(folder: Path, raw: dict[str, Any]) -> None:
    """Write what a checkpoint has beside its weights: the tokenizer, how to generate, how images are prepared if it
    takes any, and `raw` as its `config.json`. The folder is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(raw["text_config"]["max_position_embeddings"]))
    if raw["vision_config"]:
        _write_json(folder / "preprocessor_config.json", _preprocessor_config())
    _write_json(folder / "generation_config.json", _token_ids())
    _write_json(folder / "config.json", raw)


def tiny_config(storage: TinyFormat = "mxfp4") -> dict[str, Any]:
    """The published `config.json` with small sizes. Without `auto_map`: the folder brings no code."""
    raw = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text(encoding="utf-8"))
    text = raw["text_config"]
    del raw["auto_map"], text["auto_map"]
    if storage != "mxfp4":
        del text["quantization_config"]
    dtype = _DTYPES[storage]
    text |= _TEXT | _token_ids() | {"dtype": dtype}
    raw["vision_config"] |= _VISION
    return raw | _token_ids() | {"dtype": dtype, "media_placeholder_token_id": _id("<|media_pad|>")}


def tiny_tokenizer() -> Tokenizer:
    """Byte b is token b; no merges, no normalisation, nothing added in front of a text."""
    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(byte_alphabet())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [AddedToken(token, special=token not in VISIBLE_CONTROL_TOKENS, normalized=False) for token in CONTROL_TOKENS]
    )
    return tokenizer


def _id(token: str) -> int:
    return _NUM_BYTES + CONTROL_TOKENS.index(token)


def _token_ids() -> dict[str, int]:
    return {"bos_token_id": _id("[BOS]"), "eos_token_id": _id("<|end_of_msg|>"), "pad_token_id": _id("[PAD]")}


def _tokenizer_config(longest: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "KimiK3Tokenizer",
        "bos_token": "[BOS]",
        "eos_token": "<|end_of_msg|>",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "processor_class": "KimiK3Processor",
        "image_processor_type": "KimiK3ImageProcessor",
        "media_proc_cfg": {
            "patch_size": 14,
            "merge_kernel_size": 2,
            "in_patch_limit": 1024,
            "patch_limit_on_one_side": 64,
            "fixed_output_tokens": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "transparent_bg_config": {
                "pattern": "chessboard",
                "chessboard_square_size": 8,
                "chessboard_square_on_top_left": True,
                "chessboard_white_value": 255,
                "chessboard_gray_value": 180,
            },
            "transparent_bg_fill_stage": "after_resize",
        },
    }


@torch.no_grad()
def _random_model(raw: dict[str, Any], seed: int) -> KimiK3ForCausalLM:
    config = KimiK3Config.from_hf(raw)
    model = KimiK3ForCausalLM(config, dtype=getattr(torch, config.dtype))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        # What is fp32 in memory is rounded too: a checkpoint has the router and the mixers in the dtype of the rest.
        parameter.copy_(_random_weight(name, noise).to(model.dtype))
    return model


def _random_weight(name: str, noise: Tensor) -> Tensor:
    """Standard normal `noise` to the values of a parameter that keep activations near 1."""
    if name == "embed_tokens.weight":
        return noise
    if name == "lm_head.weight":
        # Printable ASCII gets by far the largest logits, so that a demonstration prints text.
        scale = torch.full((len(noise), 1), 0.1)
        scale[_PRINTABLE] = 3.0
        return noise * scale * noise.shape[-1] ** -0.5
    if "norm" in name:
        return 1 + 0.1 * noise
    if noise.ndim == 1:  # mixers, A_log, dt_bias, the router's bias
        return 0.1 * noise
    return noise * noise.shape[-1] ** -0.5


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

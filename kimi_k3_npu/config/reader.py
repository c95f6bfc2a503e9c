"""The text model's settings from a parsed `config.json`, under any of the names that they are published with."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kimi_k3_npu.config.text import LayerKind, TextConfig
from kimi_k3_npu.config.values import check_switch, check_value, shown, wrong
from kimi_k3_npu.errors import ConfigError

#: K3's additions to Kimi-Linear, with the value that leaves each out.
_KIMI_LINEAR_OFF = {
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
    "attn_res_block_size": None,
    "latent_moe_use_norm": False,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
}
_KIMI_LINEAR_OFF_ATTENTION = {"gate_lower_bound": None, "use_full_rank_gate": False}

#: transformers' own KimiLinearConfig renames these on the way in and out.
_TRANSFORMERS_NAMES = {
    "num_experts_per_tok": "num_experts_per_token",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "num_local_experts": "num_experts",
}

#: Fields of TextConfig that stand under linear_attn_config, by the names they have there.
_ATTENTION_FIELDS = {
    **{name: name for name in ("short_conv_kernel_size", "gate_lower_bound", "use_full_rank_gate")},
    "num_heads": "kda_num_heads",
    "head_dim": "kda_head_dim",
}
_LAYER_LISTS = ("kda_layers", "full_attn_layers")
_PLAIN_FIELDS = tuple(
    field.name
    for field in fields(TextConfig)
    if field.name not in {*_ATTENTION_FIELDS.values(), "layer_kinds", "mla_latent_norm_eps"}
)
_MOE_ONLY = {
    "num_experts_per_token",
    "moe_intermediate_size",
    "moe_layer_freq",
    "first_k_dense_replace",
    "routed_scaling_factor",
    "num_expert_group",
    "topk_group",
}

_READ_ELSEWHERE = """
linear_attn_config num_key_value_heads mla_use_nope mla_latent_norm_eps use_grouped_topk quantization_config model_type
dtype torch_dtype bos_token_id eos_token_id pad_token_id layer_types mlp_layer_types linear_num_heads linear_head_dim
linear_conv_kernel_dim
"""
#: Keys that published files carry and that change nothing in the forward pass: generation defaults and bookkeeping.
_INERT = """
_attn_implementation _name_or_path add_cross_attention architectures attention_bias attention_dropout auto_map
bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
forced_bos_token_id forced_eos_token_id head_dim id2label initializer_range is_decoder is_encoder_decoder label2id
length_penalty max_length max_position_embeddings min_length model_max_length no_repeat_ngram_size num_beam_groups
num_beams num_nextn_predict_layers num_return_sequences output_attentions output_hidden_states output_router_logits
output_scores prefix pretraining_tp problem_type pruned_heads qk_head_dim remove_invalid_values repetition_penalty
return_dict return_dict_in_generate rope_parameters rope_scaling rope_theta sep_token_id suppress_tokens
task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p topk_method torchscript
transformers_version typical_p use_bfloat16 use_cache
"""


def read_text(raw: dict[str, Any], *, lenient: bool) -> TextConfig:
    """The settings of a text model; `lenient` where K3's features may be absent, which means "off"."""
    raw = _from_transformers_names(raw)
    attention = raw.get("linear_attn_config")
    if not isinstance(attention, Mapping):
        raise ConfigError("config.json: linear_attn_config is missing; it holds the KDA sizes and the two layer lists")
    attention = dict(attention)
    if lenient:
        raw = _KIMI_LINEAR_OFF | raw
        attention = _KIMI_LINEAR_OFF_ATTENTION | attention
    missing = [name for name in _PLAIN_FIELDS if name not in raw] + [
        f"linear_attn_config.{name}" for name in (*_ATTENTION_FIELDS, *_LAYER_LISTS) if name not in attention
    ]
    if missing:
        raise ConfigError(
            f"config.json: missing {', '.join(missing)}; each changes what the model computes, so none has a default "
            "(null is a value where a feature is off)"
        )
    values = {name: raw[name] for name in _PLAIN_FIELDS}
    values |= {field: attention[name] for name, field in _ATTENTION_FIELDS.items()}
    _settle_switches(raw, values)
    _warn_unknown(raw)
    if "mla_latent_norm_eps" in raw:
        values["mla_latent_norm_eps"] = raw["mla_latent_norm_eps"]
    layers = _layer_kinds(attention["kda_layers"], attention["full_attn_layers"], values["num_hidden_layers"])
    return TextConfig(layer_kinds=layers, **values)


def _settle_switches(raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Apply to `values` the keys that are no fields: each either turns one off or has only one value that works."""
    for name in ("mla_use_nope", "use_grouped_topk"):
        check_switch(name, raw.get(name, True))
    if not raw.get("mla_use_nope", True):
        raise ConfigError("config.json: mla_use_nope is false; this model has no rotary embedding in its text layers")
    if not raw.get("use_grouped_topk", True):
        values |= {"num_expert_group": 1, "topk_group": 1}
    for name in ("num_experts", "num_shared_experts"):
        values[name] = values[name] or 0
    if not values["num_experts"]:  # a dense model: the routing fields are null in such files
        values |= {name: 1 for name in _MOE_ONLY if values[name] is None}
    heads, kv_heads = values["num_attention_heads"], raw.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ConfigError(
            f"config.json: num_key_value_heads is {shown(kv_heads)}, but MLA needs num_attention_heads = {shown(heads)}"
        )


def _from_transformers_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Undo the renaming of transformers' own KimiLinearConfig; published files pass through unchanged."""
    raw = {_TRANSFORMERS_NAMES.get(name, name): value for name, value in raw.items()}
    if "linear_attn_config" in raw or "layer_types" not in raw:
        return raw
    if missing := [
        name for name in ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim") if name not in raw
    ]:
        raise ConfigError(f"config.json: missing {', '.join(missing)}, which go with layer_types")
    kinds, mlp_kinds = raw["layer_types"], raw.get("mlp_layer_types") or []
    for name, given in (("layer_types", kinds), ("mlp_layer_types", mlp_kinds)):
        if not isinstance(given, list | tuple):
            raise wrong(name, given, "expected a list with the kind of each layer")
    raw["linear_attn_config"] = {
        "num_heads": raw["linear_num_heads"],
        "head_dim": raw["linear_head_dim"],
        "short_conv_kernel_size": raw["linear_conv_kernel_dim"],
        "kda_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"],
        "full_attn_layers": [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"],
    }
    raw.setdefault("first_k_dense_replace", mlp_kinds.index("sparse") if "sparse" in mlp_kinds else len(mlp_kinds))
    raw.setdefault("moe_layer_freq", 1)
    raw.setdefault("moe_router_activation_func", "sigmoid")
    return raw


def _layer_kinds(kda: Any, full: Any, num_layers: int) -> tuple[LayerKind, ...]:
    """Turn the two published 1-based layer lists into one kind per layer."""
    check_value("num_hidden_layers", "int", num_layers)
    for name, layers in (("kda_layers", kda), ("full_attn_layers", full)):
        if not isinstance(layers, list | tuple) or not all(type(layer) is int for layer in layers):
            raise ConfigError(f"config.json: linear_attn_config.{name} is {shown(layers)}, expected a list of integers")
    rule = f"kda_layers and full_attn_layers are 1-based and must hold each of 1..{num_layers} exactly once"
    listed = [*kda, *full]
    problems = []
    if outside := sorted({layer for layer in listed if not 1 <= layer <= num_layers}):
        problems.append(f"outside the model: {_some(outside)}")
    if twice := sorted(layer for layer, count in Counter(listed).items() if count > 1):
        problems.append(f"listed twice: {_some(twice)}")
    if absent := sorted(set(range(1, num_layers + 1)) - set(listed)):
        problems.append(f"in neither list: {_some(absent)}")
    if problems:
        raise ConfigError(f"config.json: linear_attn_config: {'; '.join(problems)}. {rule}")
    mla = set(full)
    return tuple("mla" if layer in mla else "kda" for layer in range(1, num_layers + 1))


def _some(layers: list[int]) -> str:
    more = f" and {len(layers) - 100} more" if len(layers) > 100 else ""
    return f"[{', '.join(map(shown, layers[:100]))}]{more}"


def _warn_unknown(raw: Mapping[str, Any]) -> None:
    known = {*_PLAIN_FIELDS, *_READ_ELSEWHERE.split(), *_INERT.split()}
    if unknown := sorted(name for name, value in raw.items() if name not in known and value is not None)[:100]:
        warnings.warn(
            f"config.json: keys this version does not know: {', '.join(unknown)}; "
            "if one changes the maths, results will differ",
            stacklevel=2,
        )

"""What a checkpoint's `config.json` says about the network, checked once and then frozen.

Two kinds of file are read: `kimi_k3` (nested: the text model under `text_config`, the vision tower under
`vision_config`) and `kimi_linear` (flat: Kimi-Linear). Field names are the published ones. A key that changes the
maths has no default in a `kimi_k3` file: absent is an error, null is a value. Kimi-Linear files predate K3's
features, so there the keys of those features may be absent and mean "off".
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from kimi_k3_npu.config_values import (
    CONFIG_FILE,
    check_switch,
    check_token_ids,
    check_value,
    read_json_object,
    shown,
    wrong,
)
from kimi_k3_npu.errors import ConfigError

LayerKind = Literal["kda", "mla"]

MODEL_TYPES = ("kimi_k3", "kimi_linear")
ACTIVATIONS = ("situ", "silu")
ROUTER_ACTIVATIONS = ("sigmoid", "softmax")
#: Inputs of a packed expert (MXFP4, int4x2) that share a scale.
MXFP4_GROUP = 32

Quantization = Literal["mxfp4", "int4x2"]
#: The quant_method of what `weights convert --to int4x2` writes.
OWN_QUANT_METHOD = "kimi-k3-npu"

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


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text model. Sizes are element counts; `layer_kinds` and `moe_layers` are 0-based."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    layer_kinds: tuple[LayerKind, ...]
    #: Layers of one attention-residual block; None: plain residual additions (Kimi-Linear).
    attn_res_block_size: int | None

    hidden_act: Literal["situ", "silu"]
    activation_situ_beta: float | None
    activation_situ_linear_beta: float | None
    intermediate_size: int

    kda_num_heads: int
    kda_head_dim: int
    short_conv_kernel_size: int
    #: Log-decay is `bound * sigmoid(...)`; None: the unbounded `-exp(A) * softplus(...)` of Kimi-Linear.
    gate_lower_bound: float | None
    use_full_rank_gate: bool

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_use_output_gate: bool
    #: eps of q_a_layernorm and kv_a_layernorm. The published code leaves them at 1e-6; serving engines use
    #: rms_norm_eps.
    mla_latent_norm_eps: float = 1e-6

    #: 0: every layer is dense.
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    moe_layer_freq: int
    first_k_dense_replace: int
    #: Width of the latent space of the routed experts; None: they work on hidden_size.
    routed_expert_hidden_size: int | None
    latent_moe_use_norm: bool
    moe_router_activation_func: Literal["sigmoid", "softmax"]
    moe_renormalize: bool
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int

    def __post_init__(self) -> None:
        _check_text(self)

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def expert_hidden_size(self) -> int:
        """Width of the input and output of a routed expert."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def activation_betas(self) -> tuple[float | None, float | None]:
        """SiTU's beta and linear_beta; a beta of None stands for SiLU."""
        return (
            (self.activation_situ_beta, self.activation_situ_linear_beta) if self.hidden_act == "situ" else (None, None)
        )

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has experts, and not one dense MLP."""
        return self.num_experts > 0 and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_hidden_layers) if self.is_moe(layer))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, kind in enumerate(self.layer_kinds) if kind == "mla")


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
        config = cls(
            model_type=model_type,
            text=_read_text(text, lenient=model_type == "kimi_linear"),
            vision=_read_vision(vision) if vision else None,
            dtype=_read_dtype(raw, text),
            quantization=_read_quantization(raw.get("quantization_config"), text.get("quantization_config")),
            bos_token_id=raw.get("bos_token_id", text.get("bos_token_id")),
            eos_token_id=_frozen(raw.get("eos_token_id", text.get("eos_token_id"))),
            pad_token_id=raw.get("pad_token_id", text.get("pad_token_id")),
            media_placeholder_token_id=raw.get("media_placeholder_token_id"),
        )
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "media_placeholder_token_id"):
            check_token_ids(name, getattr(config, name), config.text.vocab_size, several=name == "eos_token_id")
        if config.quantization:
            _check_groups(config.text, config.quantization)
        if config.vision:
            _check_vision(config.vision, config.text)
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


def _read_text(raw: dict[str, Any], *, lenient: bool) -> TextConfig:
    raw = _from_transformers_names(raw)
    attention = raw.get("linear_attn_config")
    if not isinstance(attention, Mapping):
        raise ConfigError("config.json: linear_attn_config is missing; it holds the KDA sizes and the two layer lists")
    attention = dict(attention)
    if lenient:
        raw = _KIMI_LINEAR_OFF | raw
        attention = _KIMI_LINEAR_OFF_ATTENTION | attention
    values: dict[str, Any] = {
        "kda_num_heads": attention.get("num_heads"),
        "kda_head_dim": attention.get("head_dim"),
        **{name: attention.get(name) for name in _ATTENTION_FIELDS},
        **{name: raw.get(name) for name in _PLAIN_FIELDS},
    }
    missing = [name for name in _PLAIN_FIELDS if name not in raw] + [
        f"linear_attn_config.{name}" for name in (*_ATTENTION_FIELDS, *_ATTENTION_RENAMED) if name not in attention
    ]
    if missing:
        raise ConfigError(
            f"config.json: missing {', '.join(missing)}; each changes what the model computes, so none has a default "
            "(null is a value where a feature is off)"
        )
    for name in ("mla_use_nope", "use_grouped_topk"):
        check_switch(name, raw.get(name, True))
    if not raw.get("mla_use_nope", True):
        raise ConfigError("config.json: mla_use_nope is false; this model has no rotary embedding in its text layers")
    if not raw.get("use_grouped_topk", True):
        values |= {"num_expert_group": 1, "topk_group": 1}
    values["num_experts"] = values["num_experts"] or 0
    values["num_shared_experts"] = values["num_shared_experts"] or 0
    if not values["num_experts"]:  # a dense model: the routing fields are null in such files
        values = {name: 1 if name in _MOE_ONLY and value is None else value for name, value in values.items()}
    heads, kv_heads = values["num_attention_heads"], raw.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ConfigError(
            f"config.json: num_key_value_heads is {shown(kv_heads)}, but MLA needs num_attention_heads = {shown(heads)}"
        )
    _warn_unknown(raw)
    if "mla_latent_norm_eps" in raw:
        values["mla_latent_norm_eps"] = raw["mla_latent_norm_eps"]
    layers = _layer_kinds(attention["kda_layers"], attention["full_attn_layers"], values["num_hidden_layers"])
    return TextConfig(layer_kinds=layers, **values)


_ATTENTION_FIELDS = ("short_conv_kernel_size", "gate_lower_bound", "use_full_rank_gate")
_ATTENTION_RENAMED = ("num_heads", "head_dim", "kda_layers", "full_attn_layers")
_PLAIN_FIELDS = tuple(
    field.name
    for field in fields(TextConfig)
    if field.name not in {*_ATTENTION_FIELDS, "kda_num_heads", "kda_head_dim", "layer_kinds", "mla_latent_norm_eps"}
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


def _check_text(config: TextConfig) -> None:
    for field in fields(config):
        check_value(field.name, str(field.type), getattr(config, field.name))
    if config.hidden_act not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: hidden_act is {shown(config.hidden_act)}; known activations: {', '.join(ACTIVATIONS)}"
        )
    if config.hidden_act == "situ" and not config.activation_situ_beta:
        raise ConfigError(
            "config.json: hidden_act is situ, so activation_situ_beta needs a positive value (K3 has 4.0)"
        )
    if config.gate_lower_bound is not None and config.gate_lower_bound >= 0:
        raise ConfigError(
            f"config.json: gate_lower_bound is {config.gate_lower_bound}, a bound of log-decay is negative"
        )
    if config.num_experts:
        _check_moe(config)


def _check_moe(config: TextConfig) -> None:
    experts, top_k, groups, kept = (
        config.num_experts,
        config.num_experts_per_token,
        config.num_expert_group,
        config.topk_group,
    )
    if config.moe_router_activation_func not in ROUTER_ACTIVATIONS:
        raise ConfigError(
            f"config.json: moe_router_activation_func is {shown(config.moe_router_activation_func)}; "
            f"known: {', '.join(ROUTER_ACTIVATIONS)}"
        )
    if top_k > experts:
        raise ConfigError(f"config.json: num_experts_per_token is {top_k}, more than num_experts = {experts}")
    if experts % groups:
        raise ConfigError(
            f"config.json: num_experts = {experts} does not divide into num_expert_group = {groups} groups"
        )
    if kept > groups:
        raise ConfigError(f"config.json: topk_group is {kept}, more than num_expert_group = {groups}")
    size = experts // groups
    if groups > 1 and size < 2:
        raise ConfigError(
            f"config.json: {groups} expert groups of {size} expert; group scores need at least 2 experts each"
        )
    if top_k > size * kept:
        raise ConfigError(
            f"config.json: num_experts_per_token is {top_k}, but {kept} groups of {size} hold only {size * kept}"
        )


def _check_groups(text: TextConfig, form: Quantization) -> None:
    for name, size in (
        ("expert input", text.expert_hidden_size),
        ("moe_intermediate_size", text.moe_intermediate_size),
    ):
        if size % MXFP4_GROUP:
            label = {"mxfp4": "MXFP4", "int4x2": "int4x2"}[form]
            raise ConfigError(f"config.json: {label} experts need {name} = {size} to be a multiple of {MXFP4_GROUP}")


def _check_vision(vision: VisionConfig, text: TextConfig) -> None:
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


def _read_quantization(*sources: Mapping[str, Any] | None) -> Quantization | None:
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
        groups = source.get("config_groups") or {}
        if not isinstance(groups, Mapping):
            raise ConfigError(f"config.json: quantization_config.config_groups is {shown(groups)}, expected an object")
        for name, group in groups.items():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            weights = weights if isinstance(weights, Mapping) else {}
            if (weights.get("num_bits"), weights.get("type"), weights.get("group_size")) != (4, "float", MXFP4_GROUP):
                found = ", ".join(f"{key!r}: {shown(weights.get(key))}" for key in ("num_bits", "type", "group_size"))
                raise ConfigError(
                    f"config.json: quantization_config {name} has {{{found}}}; MXFP4 is 4 bits, 'float', {MXFP4_GROUP}"
                )
        return "mxfp4"
    return None


def _read_vision(raw: Mapping[str, Any]) -> VisionConfig:
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
    config = VisionConfig(**{name: _frozen(raw[name]) for name in names})
    for field in fields(config):
        check_value(f"vision_config.{field.name}", str(field.type), getattr(config, field.name))
    merge = config.merge_kernel_size
    if not isinstance(merge, tuple) or len(merge) != 2 or not all(type(n) is int and 0 < n <= 64 for n in merge):
        raise wrong("vision_config.merge_kernel_size", raw["merge_kernel_size"], "expected two sizes in 1..64")
    return config


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _warn_unknown(raw: Mapping[str, Any]) -> None:
    known = {*_PLAIN_FIELDS, *_READ_ELSEWHERE, *_INERT}
    if unknown := sorted(name for name, value in raw.items() if name not in known and value is not None)[:100]:
        warnings.warn(
            f"config.json: keys this version does not know: {', '.join(unknown)}; "
            "if one changes the maths, results will differ",
            stacklevel=2,
        )


_READ_ELSEWHERE = {
    *("linear_attn_config", "num_key_value_heads", "mla_use_nope", "mla_latent_norm_eps", "use_grouped_topk"),
    *("quantization_config", "model_type", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"),
}

#: Keys that published files carry and that change nothing in the forward pass: generation defaults and bookkeeping.
_INERT = {
    *("_name_or_path", "add_cross_attention", "architectures", "attention_bias", "attention_dropout", "auto_map"),
    *("bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "cross_attention_hidden_size"),
    *("decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "head_dim"),
    *("id2label", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "length_penalty", "max_length"),
    *(
        "max_position_embeddings",
        "model_max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
    ),
    *("num_nextn_predict_layers", "num_return_sequences", "output_attentions", "output_hidden_states"),
    *(
        "output_router_logits",
        "output_scores",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "qk_head_dim",
    ),
    *("remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate", "rope_parameters"),
    *("rope_scaling", "rope_theta", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature"),
    *("tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "topk_method", "torchscript"),
    *("transformers_version", "typical_p", "use_bfloat16", "use_cache", "_attn_implementation"),
}

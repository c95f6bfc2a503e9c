"""Every field that changes the maths is read as published; what cannot be this model is refused in one sentence."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from kimi_k3_npu.config import KimiK3Config, TextConfig
from kimi_k3_npu.errors import ConfigError
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.resources import resource_path

if TYPE_CHECKING:
    from tests.conftest import Oracle

Raw = dict[str, Any]


@pytest.fixture
def k3(oracle: Callable[[str], Oracle]) -> Raw:
    return json.loads((oracle("k3").folder / "config.json").read_text())


@pytest.fixture
def flat(oracle: Callable[[str], Oracle]) -> Raw:
    return json.loads((oracle("kimi-linear-flat").folder / "config.json").read_text())


def changed(raw: Raw, path: str, value: Any) -> Raw:
    """A copy with `value` at a dotted path."""
    raw = copy.deepcopy(raw)
    *parents, name = path.split(".")
    place = raw
    for parent in parents:
        place = place[parent]
    place[name] = value
    return raw


def without(raw: Raw, path: str) -> Raw:
    """A copy without the key at a dotted path."""
    raw = copy.deepcopy(raw)
    *parents, name = path.split(".")
    place = raw
    for parent in parents:
        place = place[parent]
    del place[name]
    return raw


# --- what is read ---


def test_the_published_config() -> None:
    raw = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text())
    config = KimiK3Config.from_hf(raw)
    assert config.quantization == "mxfp4"
    assert config.dtype == "bfloat16"
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (163584, 163586, 163839)
    assert config.media_placeholder_token_id == 163605
    text = config.text
    assert text.mla_layers == (*range(3, 92, 4), 92)
    assert len(text.kda_layers) == 69
    assert text.moe_layers == tuple(range(1, 93))
    assert (text.num_experts, text.num_experts_per_token, text.expert_hidden_size) == (896, 16, 3584)
    assert text.activation_betas == (4.0, 25.0)
    assert text.qk_head_dim == 192
    assert text.mla_latent_norm_eps == 1e-6
    assert config.vision is not None
    assert config.vision.merge_kernel_size == (2, 2)
    assert hash(config)  # frozen all through


#: A path in config.json, another value than k3's, and the field it becomes.
FIELDS = [
    ("rms_norm_eps", 1e-6, "rms_norm_eps"),
    ("mla_latent_norm_eps", 1e-5, "mla_latent_norm_eps"),
    ("tie_word_embeddings", True, "tie_word_embeddings"),
    ("attn_res_block_size", None, "attn_res_block_size"),
    ("attn_res_block_size", 3, "attn_res_block_size"),
    ("hidden_act", "silu", "hidden_act"),
    ("activation_situ_beta", 2.0, "activation_situ_beta"),
    ("activation_situ_linear_beta", None, "activation_situ_linear_beta"),
    ("intermediate_size", 128, "intermediate_size"),
    ("linear_attn_config.num_heads", 2, "kda_num_heads"),
    ("linear_attn_config.head_dim", 32, "kda_head_dim"),
    ("linear_attn_config.short_conv_kernel_size", 3, "short_conv_kernel_size"),
    ("linear_attn_config.gate_lower_bound", None, "gate_lower_bound"),
    ("linear_attn_config.gate_lower_bound", -3, "gate_lower_bound"),
    ("linear_attn_config.use_full_rank_gate", False, "use_full_rank_gate"),
    ("q_lora_rank", None, "q_lora_rank"),
    ("mla_use_output_gate", False, "mla_use_output_gate"),
    ("num_experts_per_token", 2, "num_experts_per_token"),
    ("num_shared_experts", 0, "num_shared_experts"),
    ("moe_intermediate_size", 64, "moe_intermediate_size"),
    ("moe_layer_freq", 2, "moe_layer_freq"),
    ("first_k_dense_replace", 3, "first_k_dense_replace"),
    ("routed_expert_hidden_size", None, "routed_expert_hidden_size"),
    ("latent_moe_use_norm", False, "latent_moe_use_norm"),
    ("moe_router_activation_func", "softmax", "moe_router_activation_func"),
    ("moe_renormalize", False, "moe_renormalize"),
    ("routed_scaling_factor", 2.446, "routed_scaling_factor"),
]


@pytest.mark.parametrize(("path", "value", "field"), FIELDS)
def test_a_field_is_read_and_makes_a_model(k3: Raw, path: str, value: Any, field: str) -> None:
    config = KimiK3Config.from_hf(changed(k3, f"text_config.{path}", value))
    assert getattr(config.text, field) == value
    with torch.device("meta"):
        KimiK3ForCausalLM(config)


def test_expert_groups_go_together(k3: Raw) -> None:
    raw = changed(changed(k3, "text_config.num_expert_group", 4), "text_config.topk_group", 2)
    config = KimiK3Config.from_hf(raw).text
    assert (config.num_expert_group, config.topk_group) == (4, 2)
    config = KimiK3Config.from_hf(changed(raw, "text_config.use_grouped_topk", False)).text
    assert (config.num_expert_group, config.topk_group) == (1, 1)


def test_which_layers_have_experts(k3: Raw) -> None:
    config = KimiK3Config.from_hf(k3)
    assert config.with_text(moe_layer_freq=2, first_k_dense_replace=3).text.moe_layers == (4, 6, 8)
    assert config.with_text(num_experts=0, num_shared_experts=0).text.moe_layers == ()


def test_layers_are_counted_from_0_once_read(k3: Raw) -> None:
    config = KimiK3Config.from_hf(k3).text
    assert config.mla_layers == (3, 7, 8)
    assert config.kda_layers == (0, 1, 2, 4, 5, 6)
    assert config.layer_kinds[3:5] == ("mla", "kda")


@pytest.mark.parametrize("dense", [None, 0])
def test_a_dense_model_has_null_where_routing_would_be(k3: Raw, dense: int | None) -> None:
    raw = changed(k3, "text_config.num_experts", dense)
    for name in ("num_experts_per_token", "moe_intermediate_size", "num_expert_group", "topk_group"):
        raw = changed(raw, f"text_config.{name}", None)
    config = KimiK3Config.from_hf(raw)
    assert config.text.moe_layers == ()
    with torch.device("meta"):
        KimiK3ForCausalLM(config)


def test_sources_agree(oracle: Callable[[str], Oracle], k3: Raw) -> None:
    folder = oracle("k3").folder
    assert KimiK3Config.from_pretrained(folder) == KimiK3Config.from_hf(k3) == KimiK3Config.from_pretrained(str(folder))


def test_a_source_is_not_changed(k3: Raw, flat: Raw) -> None:
    for raw in (k3, flat):
        before = copy.deepcopy(raw)
        KimiK3Config.from_hf(raw)
        assert raw == before


has_kimi_linear = pytest.mark.skipif(
    not hasattr(transformers, "KimiLinearConfig"), reason="this version of transformers has no kimi_linear of its own"
)


def test_flat_and_nested_kimi_linear_are_the_same_network(oracle: Callable[[str], Oracle]) -> None:
    nested, flat = (KimiK3Config.from_pretrained(oracle(name).folder) for name in ("kimi-linear", "kimi-linear-flat"))
    assert nested.text == flat.text
    assert (nested.model_type, flat.model_type) == ("kimi_k3", "kimi_linear")


@has_kimi_linear
def test_an_object_of_transformers(oracle: Callable[[str], Oracle]) -> None:
    folder = oracle("kimi-linear-flat").folder
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, transformers.KimiLinearConfig)
    assert KimiK3Config.from_hf(config) == KimiK3Config.from_pretrained(folder)


@has_kimi_linear
def test_an_object_of_transformers_made_by_hand() -> None:
    """It then has layer kinds in place of the published lists."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = transformers.KimiLinearConfig(
        num_hidden_layers=3,
        layer_types=kinds,
        mlp_layer_types=["dense", "dense", "sparse"],
        linear_num_heads=3,
        linear_head_dim=8,
        linear_conv_kernel_dim=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_token=3,
        routed_scaling_factor=1.5,
    )
    text = KimiK3Config.from_hf(config).text
    assert text.layer_kinds == ("kda", "mla", "kda")
    assert text.moe_layers == (2,)
    assert (text.kda_num_heads, text.kda_head_dim, text.short_conv_kernel_size) == (3, 8, 2)
    assert (text.num_experts, text.num_experts_per_token, text.routed_scaling_factor) == (8, 3, 1.5)
    assert text.attn_res_block_size is None
    assert text.gate_lower_bound is None


def test_token_ids_may_be_several_or_none(k3: Raw) -> None:
    assert KimiK3Config.from_hf(changed(k3, "eos_token_id", [2, 5])).eos_token_id == (2, 5)
    assert KimiK3Config.from_hf(without(k3, "eos_token_id")).eos_token_id == 2  # text_config has it too
    assert KimiK3Config.from_hf(changed(k3, "pad_token_id", None)).pad_token_id is None


@pytest.mark.parametrize(("raw_dtype", "dtype"), [("float16", "float16"), ("torch.bfloat16", "bfloat16")])
def test_dtype(k3: Raw, raw_dtype: str, dtype: str) -> None:
    assert KimiK3Config.from_hf(changed(k3, "dtype", raw_dtype)).dtype == dtype
    older = changed(without(k3, "dtype"), "torch_dtype", raw_dtype)
    assert KimiK3Config.from_hf(older).dtype == dtype


def test_with_text_checks_again(k3: Raw) -> None:
    config = KimiK3Config.from_hf(k3)
    assert config.with_text(rms_norm_eps=1e-6).text.rms_norm_eps == 1e-6
    with pytest.raises(ConfigError, match="num_experts_per_token is 17, more than num_experts = 16"):
        config.with_text(num_experts_per_token=17)


def test_unknown_keys_warn_and_known_ones_do_not(k3: Raw) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KimiK3Config.from_hf(k3)
        KimiK3Config.from_hf(changed(k3, "text_config.temperature", 0.7))
        KimiK3Config.from_hf(changed(k3, "text_config.something_new", None))
    raw = changed(changed(k3, "text_config.something_new", 3), "text_config.another", [1])
    with pytest.warns(UserWarning, match="keys this version does not know: another, something_new; if one changes"):
        KimiK3Config.from_hf(raw)


# --- what is refused ---


NEEDED = [
    *("vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "tie_word_embeddings", "attn_res_block_size"),
    *("hidden_act", "activation_situ_beta", "activation_situ_linear_beta", "intermediate_size", "num_attention_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mla_use_output_gate"),
    *("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_layer_freq"),
    *("first_k_dense_replace", "routed_expert_hidden_size", "latent_moe_use_norm", "moe_router_activation_func"),
    *("moe_renormalize", "routed_scaling_factor", "num_expert_group", "topk_group"),
    *(f"linear_attn_config.{name}" for name in ("num_heads", "head_dim", "kda_layers", "full_attn_layers")),
    *(f"linear_attn_config.{name}" for name in ("short_conv_kernel_size", "gate_lower_bound", "use_full_rank_gate")),
]
#: In a Kimi-Linear file the absence of these leaves K3's feature out.
K3_ONLY = {
    *("attn_res_block_size", "activation_situ_beta", "activation_situ_linear_beta", "routed_expert_hidden_size"),
    *("latent_moe_use_norm", "mla_use_output_gate", "linear_attn_config.gate_lower_bound"),
    "linear_attn_config.use_full_rank_gate",
}


def test_every_field_is_needed_or_has_a_reason_not_to_be() -> None:
    renamed = {"kda_num_heads": "num_heads", "kda_head_dim": "head_dim", "layer_kinds": "kda_layers"}
    named = {path.rpartition(".")[2] for path in NEEDED}
    fields = {renamed.get(name, name) for name in TextConfig.__dataclass_fields__} - {"mla_latent_norm_eps"}
    assert fields <= named


@pytest.mark.parametrize("path", NEEDED)
def test_an_absent_key_is_named(k3: Raw, path: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"missing {path}; each changes what the model computes, so none has a defau"
    ):
        KimiK3Config.from_hf(without(k3, f"text_config.{path}"))


@pytest.mark.parametrize("path", NEEDED)
def test_kimi_linear_files_may_leave_out_what_only_k3_has(flat: Raw, path: str) -> None:
    if path in K3_ONLY:
        assert KimiK3Config.from_hf(flat)  # none of them is there
        assert path.rpartition(".")[2] not in {*flat, *flat["linear_attn_config"]}
    else:
        with pytest.raises(ConfigError, match=rf"missing {path};"):
            KimiK3Config.from_hf(without(flat, path))


def test_several_absent_keys_are_named_together(k3: Raw) -> None:
    raw = without(without(k3, "text_config.vocab_size"), "text_config.linear_attn_config.head_dim")
    with pytest.raises(ConfigError, match=r"missing vocab_size, linear_attn_config\.head_dim;"):
        KimiK3Config.from_hf(raw)


RULE = r"kda_layers and full_attn_layers are 1-based and must hold each of 1\.\.9 exactly once"
REFUSED = [
    # layer lists
    ("linear_attn_config.kda_layers", [0, 1, 2, 4, 5, 6], rf"outside the model: \[0\]; listed twice: \[4\].*{RULE}"),
    ("linear_attn_config.full_attn_layers", [4, 8], rf"in neither list: \[9\]\. {RULE}"),
    ("linear_attn_config.full_attn_layers", [3, 4, 8, 9], rf"listed twice: \[3\]\. {RULE}"),
    ("linear_attn_config.full_attn_layers", [4, 8, 10], rf"outside the model: \[10\]; in neither list: \[9\]\. {RULE}"),
    ("linear_attn_config.kda_layers", None, r"linear_attn_config\.kda_layers is None, expected a list of integers"),
    ("linear_attn_config.kda_layers", ["1"], r"linear_attn_config\.kda_layers is \['1'\], expected a list of integers"),
    ("num_hidden_layers", 10, r"in neither list: \[10\]"),
    ("linear_attn_config", None, "linear_attn_config is missing; it holds the KDA sizes and the two layer lists"),
    # experts
    ("num_experts_per_token", 17, "num_experts_per_token is 17, more than num_experts = 16"),
    ("num_expert_group", 3, "num_experts = 16 does not divide into num_expert_group = 3 groups"),
    ("num_expert_group", 16, "16 expert groups of 1 expert; group scores need at least 2 experts each"),
    ("num_expert_group", 8, "num_experts_per_token is 4, but 1 groups of 2 hold only 2"),
    ("topk_group", 2, "topk_group is 2, more than num_expert_group = 1"),
    ("moe_router_activation_func", "tanh", "moe_router_activation_func is 'tanh'; known: sigmoid, softmax"),
    # the rest of the network
    ("hidden_act", "gelu", "hidden_act is 'gelu'; known activations: situ, silu"),
    (
        "activation_situ_beta",
        None,
        r"hidden_act is situ, so activation_situ_beta needs a positive value \(K3 has 4\.0\)",
    ),
    ("linear_attn_config.gate_lower_bound", 5.0, "gate_lower_bound is 5.0, a bound of log-decay is negative"),
    ("num_key_value_heads", 2, "num_key_value_heads is 2, but MLA needs num_attention_heads = 4"),
    ("mla_use_nope", False, "mla_use_nope is false; this model has no rotary embedding in its text layers"),
    # values of the wrong kind
    ("hidden_size", None, "hidden_size is null, a value is needed"),
    ("num_hidden_layers", None, "num_hidden_layers is null, a value is needed"),
    ("hidden_size", 0, "hidden_size is 0, must be positive"),
    ("kv_lora_rank", -1, "kv_lora_rank is -1, must be positive"),
    ("attn_res_block_size", 0, "attn_res_block_size is 0, must be positive"),
    ("rms_norm_eps", -1e-5, "rms_norm_eps is -1e-05, must be positive"),
    ("activation_situ_linear_beta", 0.0, "activation_situ_linear_beta is 0.0, must be positive"),
    ("hidden_size", "64", "hidden_size is '64', expected an integer"),
    ("vocab_size", 128.0, "vocab_size is 128.0, expected an integer"),
    ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5', expected a number"),
    ("moe_renormalize", "true", "moe_renormalize is 'true', expected true or false"),
    ("num_experts", True, "num_experts is True, expected an integer"),
    ("moe_renormalize", 1, "moe_renormalize is 1, expected true or false"),
]


@pytest.mark.parametrize(("path", "value", "message"), REFUSED, ids=[f"{path}={value}" for path, value, _ in REFUSED])
def test_a_text_config_that_cannot_be(k3: Raw, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^config.json: .*{message}") as error:
        KimiK3Config.from_hf(changed(k3, f"text_config.{path}", value))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model_type", ["llama", "kimi_k2", None])
def test_another_model(k3: Raw, model_type: str | None) -> None:
    message = f"model_type is {model_type!r}; this package serves kimi_k3 and kimi_linear"
    with pytest.raises(ConfigError, match=message):
        KimiK3Config.from_hf(changed(k3, "model_type", model_type))


def test_a_k3_config_without_a_text_config(k3: Raw) -> None:
    with pytest.raises(ConfigError, match="needs the text model's settings under text_config"):
        KimiK3Config.from_hf(without(k3, "text_config"))


# --- quantisation and vision ---


@pytest.fixture
def mxfp4(oracle: Callable[[str], Oracle]) -> Raw:
    return json.loads((oracle("k3-mxfp4").folder / "config.json").read_text())


QUANTIZATION = "text_config.quantization_config"


def test_mxfp4_is_found_at_either_level(mxfp4: Raw, k3: Raw) -> None:
    assert KimiK3Config.from_hf(mxfp4).quantization == "mxfp4"
    section = mxfp4["text_config"]["quantization_config"]
    assert KimiK3Config.from_hf(changed(k3, "quantization_config", section)).quantization == "mxfp4"
    assert KimiK3Config.from_hf(k3).quantization is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (f"{QUANTIZATION}.quant_method", "fp8", "quant_method 'fp8', format 'mxfp4-pack-quantized'; supported: compr"),
        (f"{QUANTIZATION}.format", "pack-quantized", "format 'pack-quantized'; supported: compressed-tensors, mxfp4-"),
        (
            f"{QUANTIZATION}.config_groups.group_0.weights.group_size",
            16,
            "'group_size': 16}; MXFP4 is 4 bits, 'float', 32",
        ),
        (f"{QUANTIZATION}.config_groups.group_0.weights", None, "group_0 has {'num_bits': None,"),
        ("text_config.routed_expert_hidden_size", 40, "MXFP4 experts need expert input = 40 to be a multiple of 32"),
        ("text_config.moe_intermediate_size", 48, "MXFP4 experts need moe_intermediate_size = 48 to be a multiple of"),
    ],
)
def test_a_quantisation_that_cannot_be(mxfp4: Raw, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KimiK3Config.from_hf(changed(mxfp4, path, value))


@pytest.fixture
def vision(oracle: Callable[[str], Oracle]) -> Raw:
    return json.loads((oracle("k3-vision").folder / "config.json").read_text())


def test_vision_is_there_or_not(vision: Raw, k3: Raw) -> None:
    config = KimiK3Config.from_hf(vision)
    assert config.vision is not None
    assert config.vision.init_pos_emb_height == 8
    assert KimiK3Config.from_hf(k3).vision is None
    assert KimiK3Config.from_hf(changed(vision, "vision_config", None)).vision is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("norm_type", "layernorm", "vision_config.norm_type is 'layernorm'; this package knows 'rmsnorm'"),
        ("attn_bias", True, "vision_config.attn_bias is True; this package knows False"),
        (
            "vt_num_attention_heads",
            5,
            "qkv_hidden_size = 48 over vt_num_attention_heads = 5: a head's width must be whole",
        ),
        ("vt_num_attention_heads", 8, "and a multiple of 4 for its rotation"),
        ("text_hidden_size", 32, "text_hidden_size is 32, but the text model has hidden_size = 64"),
        ("mm_hidden_size", 64, "mm_hidden_size is 64, but the tower it reads from has vt_hidden_size = 32"),
    ],
)
def test_a_vision_config_that_cannot_be(vision: Raw, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KimiK3Config.from_hf(changed(vision, f"vision_config.{name}", value))


def test_absent_vision_keys_are_named_together(vision: Raw) -> None:
    raw = without(without(vision, "vision_config.patch_size"), "vision_config.merge_kernel_size")
    with pytest.raises(ConfigError, match="vision_config is missing patch_size, merge_kernel_size"):
        KimiK3Config.from_hf(raw)


# --- files ---


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: no such folder; give the folder that holds config\.json"):
        KimiK3Config.from_pretrained(tmp_path / "nowhere")


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: missing; a checkpoint folder needs its config\.json"):
        KimiK3Config.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"model_type": ', r"config\.json: not valid JSON \(Expecting value: line 1 column 16"),
        (b"\xff\xfe", r"config\.json: not valid JSON \('utf-8' codec"),
        (b"", r"config\.json: not valid JSON"),
        (b"[1, 2]", r"config\.json: holds a JSON list, expected an object"),
    ],
    ids=["cut", "not text", "empty", "list"],
)
def test_a_broken_config(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        KimiK3Config.from_pretrained(tmp_path)

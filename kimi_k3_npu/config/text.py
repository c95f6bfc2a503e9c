"""The text model's settings, checked wherever they are made."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from kimi_k3_npu.config.values import check_value, shown
from kimi_k3_npu.errors import ConfigError

LayerKind = Literal["kda", "mla"]

ACTIVATIONS = ("situ", "silu")
ROUTER_ACTIVATIONS = ("sigmoid", "softmax")


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

"""The model's attention over SGLang's layers, pools and backends.

SGLang's backends take two forms of call. `Generic` is what its portable backends take: always the absorbed form, keys
and values 576 and 512 wide. `Ascend` is what its NPU backend takes: absorbed for decode and verification, with the two
halves of queries and keys apart; expanded for prefill, where the model writes the cache.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.sglang.options import ATTENTION_BACKEND, AttentionBackend
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.model.attention import LatentProjections
from kimi_k3_npu.model.delta_rule import DeltaRule
from kimi_k3_npu.model.kda import KimiDeltaAttention
from kimi_k3_npu.model.mla import MultiHeadLatentAttention


class EngineAttention:
    """SGLang's attention layers for the layers of one model; `for_batch` makes the attention of one pass.

    They are no modules of the model: they hold no weights of their own, only views of the model's.
    """

    def __init__(self, layers: nn.ModuleDict, prefill_backend: str, decode_backend: str) -> None:
        self.form = _form(prefill_backend, decode_backend)
        attentions: list[Any] = [layer.self_attn for layer in layers.values()]
        self.mla = {a.index: self.form.engine_layers(a) for a in attentions if isinstance(a, MultiHeadLatentAttention)}
        self.kda = {a.index: _kda_layer(a.index, a.rule) for a in attentions if isinstance(a, KimiDeltaAttention)}

    def for_batch(self, forward_batch: Any) -> BatchAttention:
        return self.form(self, forward_batch)

    def refresh(self) -> None:
        """After a change of the weights: SGLang's NPU backend keeps a transposed copy of the convolution's."""
        for layer in self.kda.values():
            copied = getattr(layer, "_conv_weights_t", None)
            if copied is not None:
                copied.copy_(layer.conv_weights.t())  # in place: captured graphs read it


class BatchAttention:
    """One forward pass over one SGLang batch. What an idle batch attends to is zero; SGLang leaves it uninitialised."""

    def __init__(self, layers: EngineAttention, forward_batch: Any) -> None:
        self.layers, self.batch = layers, forward_batch
        self.idle = forward_batch.forward_mode.is_idle()

    @staticmethod
    def engine_layers(layer: MultiHeadLatentAttention) -> Any:
        """SGLang's layers that serve one MLA layer in this form."""
        raise NotImplementedError

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        q_latent, q_rope = layer.absorb(q)
        if self.idle:
            return layer.raise_values(torch.zeros_like(q_latent))
        o = self._absorbed(layer.index, q_latent, q_rope, kv_latent, k_rope)
        return layer.raise_values(o.view(q_latent.shape))

    def _absorbed(self, layer: int, q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Write the cache rows and attend over the cache: q_latent [T, h, R], q_rope [T, h, r] -> [T, h, R], in any
        shape."""
        raise NotImplementedError

    def kda(self, layer: int, rule: DeltaRule, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor) -> Tensor:
        """SGLang's layer shares the weights of `rule`."""
        tokens, heads, width = forget_gate.shape
        if self.idle:
            return forget_gate.new_zeros(tokens, heads, width)
        # Not forward_mode: beside a replica that extends, SGLang may run another's decoding as an extension.
        decode = self.batch.logical_forward_mode.is_decode()
        gate = forget_gate.flatten(1) if decode else forget_gate.unsqueeze(0)
        o = self.layers.kda[layer](self.batch, mixed_qkv.contiguous(), gate, beta.unsqueeze(0))
        return o.view(tokens, heads, width)


class Generic(BatchAttention):
    """For backends that see MLA as attention with one key-value head."""

    @staticmethod
    def engine_layers(layer: MultiHeadLatentAttention) -> Any:
        return _latent_layer(layer)

    def _absorbed(self, layer: int, q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        q, k = torch.cat([q_latent, q_rope], dim=-1), torch.cat([kv_latent, k_rope], dim=-1)
        return self.layers.mla[layer](q, k.unsqueeze(1), kv_latent.unsqueeze(1), self.batch)


class Ascend(BatchAttention):
    """For SGLang's NPU backend."""

    @staticmethod
    def engine_layers(layer: MultiHeadLatentAttention) -> Any:
        if layer.n != layer.v:
            raise LaunchError(
                f"SGLang's ascend backend splits queries at the value width, so qk_nope_head_dim = {layer.n} must "
                f"equal v_head_dim = {layer.v}"
            )
        expanded = engine.RadixAttention(
            layer.num_heads, layer.n + layer.r, layer.scale, layer.num_heads, layer.index, v_head_dim=layer.v
        )
        # The backend expands the latent rows of a cached prefix by this, and takes the first of what it returns.
        expanded.kv_b_proj = lambda latent: (layer.kv_b_proj(latent), None)
        return _latent_layer(layer), expanded

    def mla(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        mode = self.batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify() and not mode.is_draft_extend_v2():
            return self._expanded(layer, q, kv_latent, k_rope)
        return super().mla(layer, q, kv_latent, k_rope)

    def _absorbed(self, layer: int, q_latent: Tensor, q_rope: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        attend, _ = self.layers.mla[layer]
        k = kv_latent.unsqueeze(1)
        return attend(q_latent, k, k, self.batch, q_rope=q_rope.contiguous(), k_rope=k_rope.unsqueeze(1).contiguous())

    def _expanded(self, layer: LatentProjections, q: Tensor, kv_latent: Tensor, k_rope: Tensor) -> Tensor:
        """Write the cache rows and attend over the cache: q [T, h, n + r] -> [T, h, v]."""
        _, attend = self.layers.mla[layer.index]
        # This backend does not write the cache in prefill.
        engine.get_token_to_kv_pool().set_kv_buffer(
            attend, self.batch.out_cache_loc, kv_latent.unsqueeze(1), k_rope.unsqueeze(1)
        )
        keys, values = layer.expand(kv_latent)
        keys = torch.cat([keys, k_rope.unsqueeze(1).expand(-1, keys.shape[1], -1)], dim=-1)
        o = attend(q.contiguous(), keys, values.contiguous(), self.batch, save_kv_cache=False)
        return o.view(values.shape)


FORMS: dict[AttentionBackend, type[BatchAttention]] = {"torch_native": Generic, "ascend": Ascend}


def _form(prefill: str, decode: str) -> type[BatchAttention]:
    found = prefill if prefill == decode else f"{prefill} for prefill and {decode} for decode"
    ATTENTION_BACKEND.check(found)
    return FORMS[cast(AttentionBackend, found)]


def _latent_layer(layer: MultiHeadLatentAttention) -> Any:
    return engine.RadixAttention(
        layer.num_heads, layer.R + layer.r, layer.scale, num_kv_heads=1, layer_id=layer.index, v_head_dim=layer.R
    )


def _kda_layer(index: int, rule: DeltaRule) -> Any:
    """The weights are shared with the model, and read when the layer runs."""
    h, d = rule.dt_bias.shape
    return engine.RadixLinearAttention(
        index,
        *(h, h, h),
        *(d, d, d),
        conv_weights=rule.conv_weight.data,
        A_log=rule.A_log.data,
        dt_bias=rule.dt_bias.data.flatten(),
        lower_bound=rule.lower_bound,
    )

"""One decoder layer: attention and a feed-forward part, each reading through a residual mixer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.model.attention import Attention
from kimi_k3_npu.model.kda import KimiDeltaAttention
from kimi_k3_npu.model.mla import MultiHeadLatentAttention
from kimi_k3_npu.model.mlp import DenseMLP
from kimi_k3_npu.model.moe import DispatchedMoE, GatheredMoE
from kimi_k3_npu.model.norm import RMSNorm
from kimi_k3_npu.model.residual import ResidualMixer
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer


class DecoderLayer(Layer):
    """Layer `index` (0-based). What travels between layers is the running sum `prefix` of the current block and the
    `bank`: the embeddings and the finished sums of the earlier blocks, [T, B, H]."""

    def __init__(self, config: TextConfig, index: int, mesh: Mesh, dtype: torch.dtype, *, experts: str) -> None:
        super().__init__()
        hidden, eps, block = config.hidden_size, config.rms_norm_eps, config.attn_res_block_size
        attention = KimiDeltaAttention if config.layer_kinds[index] == "kda" else MultiHeadLatentAttention
        self.self_attn = attention(config, index, mesh, dtype)
        if config.is_moe(index):
            moe = DispatchedMoE if mesh.layout.uses_all_to_all else GatheredMoE
            self.mlp: Layer = moe(config, mesh, dtype, experts)
        else:
            self.mlp = DenseMLP(config, mesh, dtype)
        self.input_layernorm = RMSNorm(hidden, eps, dtype)
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype)
        self.starts_block = block is not None and index % block == 0
        self.self_attention_res = ResidualMixer(hidden, eps) if block is not None else None
        self.mlp_res = ResidualMixer(hidden, eps) if block is not None else None

    def forward(
        self, prefix: Tensor, bank: Tensor, attention: Attention, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """prefix [T, H], bank [T, B, H] -> the next prefix and bank. counts: the rows of each data-parallel replica."""
        x = self._read(self.self_attention_res, prefix, bank)
        attended = self.self_attn(self.input_layernorm(x), attention)
        if self.starts_block:
            # The block before is complete: it becomes a row of the bank, and a new sum starts from this attention
            # alone.
            bank = torch.cat([bank, prefix.unsqueeze(1)], dim=1)
            prefix = attended
        else:
            prefix = prefix + attended
        x = self._read(self.mlp_res, prefix, bank)
        return prefix + self.mlp(self.post_attention_layernorm(x), counts), bank

    @staticmethod
    def _read(mixer: ResidualMixer | None, prefix: Tensor, bank: Tensor) -> Tensor:
        """The mixture; just the running sum where there is nothing to mix it with (Kimi-Linear, and the first
        layer)."""
        return prefix if mixer is None or not bank.shape[1] else mixer(prefix, bank)

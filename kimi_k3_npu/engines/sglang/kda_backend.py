"""KDA in plain torch as a backend of SGLang, over SGLang's own pools: for the CPU, where SGLang has none.

Pools of one layer: conv[0] [slots, W - 1, 3hd] and temporal [slots, h, V, K], whose states are the transposed of ours.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.model.delta_rule import DeltaRule, StatePools
from kimi_k3_npu.ops.kda_chunk import kda_chunk


class TorchKdaBackend(engine.MambaAttnBackendBase):
    """Decode and prefill, with the snapshots of states that SGLang's prefix cache asks for."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        windows = model_runner.req_to_token_pool.mamba_pool.mamba_cache.conv[0]
        self.conv_states_shape = windows.transpose(-1, -2).shape  # the base class reads the last size as W - 1

    def forward_decode(
        self, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        """mixed_qkv [S, 3hd], a [S, hd] raw, b [1, S, h] raw -> [1, S, h, d]."""
        rule, pools = _rule(layer), self._pools(layer)
        gate = a.reshape(-1, *rule.dt_bias.shape)
        o = rule.over_pools(mixed_qkv, gate, b[0], pools, [1] * len(gate))
        tracked = forward_batch.mamba_track_mask
        if tracked is not None:
            metadata = self.forward_metadata
            source, target = metadata.mamba_cache_indices[tracked].long(), metadata.mamba_track_indices[tracked].long()
            for kept in (pools.windows, pools.states):
                kept[target] = kept[source]
        return o.to(mixed_qkv.dtype).unsqueeze(0)

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **_: Any
    ) -> Tensor:
        """mixed_qkv [T, 3hd], a [1, T, h, d] raw, b [1, T, h] raw -> [1, T, h, d]."""
        if forward_batch.forward_mode.is_target_verify():
            raise NotImplementedError("speculative decoding is not implemented for KDA on a CPU")
        metadata = self.forward_metadata
        lengths = [end - start for start, end in pairwise(metadata.query_start_loc.tolist())]
        tokens = sum(lengths)
        pools = self._pools(layer)
        windows, states = pools.read()
        real = mixed_qkv[:tokens], a[0, :tokens], b[0, :tokens]
        inputs, windows = _rule(layer).inputs(*real, windows, lengths)
        o, states, snapshots = self._extend(inputs, states, lengths)
        pools.write(windows, states)
        if metadata.has_mamba_track_mask:
            self._track(pools, forward_batch, mixed_qkv, snapshots)
        padded = o.new_zeros(mixed_qkv.shape[0], *o.shape[1:])
        padded[:tokens] = o
        return padded.to(mixed_qkv.dtype).unsqueeze(0)

    def _pools(self, layer: Any) -> StatePools:
        pool = self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        slots = self.forward_metadata.mamba_cache_indices.long()
        return StatePools(pool.conv[0], pool.temporal, slots, transposed=True)

    def _extend(self, inputs: tuple[Tensor, ...], states: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The outputs, the final states, and the states where SGLang wants a snapshot inside a sequence's new tokens.

        A snapshot is of a chunk boundary; the sequence is cut there into two, and everything else stays one batch.
        """
        metadata = self.forward_metadata
        cut_at = [0] * len(lengths)
        if metadata.has_mamba_track_mask and metadata.track_chunk_idx is not None:
            cut_at = [max(chunk, 0) * self.mamba_chunk_size for chunk in metadata.track_chunk_idx.tolist()]
        if not any(cut_at):
            return (*kda_chunk(*inputs, states, lengths), states)
        cut_points = [x for n, cut in zip(lengths, cut_at, strict=True) for x in (cut, n - cut)]
        halves = [x.split(cut_points) for x in inputs]
        first = [torch.cat(x[::2]) for x in halves]
        rest = [torch.cat(x[1::2]) for x in halves]
        left = [n - cut for n, cut in zip(lengths, cut_at, strict=True)]
        early, snapshots = kda_chunk(*first, states, cut_at)
        late, states = kda_chunk(*rest, snapshots, left)
        outputs = [x for pair in zip(early.split(cut_at), late.split(left), strict=True) for x in pair]
        return torch.cat(outputs), states, snapshots

    def _track(self, pools: StatePools, forward_batch: Any, mixed_qkv: Tensor, snapshots: Tensor) -> None:
        """Copy windows and states at the tracked boundaries to the slots that the prefix cache will own."""
        metadata = self.forward_metadata
        rows = metadata.mamba_track_mask_indices
        if rows is None:
            rows = forward_batch.mamba_track_mask.nonzero(as_tuple=True)[0]
        windows, states = pools.windows, pools.states
        windows[forward_batch.mamba_track_indices[rows].long()] = mixed_qkv[metadata.track_conv_indices].to(
            windows.dtype
        )
        states[metadata.track_ssm_final_dst.long()] = states[metadata.track_ssm_final_src.long()]
        inside = snapshots[metadata.track_ssm_h_batch_src.long()]
        states[metadata.track_ssm_h_dst.long()] = inside.mT.to(states.dtype)


def _rule(layer: Any) -> DeltaRule:
    """The weights that SGLang's layer shares with the model's."""
    dt_bias = layer.dt_bias.view(layer.num_k_heads, layer.head_k_dim)
    return DeltaRule(layer.conv_weights, layer.A_log, dt_bias, layer.lower_bound)

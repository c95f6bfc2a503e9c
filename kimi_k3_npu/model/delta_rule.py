"""The recurrence of a KDA layer, apart from who keeps what it remembers: convolution windows and states.

Letters: T tokens of S sequences laid end to end, h heads of this rank, d their width, W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from kimi_k3_npu.ops.kda import kda_gate, kda_recurrent, kda_step, normed_qkv, short_conv
from kimi_k3_npu.ops.kda_chunk import kda_chunk

KdaForm = Literal["auto", "recurrent", "chunk"]


@dataclass(frozen=True)
class DeltaRule:
    """One layer's weights of the recurrence, fp32: conv_weight [3hd, W], A_log [h], dt_bias [h, d]."""

    conv_weight: Tensor
    A_log: Tensor
    dt_bias: Tensor
    #: Of log-decay; None: it has none.
    lower_bound: float | None

    def inputs(
        self, mixed_qkv: Tensor, forget_gate: Tensor, beta: Tensor, windows: Tensor, query_lens: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """q, k, v, g, beta of `kda_step` and `kda_chunk`, and the next windows.

        mixed_qkv [T, 3hd] before the convolution, forget_gate [T, h, d] and beta [T, h] raw, windows [S, W - 1, 3hd].
        """
        mixed, windows = short_conv(mixed_qkv, self.conv_weight, windows, query_lens)
        q, k, v = normed_qkv(mixed, len(self.A_log))
        return (q, k, v, self.log_decay(forget_gate), beta.float().sigmoid()), windows

    def log_decay(self, forget_gate: Tensor) -> Tensor:
        """forget_gate [T, h, d] raw -> fp32 [T, h, d]."""
        return kda_gate(forget_gate, self.A_log, self.dt_bias, self.lower_bound)

    def over_pools(
        self,
        mixed_qkv: Tensor,
        forget_gate: Tensor,
        beta: Tensor,
        pools: tuple[Tensor, Tensor],
        own: slice | Tensor,
        query_lens: Sequence[int],
        form: KdaForm = "auto",
    ) -> Tensor:
        """[T, h, d], with the windows and states in pools [slots, ...], of which `own` picks this batch's."""
        windows, states = pools
        inputs, windows[own] = self.inputs(mixed_qkv, forget_gate, beta, windows[own], query_lens)
        if all(n == 1 for n in query_lens):
            o, states[own] = kda_step(*inputs, states[own])
        elif form == "recurrent":
            o, states[own] = kda_recurrent(*inputs, states[own], query_lens)
        else:
            o, states[own] = kda_chunk(*inputs, states[own], query_lens)
        return o

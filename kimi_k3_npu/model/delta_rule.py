"""The recurrence of a KDA layer, apart from who keeps what it remembers: convolution windows and states.

Letters: T tokens of S sequences laid end to end, h heads of this rank, d their width (K of keys, V of values), W taps
of the convolution.
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
class StatePools:
    """What one layer's sequences remember: windows [slots, W - 1, 3hd] and states [slots, h, K, V].

    `own` picks the slots of the S sequences of this pass. The slots of sequences that are `fresh`, bool [S], hold what
    an earlier owner left: these begin from zero, and nobody has to clear the slots before. `transposed` states are
    [slots, h, V, K].
    """

    windows: Tensor
    states: Tensor
    own: slice | Tensor
    fresh: Tensor | None = None
    transposed: bool = False

    def read(self) -> tuple[Tensor, Tensor]:
        """Windows [S, W - 1, 3hd] and fp32 states [S, h, K, V] as the pass finds them."""
        windows, states = self.windows[self.own], self.states[self.own].float()
        if self.fresh is not None:
            windows = windows.masked_fill(self.fresh.view(-1, 1, 1), 0)
            states = states.masked_fill(self.fresh.view(-1, 1, 1, 1), 0)
        return windows, states.mT if self.transposed else states

    def write(self, windows: Tensor, states: Tensor) -> None:
        """Keep what `read` gives in the next pass."""
        states = states.mT if self.transposed else states
        self.windows[self.own] = windows.to(self.windows.dtype)
        self.states[self.own] = states.to(self.states.dtype)


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
        pools: StatePools,
        query_lens: Sequence[int],
        form: KdaForm = "auto",
    ) -> Tensor:
        """One pass over sequences of `query_lens` tokens -> [T, h, d]; the other arguments as of `inputs`."""
        windows, states = pools.read()
        inputs, windows = self.inputs(mixed_qkv, forget_gate, beta, windows, query_lens)
        if all(n == 1 for n in query_lens):
            o, states = kda_step(*inputs, states)
        elif form == "recurrent":
            o, states = kda_recurrent(*inputs, states, query_lens)
        else:
            o, states = kda_chunk(*inputs, states, query_lens)
        pools.write(windows, states)
        return o

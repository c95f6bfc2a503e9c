"""Kimi Delta Attention by the kernels of sgl_kernel_npu: their limits and their launches.

torch_npu's own delta-rule operators do not do: the recurrent one refuses a decay per key dimension, the chunked one has
only a decay per head, and its causal convolutions are 3 wide where this one is 4.

Left out, and composed of basic operators instead: sgl_kernel_npu's convolutions, which round the weights to bfloat16
and own the windows; its decode and verify kernels, which norm q and k themselves; and the single steps of its chunked
form, whose releases disagree on whether decays are powers of e or of 2. `chunk_kda_fwd` is the whole chunked form.

Letters as in `ops.kda`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kimi_k3_npu.ops import sgl
from kimi_k3_npu.ops.constants import constant
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.limits import FLOATS, OFFSET_LIMIT, no_kernel, nothing_to_run, wrong_dtype

CHUNK = 64

#: Of chunk_kda_fwd's host code: key and value dimensions, heads, and sequences of a batch.
WIDTHS = range(16, 257, 16)
MOST_HEADS = 128
MOST_SEQUENCES = 1024


@dataclass(frozen=True)
class Gate:
    """One decay gate of `tokens` tokens on one device."""

    tokens: int
    heads: int
    width: int
    dtype: torch.dtype
    device: Device


@dataclass(frozen=True)
class Chunked:
    """One chunked delta rule on one device. `dtype` is v's, the one that the model computes in."""

    seq_lens: tuple[int, ...]
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype
    device: Device


def refuse_gate(case: Gate) -> str | None:
    """The limits of fused_kda_gate_npu."""
    if reason := nothing_to_run(case.device, case.tokens) or no_kernel(case.device, sgl.KDA_GATE):
        return reason
    elements = case.tokens * case.heads * case.width
    if elements >= OFFSET_LIMIT:
        return f"{elements} elements, must be below 2^31: offsets are counted in 32 bits"
    return wrong_dtype("f", case.dtype, FLOATS)


def gate(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    kernel = sgl.kernel(sgl.KDA_GATE)
    return kernel(
        f.contiguous().flatten(1), A_log, f.shape[2], gate_bias=dt_bias.contiguous().flatten(), lower_bound=lower_bound
    )


def refuse_chunk(case: Chunked) -> str | None:
    """The limits of chunk_kda_fwd: its host code's checks, and that it rounds q, k and v to bfloat16."""
    if reason := nothing_to_run(case.device, sum(case.seq_lens)) or no_kernel(case.device, sgl.KDA_CHUNK):
        return reason
    if case.dtype != torch.bfloat16:
        return f"v is {case.dtype}, which would be rounded to bfloat16"
    for name, width in (("K", case.key_width), ("V", case.value_width)):
        if width not in WIDTHS:
            return f"{name} = {width}, must be a multiple of {WIDTHS.step} up to {WIDTHS[-1]}"
    if case.heads > MOST_HEADS:
        return f"{case.heads} heads, at most {MOST_HEADS}"
    if len(case.seq_lens) > MOST_SEQUENCES:
        return f"{len(case.seq_lens)} sequences, at most {MOST_SEQUENCES}"
    return None if all(case.seq_lens) else "a sequence is empty"


def chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, seq_lens: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """q is scaled already. States stay fp32 [S, h, K, V]; o is bfloat16 on the way out."""
    kernel = sgl.kernel(sgl.KDA_CHUNK)
    o, states, *_ = kernel(
        *(x.to(torch.bfloat16).contiguous().unsqueeze(0) for x in (q, k, v)),
        *(x.float().contiguous().unsqueeze(0) for x in (g, beta)),
        scale=1.0,
        initial_state=state.contiguous(),
        output_final_state=True,
        cu_seqlens=boundaries(tuple(seq_lens), q.device),
        chunk_size=CHUNK,
        layout="BSND",
        use_gate_in_kernel=False,
        safe_gate=False,
        state_v_first=False,
    )
    return o.squeeze(0).float(), states


@constant
def boundaries(seq_lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Where sequences begin and end, int64 [S + 1]."""
    return torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int64, device=device)

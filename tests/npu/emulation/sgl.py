"""The kernels of sgl_kernel_npu that are used besides batch_matmul_transpose: functions of its modules, an operator.

Their limits are those of their code; what it leaves unchecked and would get wrong raises here.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from tests.npu.emulation.core import Limits, calls, emulates

PACKAGE = "sgl_kernel_npu"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

#: Module and name of each emulated function.
_FUNCTIONS: dict[tuple[str, str], Callable] = {}

_chunk = Limits("chunk_kda_fwd")


@contextmanager
def with_sgl_kernel_npu() -> Iterator[None]:
    """Let `import sgl_kernel_npu` succeed inside the block; its operators exist once the emulation is imported."""
    modules = {PACKAGE: types.ModuleType(PACKAGE)}
    for (module, name), function in _FUNCTIONS.items():
        full = f"{PACKAGE}.{module}"
        setattr(modules.setdefault(full, types.ModuleType(full)), name, function)
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def function(module: str) -> Callable[[Callable], Callable]:
    """Make the decorated function the one of that name in sgl_kernel_npu.`module`, and record its calls."""

    def bind(kernel: Callable) -> Callable:
        def recorded(*args: object, **kwargs: object) -> object:
            calls[kernel.__name__] += 1
            return kernel(*args, **kwargs)

        _FUNCTIONS[module, kernel.__name__] = recorded
        return recorded

    return bind


def require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


@function("activation.situ")
def situ_and_mul(
    x: Tensor,
    group_list: Tensor | None = None,
    group_list_type: int | None = None,
    beta: float = 4.0,
    linear_beta: float | None = 25.0,
) -> Tensor:
    """[..., 2d] -> [..., d], the gate first. With a list of counts the rows past its sum stay unset."""
    require(x.dtype in FLOATS, f"situ_and_mul: x is {x.dtype}")
    require(x.is_contiguous(), "situ_and_mul: strides are not looked at, x must be contiguous")
    gate, up = x.float().chunk(2, dim=-1)
    up = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
    y = (beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate)) * up).to(x.dtype)
    if group_list is not None:
        require(group_list_type == 1, "situ_and_mul: running sums are read past their end, give counts")
        require(group_list.dtype in (torch.int32, torch.int64) and x.dim() == 2, "situ_and_mul: group_list or x")
        nobodys = torch.arange(x.shape[0], device=x.device) >= group_list.sum()
        y = y.masked_fill(nobodys.unsqueeze(1), torch.nan)
    return y


@function("kimi_k3.attn_residual")
def mix_fused(
    prefix_sum: Tensor, bank: Tensor, num_valid_blocks: int, combined_weight: Tensor, variance_epsilon: float
) -> Tensor:
    """[N, H] from prefix [N, H] and the first rows of bank [N, B, H]."""
    tokens, width = prefix_sum.shape
    require(0 <= num_valid_blocks <= bank.shape[1], "num_valid_blocks must fit within the residual bank")
    require(width <= 8192, f"mix_fused: a row of {width} overflows the unified buffer")
    strides = (prefix_sum.stride(1), bank.stride(2), combined_weight.stride(0))
    require(strides == (1, 1, 1), f"mix_fused: inner strides {strides} are taken for 1")
    require(tokens * bank.stride(0) < 2**31, "mix_fused: offsets into the bank are counted in 32 bits")
    rows = torch.cat((bank.narrow(1, 0, num_valid_blocks), prefix_sum.unsqueeze(1)), 1).float()
    normed = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + variance_epsilon)
    shares = (normed * combined_weight.float()).sum(-1).softmax(-1)
    return (shares.unsqueeze(-1) * rows).sum(1).to(prefix_sum.dtype)


@function("fla.kda_gate")
def fused_kda_gate_npu(
    gate: Tensor,
    A_log: Tensor,
    head_dim: int,
    *,
    gate_bias: Tensor | None = None,
    beta: float = 1.0,
    threshold: float = 20.0,
    lower_bound: float | None = None,
) -> Tensor:
    """[..., h * d] -> fp32 [..., h, d]."""
    require(A_log.numel() * head_dim == gate.shape[-1], "KDA gate shape does not match A_log and head_dim")
    require(gate_bias is None or gate_bias.numel() == gate.shape[-1], "KDA gate bias shape does not match the gate")
    require(gate.numel() > 0, "fused_kda_gate_npu: nothing to launch")
    dense = all(tensor.is_contiguous() for tensor in (gate, A_log, gate_bias) if tensor is not None)
    require(dense, "fused_kda_gate_npu: strides are not looked at")
    x = gate.float() if gate_bias is None else gate.float() + gate_bias
    x = x.unflatten(-1, (-1, head_dim))
    rate = A_log.exp().unsqueeze(1)
    if lower_bound is not None:
        return lower_bound * torch.sigmoid(rate * x)
    return -rate * torch.where(x * beta > threshold, x, torch.log(1 + torch.exp(x * beta)) / beta)


@emulates(_chunk)
def chunk_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    layout: str = "BSND",
    scale: float = 1.0,
    chunk_size: int = 64,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    use_gate_in_kernel: bool = False,
    state_v_first: bool = False,
    output_final_state: bool = True,
    *outputs: bool,
) -> tuple[Tensor | None, ...]:
    """(o [1, T, h, V] bf16, states fp32 [S, h, K, V], nine intermediates), token by token in fp32; g is log-decay."""
    _chunk.no(a_log=a_log, dt_bias=dt_bias, chunk_indices=chunk_indices)
    _chunk(not safe_gate and not any(outputs), "safe_gate and the intermediate outputs are not emulated")
    _chunk(layout == "BSND" and not use_gate_in_kernel and not state_v_first, "only BSND, gates applied, states [K, V]")
    _chunk(chunk_size in (64, 128), "chunkSize must be 64 or 128")
    _chunk(all(x.dtype == torch.bfloat16 for x in (q, k, v)), "q, k and v must be bfloat16")
    _chunk(all(x.dtype in (torch.float32, torch.bfloat16) for x in (g, beta)), "g and beta must be float32 or bfloat16")
    one, T, h, K = q.shape
    V = v.shape[3]
    _chunk(q.shape == k.shape == g.shape and v.shape[:3] == (one, T, h) == beta.shape and one == 1, "shapes")
    _chunk(h <= 128, f"{h} heads, H and HV must be <= 128")
    _chunk(all(16 <= d <= 256 and d % 16 == 0 for d in (K, V)), f"K = {K}, V = {V}: multiples of 16 up to 256")
    _chunk(T > 0, "invalid sequence length")
    _chunk(cu_seqlens is not None and initial_state is not None and output_final_state, "as the engines call it")
    _chunk(
        cu_seqlens.dtype == torch.int64 and 2 <= cu_seqlens.numel() <= 1025, "cu_seqlens: int64, at most 1024 sequences"
    )
    ends = cu_seqlens.tolist()
    _chunk(ends[0] == 0 and ends[-1] == T and ends == sorted(set(ends)), f"cu_seqlens {ends} for {T} tokens")
    _chunk(initial_state.dtype == torch.float32, "initial_state must be float32")
    _chunk(initial_state.shape == (len(ends) - 1, h, K, V), f"initial_state {list(initial_state.shape)}")

    q, k, v, g, beta = (x[0].float() for x in (q, k, v, g, beta))
    o, states = torch.empty(1, T, h, V, dtype=torch.bfloat16), []
    for s, (start, end) in enumerate(pairwise(ends)):
        state = initial_state[s]
        for t in range(start, end):
            state = state * g[t].exp().unsqueeze(-1)
            write = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t].unsqueeze(-1) * write.unsqueeze(-2)
            o[0, t] = torch.einsum("hk,hkv->hv", q[t] * scale, state)
        states.append(state)
    products = torch.full((1, h, T, chunk_size), torch.nan, dtype=torch.bfloat16)
    return o, torch.stack(states), None, products, products.clone(), *[None] * 6


_SCHEMAS = torch.library.Library("npu", "FRAGMENT")
_SCHEMAS.define(
    "chunk_kda_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? a_log=None, Tensor? dt_bias=None, "
    "Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? chunk_indices=None, str layout='BSND', "
    "float scale=1.0, int chunk_size=64, bool safe_gate=False, float lower_bound=-5.0, bool use_gate_in_kernel=False, "
    "bool state_v_first=False, bool output_final_state=True, bool output_gk=False, bool output_w=False, "
    "bool output_u=False, bool output_qg=False, bool output_kg=False, bool output_v_new=False, bool output_h=False)"
    " -> (Tensor, Tensor?, Tensor?, Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?)"
)


def _chunk_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: None,
    dt_bias: None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    chunk_indices: None = None,
    layout: str = "BSND",
    scale: float = 1.0,
    chunk_size: int = 64,
    *rest: object,
) -> tuple[Tensor | None, ...]:
    _, T, h, K = q.shape
    states = q.new_empty((cu_seqlens.shape[0] - 1, h, K, v.shape[3]), dtype=torch.float32)
    products = q.new_empty((1, h, T, chunk_size))
    return torch.empty_like(v), states, None, products, products.clone(), *[None] * 6


_SCHEMAS.impl("chunk_kda_fwd", _chunk_shapes, "Meta")

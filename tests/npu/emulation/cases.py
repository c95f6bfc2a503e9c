"""One call of each emulated operator, and of each form of it, that is within all its limits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from kimi_k3_npu.ops.device import Device, assume, parse_cann
from tests.npu.emulation.core import FLOAT4_E2M1, FLOAT8_E8M0

NPU = torch.ops.npu
BF16 = torch.bfloat16
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def on(soc: str, cann: str = "9.1"):
    """Let the emulated NPU be of this generation inside the block."""
    return assume(Device(soc, parse_cann(cann)))


def randn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape).to(dtype)


def int4(*shape: int) -> Tensor:
    return torch.randint(-8, 8, shape, dtype=torch.int32)


def int8(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def pack(w: Tensor) -> Tensor:
    return NPU.npu_convert_weight_to_int4pack(w.flatten(0, -2)).view(*w.shape[:-1], -1)


def counts(*sizes: int) -> Tensor:
    return torch.tensor(sizes)


def transpose_batchmatmul() -> dict:
    return {"input": randn(4, 2, 256), "weight": randn(2, 256, 128), "perm_x1": [1, 0, 2], "perm_y": [1, 0, 2]}


def sgl_bmm() -> dict:
    return {"tensor_a": randn(4, 2, 30), "tensor_b": randn(2, 30, 10), "tensor_c": torch.empty(4, 2, 10, dtype=BF16)}


def rms_norm() -> dict:
    return {"input": randn(3, 64), "gamma": randn(64), "epsilon": 1e-5}


def add_rms_norm() -> dict:
    return {"x1": randn(3, 64), "x2": randn(3, 64), "gamma": randn(64), "epsilon": 1e-5}


def gating() -> dict:
    options = {"norm_type": 1, "routed_scaling_factor": 2.5, "out_flag": True}
    return {"x": torch.randn(5, 12), "k": 3, "bias": torch.randn(12)} | options


def init_routing() -> dict:
    ids = torch.tensor([[2, 0], [1, 3], [2, 1]], dtype=torch.int32)
    options = {"expert_num": 4, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    return {"x": randn(3, 8), "expert_idx": ids, "active_expert_range": [1, 3]} | options


def finalize_routing() -> dict:
    order = torch.tensor([3, 0, 5, 1, 4, 2], dtype=torch.int32)
    absent = dict.fromkeys(("skip1", "skip2", "bias", "export_for_source_row"))
    return {"expanded_permuted_rows": randn(6, 8), "scales": randn(3, 2), "expanded_src_to_dst_row": order} | absent


def unpermute() -> dict:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    return {"permuted_tokens": randn(6, 8), "sorted_indices": order, "probs": randn(3, 2)}


def grouped(x: Tensor, weight: Tensor, **tensors: Tensor) -> dict:
    options = {"split_item": 2, "group_type": 0, "group_list": counts(3, 0, 2), "group_list_type": 1}
    lists = {name: [tensor] for name, tensor in tensors.items()}
    return {"x": [x], "weight": [weight], "output_dtype": torch.bfloat16} | lists | options


def gmm_plain() -> dict:
    return grouped(randn(6, 64), randn(3, 64, 32), bias=randn(3, 32, dtype=torch.float32))


def gmm_w8a8() -> dict:
    scales = {"scale": randn(3, 32), "per_token_scale": torch.rand(6)}
    return grouped(int8(6, 64), int8(3, 64, 32), **scales)


def gmm_w4a8() -> dict:
    w, scale = int4(3, 64, 32), torch.rand(3, 1, 32)
    bits = scale.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bias = 8 * (w * scale).sum(1)
    return grouped(int8(6, 64), pack(w), scale=bits, bias=bias, per_token_scale=torch.rand(6))


def gmm_w4a16() -> dict:
    scale = randn(3, 2, 32)
    return grouped(randn(6, 64), pack(int4(3, 64, 32)), antiquant_scale=scale, antiquant_offset=torch.zeros_like(scale))


def gmm_mxfp4() -> dict:
    with on("a5"):
        w, w_scale = NPU.npu_dynamic_mx_quant(randn(3, 32, 128), dst_type=FLOAT4_E2M1)
        x, x_scale = NPU.npu_dynamic_mx_quant(randn(6, 128), dst_type=torch.float8_e4m3fn)
        w = NPU.npu_format_cast(w, 29, customize_dtype=torch.float8_e4m3fn, input_dtype=FLOAT4_E2M1)
    scales = {"antiquant_scale": w_scale.transpose(1, 2), "per_token_scale": x_scale}
    dtypes = {"weight_dtype": FLOAT4_E2M1, "per_token_scale_dtype": FLOAT8_E8M0}
    return grouped(x, w.transpose(1, 2), **scales) | dtypes


def dynamic_quant() -> dict:
    return {"input": torch.cat((randn(3, 16), torch.zeros(1, 16, dtype=BF16)))}


def dynamic_mx_quant() -> dict:
    return {"input": randn(3, 128), "dst_type": torch.float8_e4m3fn}


def quant_matmul() -> dict:
    scales = {"scale": torch.rand(32), "pertoken_scale": torch.rand(4)}
    return {"x1": int8(4, 64), "x2": int8(64, 32), "bias": torch.randn(32), "output_dtype": BF16} | scales


def weight_quant() -> dict:
    scales = {"antiquant_scale": randn(2, 32), "antiquant_offset": randn(2, 32), "antiquant_group_size": 32}
    return {"x": randn(4, 64), "weight": pack(int4(64, 32))} | scales


def format_cast() -> dict:
    return {"input": int8(3, 64, 16), "acl_format": 29}


def int4pack() -> dict:
    return {"weight": int4(4, 16)}


def fia_absorbed() -> dict:
    """Two sequences, 3 queries over 20 tokens and 1 over 5, 4 heads, pages of 16."""
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    tensors = {"query": randn(4, 4, 512), "query_rope": randn(4, 4, 64), "key_rope": randn(5, 16, 64)}
    cache = randn(5, 16, 512)
    lens = {"actual_seq_qlen": [3, 4], "actual_seq_kvlen": [20, 5]}
    options = {"num_query_heads": 4, "num_key_value_heads": 1, "block_size": 16, "input_layout": "TND"}
    mode = {"sparse_mode": 3, "atten_mask": CAUSAL, "softmax_scale": 0.05, "return_softmax_lse": True}
    return tensors | {"key": cache, "value": cache, "block_table": table} | lens | options | mode


def fia_absorbed_bsnd() -> dict:
    """The second of those sequences as one decode step."""
    case = fia_absorbed()
    for name in ("query", "query_rope"):
        case[name] = case[name][3:].unsqueeze(1).contiguous()
    case |= {"block_table": case["block_table"][1:], "actual_seq_qlen": None, "actual_seq_kvlen": [5]}
    return case | {"sparse_mode": 0, "atten_mask": None, "input_layout": "BSND"}


def fia_expanded() -> dict:
    """Two sequences, 3 queries over 7 tokens and 4 over 4, 6 heads, and a row of padding."""
    tensors = {"query": randn(8, 6, 128), "key": randn(11, 6, 128), "value": randn(11, 6, 128)}
    ropes = {"query_rope": randn(8, 6, 64), "key_rope": randn(11, 6, 64)}
    lens = {"actual_seq_qlen": [3, 7], "actual_seq_kvlen": [7, 11]}
    options = {"num_query_heads": 6, "input_layout": "TND", "sparse_mode": 3, "atten_mask": CAUSAL}
    return tensors | ropes | lens | options | {"softmax_scale": 0.1}


def chunk_kda() -> dict:
    """Two sequences, 3 tokens and 66, 2 heads."""
    T, h, K, V = 69, 2, 16, 32
    per_token = {"q": randn(1, T, h, K), "k": randn(1, T, h, K) / 4, "v": randn(1, T, h, V), "scale": 0.5}
    gates = {"g": -torch.rand(1, T, h, K), "beta": torch.rand(1, T, h)}
    return (
        per_token | gates | {"initial_state": torch.randn(2, h, K, V), "cu_seqlens": counts(0, 3, 69), "chunk_size": 64}
    )


CASES: dict[str, tuple[str, Callable[[], dict]]] = {
    "transpose_batchmatmul": ("npu_transpose_batchmatmul", transpose_batchmatmul),
    "sgl_bmm": ("batch_matmul_transpose", sgl_bmm),
    "rms_norm": ("npu_rms_norm", rms_norm),
    "add_rms_norm": ("npu_add_rms_norm", add_rms_norm),
    "gating": ("npu_moe_gating_top_k", gating),
    "init_routing": ("npu_moe_init_routing_v2", init_routing),
    "finalize_routing": ("npu_moe_finalize_routing", finalize_routing),
    "unpermute": ("npu_moe_token_unpermute", unpermute),
    "gmm_plain": ("npu_grouped_matmul", gmm_plain),
    "gmm_w8a8": ("npu_grouped_matmul", gmm_w8a8),
    "gmm_w4a8": ("npu_grouped_matmul", gmm_w4a8),
    "gmm_w4a16": ("npu_grouped_matmul", gmm_w4a16),
    "gmm_mxfp4": ("npu_grouped_matmul", gmm_mxfp4),
    "dynamic_quant": ("npu_dynamic_quant", dynamic_quant),
    "dynamic_mx_quant": ("npu_dynamic_mx_quant", dynamic_mx_quant),
    "quant_matmul": ("npu_quant_matmul", quant_matmul),
    "weight_quant": ("npu_weight_quant_batchmatmul", weight_quant),
    "format_cast": ("npu_format_cast", format_cast),
    "int4pack": ("npu_convert_weight_to_int4pack", int4pack),
    "fia_absorbed": ("npu_fused_infer_attention_score_v2", fia_absorbed),
    "fia_absorbed_bsnd": ("npu_fused_infer_attention_score_v2", fia_absorbed_bsnd),
    "fia_expanded": ("npu_fused_infer_attention_score_v2", fia_expanded),
    "chunk_kda": ("chunk_kda_fwd", chunk_kda),
}
#: Cases that need an A5; the others run on an A3.
ON_A5 = ("gmm_mxfp4", "dynamic_mx_quant")


def run(case: str, **changes: object):
    """What the operator of a case gives for its arguments with these changes."""
    return with_arguments(case, **changes)[1]


def with_arguments(case: str, **changes: object):
    """(the arguments of a case with these changes, what its operator gives for them)."""
    op, arguments = CASES[case]
    changed = arguments() | changes
    with on("a5") if case in ON_A5 else nullcontext():
        return changed, getattr(NPU, op)(**changed)

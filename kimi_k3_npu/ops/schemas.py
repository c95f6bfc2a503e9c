"""What kernels need of torch_npu beside their limits: its operators, and the arguments that they pass by name.

Older versions lack some. A need is written `operator` or `operator(argument)`, and a kernel is a candidate only where
the installed version has all of its needs. How weights are laid out leaves no choice and is not here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

PACKAGE = "torch_npu"

Needs = frozenset[str]
NOTHING: Needs = frozenset()

#: Operator -> the arguments that some kernel passes by name. `call` fills it.
CALLED: dict[str, set[str]] = {}


def call(operator: str, *arguments: str) -> Needs:
    """The needs of a call of `torch.ops.npu.<operator>` with these arguments given by name."""
    CALLED.setdefault(operator, set()).update(arguments)
    return Needs((operator, *(f"{operator}({argument})" for argument in arguments)))


RMS_NORM = call("npu_rms_norm")
ADD_RMS_NORM = call("npu_add_rms_norm")
GATING_TOP_K = call("npu_moe_gating_top_k", "bias", "renorm", "norm_type", "routed_scaling_factor", "eps")
TRANSPOSE_BATCHMATMUL = call("npu_transpose_batchmatmul", "perm_x1", "perm_x2", "perm_y")

DYNAMIC_QUANT = call("npu_dynamic_quant")
W8A8 = DYNAMIC_QUANT | call("npu_quant_matmul", "pertoken_scale", "bias", "output_dtype")

_ATTENTION = "npu_fused_infer_attention_score_v2"
_LENGTHS = ("actual_seq_qlen", "actual_seq_kvlen")
_HEADS = ("num_query_heads", "num_key_value_heads")
ATTENTION = call(_ATTENTION, "atten_mask", *_LENGTHS, *_HEADS, "softmax_scale", "input_layout", "sparse_mode")
PAGED_ATTENTION = ATTENTION | call(_ATTENTION, "query_rope", "key_rope", "block_table", "block_size")

_COUNTS = ("expert_tokens_num_type", "expert_tokens_num_flag")
_RANGE = ("active_num", "expert_num", "active_expert_range")
_PRODUCT = "npu_grouped_matmul"
EXPERTS = (
    call("npu_moe_init_routing_v2", *_RANGE, *_COUNTS, "quant_mode", "row_idx_type")
    | call(_PRODUCT, "group_list", "group_list_type", "group_type", "split_item", "output_dtype")
    | call("npu_moe_finalize_routing")
)
EXPERTS_W4A8 = EXPERTS | DYNAMIC_QUANT | call(_PRODUCT, "scale", "bias", "per_token_scale")
EXPERTS_INT4 = EXPERTS | call(_PRODUCT, "antiquant_scale", "antiquant_offset")
EXPERTS_MXFP4 = (
    EXPERTS
    | call("npu_dynamic_mx_quant", "dst_type")
    | call(_PRODUCT, "antiquant_scale", "per_token_scale", "weight_dtype", "per_token_scale_dtype")
)

_COMMUNICATOR = ("group_ep", "ep_world_size", "ep_rank_id", "moe_expert_num", "global_bs", "comm_alg")
MC2 = call("npu_moe_distribute_dispatch_v2", *_COMMUNICATOR, "expert_scales") | call(
    "npu_moe_distribute_combine_v2", *_COMMUNICATOR, "expand_scales"
)


def missing() -> Iterator[str]:
    """What the installed version lacks of everything in `CALLED`. torch_npu must have been imported."""
    for operator, arguments in CALLED.items():
        overload = getattr(getattr(torch.ops.npu, operator, None), "default", None)
        if overload is None:
            yield operator
        else:
            taken = {argument.name for argument in overload._schema.arguments}
            yield from (f"{operator}({argument})" for argument in sorted(arguments - taken))

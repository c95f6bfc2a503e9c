"""Every limit of the emulated operators trips: `LIMITS` takes a call within all of them and breaks one."""

from collections.abc import Callable

import pytest
import torch

from tests.npu.emulation import LIFTABLE, fresh, install
from tests.npu.emulation.cases import (
    BF16,
    CASES,
    CAUSAL,
    NPU,
    counts,
    fia_expanded,
    gmm_mxfp4,
    gmm_w4a8,
    gmm_w4a16,
    int4,
    int8,
    on,
    pack,
    randn,
    run,
    sgl_bmm,
)
from tests.npu.emulation.core import FLOAT4_E2M1


@pytest.fixture(autouse=True)
def a3():
    install()
    fresh()
    with on("a3"):
        yield


def strided(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor of this shape that is a slice of a wider one."""
    return torch.randn(*shape[:-1], shape[-1] + 8).to(dtype)[..., : shape[-1]]


ANTIQUANT = ("antiquant_scale", "antiquant_offset")
FIA_TENSORS = ("query", "key", "value", "query_rope", "key_rope")

Change = dict[str, object]
LIMITS: list[tuple[str, Callable[[], Change], str]] = [
    ("transpose_batchmatmul", lambda: {"input": randn(4, 3, 256)}, "does not fit"),
    ("transpose_batchmatmul", lambda: {"input": randn(0, 2, 256)}, "M = 0"),
    ("transpose_batchmatmul", lambda: {"input": randn(4, 2, 255), "weight": randn(2, 255, 128)}, "multiples of 128"),
    ("transpose_batchmatmul", lambda: {"weight": randn(2, 256, 65536)}, "N = 65536"),
    ("transpose_batchmatmul", lambda: {"input": randn(1, 512, 128), "weight": randn(512, 128, 128)}, r"K\*B = 65536"),
    ("transpose_batchmatmul", lambda: {"perm_x2": [0, 2, 1]}, "perm_x2"),
    ("transpose_batchmatmul", lambda: {"bias": randn(128)}, "not supported here: bias"),
    ("transpose_batchmatmul", lambda: {"weight": randn(2, 256, 128, dtype=torch.float16)}, "float16"),
    (
        "sgl_bmm",
        lambda: {"tensor_a": randn(1025, 2, 30), "tensor_c": randn(1025, 2, 10)},
        "m = 1025, must be in 1..1024",
    ),
    ("sgl_bmm", lambda: {"tensor_a": randn(0, 2, 30), "tensor_c": randn(0, 2, 10)}, "m = 0"),
    ("sgl_bmm", lambda: {"tensor_b": strided(2, 30, 10)}, "wrong numbers for an operand with strides"),
    ("sgl_bmm", lambda: {"tensor_c": randn(4, 2, 9)}, "written past its end"),
    ("sgl_bmm", lambda: {n: t.float() for n, t in sgl_bmm().items()}, "must be float16 or bfloat16"),
    ("rms_norm", lambda: {"gamma": randn(64, dtype=torch.float32)}, "gamma is torch.float32"),
    ("rms_norm", lambda: {"input": randn(64)}, "1-D, must be 2-D"),
    ("rms_norm", lambda: {"gamma": randn(32)}, "must end x"),
    ("add_rms_norm", lambda: {"x2": randn(1, 64)}, "must have one shape"),
    ("gating", lambda: {"renorm": 1}, "renorm=1, must be 0"),
    ("gating", lambda: {"x": torch.randn(5, 2049), "bias": None}, "at most 2048"),
    ("gating", lambda: {"k": 13}, "k=13"),
    ("gating", lambda: {"group_count": 6, "k_group": 2}, "groups of 2 experts"),
    ("gating", lambda: {"x": torch.randn(5, 660), "bias": None, "group_count": 66, "k_group": 9}, "exceed 2048"),
    ("gating", lambda: {"bias": randn(12)}, "bias is torch.bfloat16"),
    ("gating", lambda: {"bias": torch.randn(11)}, r"must be \[12\]"),
    ("init_routing", lambda: {"expert_idx": torch.tensor([[0, 1]] * 3)}, "must be int32"),
    ("init_routing", lambda: {"expert_idx": torch.full((3, 2), 4, dtype=torch.int32)}, r"must be in 0\.\.3"),
    ("init_routing", lambda: {"expert_idx": torch.full((3, 2), -1, dtype=torch.int32)}, r"must be in 0\.\.3"),
    ("init_routing", lambda: {"active_expert_range": [1, 5]}, "of 4 experts"),
    ("init_routing", lambda: {"expert_tokens_num_flag": False}, "must be True"),
    ("init_routing", lambda: {"expert_tokens_num_type": 0}, "expert_tokens_num_type=0"),
    ("init_routing", lambda: {"quant_mode": 3}, "must be -1 or 1"),
    ("init_routing", lambda: {"x": int8(3, 8), "quant_mode": 1}, "quantised again"),
    ("finalize_routing", lambda: {"expanded_src_to_dst_row": torch.tensor([-1, 0, 1, 2, 3, 4]).int()}, r"in 0\.\.5"),
    ("finalize_routing", lambda: {"expanded_src_to_dst_row": torch.arange(6)}, "row indices are torch.int64"),
    ("finalize_routing", lambda: {"scales": torch.randn(3, 2)}, "scales is torch.float32"),
    ("finalize_routing", lambda: {"skip2": randn(3, 8)}, "skip2 needs skip1"),
    ("finalize_routing", lambda: {"drop_pad_mode": 1}, "drop_pad_mode=1"),
    ("unpermute", lambda: {"sorted_indices": torch.tensor([-1, 0, 1, 2, 3, 4])}, r"in 0\.\.5"),
    ("unpermute", lambda: {"permuted_tokens": torch.randn(6, 8)}, "must be bfloat16"),
    ("unpermute", lambda: {"probs": torch.randn(3, 2)}, "probs are torch.float32"),
    ("gmm_plain", lambda: {"x": [strided(6, 64)]}, "x must be 2-D and contiguous"),
    ("gmm_plain", lambda: {"x": [randn(0, 64)], "group_list": counts(0, 0, 0)}, "no rows"),
    ("gmm_plain", lambda: {"group_list": counts(3, 0, 4)}, "sums to 7, x has 6 rows"),
    ("gmm_plain", lambda: {"group_list": torch.tensor([3, 2, 5]), "group_list_type": 0}, "negative group"),
    ("gmm_plain", lambda: {"group_list": counts(3, 2)}, "for 3 experts"),
    ("gmm_plain", lambda: {"group_list": counts(3, 0, 2).int()}, "must be an int64"),
    ("gmm_plain", lambda: {"weight": [randn(1, 64, 32)], "group_list": counts(6), "bias": None}, "length 1"),
    ("gmm_plain", lambda: {"bias": [randn(3, 32)]}, "bias is torch.bfloat16"),
    ("gmm_plain", lambda: {"weight": [strided(3, 64, 32)]}, "contiguous or the transpose"),
    ("gmm_plain", lambda: {"weight": [randn(3, 64, 65536)], "bias": None}, "65536 of weight, must be below"),
    ("gmm_plain", lambda: {"split_item": 0}, "split_item=0"),
    ("gmm_plain", lambda: {"act_type": 5}, "act_type=5"),
    ("gmm_plain", lambda: {"scale": [randn(3, 32)]}, "a plain product does not take scale"),
    ("gmm_plain", lambda: {"output_dtype": torch.float16}, "output is torch.float16"),
    ("gmm_w8a8", lambda: {"scale": [torch.rand(3, 32)]}, "scale is torch.float32"),
    ("gmm_w8a8", lambda: {"per_token_scale": None}, "W8A8 needs per_token_scale"),
    ("gmm_w4a8", lambda: {"bias": None}, "needs the bias of 8"),
    ("gmm_w4a8", lambda: {"scale": [torch.rand(3, 1, 32)]}, "must be int64 with the bits"),
    ("gmm_w4a8", lambda: {"scale": [gmm_w4a8()["scale"][0].squeeze(1)]}, r"must be \[3, 1, 32\]"),
    ("gmm_w4a8", lambda: {"scale": [torch.full((3, 1, 32), -1)]}, "high half"),
    ("gmm_w4a8", lambda: {"weight": [pack(int4(3, 32, 64)).mT]}, "transposed int4 weight"),
    ("gmm_w4a8", lambda: {"x": [int8(6, 18440)], "weight": [pack(int4(3, 18440, 32))]}, "at most 18432"),
    ("gmm_w4a16", lambda: {"antiquant_offset": None}, "W4A16 needs antiquant_offset"),
    ("gmm_w4a16", lambda: {"antiquant_offset": [randn(3, 2, 32)]}, "an offset by group must be zero"),
    ("gmm_w4a16", lambda: {n: [torch.zeros(3, 3, 32).bfloat16()] for n in ANTIQUANT}, "divisible"),
    ("gmm_w4a16", lambda: {"weight": [NPU.npu_format_cast(gmm_w4a16()["weight"][0], 29)]}, "must stay ND"),
    ("gmm_mxfp4", lambda: {"weight_dtype": None}, "weight_dtype=None"),
    ("gmm_mxfp4", lambda: {"weight": [gmm_mxfp4()["weight"][0].clone()]}, "must have been cast to NZ"),
    ("gmm_mxfp4", lambda: {"antiquant_scale": [gmm_mxfp4()["antiquant_scale"][0].contiguous()]}, "must be transposed"),
    ("dynamic_quant", lambda: {"input": torch.randn(3, 16)}, "must be float16 or bfloat16"),
    ("dynamic_quant", lambda: {"input": randn(16)}, "more than one dimension"),
    ("dynamic_quant", lambda: {"quant_mode": "pertensor"}, "must be left alone"),
    ("dynamic_mx_quant", lambda: {"round_mode": "floor"}, "must be rint"),
    ("dynamic_mx_quant", lambda: {"input": randn(3, 63), "dst_type": FLOAT4_E2M1}, "must be even"),
    ("quant_matmul", lambda: {"x1": int8(0, 64), "pertoken_scale": torch.rand(0)}, "empty operands"),
    ("quant_matmul", lambda: {"x2": int8(64, 65536), "scale": torch.rand(1), "bias": None}, "at most 65535"),
    ("quant_matmul", lambda: {"scale": torch.rand(1, 32)}, r"must be \[1\] or \[32\]"),
    (
        "quant_matmul",
        lambda: {"output_dtype": torch.float16, "scale": randn(32), "bias": None},
        "for output torch.float16",
    ),
    ("quant_matmul", lambda: {"pertoken_scale": randn(4)}, "must be fp32"),
    ("weight_quant", lambda: {"antiquant_group_size": 48}, "multiple of 32"),
    ("weight_quant", lambda: {"antiquant_group_size": 64}, r"in \[32, 63\]"),
    ("weight_quant", lambda: {"bias": randn(32)}, "bias is torch.bfloat16"),
    ("weight_quant", lambda: {"antiquant_scale": randn(3, 32)}, "must be one of"),
    ("weight_quant", lambda: {"x": torch.randn(4, 64)}, "x is torch.float32"),
    ("format_cast", lambda: {"acl_format": 3}, "acl_format=3"),
    ("int4pack", lambda: {"weight": int4(4, 12)}, "multiple of 8"),
    ("int4pack", lambda: {"weight": int4(4, 16) + 8}, r"in -8\.\.7"),
    ("int4pack", lambda: {"weight": int4(16, 4).T}, "must be contiguous"),
    (
        "fia_absorbed",
        lambda: {"query": randn(4, 6, 512), "query_rope": randn(4, 6, 64), "num_query_heads": 6},
        "power of two",
    ),
    ("fia_absorbed", lambda: {"query": strided(4, 4, 512)}, "query must be contiguous"),
    ("fia_absorbed", lambda: {"key": strided(5, 16, 512)}, "key must be contiguous"),
    ("fia_absorbed", lambda: {"query_rope": None, "key_rope": None}, "absorbed form only"),
    ("fia_absorbed", lambda: {"key_rope": None}, "go together"),
    (
        "fia_absorbed",
        lambda: {"query": randn(4, 4, 256), "key": randn(5, 16, 256), "value": randn(5, 16, 256)},
        r"512 \+ 64",
    ),
    ("fia_absorbed", lambda: {"block_size": 32}, "must be 16 or 128"),
    ("fia_absorbed", lambda: {"block_size": 128}, "blocks of 16"),
    ("fia_absorbed", lambda: {"actual_seq_kvlen": None}, "must give 2 lengths"),
    ("fia_absorbed", lambda: {"actual_seq_kvlen": [33, 5]}, "room for 32 tokens"),
    ("fia_absorbed", lambda: {"actual_seq_kvlen": [2, 5]}, "3 queries over 2 keys"),
    ("fia_absorbed", lambda: {"actual_seq_qlen": None}, "actual_seq_qlen must be given"),
    ("fia_absorbed", lambda: {"actual_seq_qlen": [4, 3]}, "cumulative"),
    ("fia_absorbed", lambda: {"actual_seq_qlen": [4, 4]}, "1 to 16 each"),
    ("fia_absorbed", lambda: {"block_table": torch.tensor([[5, 1], [2, 0]]).int()}, "block ids"),
    ("fia_absorbed", lambda: {"block_table": torch.tensor([[4, 1], [2, 0]])}, "block_table is torch.int64"),
    ("fia_absorbed", lambda: {"sparse_mode": 0, "atten_mask": None}, "sparse_mode=0 with several queries"),
    ("fia_absorbed", lambda: {"atten_mask": None}, "needs atten_mask"),
    ("fia_absorbed", lambda: {"atten_mask": ~CAUSAL}, "1 above the diagonal"),
    ("fia_absorbed", lambda: {"atten_mask": CAUSAL[:64, :64].contiguous()}, r"atten_mask is \[64, 64\]"),
    ("fia_absorbed", lambda: {"num_key_value_heads": 0}, "4 key heads, must be 1"),
    ("fia_absorbed_bsnd", lambda: {"sparse_mode": 3, "atten_mask": CAUSAL}, "sparse_mode=3 with one query"),
    ("fia_absorbed_bsnd", lambda: {"key": randn(5, 1, 16, 512)}, r"must be \[blocks, block, D\] in layout BSND"),
    ("fia_expanded", lambda: {n: fia_expanded()[n].half() for n in FIA_TENSORS}, "must be bfloat16"),
    ("fia_expanded", lambda: {"input_layout": "BSH"}, "not emulated"),
    ("fia_expanded", lambda: {"actual_seq_kvlen": [2, 11]}, "3 queries over 2 keys"),
    ("fia_expanded", lambda: {"actual_seq_kvlen": [7, 12]}, "there are 11 tokens"),
    ("fia_expanded", lambda: {"value": randn(11, 6, 64)}, "must be 128 with 64"),
    ("fia_expanded", lambda: {"num_key_value_heads": 3}, "heads"),
    ("fia_expanded", lambda: {"pre_tokens": 5}, "pre_tokens"),
    ("fia_expanded", lambda: {"learnable_sink": randn(6)}, "not supported here: learnable_sink"),
    ("chunk_kda", lambda: {"q": randn(1, 69, 2, 16, dtype=torch.float16)}, "must be bfloat16"),
    ("chunk_kda", lambda: {"cu_seqlens": counts(0, 3, 3, 69)}, "cu_seqlens"),
    ("chunk_kda", lambda: {"cu_seqlens": counts(0, 3, 60)}, "for 69 tokens"),
    ("chunk_kda", lambda: {"initial_state": torch.zeros(2, 2, 32, 16)}, "initial_state"),
    ("chunk_kda", lambda: {"chunk_size": 32}, "64 or 128"),
]


@pytest.mark.parametrize(("case", "change", "match"), LIMITS, ids=[f"{case}: {match}" for case, _, match in LIMITS])
def test_limit(case: str, change: Callable[[], Change], match: str):
    with pytest.raises(RuntimeError, match=f"^{CASES[case][0]}: .*{match}"):
        run(case, **change())


def test_every_operator_has_limits_that_trip():
    assert {CASES[case][0] for case, _, _ in LIMITS} == set(LIFTABLE)


@pytest.mark.parametrize(
    ("case", "soc"), [("sgl_bmm", "a5"), ("gmm_w4a8", "a5"), ("dynamic_mx_quant", "a3"), ("gmm_mxfp4", "a3")]
)
def test_operators_of_another_generation(case: str, soc: str):
    arguments = CASES[case][1]()
    with on(soc), pytest.raises(RuntimeError, match=r"only on|are for A2 and A3"):
        getattr(NPU, CASES[case][0])(**arguments)


@pytest.mark.parametrize(("soc", "cann"), [("a3", "9.2"), ("a5", "9.1")])
def test_the_product_limit_is_gone_with_cann_9_2_and_on_a5(soc: str, cann: str):
    with on(soc, cann):
        assert run("transpose_batchmatmul", input=randn(1, 512, 128), weight=randn(512, 128, 128)).shape == (
            1,
            512,
            128,
        )

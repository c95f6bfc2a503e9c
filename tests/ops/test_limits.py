"""What each NPU kernel refuses, and the reason it gives: pure functions, so that plans and runs agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops import (
    attention,
    experts,
    experts_int4,
    grouped,
    kda,
    kda_chunk,
    norm,
    nz,
    q_absorb,
    quant_linear,
    residual,
    routing,
    schemas,
    situ,
    v_up,
)
from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.mc2 import MC2, Exchange
from kimi_k3_npu.ops.op import Choice, npu_operators
from kimi_k3_npu.parallel.experts import Mc2
from kimi_k3_npu.parallel.groups import Group

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

A3 = Device("a3", parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))
A5 = replace(A3, soc="a5")
BARE = Device("a3", parse_cann("9.1"))
CPU = Device("cpu")

NORM = norm.Norm((16, 7168), BF16, BF16, A3)
SITU = situ.Situ(16, BF16, A3)
MIX = residual.Mix(16, 8, 7168, BF16, True, A3)
ROUTING = routing.Routing(16, 896, 16, 1, 1, True, True, FP32, A3)
GATE = kda.Gate(16, 96, 128, BF16, A3)
CHUNKED = kda_chunk.Chunked(128, 2, False, 96, 128, 128, BF16, A3)
LATENT = attention.Latent(2, 96, (512, 64), 64, 8192, BF16, BF16, True, A3)
EXPANDED = attention.Expanded(520, 9500, 2, 96, (192, 128), BF16, A3)
VISIT = grouped.Visit(16, 16, 14, 42, 3584, 3072, BF16, A3)
MXFP4 = experts.Mxfp4Visit(replace(VISIT, device=A5), nz=True)
INT4 = experts_int4.Int4Visit(VISIT, prepared=True)
CAST = nz.Cast(3584, 3072, False, A3)
ROWS = quant_linear.Rows(16, 2, BF16, A3)
LINEAR = quant_linear.Linear(16, 7168, 12288, BF16, FP32, A3)
BMM = v_up.Bmm(16, 6, 512, 128, BF16, True, A3)
EXCHANGE = Exchange(64, 896, 16, 3584, 16, BF16, 1 << 40, A3)

#: Operator, a case that its first kernel takes, changes to it that it refuses, and the reason.
REFUSED: list[tuple[Any, Any, dict[str, Any], str]] = [
    (norm.rms_norm, NORM, {"shape": (0, 7168)}, "there are no rows"),
    (norm.rms_norm, NORM, {"shape": (7168,)}, "x has 1 dimensions, must have 2 to 8"),
    (norm.rms_norm, NORM, {"weight_dtype": FP32}, "weight is torch.float32, must be x's torch.bfloat16"),
    (norm.add_rms_norm, NORM, {"dtype": torch.float64, "weight_dtype": torch.float64}, "x is torch.float64"),
    (norm.rms_norm, NORM, {"device": CPU}, "there is no NPU"),
    (situ.situ_and_mul, SITU, {"device": BARE}, "the package sgl_kernel_npu cannot be imported"),
    (situ.situ_and_mul, SITU, {"rows": 0}, "there are no rows"),
    (residual.mix_residuals, MIX, {"device": BARE}, "the package sgl_kernel_npu cannot be imported"),
    (residual.mix_residuals, MIX, {"width": 12288}, "a row has 12288 elements, at most 8192 fit a core"),
    (residual.mix_residuals, MIX, {"contiguous": False}, "prefix, bank and weight must be contiguous"),
    (residual.mix_residuals, MIX, {"rows": 0}, "the bank has no rows"),
    (routing.route, ROUTING, {"sigmoid": False}, "scores are a softmax, which it never renormalises"),
    (routing.route, ROUTING, {"renormalize": False}, "it always divides sigmoid scores by their sum"),
    (routing.route, ROUTING, {"top_k": 1}, "it always divides sigmoid scores by their sum"),
    (routing.route, ROUTING, {"num_groups": 4, "topk_group": 2}, "it ranks the experts of a masked group"),
    (routing.route, ROUTING, {"experts": 2049}, "2049 experts, must be 3 to 2048"),
    (routing.route, ROUTING, {"dtype": BF16}, "logits are torch.bfloat16, must be float32"),
    (kda.kda_gate, GATE, {"tokens": 1 << 18}, "3221225472 elements, must be below 2^31"),
    (kda_chunk.kda_chunk, CHUNKED, {"dtype": FP32}, "v is torch.float32, which would be rounded to bfloat16"),
    (kda_chunk.kda_chunk, CHUNKED, {"key_width": 120}, "K = 120, must be a multiple of 16 up to 256"),
    (kda_chunk.kda_chunk, CHUNKED, {"heads": 129}, "129 heads, at most 128"),
    (kda_chunk.kda_chunk, CHUNKED, {"has_empty": True}, "a sequence is empty"),
    (kda_chunk.kda_chunk, CHUNKED, {"sequences": 1025}, "1025 sequences, at most 1024"),
    (attention.latent_attention, LATENT, {"heads": 129}, "129 heads, at most 128"),
    (attention.latent_attention, LATENT, {"sizes": (512, 32)}, r"latent \+ shared width are \(512, 32\)"),
    (attention.latent_attention, LATENT, {"dtype": FP32}, "q is torch.float32, must be float16 or bfloat16"),
    (attention.latent_attention, LATENT, {"pool_dtype": FP16}, "the cache is torch.float16"),
    (attention.latent_attention, LATENT, {"capacity": 8200}, "a slot has 8200 rows, must be a multiple of 128"),
    (attention.latent_attention, LATENT, {"slots": 512}, "the pool has 2147483648 elements"),
    (attention.latent_attention, LATENT, {"contiguous": False}, "the pools must be contiguous"),
    (attention.latent_attention, LATENT, {"tokens": 0}, "there are no rows"),
    (attention.causal_attention, EXPANDED, {"dtype": FP16}, "q is torch.float16, must be bfloat16"),
    (attention.causal_attention, EXPANDED, {"sizes": (72, 16)}, r"query and value sizes are \(72, 16\)"),
    (attention.causal_attention, EXPANDED, {"heads": 257}, "257 heads, at most 256"),
    (attention.causal_attention, EXPANDED, {"sequences": 4097}, "4097 sequences, at most 4096"),
    (attention.causal_attention, EXPANDED, {"keys": 1 << 21}, "2097152 tokens, at most 1048576"),
    (experts.moe_experts, VISIT, {"tokens": 0}, "there are no rows"),
    (experts.moe_experts, VISIT, {"first": 10240}, "expert ids up to 10253, must be below 10240"),
    (experts.moe_experts, VISIT, {"experts": 1025, "first": 0}, "1025 experts, at most 1024"),
    (experts.moe_experts, VISIT, {"width": 65536}, "H = 65536, must be below 65536"),
    (experts.moe_experts, VISIT, {"tokens": 1 << 27}, "2147483648 rows, must be below 2"),
    (experts.moe_experts_mxfp4, MXFP4, {"visit": VISIT}, "a3 has no FP4 hardware"),
    (experts.moe_experts_mxfp4, MXFP4, {"nz": False}, "the packed matrices do not lie in NZ"),
    (
        experts.moe_experts_mxfp4,
        MXFP4,
        {"visit": replace(MXFP4.visit, inner=96)},
        "I = 96, must be a multiple of 64",
    ),
    (experts_int4.moe_experts_w4a8, INT4, {"visit": MXFP4.visit}, "its weights are laid out for a2 and a3"),
    (experts_int4.moe_experts_w4a8, INT4, {"prepared": False}, "the weights are as published"),
    (
        experts_int4.moe_experts_w4a8,
        INT4,
        {"visit": replace(VISIT, experts=1)},
        "one expert: it reads a list of counts",
    ),
    (experts_int4.moe_experts_w4a8, INT4, {"visit": replace(VISIT, width=18440)}, "H = 18440, must be at most 18432"),
    (experts_int4.moe_experts_int4_group, INT4, {"visit": replace(VISIT, dtype=FP32)}, "x is torch.float32"),
    (nz.as_nz, CAST, {"fp4": True}, "a3 has no 4-bit floats, only a5 has"),
    (nz.as_nz, CAST, {"rows": 24}, "24 rows of 3072 bytes are not whole tiles of 16 rows of 32"),
    (quant_linear.dynamic_quant_int8, ROWS, {"dims": 1}, "x has 1 dimension, must have 2 or more"),
    (quant_linear.w8a8_linear, LINEAR, {"outputs": 67584}, "O = 67584, must be below 65536; shard or split the layer"),
    (quant_linear.w8a8_linear, LINEAR, {"scale_dtype": BF16}, "scale is torch.bfloat16, must be float32"),
]


@pytest.mark.parametrize(("op", "case", "changes", "reason"), REFUSED)
def test_refusals(op: Any, case: Any, changes: dict[str, Any], reason: str) -> None:
    taken: Choice = op.choose(case)
    assert not taken.refused
    other: Choice = op.choose(replace(case, **changes))
    assert other.name in ("composed", "plain")
    assert list(other.refused) == [taken.name]
    (given,) = other.refused.values()
    assert given.startswith(reason.replace("\\", ""))


def test_mixtures_of_many_tokens_take_several_launches() -> None:
    """65,536 tokens of Kimi-K3's 8 rows are 3.8 billion elements, which 32-bit offsets do not reach."""
    most = residual.tokens_per_launch(8, 7168)
    assert most * 8 * 7168 < 2**31 <= (most + 1) * 8 * 7168


def test_a_batch_of_more_sequences_than_one_call_takes_is_still_taken() -> None:
    many = replace(LATENT, tokens=17 * 5000)
    assert attention.latent_attention.choose(many).name == "fia_v2_absorbed"


#: Operators with kernels that call torch_npu's, and a case that the first of these takes.
CALLING: list[tuple[Any, Any]] = [
    (norm.rms_norm, NORM),
    (norm.add_rms_norm, NORM),
    (routing.route, ROUTING),
    (attention.latent_attention, LATENT),
    (attention.causal_attention, EXPANDED),
    (experts.moe_experts, VISIT),
    (experts.moe_experts_mxfp4, MXFP4),
    (experts_int4.moe_experts_w4a8, INT4),
    (experts_int4.moe_experts_int4_group, INT4),
    (quant_linear.dynamic_quant_int8, ROWS),
    (quant_linear.w8a8_linear, LINEAR),
    (q_absorb.q_absorb, BMM),
    (v_up.v_up, BMM),
]


def lacking(case: Any, *needs: str) -> Any:
    """The same case where torch_npu is without `needs`."""
    if hasattr(case, "visit"):
        return replace(case, visit=lacking(case.visit, *needs))
    return replace(case, device=replace(case.device, missing=frozenset(needs)))


def test_every_kernel_that_calls_torch_npu_is_among_them() -> None:
    """But for the casts to another layout."""
    calling = {name for name, op in npu_operators().items() if any(kernel.needs for kernel in op.kernels)}
    assert {op.name for op, _ in CALLING} == calling
    needed = frozenset().union(*(kernel.needs for op, _ in CALLING for kernel in op.kernels), MC2.needs)
    assert {need.partition("(")[0] for need in needed} == set(schemas.CALLED)


@pytest.mark.parametrize(("op", "case"), CALLING, ids=lambda value: getattr(value, "name", ""))
def test_a_kernel_is_refused_where_torch_npu_lacks_what_it_needs(
    op: Any, case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)
    first = op.choose(case).kernel
    assert first.needs
    for need in first.needs:
        choice = op.choose(lacking(case, need))
        refused = [kernel for kernel in op.kernels if need in kernel.needs]
        assert first in refused
        assert choice.refused == {kernel.name: f"the installed torch_npu has no {need}" for kernel in refused}
        assert choice.name == {"v_up": "batch_matmul_transpose", "q_absorb": "bmm"}.get(op.name, "composed")
    assert op.choose(lacking(case, "npu_of_another_kernel", "torch.ops.npu.another")).kernel is first


def test_all_that_is_lacking_is_named() -> None:
    both = lacking(LINEAR, "npu_quant_matmul(output_dtype)", "npu_dynamic_quant")
    assert quant_linear.w8a8_linear.choose(both).refused == {
        "npu_quant_matmul": "the installed torch_npu has no npu_dynamic_quant, npu_quant_matmul(output_dtype)"
    }


def test_a_forced_kernel_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_K3_NPU_V_UP", "transpose_batchmatmul")
    with pytest.raises(LaunchError, match=r"torch_npu has no npu_transpose_batchmatmul\(perm_y\)"):
        v_up.v_up.choose(lacking(BMM, "npu_transpose_batchmatmul(perm_y)"))


@pytest.mark.parametrize("need", sorted(MC2.needs))
def test_rows_travel_otherwise_where_torch_npu_lacks_what_mc2_needs(need: str) -> None:
    carrier = Mc2(Group("mc2", 0, 64), 896, lambda z, *_: z)
    assert carrier.choose(EXCHANGE).name == "mc2"
    with pytest.warns(UserWarning, match="mc2 is never used here, alltoall .*: the installed torch_npu has no npu_moe"):
        choice = carrier.choose(lacking(EXCHANGE, need))
    assert (choice.name, choice.refused) == ("alltoall", {"mc2": f"the installed torch_npu has no {need}"})


def test_int4_experts_stay_as_they_are_where_no_product_reads_another_order() -> None:
    """So that they can be expanded."""
    codes = torch.zeros(1, 8, 1, dtype=torch.int32)
    with assume(replace(A3, missing=frozenset({"npu_moe_init_routing_v2(active_expert_range)"}))):
        assert experts_int4.int4_layout_npu(codes, BF16) is codes

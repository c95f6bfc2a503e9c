"""The whole model on the NPU's kernels, with torch_npu's operators emulated on CPU tensors.

The tiny oracle is too small and too precise for some operators, so their limits on sizes and dtypes are lifted, here
and in the selectors; the full-width layers run with nothing lifted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.model.attention import CachedAttention
from kimi_k3_npu.model.cache import ModelCache
from kimi_k3_npu.model.kda import KimiDeltaAttention
from kimi_k3_npu.model.mla import MultiHeadLatentAttention
from kimi_k3_npu.model.moe import GatheredMoE
from kimi_k3_npu.ops import attention, v_up
from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.limits import FLOATS
from kimi_k3_npu.ops.op import CHOSEN, npu_operators
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Layer, layers
from tests.npu.emulation import calls, fresh, install, lifted, with_sgl_kernel_npu
from tests.npu.on_cpu import on_cpu

#: Of logits between -5 and 5, fp32, as on the CPU's own operators.
TOLERANCE = 5e-4

A3 = Device("a3", parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))
BARE_A3 = Device("a3", parse_cann("9.1"))


class Anything:
    """Contains whatever it is asked for."""

    def __contains__(self, item: object) -> bool:
        return True


#: What the tiny fp32 oracle needs lifted: operator and limit, and where the selectors hold the same.
LIFTED = (
    ("npu_fused_infer_attention_score_v2", "head_dim", "dtype"),
    ("npu_transpose_batchmatmul", "alignment"),
)
LIFTED_IN_SELECTORS = (
    (attention, "LATENT_SIZES", Anything()),
    (attention, "EXPANDED_SIZES", Anything()),
    (attention, "HALVES", FLOATS),
    (attention, "EXPANDED_DTYPES", FLOATS),
    (v_up, "ALIGNMENT", 1),
)

#: What the oracle's model has no use for: Kimi-Linear's residual, and quantised weights.
NOT_IN_THE_ORACLE = {
    "add_rms_norm",
    "moe_experts_mxfp4",
    "moe_experts_w4a8",
    "moe_experts_int4_group",
    "dynamic_quant_int8",
    "w8a8_linear",
    "as_nz",
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)
    install()
    fresh()
    CHOSEN.clear()
    with with_sgl_kernel_npu():
        yield


@pytest.fixture
def tiny_sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lift LIFTED; gives what was then broken, in words."""
    for module, name, value in LIFTED_IN_SELECTORS:
        monkeypatch.setattr(module, name, value)
    broken: list[str] = []
    with ExitStack() as stack:
        sets = [stack.enter_context(lifted(op, *limits)) for op, *limits in LIFTED]
        yield broken
        for found in sets:
            broken.extend(sorted(found))


def logits_of(
    model: Any, cache: ModelCache, slots: Sequence[int], tokens: Sequence[Tensor], **forms: Any
) -> list[Tensor]:
    """One pass of some sequences' next tokens; logits at each of them."""
    attention = CachedAttention(cache, slots, [len(part) for part in tokens], **forms)
    hidden = model(torch.cat(list(tokens)), attention)
    attention.commit()
    return list(model.logits(hidden).split([len(part) for part in tokens]))


def close(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


def passes(model: Any, prompts: Sequence[Tensor], cuts: Sequence[int], **forms: Any) -> list[Tensor]:
    """Logits of the prompts, taken in passes that end at these shares (in eighths) of each."""
    cache = model.new_cache(len(prompts), max(map(len, prompts)))
    slots = [cache.join() for _ in prompts]
    steps = [
        logits_of(model, cache, slots, [p[len(p) * a // 8 : len(p) * b // 8] for p in prompts], **forms)
        for a, b in pairwise((0, *cuts, 8))
    ]
    return [torch.cat(parts) for parts in zip(*steps, strict=True)]


@pytest.mark.parametrize("device", [A3, BARE_A3], ids=["with sgl_kernel_npu", "without"])
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("cuts", [(), (3,), (2, 5)], ids=["fresh prefill", "two chunks", "three chunks"])
def test_prefill(oracle: Callable, tiny_sizes: list[str], cuts: tuple[int, ...], form: str, device: Device):
    expected = oracle("k3").expected
    with on_cpu(), assume(device):
        close(passes(oracle("k3").model, expected.prompts, cuts, form=form), expected.logits)
    assert calls["npu_fused_infer_attention_score_v2"] == 3 * (len(cuts) + 1)  # of 3 MLA layers


def test_decode(oracle: Callable, tiny_sizes: list[str]):
    """Eight tokens after the first three of each long prompt, one at a time, all prompts in one batch."""
    expected, model = oracle("k3").expected, oracle("k3").model
    prompts, wanted = zip(
        *((p[:11], want[:11]) for p, want in zip(expected.prompts, expected.logits, strict=True) if len(p) >= 11),
        strict=True,
    )
    assert len(prompts) > 1
    cache = model.new_cache(len(prompts), 11)
    slots = [cache.join() for _ in prompts]
    with on_cpu(), assume(A3):
        steps = [logits_of(model, cache, slots, [p[:3] for p in prompts])]
        steps += [logits_of(model, cache, slots, [p[t : t + 1] for p in prompts]) for t in range(3, 11)]
    close([torch.cat(parts) for parts in zip(*steps, strict=True)], wanted)
    assert calls["npu_fused_infer_attention_score_v2"] == 3 * 9


def test_every_kernel_has_run(oracle: Callable, tiny_sizes: list[str]):
    """A model is right on compositions too, so the record has to show who did the work."""
    prompts = oracle("k3").expected.prompts
    with on_cpu(), assume(A3):
        for form in ("absorbed", "expanded"):
            passes(oracle("k3").model, prompts, (3,), form=form)
    assert {op for op, _ in CHOSEN} | NOT_IN_THE_ORACLE == set(npu_operators())
    assert set(CHOSEN) == {
        ("rms_norm", "npu_rms_norm"),
        ("situ_and_mul", "sgl_situ_and_mul"),
        ("mix_residuals", "sgl_mix_fused"),
        ("route", "npu_moe_gating_top_k"),
        ("kda_gate", "sgl_kda_gate"),
        ("kda_chunk", "composed"),  # sgl_kernel_npu's would round an fp32 model to bfloat16
        ("latent_attention", "fia_v2_absorbed"),
        ("causal_attention", "fia_v2_expanded"),
        ("q_absorb", "transpose_batchmatmul"),
        ("v_up", "transpose_batchmatmul"),
        ("moe_experts", "grouped_matmul"),
    }
    assert set(calls) == {
        "npu_rms_norm",
        "situ_and_mul",
        "mix_fused",
        "npu_moe_gating_top_k",
        "fused_kda_gate_npu",
        "npu_fused_infer_attention_score_v2",
        "npu_transpose_batchmatmul",
        "npu_moe_init_routing_v2",
        "npu_grouped_matmul",
        "npu_moe_finalize_routing",
    }


def test_what_is_lifted_is_needed(oracle: Callable, monkeypatch: pytest.MonkeyPatch):
    """Without the lifts in the emulation the selectors' own make the model fail, so they would fail on a device."""
    for module, name, value in LIFTED_IN_SELECTORS:
        monkeypatch.setattr(module, name, value)
    with (
        on_cpu(),
        assume(A3),
        pytest.raises(RuntimeError, match=r"must be multiples of 128|must be float16 or bfloat16"),
    ):
        oracle("k3").model.score(oracle("k3").expected.prompts[:1])


# --- single layers at Kimi-K3's own widths, in bfloat16, with nothing lifted ---

FULL = TextConfig(
    vocab_size=163840,
    hidden_size=7168,
    num_hidden_layers=2,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    layer_kinds=("kda", "mla"),
    attn_res_block_size=12,
    hidden_act="situ",
    activation_situ_beta=4.0,
    activation_situ_linear_beta=25.0,
    intermediate_size=33792,
    kda_num_heads=96,
    kda_head_dim=128,
    short_conv_kernel_size=4,
    gate_lower_bound=-5.0,
    use_full_rank_gate=True,
    num_attention_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    mla_use_output_gate=True,
    num_experts=8,
    num_experts_per_token=4,
    num_shared_experts=2,
    moe_intermediate_size=3072,
    moe_layer_freq=1,
    first_k_dense_replace=0,
    routed_expert_hidden_size=3584,
    latent_moe_use_norm=True,
    moe_router_activation_func="sigmoid",
    moe_renormalize=True,
    routed_scaling_factor=1.0,
    num_expert_group=1,
    topk_group=1,
)

BF16, FP32 = torch.bfloat16, torch.float32
#: A prime number of normal numbers, repeated, is as good as fresh ones: no row of a matrix is like another.
NOISE = 1_000_003


def filled(layer: Layer) -> Layer:
    """Weights of a trained model's magnitude: activations stay near 1."""
    noise = torch.randn(NOISE, generator=torch.Generator().manual_seed(0))
    for name, parameter in layer.named_parameters():
        scale = 0.5 if parameter.dim() < 2 or "conv" in name else parameter.shape[-1] ** -0.5
        flat = parameter.data.view(-1)
        for start in range(0, flat.numel(), NOISE):
            part = flat[start : start + NOISE]
            part.copy_(noise[: part.numel()] * scale)
        if "norm" in name:
            parameter.data.add_(1)
    for _, part in layers(layer):
        part.prepare()
    return layer.requires_grad_(False)


def in_fp32(layer: Layer, wide: Layer) -> Layer:
    """The same weights, so that the difference is of the arithmetic alone."""
    for target, source in zip(wide.parameters(), layer.parameters(), strict=True):
        target.data.copy_(source)
    for _, part in layers(wide):
        part.prepare()
    return wide.requires_grad_(False)


def attention_passes(layer: Layer, x: Sequence[Tensor], lens: Sequence[Sequence[int]]) -> Tensor:
    """Passes over three sequences, one after another in the same cache; the outputs of all."""
    cache = ModelCache(FULL, 3, 300, dtype=x[0].dtype)
    slots = [cache.join() for _ in range(3)]
    outputs = []
    for rows, query_lens in zip(x, lens, strict=True):
        attention = CachedAttention(cache, slots, query_lens)
        outputs.append(layer(rows, attention))
        attention.commit()
    return torch.cat(outputs)


def compare(make: Callable[[torch.dtype], Layer], run: Callable[[Layer, torch.dtype], Tensor], device: Device) -> None:
    """The NPU's kernels in bfloat16 are no further from fp32 than the CPU's own operators in bfloat16 are.

    Both round to bfloat16 after each projection, at slightly different places between them, so one's largest error may
    be half again the other's. Either is a few units in the last place of the largest output.
    """
    narrow = filled(make(BF16))
    with on_cpu(), assume(device):
        got = run(narrow, BF16)
    reference = run(narrow, BF16)
    exact = run(in_fp32(narrow, make(FP32)), FP32)
    error, usual = ((out.float() - exact).abs().max().item() for out in (got, reference))
    assert error <= 1.5 * usual
    assert error <= 2**-5 * exact.abs().max().item()


@pytest.mark.slow
@pytest.mark.parametrize("device", [A3, BARE_A3], ids=["with sgl_kernel_npu", "without"])
def test_full_width_kda_layer(device: Device):
    lens = [[70, 3, 1], [1, 1, 1]]
    x = [torch.randn(sum(part), FULL.hidden_size).to(BF16) for part in lens]
    compare(
        lambda dtype: KimiDeltaAttention(FULL, 0, Mesh(), dtype),
        lambda layer, dtype: attention_passes(layer, [rows.to(dtype) for rows in x], lens),
        device,
    )
    fused = device is A3
    assert CHOSEN["kda_chunk", "sgl_chunk_kda_fwd" if fused else "composed"] == 1
    assert CHOSEN["kda_gate", "sgl_kda_gate" if fused else "composed"] == 2
    assert CHOSEN["rms_norm", "npu_rms_norm"] == 2


@pytest.mark.slow
def test_full_width_mla_layer():
    """A fresh prefill in the expanded form, one that goes on in the absorbed form, and a decode step."""
    lens = [[40, 33, 1], [2, 20, 1], [1, 1, 1]]
    x = [torch.randn(sum(part), FULL.hidden_size).to(BF16) for part in lens]
    compare(
        lambda dtype: MultiHeadLatentAttention(FULL, 1, Mesh(), dtype),
        lambda layer, dtype: attention_passes(layer, [rows.to(dtype) for rows in x], lens),
        A3,
    )
    assert CHOSEN["causal_attention", "fia_v2_expanded"] + CHOSEN["latent_attention", "fia_v2_absorbed"] == 3
    assert CHOSEN["latent_attention", "fia_v2_absorbed"] > 0
    assert not any(kernel == "composed" for _, kernel in CHOSEN)


@pytest.mark.slow
def test_full_width_moe_layer():
    x = torch.randn(20, FULL.hidden_size).to(BF16)
    compare(
        lambda dtype: GatheredMoE(FULL, Mesh(), dtype, "plain"),
        lambda layer, dtype: layer(x.to(dtype), [len(x)]),
        A3,
    )
    assert set(CHOSEN) == {
        ("route", "npu_moe_gating_top_k"),
        ("moe_experts", "grouped_matmul"),
        ("situ_and_mul", "sgl_situ_and_mul"),
        ("rms_norm", "npu_rms_norm"),
    }

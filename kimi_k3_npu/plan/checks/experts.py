"""Checks of the routed experts: their number, their function, their format."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.ops.experts import Mxfp4Visit, moe_experts, moe_experts_mxfp4
from kimi_k3_npu.ops.experts_int4 import Int4Visit, moe_experts_int4_group, moe_experts_w4a8
from kimi_k3_npu.ops.grouped import Visit
from kimi_k3_npu.ops.op import COMPOSED, Choice
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.schema import CheckpointFormat
from kimi_k3_npu.recipes.serving import Serving, runs_own_model


def number(subject: Subject) -> Iterator[Finding]:
    """The experts of a rank suit the kernels."""
    if not subject.serving or subject.device.soc == "cpu":
        return
    held = subject.config.text.num_experts // subject.serving.layout.ep
    if held == 1:
        words = "one expert a rank: npu_grouped_matmul takes counts of at least two groups"
        yield Finding("error", "experts-per-rank", words, "use a smaller ep")
    if subject.launch.flag("--moe-a2a-backend") == "ascend_fuseep":
        if not runs_own_model(subject.launch):
            words = "ascend_fuseep does not pass SiTU's betas, so experts compute another function"
            yield Finding("error", "expert-function", words, "use --moe-a2a-backend deepep")
        if held % 8:
            words = f"{held} experts a rank: garbled output was reported for counts that are no multiple of 8"
            yield Finding("warning", "experts-per-rank", words, "use --moe-a2a-backend deepep")


def function(subject: Subject) -> Iterator[Finding]:
    """SGLang's own class computes SwiGLU instead of SiTU in INT4 experts without an all-to-all."""
    if subject.engine != "sglang" or runs_own_model(subject.launch) or not subject.serving:
        return
    if subject.form.startswith("w4a8") and not subject.serving.layout.uses_all_to_all and subject.device.soc != "cpu":
        words = "without an all-to-all SGLang's own model runs W4A8 experts with SwiGLU, not SiTU"
        yield Finding("error", "expert-function", words, "use --model-impl kimi_k3_npu, or --moe-a2a-backend deepep")


def expert_format(subject: Subject) -> Iterator[Finding]:
    """The SoC has kernels for experts in this format."""
    if not subject.serving or subject.device.soc == "cpu":
        return
    choice = expert_choice(subject.config, subject.serving, subject.form, subject.device, tokens=16)
    if choice.name == COMPOSED:
        reason = "; ".join(choice.refused.values())
        fix = (
            "use a W4A8 checkpoint, or convert it: kimi-k3-npu weights convert --to int4x2"
            if subject.form == "mxfp4"
            else "use the published MXFP4 checkpoint"
        )
        yield Finding("error", "format-on-soc", f"{subject.form} experts on {subject.device.soc}: {reason}", fix)


def expert_choice(config: KimiK3Config, of: Serving, form: CheckpointFormat, device: Device, tokens: int) -> Choice:
    """The kernel for a rank's experts, with weights prepared as they are after loading."""
    text, layout = config.text, of.layout
    held, inner = text.num_experts // layout.ep, text.moe_intermediate_size // layout.moe_tp
    pairs = (tokens * text.num_experts_per_token, 1) if layout.uses_all_to_all else (tokens, text.num_experts_per_token)
    visit = Visit(*pairs, held, 0, text.expert_hidden_size, inner, torch.bfloat16, device)
    if form == "mxfp4":
        return moe_experts_mxfp4.choose(Mxfp4Visit(visit, nz=True))
    if form == "int4x2":
        return moe_experts_int4_group.choose(Int4Visit(visit, prepared=True))
    return moe_experts.choose(visit) if form == "bf16" else moe_experts_w4a8.choose(Int4Visit(visit, prepared=True))

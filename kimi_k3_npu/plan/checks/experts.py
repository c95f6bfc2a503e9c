"""Checks of the routed experts: their number, their function, their format."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3_npu.ops.op import COMPOSED
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.serving import runs_own_model

#: Of a pass that no kernel would refuse for its size.
SOME_TOKENS = 16


def number(subject: Subject) -> Iterator[Finding]:
    """The experts of a rank suit the kernels."""
    if not subject.serving or subject.device.soc == "cpu":
        return
    share = Group("ep", size=subject.serving.layout.ep).part(subject.config.text.num_experts, "routed experts")
    held = share.stop - share.start
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
    row = subject.expert_kernel(SOME_TOKENS)
    if row and row.kernel == COMPOSED:
        reason = "; ".join(row.refused.values())
        fix = (
            "use a W4A8 checkpoint, or convert it: kimi-k3-npu weights convert --to int4x2"
            if subject.form == "mxfp4"
            else "use the published MXFP4 checkpoint"
        )
        yield Finding("error", "format-on-soc", f"{subject.form} experts on {subject.device.soc}: {reason}", fix)

"""Checks of the sizes of prefill passes and decode steps."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3_npu.plan.choices import LayerKernel
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.serving import runs_own_model

#: SGLang's own class sends v-up to a kernel that refuses more than 1024 tokens from this many on.
SGLANG_V_UP_TOKENS = 65536


def kernels(subject: Subject) -> Iterator[Finding]:
    """The sizes of the passes suit the kernels: none is refused for its size."""
    of = subject.serving
    if not of or subject.device.soc == "cpu":
        return
    if subject.engine == "sglang" and not runs_own_model(subject.launch) and of.chunk >= SGLANG_V_UP_TOKENS:
        words = f"a prefill pass of {of.chunk} tokens: SGLang's own model then calls a kernel that raises beyond 1024"
        yield Finding("error", "chunk", words, "lower --chunked-prefill-size, or use --model-impl kimi_k3_npu")
    for row in refused_for_size(subject):
        words = f"{row.op} of {row.tokens} tokens falls back to {row.kernel}: {'; '.join(row.refused.values())}"
        yield Finding("warning", "kernels", words, "make the pass smaller")


def refused_for_size(subject: Subject) -> Iterator[LayerKernel]:
    """The operators that a smaller pass would run on another kernel."""
    for phase, tokens in subject.passes:
        one = {(row.block, row.op, row.shape): row.kernel for row in subject.kernels(phase, 1)}
        for row in subject.kernels(phase, tokens):
            if row.kernel != one.get((row.block, row.op, row.shape), row.kernel):
                yield row


def graphs(subject: Subject) -> Iterator[Finding]:
    """The largest decode step has a graph."""
    of = subject.serving
    if of and of.graph_batches and of.phase != "prefill" and max(of.graph_batches) < of.requests:
        words = f"{of.requests} requests a replica, graphs up to {max(of.graph_batches)}: larger steps run without"
        yield Finding("warning", "graphs", words, "add the size to the graph batches")

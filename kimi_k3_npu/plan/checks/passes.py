"""Checks of the sizes of prefill passes and decode steps."""

from __future__ import annotations

from collections.abc import Iterator

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.ops.device import Device
from kimi_k3_npu.plan.finding import Finding
from kimi_k3_npu.plan.kernels import LayerKernel, Situation, layer_kernels
from kimi_k3_npu.plan.subject import Subject
from kimi_k3_npu.recipes.serving import Serving, runs_own_model

#: SGLang's own class sends v-up to a kernel that refuses more than 1024 tokens from this many on.
SGLANG_V_UP_TOKENS = 65536
#: Tokens that a replica's cache is taken to have room for, where kernels ask: 29 GB in K3.
POOL_TOKENS = 1 << 20


def kernels(subject: Subject) -> Iterator[Finding]:
    """The sizes of the passes suit the kernels: none is refused for its size."""
    of = subject.serving
    if not of or subject.device.soc == "cpu":
        return
    if subject.engine == "sglang" and not runs_own_model(subject.launch) and of.chunk >= SGLANG_V_UP_TOKENS:
        words = f"a prefill pass of {of.chunk} tokens: SGLang's own model then calls a kernel that raises beyond 1024"
        yield Finding("error", "chunk", words, "lower --chunked-prefill-size, or use --model-impl kimi_k3_npu")
    for row in refused_for_size(subject.config, of, subject.device):
        words = f"{row.op} of {row.tokens} tokens falls back to {row.kernel}: {'; '.join(row.refused.values())}"
        yield Finding("warning", "kernels", words, "make the pass smaller")


def refused_for_size(config: KimiK3Config, of: Serving, device: Device) -> list[LayerKernel]:
    """The operators that a smaller pass would run on another kernel."""
    found = []
    for tokens, phase in ((of.chunk, "prefill"), (of.decode_rows, "decode")):
        if tokens:
            one = {(row.block, row.op, row.phase, row.shape): row.kernel for row in _kernels(config, of, device, 1)}
            for row in _kernels(config, of, device, tokens):
                small = one.get((row.block, row.op, row.phase, row.shape), row.kernel)
                if row.phase in ("any", phase) and row.kernel not in (small, None):
                    found.append(row)
    return found


def _kernels(config: KimiK3Config, of: Serving, device: Device, tokens: int) -> list[LayerKernel]:
    context = max(1, min(of.context, POOL_TOKENS // tokens))
    return layer_kernels(config.text, Situation(tokens, of.layout, device, context=context))


def graphs(subject: Subject) -> Iterator[Finding]:
    """The largest decode step has a graph."""
    of = subject.serving
    if of and of.graph_batches and of.phase != "prefill" and max(of.graph_batches) < of.requests:
        words = f"{of.requests} requests a replica, graphs up to {max(of.graph_batches)}: larger steps run without"
        yield Finding("warning", "graphs", words, "add the size to the graph batches")

"""Kimi-K3 inside SGLang: `--model-impl kimi_k3_npu`.

`register` is the entry point of group `sglang.srt.plugins`. SGLang calls it in each of its processes, and only logs
what it raises; so it does nothing that can fail for a reason of ours. It places two light hooks. What they find wrong
they raise where SGLang does not catch it, and whatever keeps them from being placed is reported by `guard`.
"""

from __future__ import annotations


def register() -> None:
    """Place the hooks that notice when this implementation is asked for."""
    from kimi_k3_npu.engines.sglang.hooks import ALWAYS
    from kimi_k3_npu.engines.sglang.registry import place

    place(ALWAYS)

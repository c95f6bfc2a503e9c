"""SGLang's registry of hooks: placing ours, and whether SGLang has applied them. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kimi_k3_npu.engines.launch import IMPL
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.errors import LaunchError

#: An AROUND hook: the function it is around, then that function's arguments.
Hook = Callable[..., Any]


def place(hooks: Mapping[str, Hook]) -> None:
    """Register `hooks` with SGLang, once each. SGLang applies them after its plugins have run."""
    registry, around = engine.HookRegistry, engine.HookType.AROUND
    for target, hook in hooks.items():
        if not any(known is hook for _, known, _ in registry._hooks[target]):
            registry.register(target, hook, around)


def check_live() -> None:
    """Raise LaunchError unless SGLang has applied our hooks: it only logs the ones that it cannot apply."""
    if missing := [target for target in engine.HOOKED if target not in engine.HookRegistry._patched]:
        installed, tested = engine.SGLANG.installed(), engine.SGLANG.tested
        raise LaunchError(
            f"SGLang {installed} did not apply the hooks of {IMPL} on {', '.join(missing)}; its log says why. This "
            f"plugin was tested with SGLang {tested}"
        )


def apply() -> None:
    """Have SGLang apply what has been placed. Raises LaunchError unless it could."""
    engine.HookRegistry.apply_hooks()
    check_live()

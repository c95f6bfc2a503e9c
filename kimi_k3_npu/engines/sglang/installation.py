"""What is right and wrong with an installation of SGLang and this plugin, found by trying it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from kimi_k3_npu import envs
from kimi_k3_npu.engines import versions
from kimi_k3_npu.engines.launch import IMPL, guard
from kimi_k3_npu.engines.sglang import hooks, registry, symbols
from kimi_k3_npu.engines.versions import Finding
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops import sgl

#: Packages beside SGLang, and what each is for.
BESIDE = {
    "torch": "",
    "transformers": "",
    "torch_npu": "needed on Ascend",
    "sgl_kernel_npu": "needed by SGLang on Ascend, and by its backend for KDA",
    "deep_ep": "needed by --moe-a2a-backend deepep on Ascend",
}


def examine() -> Iterator[Finding]:
    """Every check, each after those it depends on. Imports SGLang and places the hooks in this process."""
    yield from _version()
    if symbols.SGLANG.installed() is None:
        return
    yield from _entry_point()
    yield from _guard_at_work()
    yield from _symbols()
    yield from _tried("SGLang applies the plugin's hooks", _apply_hooks)
    yield from _packages()
    yield from _tried("environment variables are known", envs.check)
    for name in envs.VARIABLES:
        if value := envs.text(name):
            yield Finding("note", f"{name}={value}")


def _version() -> Iterator[Finding]:
    found = symbols.SGLANG.installed()
    if found is None:
        yield Finding("problem", f"SGLang is not installed; tested with {symbols.SGLANG.tested}")
    elif found == symbols.SGLANG.tested:
        yield Finding("ok", f"SGLang {found}, the tested version")
    else:
        yield Finding("note", f"SGLang {found}; tested with {symbols.SGLANG.tested}")


def _entry_point() -> Iterator[Finding]:
    if reason := guard.SGLANG.left_out():
        yield Finding("problem", reason)
    else:
        yield Finding("ok", f"SGLang loads the plugin {IMPL}")


def _guard_at_work() -> Iterator[Finding]:
    if "_kimi_k3_npu_guard" in sys.modules:
        yield Finding("ok", "a launch that asks for the plugin is refused when SGLang does not run it")
    else:
        yield Finding(
            "note",
            "the guard is not at work (no kimi_k3_npu_guard.pth in this site-packages; reinstall kimi-k3-npu): should "
            f"SGLang not run the plugin, --model-impl {IMPL} runs SGLang's own class",
        )


def _symbols() -> Iterator[Finding]:
    missing = []
    for path in symbols.SYMBOLS.values():
        try:
            symbols.find(path)
        except LaunchError as error:
            missing.append(Finding("problem", str(error)))
        except Exception as error:
            missing.append(Finding("problem", f"{path} cannot be imported here: {type(error).__name__}: {error}"))
    yield from missing or [Finding("ok", f"all {len(symbols.SYMBOLS)} names of SGLang that the plugin uses exist")]


def _apply_hooks() -> None:
    symbols.find("sglang.srt.plugins:load_plugins")()
    registry.place({**hooks.ALWAYS, **hooks.WHEN_USED})
    registry.apply()


def _packages() -> Iterator[Finding]:
    yield from versions.examine(BESIDE)
    if versions.installed(sgl.PACKAGE):
        yield from _kernels()


def _kernels() -> Iterator[Finding]:
    missing = sgl.missing()
    if there := [symbol for symbol in sgl.USED if symbol not in missing]:
        yield Finding("ok", f"{sgl.PACKAGE} has {', '.join(there)}")
    for symbol, reason in missing.items():
        yield Finding("note", f"{sgl.PACKAGE} has no usable {symbol} ({reason}); basic operators take its place")


def _tried(what: str, action: Callable[[], None]) -> Iterator[Finding]:
    try:
        action()
    except Exception as error:
        yield Finding("problem", f"{type(error).__name__}: {error}")
    else:
        yield Finding("ok", what)

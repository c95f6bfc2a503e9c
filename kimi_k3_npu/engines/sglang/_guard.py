"""Refuses `--model-impl kimi_k3_npu` when the plugin that would serve it is not at work. Standard library only.

SGLang takes any string for --model-impl, only logs plugins that fail, and then runs its own class of the same
architecture. So this cannot be left to the plugin. The wheel puts this file at the top of site-packages, as
`_kimi_k3_npu_guard`, and a .pth file beside it imports it whenever Python starts. It looks at two modules of SGLang
when they are imported, and never at a launch that does not ask for kimi_k3_npu.
"""

# mypy: disable-error-code="no-untyped-def, attr-defined"

import sys

_IMPL = "kimi_k3_npu"
_ARCHITECTURE = "sglang.srt.model_loader.utils.get_model_architecture"


def _watch_loader(module):
    """The innermost function of this name only sees our implementation when no hook of ours is around it."""
    original = getattr(module, "get_model_architecture", None)
    if original is None:
        return

    def get_model_architecture(model_config, *args, **kwargs):
        if _asked_for(model_config):
            raise RuntimeError(_report("the hook on " + _ARCHITECTURE + " is not in place"))
        return original(model_config, *args, **kwargs)

    get_model_architecture.__wrapped__ = original
    module.get_model_architecture = get_model_architecture


def _watch_config(module):
    """Says the same earlier, in the process that was started, where plugins have been loaded by then."""
    config = getattr(module, "ModelConfig", None)
    if config is None:
        return
    original = config.__init__

    def __init__(self, *args, **kwargs):
        original(self, *args, **kwargs)
        if _asked_for(self) and _plugins_have_run() and not _is_hooked():
            raise RuntimeError(_report("the plugin has placed no hooks"))

    __init__.__wrapped__ = original
    config.__init__ = __init__


_WATCHED = {
    "sglang.srt.model_loader.utils": _watch_loader,
    "sglang.srt.configs.model_config": _watch_config,
}


def _asked_for(model_config):
    """A draft model is configured with the target's model_impl, and is not ours."""
    asked = getattr(model_config, "model_impl", None) == _IMPL
    return asked and not getattr(model_config, "is_draft_model", False)


def _plugins_have_run():
    return bool(getattr(sys.modules.get("sglang.srt.plugins"), "_plugins_loaded", False))


def _is_hooked():
    registry = getattr(sys.modules.get("sglang.srt.plugins.hook_registry"), "HookRegistry", None)
    return _ARCHITECTURE in getattr(registry, "_patched", ())


def _report(found):
    return (
        "--model-impl " + _IMPL + " was asked for, but " + found + ": SGLang would run its own Kimi class instead. "
        "Reason: " + why_not() + ". `kimi-k3-npu doctor sglang` checks the installation."
    )


def why_not():
    """Why the plugin's hooks are not in place in this process."""
    import os
    import traceback
    from importlib.metadata import entry_points

    entries = entry_points(group="sglang.srt.plugins", name=_IMPL)
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if not entries:
        return "no installed package offers the entry point " + _IMPL + "; reinstall kimi-k3-npu"
    if allowed and _IMPL not in [name.strip() for name in allowed.split(",")]:
        return "SGLANG_PLUGINS=" + allowed + " leaves the plugin out; add " + _IMPL + " to it, or unset it"
    for entry in entries:
        try:
            entry.load()()
        except Exception:
            return "the plugin fails to register:\n" + traceback.format_exc().rstrip() + "\n"
    if not _plugins_have_run():
        return "SGLang's plugins are not loaded in this process; call sglang.srt.plugins.load_plugins() first"
    return "SGLang could not apply the plugin's hooks; it has logged why (Failed to apply hooks)"


class _Watcher:
    """A finder that lets every other finder do the work, and looks at two modules after they are executed."""

    def find_spec(self, name, path=None, target=None):
        look = _WATCHED.get(name)
        if look is None:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _look_after(spec.loader, look)
        return spec


def _look_after(loader, look):
    execute = loader.exec_module

    def exec_module(module):
        execute(module)
        look(module)

    loader.exec_module = exec_module


sys.meta_path.insert(0, _Watcher())

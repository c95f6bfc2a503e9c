"""Refuses `--model-impl kimi_k3_npu` when the plugin that would serve it is not at work. Standard library only.

Engines take any string for --model-impl, only log plugins that fail, and then run their own class of the same
architecture. So this cannot be left to the plugin. The wheel puts this file at the top of site-packages, as
`_kimi_k3_npu_guard`, and a .pth file beside it calls `watch` whenever Python starts. It looks at the modules of
`ENGINES` when they are imported, and never at a launch that does not ask for kimi_k3_npu.
"""

# mypy: disable-error-code="no-untyped-def"

import sys

#: What `--model-impl` must say.
IMPL = "kimi_k3_npu"


class Watched:
    """How one engine loads plugins and looks model classes up. Places are written `module:name.name`.

    Args:
        name: What messages call it; in lower case, what `doctor` does.
        group: The group of entry points that its plugins are in.
        allowed: The environment variable that leaves out the plugins it does not list.
        loaded: Where it notes that it has loaded its plugins.
        load: What does that.
        lookups: The functions that find the class for a model's configuration. Our plugin's hooks go around them, so
            that a function itself sees a model of ours only when its hook is not in place.
        configured: The initialiser of that configuration: after it, the process that the user started can be told
            the same earlier, if it has loaded its plugins. Needs `hooks`.
        hooks: Where the engine notes the places (written with dots) that it has hooked.
    """

    def __init__(self, *, name, group, allowed, loaded, load, lookups, configured=None, hooks=None):
        self.name, self.group, self.allowed, self.loaded, self.load = name, group, allowed, loaded, load
        self.lookups, self.configured, self.hooks = lookups, configured, hooks

    def wrappers(self):
        """Each place to watch, and what goes around the function there."""
        yield from ((place, lambda original, place=place: self._lookup(place, original)) for place in self.lookups)
        if self.configured:
            yield self.configured, self._initialiser

    def _lookup(self, place, original):
        def lookup(*args, **kwargs):
            if any(_asks_for_us(value) for value in (*args, *kwargs.values())):
                raise RuntimeError(self.report(f"the hook on {_dotted(place)} is not in place"))
            return original(*args, **kwargs)

        return lookup

    def _initialiser(self, original):
        def __init__(config, *args, **kwargs):
            original(config, *args, **kwargs)
            if _asks_for_us(config) and self._plugins_have_run() and not self._is_hooked():
                raise RuntimeError(self.report("the plugin has placed no hooks"))

        return __init__

    def _plugins_have_run(self):
        return bool(_found(self.loaded))

    def _is_hooked(self):
        return all(_dotted(place) in (_found(self.hooks) or ()) for place in self.lookups)

    def report(self, found):
        return (
            f"--model-impl {IMPL} was asked for, but {found}: {self.name} would run its own Kimi class instead. "
            f"Reason: {self.why_not()}. `kimi-k3-npu doctor {self.name.lower()}` checks the installation."
        )

    def why_not(self):
        """Why the plugin's hooks are not in place in this process."""
        return self.left_out() or self._fails() or self._not_hooked()

    def left_out(self):
        """Why the engine does not load the plugin at all, None if it does."""
        import os
        from importlib.metadata import entry_points

        if not entry_points(group=self.group, name=IMPL):
            return f"no installed package offers the entry point {IMPL} in group {self.group}; reinstall kimi-k3-npu"
        allowed = os.environ.get(self.allowed, "")
        names = [name.strip() for name in allowed.split(",") if name.strip()]
        if names and IMPL not in names:
            return f"{self.allowed}={allowed} leaves the plugin out; add {IMPL} to it, or unset it"
        return None

    def _fails(self):
        """What keeps the plugin from registering, None if nothing does. The traceback goes to the log."""
        import logging
        from importlib.metadata import entry_points

        for entry in entry_points(group=self.group, name=IMPL):
            try:
                entry.load()()
            except Exception as error:
                logging.getLogger(IMPL).exception("the plugin of %s fails to register", self.name)
                words = " ".join(f"{type(error).__name__}: {error}".split())
                return f"the plugin fails to register: {words} (the log has the traceback, above this)"
        return None

    def _not_hooked(self):
        if not self._plugins_have_run():
            return f"{self.name}'s plugins are not loaded in this process; call {self.load} first"
        return f"{self.name} could not apply the plugin's hooks; its log says why"


SGLANG = Watched(
    name="SGLang",
    group="sglang.srt.plugins",
    allowed="SGLANG_PLUGINS",
    loaded="sglang.srt.plugins:_plugins_loaded",
    load="sglang.srt.plugins.load_plugins()",
    lookups=["sglang.srt.model_loader.utils:get_model_architecture"],
    configured="sglang.srt.configs.model_config:ModelConfig.__init__",
    hooks="sglang.srt.plugins.hook_registry:HookRegistry._patched",
)

ENGINES = [SGLANG]


def misspelt(model_impl):
    """What is wrong with a --model-impl that is ours but for its spelling, None with any other.

    An engine would take it for its own class.
    """
    if not isinstance(model_impl, str) or model_impl == IMPL or _letters(model_impl) != _letters(IMPL):
        return None
    return f"--model-impl {model_impl}: the name of this implementation is {IMPL}"


def _letters(name):
    return [letter for letter in name.lower() if letter.isalnum()]


def _asks_for_us(config):
    """A draft model is configured with the target's model_impl, and is not ours."""
    asked = getattr(config, "model_impl", None)
    if asked is None or getattr(config, "is_draft_model", False):
        return False
    if words := misspelt(asked):
        raise RuntimeError(words)
    return asked == IMPL


def _dotted(place):
    return place.replace(":", ".")


def _found(place):
    """What is at `place` in this process, None if nothing is."""
    module, _, names = place.partition(":")
    found = sys.modules.get(module)
    for name in names.split("."):
        found = getattr(found, name, None)
    return found


class Watcher:
    """A finder that lets every other finder do the work, and puts wrappers into modules once they are executed."""

    def __init__(self, engines):
        self._wrappers: dict = {}  # module -> names in it, and what goes around each
        for place, wrapper in (pair for engine in engines for pair in engine.wrappers()):
            module, _, names = place.partition(":")
            self._wrappers.setdefault(module, []).append((names, wrapper))

    def find_spec(self, name, path=None, target=None):
        if name not in self._wrappers:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._wrap_after(spec.loader, self._wrappers[name])
        return spec

    def _wrap_after(self, loader, wrappers):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            for names, wrapper in wrappers:
                _wrap(module, names, wrapper)

        loader.exec_module = exec_module


def _wrap(module, names, wrapper):
    """What another version of the engine does not have is left alone."""
    *owners, name = names.split(".")
    owner = module
    for each in owners:
        owner = getattr(owner, each, None)
    original = getattr(owner, name, None) if owner is not None else None
    if original is None:
        return
    wrapped = wrapper(original)
    wrapped.__name__, wrapped.__wrapped__ = name, original
    setattr(owner, name, wrapped)


def watch():
    """Look at the engines' modules from now on, as they are imported. Python reads a .pth of a venv twice."""
    if not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher(ENGINES))

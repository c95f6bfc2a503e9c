"""The guard over the modules of an engine that is made up for the test: what it asks of an engine is a row of data."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_k3_npu.engines import guard
from kimi_k3_npu.engines.launch import is_ours
from kimi_k3_npu.errors import LaunchError

ROW = guard.Watched(
    name="Motor",
    group="motor.plugins",
    allowed="MOTOR_PLUGINS",
    loaded="motor.plugins:done",
    load="motor.plugins.load()",
    lookups=["motor.registry:Registry.find", "motor.registry:Registry.look"],
    configured="motor.registry:Config.__init__",
    hooks="motor.plugins:hooked",
)

REGISTRY = """
class Config:
    def __init__(self, model_impl):
        self.model_impl = model_impl

class Registry:
    def find(self, names, config):
        return "theirs"
"""


@pytest.fixture
def motor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Its modules `registry` and `plugins`, imported while the guard looks; one of its lookups is gone."""
    (tmp_path / "motor").mkdir()
    files = {"__init__": "", "registry": REGISTRY, "plugins": "done, hooked = False, set()"}
    for name, code in files.items():
        (tmp_path / "motor" / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [guard.Watcher([ROW]), *sys.meta_path])
    monkeypatch.delenv("MOTOR_PLUGINS", raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(f"motor.{name}") for name in ("plugins", "registry")})
    for name in [name for name in sys.modules if name.split(".")[0] == "motor"]:
        del sys.modules[name]


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a plugin whose entry point is the attribute of this test module."""

    def install(attribute: str) -> None:
        entry = EntryPoint(guard.IMPL, f"{__name__}:{attribute}", ROW.group)
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **asked: [entry])
        monkeypatch.setattr(EntryPoint, "load", lambda self: globals()[attribute])

    return install


def works() -> None: ...


def breaks() -> None:
    raise OSError("no such\n  device")


def found(motor: Any, config: Any) -> str:
    return motor.registry.Registry().find(["Kimi"], config=config)


def test_it_looks_once_however_often_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [finder for finder in sys.meta_path if not isinstance(finder, guard.Watcher)]
    monkeypatch.setattr(sys, "meta_path", [*others])
    guard.watch()
    guard.watch()
    assert [type(finder) for finder in sys.meta_path] == [guard.Watcher, *map(type, others)]


def test_another_implementation_is_looked_up_as_ever(motor: Any) -> None:
    for impl in ("auto", "motor", None, 3):
        assert found(motor, motor.registry.Config(impl)) == "theirs"
    assert found(motor, SimpleNamespace(model_impl=guard.IMPL, is_draft_model=True)) == "theirs"


def test_ours_is_refused_in_one_line_that_says_why(motor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = motor.registry.Config(guard.IMPL)
    with pytest.raises(RuntimeError) as refusal:
        found(motor, config)
    assert str(refusal.value) == (
        "--model-impl kimi_k3_npu was asked for, but the hook on motor.registry.Registry.find is not in place: Motor "
        "would run its own Kimi class instead. Reason: no installed package offers the entry point kimi_k3_npu in "
        "group motor.plugins; reinstall kimi-k3-npu. `kimi-k3-npu doctor motor` checks the installation."
    )


def test_each_reason(motor: Any, offer: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    offer("works")
    monkeypatch.setenv("MOTOR_PLUGINS", "a, b")
    assert ROW.why_not() == "MOTOR_PLUGINS=a, b leaves the plugin out; add kimi_k3_npu to it, or unset it"
    monkeypatch.setenv("MOTOR_PLUGINS", "a, kimi_k3_npu")
    assert ROW.left_out() is None
    assert ROW.why_not() == "Motor's plugins are not loaded in this process; call motor.plugins.load() first"
    motor.plugins.done = True
    assert ROW.why_not() == "Motor could not apply the plugin's hooks; its log says why"


def test_the_traceback_of_a_plugin_that_fails_goes_to_the_log(
    motor: Any, offer: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    offer("breaks")
    with caplog.at_level(logging.ERROR):
        assert ROW.why_not() == (
            "the plugin fails to register: OSError: no such device (the log has the traceback, above this)"
        )
    (record,) = caplog.records
    assert record.getMessage() == "the plugin of Motor fails to register"
    assert record.exc_info
    assert "in breaks" in caplog.text


def test_a_configuration_is_refused_once_plugins_have_run_without_hooks(motor: Any) -> None:
    motor.plugins.done = True
    with pytest.raises(RuntimeError, match="but the plugin has placed no hooks: Motor would run"):
        motor.registry.Config(guard.IMPL)
    motor.plugins.hooked |= {"motor.registry.Registry.find", "motor.registry.Registry.look"}
    assert motor.registry.Config(guard.IMPL).model_impl == guard.IMPL


@pytest.mark.parametrize("spelling", ["kimi-k3-npu", "KIMI_K3_NPU", "KimiK3NPU", "kimi_k3-npu "])
def test_a_misspelt_name_is_refused_with_and_without_the_plugin(motor: Any, spelling: str) -> None:
    words = f"--model-impl {spelling}: the name of this implementation is kimi_k3_npu"
    with pytest.raises(LaunchError, match=f"^{words}$"):
        is_ours(spelling)
    with pytest.raises(RuntimeError, match=f"^{words}$"):
        found(motor, SimpleNamespace(model_impl=spelling))


@pytest.mark.parametrize(
    ("model_impl", "ours"), [("kimi_k3_npu", True), ("kimi_k3", False), ("", False), (None, False)]
)
def test_other_names_are_not_ours(model_impl: str | None, ours: bool) -> None:
    assert is_ours(model_impl) is ours

"""Naming an NPU, detecting one, and the environment variables that overrule detection."""

import importlib
import types

import pytest

from kimi_k3_npu import envs
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops import device
from kimi_k3_npu.ops.device import Cann, Device, assume, current, detect, parse_cann, parse_soc


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch):
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "soc"),
    [
        ("a2", "a2"),
        ("A3", "a3"),
        ("cpu", "cpu"),
        ("Ascend910B3", "a2"),
        ("Ascend910B4-1", "a2"),
        ("Ascend910_9391", "a3"),
        ("Ascend910_9589", "a5"),
        ("Ascend950PR_9589", "a5"),
    ],
)
def test_soc_names(text: str, soc: str):
    assert parse_soc(text) == soc


@pytest.mark.parametrize("text", ["a4", "", "Ascend910A", "Ascend910B", "Ascend310P3", "cuda"])
def test_unknown_soc_names_are_refused_with_what_is_known(text: str):
    with pytest.raises(LaunchError, match=r"not a supported NPU.*Ascend910_93xx"):
        parse_soc(text)


@pytest.mark.parametrize(
    ("version", "parsed"),
    [
        ("9.1", Cann(9, 1, 0)),
        ("8.5.0", Cann(8, 5, 0)),
        ((9, 2), Cann(9, 2, 0)),
        ((8, 5, 1), Cann(8, 5, 1)),
        (Cann(9, 1), Cann(9, 1, 0)),
        ("8.3.RC1", Cann(8, 3, 0, released=False)),
        ("8.0.RC3.alpha002", Cann(8, 0, 0, released=False)),
        ("9.2.0-beta.1", Cann(9, 2, 0, released=False)),
    ],
)
def test_cann_versions(version: str | tuple[int, ...], parsed: Cann):
    assert parse_cann(version) == parsed


def test_cann_versions_are_ordered_and_a_pre_release_comes_first():
    versions = ["8.3.RC1", "8.3.0", "8.5.0", "9.1", "9.2.RC1", "9.2", "9.10"]
    assert sorted(reversed(versions), key=parse_cann) == versions


@pytest.mark.parametrize("version", ["", "9", "nine", "9.1.x", "v9.1", (9,), (9, 1, 0, 0), 9.1])
def test_other_cann_versions_are_refused(version: object):
    with pytest.raises(LaunchError, match="not a CANN version"):
        parse_cann(version)  # type: ignore[arg-type]


def test_arguments_are_enough_to_plan_for_an_npu_that_is_not_here():
    planned = detect(soc="a3", cann="9.1", packages=["sgl_kernel_npu"])
    assert planned == Device("a3", Cann(9, 1, 0), frozenset({"sgl_kernel_npu"}))


@pytest.mark.parametrize(("code", "soc"), [(220, "a2"), (225, "a2"), (250, "a3"), (260, "a5")])
def test_detection_asks_torch_npu(fake_npu: types.SimpleNamespace, code: int, soc: str):
    fake_npu.code = code
    assert detect(packages=()) == Device(soc, Cann(9, 1, 0))


def test_an_unknown_code_is_resolved_by_name(fake_npu: types.SimpleNamespace):
    fake_npu.code, fake_npu.name = 999, "Ascend950DT_9591"
    assert detect().soc == "a5"
    fake_npu.name = "Ascend310P3"
    with pytest.raises(LaunchError, match="Ascend310P3"):
        detect()


def test_a_cann_that_reports_no_version_must_be_named(fake_npu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    fake_npu.cann = ""
    with pytest.raises(LaunchError, match="KIMI_K3_NPU_CANN"):
        detect()
    monkeypatch.setenv(envs.CANN, "8.0.RC3")
    assert detect().cann == Cann(8, 0, 0, released=False)


def test_arguments_win_over_variables_and_variables_over_detection(
    fake_npu: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(envs.SOC, "a5")
    monkeypatch.setenv(envs.CANN, "9.2")
    assert detect(packages=()) == Device("a5", Cann(9, 2, 0))
    assert detect(soc="a2", cann="8.5", packages=()) == Device("a2", Cann(8, 5, 0))


def test_without_an_npu_the_device_is_the_cpu(fake_npu: types.SimpleNamespace):
    fake_npu.available = False
    assert detect(packages=()) == Device("cpu")


def test_a_broken_torch_npu_is_not_taken_for_a_cpu(monkeypatch: pytest.MonkeyPatch):
    def cannot(name: str) -> types.ModuleType:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", cannot)
    with pytest.raises(LaunchError, match=r"libhccl\.so.*set_env\.sh"):
        detect()


@pytest.mark.parametrize(("soc", "cann"), [("a3", None), ("cpu", Cann(9, 1))])
def test_a_device_without_a_cann_version_or_a_cpu_with_one_is_refused(soc: device.Soc, cann: Cann | None):
    with pytest.raises(LaunchError, match="has a CANN version"):
        Device(soc, cann)


def test_an_assumed_device_is_current_inside_its_block():
    a3 = Device("a3", Cann(9, 1))
    with assume(a3):
        assert current() == a3
    assert current() == detect()


def test_only_an_npu_is_before_a_cann_version():
    assert Device("a3", Cann(9, 1)).before(Cann(9, 2))
    assert not Device("a3", Cann(9, 2)).before(Cann(9, 2))
    assert not Device("cpu").before(Cann(9, 2))


def test_misspelt_variables_are_refused_with_what_was_meant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_NPU_VUP", "bmm")
    monkeypatch.setenv("KIMI_K3_NPU_SOCK", "a3")
    with pytest.raises(LaunchError, match=r"(?s)KIMI_K3_NPU_SOCK; did you mean KIMI_K3_NPU_SOC.*KIMI_K3_NPU_V_UP"):
        detect()


def test_variables_are_documented_and_nothing_else_can_be_read():
    assert all(name.startswith(envs.PREFIX) and text.endswith(".") for name, text in envs.VARIABLES.items())
    with pytest.raises(KeyError):
        envs.text("KIMI_K3_NPU_OTHER")

"""What the installed torch_npu lacks of the operators that kernels call: asked for once, on an NPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kimi_k3_npu import envs
from kimi_k3_npu.ops import device, schemas
from kimi_k3_npu.ops.device import Device, detect, parse_cann

#: Operators that a made-up older torch_npu is without, and arguments of others.
GONE = {"npu_dynamic_mx_quant", "npu_quant_matmul(output_dtype)", "npu_grouped_matmul(weight_dtype)"}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in envs.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def older(fake_npu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An NPU with a torch_npu whose operators are without GONE."""
    operators = SimpleNamespace()
    for name, arguments in schemas.CALLED.items():
        taken = [SimpleNamespace(name=argument) for argument in arguments if f"{name}({argument})" not in GONE]
        overload = SimpleNamespace(_schema=SimpleNamespace(arguments=taken))
        if name not in GONE:
            setattr(operators, name, SimpleNamespace(default=overload))
    monkeypatch.setattr(torch.ops, "npu", operators)
    monkeypatch.setattr(device, "OPTIONAL_PACKAGES", ())
    return fake_npu


def test_an_npu_is_asked_for_its_schemas(older: SimpleNamespace) -> None:
    assert detect() == Device("a3", parse_cann("9.1.0"), missing=frozenset(GONE))


def test_it_is_asked_although_it_has_been_named(older: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SOC, "a2")
    assert detect() == Device("a2", parse_cann("9.1.0"), missing=frozenset(GONE))


def test_an_operator_without_its_usual_overload_is_lacking(
    older: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops.npu, "npu_rms_norm", SimpleNamespace(out=None))
    assert detect().missing == GONE | {"npu_rms_norm"}


def test_a_plan_lacks_nothing(older: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no NPU, or none is wanted, or what is installed is given."""
    assert detect(soc="a3", cann="9.1", packages=()).missing == frozenset()
    assert detect(soc="cpu").missing == frozenset()
    older.available = False
    assert detect(soc="a3", cann="9.1").missing == frozenset()
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    assert detect(soc="a3", cann="9.1").missing == frozenset()


def test_a_torch_npu_that_cannot_be_imported_is_not_asked_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(name: str) -> None:
        raise OSError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(device, "OPTIONAL_PACKAGES", ())
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(device.importlib, "import_module", cannot)
    assert detect(soc="a3", cann="9.1") == Device("a3", parse_cann("9.1"))

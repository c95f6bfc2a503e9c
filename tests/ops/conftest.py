"""What several tests of this folder stand on."""

import importlib.machinery
import sys
import types

import pytest


@pytest.fixture
def fake_npu(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A torch_npu that reports one Ascend910_9391 under CANN 9.1.0; change what it reports by assignment."""
    reports = types.SimpleNamespace(available=True, code=250, name="Ascend910_9391", cann="9.1.0")
    module = types.ModuleType("torch_npu")
    module.npu = types.SimpleNamespace(
        is_available=lambda: reports.available,
        get_soc_version=lambda: reports.code,
        get_device_name=lambda: reports.name,
        utils=types.SimpleNamespace(get_cann_version=lambda: reports.cann),
    )
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", loader=None)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    return reports

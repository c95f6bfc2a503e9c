"""Which kernels the installed sgl_kernel_npu has: its names differ from version to version."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch

from kimi_k3_npu.engines.sglang.installation import _kernels
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops import kda, kda_chunk, residual, sgl, situ, v_up
from kimi_k3_npu.ops.device import Device, detect, parse_cann

HALF = torch.bfloat16
GONE = {sgl.MIX_FUSED, sgl.KDA_GATE, sgl.KDA_CHUNK, sgl.BATCH_MATMUL_TRANSPOSE}


@pytest.fixture
def another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has situ_and_mul, another name for mix_fused, no module of the gate, and registers no operators."""
    modules = {
        sgl.PACKAGE: {},
        f"{sgl.PACKAGE}.activation.situ": {"situ_and_mul": lambda *_: "situ"},
        f"{sgl.PACKAGE}.kimi_k3.attn_residual": {"mix": lambda *_: None},
    }
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None)
        monkeypatch.setitem(sys.modules, name, module)


def reasons_against(device: Device) -> dict[str, str | None]:
    return {
        sgl.SITU_AND_MUL: situ.refuse_fused(situ.Situ(4, HALF, device)),
        sgl.MIX_FUSED: residual.refuse_fused(residual.Mix(4, 2, 7168, HALF, True, device)),
        sgl.KDA_GATE: kda.refuse_gate(kda.Gate(4, 6, 128, HALF, device)),
        sgl.KDA_CHUNK: kda_chunk.refuse_chunk(kda_chunk.Chunked(4, 1, False, 6, 128, 128, HALF, device)),
        sgl.BATCH_MATMUL_TRANSPOSE: v_up.refuse_batch_matmul_transpose(v_up.Bmm(4, 6, 512, 128, HALF, True, device)),
    }


def test_a_kernel_that_the_version_lacks_is_no_candidate(another_version: None) -> None:
    device = detect(soc="a3", cann="9.1")
    assert device == Device("a3", parse_cann("9.1"), frozenset({sgl.PACKAGE}), frozenset(GONE))
    assert reasons_against(device) == {
        symbol: f"the installed sgl_kernel_npu has no usable {symbol}" if symbol in GONE else None
        for symbol in sgl.USED
    }
    assert sgl.kernel(sgl.SITU_AND_MUL)() == "situ"
    with pytest.raises(LaunchError, match=r"no usable kimi_k3\.attn_residual\.mix_fused .*has no attribute"):
        sgl.kernel(sgl.MIX_FUSED)


def test_a_package_that_is_assumed_has_all(another_version: None) -> None:
    """As for a plan made on another machine."""
    device = detect(soc="a3", cann="9.1", packages=[sgl.PACKAGE])
    assert set(reasons_against(device).values()) == {None}


def test_doctor_lists_what_is_there_and_what_is_not(another_version: None) -> None:
    ok, *notes = _kernels()
    assert (ok.kind, ok.text) == ("ok", "sgl_kernel_npu has activation.situ.situ_and_mul")
    assert {note.kind for note in notes} == {"note"}
    for symbol, note in zip(sgl.USED[1:], notes, strict=True):
        assert note.text.startswith(f"sgl_kernel_npu has no usable {symbol} (")
        assert note.text.endswith("); basic operators take its place")


def test_a_package_that_cannot_be_imported_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, sgl.PACKAGE, None)
    assert set(sgl.missing()) == set(sgl.USED)

"""`doctor` without an engine: the versions here, and whether they are tested ones."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from kimi_k3_npu.cli.app import app
from kimi_k3_npu.engines import versions
from kimi_k3_npu.ops import schemas

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("found", "code", "lines"),
    [
        (
            {"torch": "2.10.0+cpu", "transformers": "5.12.0"},
            0,
            [
                "ok       torch 2.10.0+cpu, a tested version",
                "ok       transformers 5.12.0, a tested version",
                "note     torch_npu is not installed; needed on Ascend",
            ],
        ),
        (
            {"torch": "2.11.0", "transformers": "5.14.1", "torch_npu": "2.10.0.post4"},
            1,
            [
                "note     torch 2.11.0; tested with 2.10.0 and 2.13.0",
                "note     transformers 5.14.1; tested with 5.12.0 and 5.19.0",
                "note     torch_npu 2.10.0.post4; tested with 2.13.0",
                "problem  torch_npu 2.10.0.post4 is for torch 2.10, found torch 2.11.0",
            ],
        ),
    ],
)
def test_doctor(found: dict[str, str], code: int, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", found.get)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == code
    assert result.output.splitlines() == lines


def test_doctor_lists_what_torch_npu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.10.0", "transformers": "5.12.0", "torch_npu": "2.10.0"}
    monkeypatch.setattr(versions, "installed", here.get)
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    monkeypatch.setattr(schemas, "missing", lambda: iter(["npu_dynamic_mx_quant", "npu_quant_matmul(output_dtype)"]))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert result.output.splitlines()[2:] == [
        "note     torch_npu 2.10.0; tested with 2.13.0",
        "note     torch_npu 2.10.0 has no npu_dynamic_mx_quant; other kernels take the place of those that need it",
        "note     torch_npu 2.10.0 has no npu_quant_matmul(output_dtype); other kernels take the place of those that "
        "need it",
    ]


def test_doctor_says_that_it_cannot_look(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"torch": "2.13.0", "transformers": "5.19.0", "torch_npu": "2.13.0"}
    monkeypatch.setattr(versions, "installed", here.get)
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    *_, line = CliRunner().invoke(app, ["doctor"]).output.splitlines()
    assert line.startswith("note     torch_npu 2.13.0 cannot be imported (import of torch_npu halted")
    assert line.endswith("), so its operators are not looked at")


def test_tested_is_what_the_lock_files_hold() -> None:
    files = ["oldest", "core", "npu"]
    lines = [line for name in files for line in (ROOT / f"requirements/{name}.txt").read_text("utf-8").splitlines()]
    for name, tested in versions.TESTED.items():
        prefix = f"{name.replace('_', '-')}=="
        assert tuple(line.removeprefix(prefix) for line in lines if line.startswith(prefix)) == tested

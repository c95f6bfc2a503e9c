"""`kimi-k3-npu selftest` where there is no NPU: on emulated operators, at Kimi-K3's sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from kimi_k3_npu.cli.selftest import Machine, Result, run
from kimi_k3_npu.ops import experts
from kimi_k3_npu.ops.device import Device, parse_cann
from kimi_k3_npu.ops.op import OPS, npu_operators
from tests.npu.emulation import fresh, install, with_sgl_kernel_npu
from tests.npu.emulation.weights import nz_tiles
from tests.npu.on_cpu import on_cpu

A3 = Device("a3", parse_cann("9.1"), frozenset({"sgl_kernel_npu"}))


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., list[Result]]]:
    """The results of an operator's cases on an emulated A3, or A5 where the kernel needs one."""
    install()
    fresh()
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)
    monkeypatch.setattr(experts, "is_nz", lambda weight: nz_tiles(weight) is not None)
    with with_sgl_kernel_npu():
        yield lambda op, tokens=16: list(run(Machine(A3, "cpu", on_cpu), [tokens], attn_tp=16, only=op))


#: Every kernel that a case leads to.
KERNELS = {
    "add_rms_norm": ["npu_add_rms_norm"],
    "as_nz": ["npu_format_cast"],
    "causal_attention": ["fia_v2_expanded"],
    "dynamic_quant_int8": ["npu_dynamic_quant"],
    "kda_chunk": ["sgl_chunk_kda_fwd", "composed"],
    "kda_gate": ["sgl_kda_gate", "composed"],
    "latent_attention": ["fia_v2_absorbed"],
    "mix_residuals": ["sgl_mix_fused", "composed"],
    "moe_experts": ["grouped_matmul"],
    "moe_experts_int4_group": ["grouped_matmul_int4"],
    "moe_experts_mxfp4": ["composed", "grouped_matmul_mxfp4"],
    "moe_experts_w4a8": ["grouped_matmul_w4a8"],
    "q_absorb": ["transpose_batchmatmul"],
    "rms_norm": ["npu_rms_norm"],
    "route": ["npu_moe_gating_top_k"],
    "situ_and_mul": ["sgl_situ_and_mul", "composed"],
    "v_up": ["transpose_batchmatmul", "transpose_batchmatmul_head_major", "batch_matmul_transpose", "bmm"],
    "w8a8_linear": ["npu_quant_matmul"],
}


def test_every_kernel_is_tried():
    assert set(KERNELS) == set(npu_operators())


@pytest.mark.parametrize("op", KERNELS)
def test_every_kernel_passes(results: Callable, op: str):
    found = results(op)
    assert [str(result) for result in found if result.problem] == []
    assert list(dict.fromkeys(result.kernel for result in found)) == KERNELS[op]
    assert all(result.seconds is None for result in found)


def test_a_wrong_kernel_fails(results: Callable, monkeypatch: pytest.MonkeyPatch):
    right = OPS["rms_norm"].npu
    monkeypatch.setattr(OPS["rms_norm"], "npu", lambda *arguments: right(*arguments) * 1.02)
    (first, second) = results("rms_norm")
    assert first.problem.startswith("more than is explained by: both sides compute in fp32")
    assert 0.015 < first.error < 0.025
    assert second.problem
    assert "FAIL" in str(first)


def test_what_a_device_says_is_the_result_of_its_kernel(results: Callable, monkeypatch: pytest.MonkeyPatch):
    def broken(*arguments: object) -> torch.Tensor:
        raise RuntimeError("507899: aicore exception\nstack")

    monkeypatch.setattr(OPS["rms_norm"], "npu", broken)
    assert {result.problem for result in results("rms_norm")} == {"RuntimeError: 507899: aicore exception"}


def test_the_command(stand_in: bool):
    if not stand_in:
        pytest.skip("CANN is installed here")
    command = [sys.executable, "-m", "kimi_k3_npu", "selftest", "--tokens", "3", "--op", "route"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *_, first, line, verdict = done.stdout.splitlines()  # torch_npu warns that CANN is missing
    assert first.startswith("NO NPU HERE: on emulated operators")
    assert line.split()[:2] == ["route", "npu_moe_gating_top_k"]
    assert line.endswith("pass")
    assert verdict == "all passed"
    command[-1] = "routes"
    assert "no operator 'routes'" in subprocess.run(command, capture_output=True, text=True).stderr

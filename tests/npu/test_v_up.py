"""v-up and q absorption on an NPU: at Kimi-K3's sizes through the real torch_npu, in numbers on emulated operators."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.op import CHOSEN
from kimi_k3_npu.ops.q_absorb import q_absorb, select_q_absorb
from kimi_k3_npu.ops.v_up import batch_matmul_transpose, select_v_up, token_major, v_up
from tests.npu.emulation import calls, fresh, install, with_sgl_kernel_npu

HEADS, LATENT, NOPE, VALUE = 96, 512, 128, 128
ATTN_TP = [1, 2, 4, 8, 16]
TOKENS = [0, 1, 16, 1024, 1025, 8192, 65536]

#: The operator behind each candidate, as emulated; None where it is torch's own.
OPERATOR = {
    "transpose_batchmatmul": "npu_transpose_batchmatmul",
    "transpose_batchmatmul_head_major": "npu_transpose_batchmatmul",
    "batch_matmul_transpose": "batch_matmul_transpose",
    "bmm": None,
}


def npu(soc: str = "a3", cann: str = "9.1") -> Device:
    return Device(soc, parse_cann(cann), frozenset({"sgl_kernel_npu"}))


@pytest.fixture(autouse=True)
def emulated_operators(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)
    install()
    fresh()
    CHOSEN.clear()
    with with_sgl_kernel_npu():
        yield


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("attn_tp", ATTN_TP)
@pytest.mark.parametrize(("soc", "cann"), [("a2", "8.5"), ("a3", "9.1"), ("a3", "9.2"), ("a5", "9.1")])
def test_contract_at_full_size(soc: str, cann: str, attn_tp: int, tokens: int):
    heads = HEADS // attn_tp
    options = {"dtype": torch.bfloat16, "soc": soc, "cann": cann}
    with FakeTensorMode(), assume(npu(soc, cann)):
        latent = torch.empty(tokens, heads, LATENT, dtype=torch.bfloat16, device="npu")
        out = v_up.npu(latent, torch.empty(heads, LATENT, VALUE, dtype=torch.bfloat16, device="npu"))
        query = torch.empty(tokens, heads, NOPE, dtype=torch.bfloat16, device="npu")
        absorbed = q_absorb.npu(query, torch.empty(heads, NOPE, LATENT, dtype=torch.bfloat16, device="npu"))
    assert (out.shape, out.dtype, out.device.type) == ((tokens, heads, VALUE), torch.bfloat16, "npu")
    assert (absorbed.shape, absorbed.dtype, absorbed.device.type) == ((tokens, heads, LATENT), torch.bfloat16, "npu")
    planned = {
        ("v_up", select_v_up(tokens, heads, LATENT, VALUE, **options).name): 1,
        ("q_absorb", select_q_absorb(tokens, heads, NOPE, LATENT, **options).name): 1,
    }
    assert dict(CHOSEN) == (planned if tokens else {})


@pytest.mark.parametrize("name", OPERATOR)
def test_contract_of_every_kernel(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_NPU_V_UP", name)
    with FakeTensorMode(), assume(npu()):
        x = torch.empty(16, 6, LATENT, dtype=torch.bfloat16, device="npu")
        out = v_up.npu(x, torch.empty(6, LATENT, VALUE, dtype=torch.bfloat16, device="npu"))
    assert (out.shape, out.dtype, out.device.type) == ((16, 6, VALUE), torch.bfloat16, "npu")
    assert dict(CHOSEN) == {("v_up", name): 1}


@pytest.mark.parametrize("op", ["v_up", "q_absorb"])
def test_the_dispatcher_has_the_kernel_for_npu_tensors(op: str):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"kimi_k3::{op}", "PrivateUse1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 16, 1024])
@pytest.mark.parametrize("name", OPERATOR)
def test_numbers_of_every_kernel(name: str, tokens: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_NPU_V_UP", name)
    x, w = torch.randn(tokens, 6, LATENT, dtype=dtype), torch.randn(6, LATENT, VALUE, dtype=dtype)
    with assume(npu()):
        out = v_up.npu(x, w)
    want = torch.einsum("mbk,bkn->mbn", x.float(), w.float()).to(dtype)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)  # bmm may round its partial sums to dtype
    assert out.is_contiguous()
    assert calls == ({OPERATOR[name]: 1} if OPERATOR[name] else {})


@pytest.mark.parametrize("name", [kernel.name for kernel in q_absorb.kernels])
def test_numbers_of_q_absorption(name: str):
    q, w = torch.randn(16, 6, NOPE, dtype=torch.bfloat16), torch.randn(6, NOPE, LATENT, dtype=torch.bfloat16)
    launch = next(kernel.launch for kernel in q_absorb.kernels if kernel.name == name)
    with assume(npu()):
        out = launch(q, w)
    want = torch.einsum("mbn,bnr->mbr", q.float(), w.float()).bfloat16()
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("candidate", v_up.kernels, ids=OPERATOR)
def test_a_weight_view_gives_what_its_copy_gives(candidate):
    view = torch.randn(6, VALUE, LATENT, dtype=torch.bfloat16).transpose(1, 2)
    x = torch.randn(16, 8, LATENT, dtype=torch.bfloat16)[:, :6]  # without the heads that attention was padded with
    with assume(npu()):
        out = candidate.launch(x, view)
        fresh()
        torch.testing.assert_close(out, candidate.launch(x.contiguous(), view.contiguous()), rtol=0, atol=0)


def test_a_weight_view_never_reaches_the_kernel_that_ignores_strides():
    view = torch.randn(6, VALUE, 520, dtype=torch.bfloat16).transpose(1, 2)
    with assume(npu()):
        v_up.npu(torch.randn(16, 6, 520, dtype=torch.bfloat16), view)
        v_up.npu(torch.randn(16, 6, 520, dtype=torch.bfloat16), view.contiguous())
    assert dict(CHOSEN) == {("v_up", "bmm"): 1, ("v_up", "batch_matmul_transpose"): 1}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_is_chosen_runs_within_the_limits_of_the_device(data: st.DataObject):
    """Emulated operators raise outside their documented limits, which are written down apart from the selector's."""
    fresh()  # another model, another process: the tiling table may hold its shapes
    tokens = data.draw(st.sampled_from([0, 1, 3, 1024, 1025]))
    heads = data.draw(st.sampled_from([1, 3, 128]))
    K, N = data.draw(st.sampled_from([(128, 128), (512, 128), (130, 128), (128, 130)]))
    device = npu(data.draw(st.sampled_from(["a2", "a3", "a5"])), data.draw(st.sampled_from(["8.5", "9.1", "9.2"])))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    w = torch.ones(heads, K, N, dtype=dtype)
    if data.draw(st.booleans()):
        w = w.mT.contiguous().mT
    with assume(device):
        out = v_up.npu(torch.ones(min(tokens, 40 if heads == 128 else tokens), heads, K, dtype=dtype), w)
    assert (out == K).all()


def test_head_major_is_what_runs_when_the_product_is_too_large():
    x, w = torch.ones(2, 128, LATENT, dtype=torch.bfloat16), torch.ones(128, LATENT, VALUE, dtype=torch.bfloat16)
    with assume(npu()):
        assert (v_up.npu(x, w) == LATENT).all()
        with pytest.raises(RuntimeError, match=r"K\*B = 65536, must be in \[1, 65536\)"):
            token_major(x, w)
    assert dict(CHOSEN) == {("v_up", "transpose_batchmatmul_head_major"): 1}


def test_one_layer_would_break_batch_matmul_transpose_if_q_absorption_took_it_too():
    q, w_q = torch.ones(4, 6, NOPE, dtype=torch.bfloat16), torch.ones(6, NOPE, LATENT, dtype=torch.bfloat16)
    with assume(npu()):
        batch_matmul_transpose(torch.ones(4, 6, LATENT).bfloat16(), torch.ones(6, LATENT, VALUE).bfloat16())
        with pytest.raises(RuntimeError, match="the tiling of m = 4 is"):
            batch_matmul_transpose(q, w_q)

"""Which kernel v-up and q absorption take, with the reasons, and what they compute."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops.device import Cann, Device, assume
from kimi_k3_npu.ops.op import CHOSEN, OPS, Kernel, choose, npu_operators
from kimi_k3_npu.ops.q_absorb import q_absorb, select_q_absorb
from kimi_k3_npu.ops.v_up import Bmm, select_v_up, v_up

FUSED = "transpose_batchmatmul"
HEAD_MAJOR = "transpose_batchmatmul_head_major"
SGL = "batch_matmul_transpose"

SOCS = ["a2", "a3", "a5"]
CANNS = ["8.5", "9.1", "9.2"]

PRODUCT = {FUSED: "K*B = 65536, must be below 65536 with perm_x1=(1,0,2) before CANN 9.2"}
UNALIGNED = {name: "K = 520, must be a multiple of 128" for name in (FUSED, HEAD_MAJOR)}


@pytest.fixture(autouse=True)
def nothing_is_forced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KIMI_K3_NPU_V_UP", raising=False)


def pick(M: int, B: int, K: int = 512, N: int = 128, *, soc: str = "a3", cann: str = "9.1", **options):
    return select_v_up(M, B, K, N, **{"dtype": torch.bfloat16, "soc": soc, "cann": cann} | options)


@pytest.mark.parametrize("cann", CANNS)
@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize("shape", [(1, 96), (1, 127), (65536, 6)])
def test_within_every_limit_the_fused_kernel_runs_everywhere(shape: tuple[int, int], soc: str, cann: str):
    choice = pick(*shape, soc=soc, cann=cann)
    assert (choice.op, choice.name, choice.refused) == ("v_up", FUSED, {})


@pytest.mark.parametrize("M", [1, 1025])
@pytest.mark.parametrize(
    ("soc", "cann", "name", "refused"),
    [
        ("a2", "8.5", HEAD_MAJOR, PRODUCT),
        ("a2", "9.1", HEAD_MAJOR, PRODUCT),
        ("a2", "9.2", FUSED, {}),
        ("a3", "8.5", HEAD_MAJOR, PRODUCT),
        ("a3", "9.1", HEAD_MAJOR, PRODUCT),
        ("a3", "9.2.RC1", HEAD_MAJOR, PRODUCT),
        ("a3", "9.2", FUSED, {}),
        ("a5", "8.5", FUSED, {}),
        ("a5", "9.1", FUSED, {}),
        ("a5", "9.2", FUSED, {}),
    ],
)
def test_a_product_over_the_limit_goes_head_major_whatever_the_number_of_tokens(
    M: int, soc: str, cann: str, name: str, refused: dict[str, str]
):
    choice = pick(M, 128, soc=soc, cann=cann)
    assert (choice.name, choice.refused) == (name, refused)


@pytest.mark.parametrize("cann", CANNS)
@pytest.mark.parametrize(
    ("soc", "options", "name", "reason"),
    [
        ("a2", {}, SGL, None),
        ("a3", {}, SGL, None),
        ("a3", {"have_sgl_kernel_npu": False}, "bmm", "the package sgl_kernel_npu cannot be imported"),
        ("a2", {"contiguous": False}, "bmm", "both operands must be contiguous"),
        ("a3", {"dtype": torch.float32}, "bmm", "dtype = torch.float32, must be float16 or bfloat16"),
        ("a5", {}, "bmm", "does not exist on a5, only on a2 and a3"),
    ],
)
def test_an_unaligned_shape_leaves_the_fused_kernels(soc: str, cann: str, options: dict, name: str, reason: str | None):
    choice = pick(7, 12, K=520, soc=soc, cann=cann, **options)
    assert choice.name == name
    assert choice.refused == UNALIGNED | ({SGL: reason} if reason else {})


@pytest.mark.parametrize("M", [1025, 65536])
def test_batch_matmul_transpose_is_never_chosen_for_more_tokens_than_its_table_has(M: int):
    choice = pick(M, 12, K=520)
    assert choice.name == "bmm"
    assert choice.refused == UNALIGNED | {SGL: f"M = {M}, must be in 1..1024"}


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"N": 130}, "N = 130, must be a multiple of 128"),
        ({"N": 65536}, "N = 65536, must be at least 1 and below 65536"),
        ({"B": 65536, "K": 128}, "B = 65536, must be at least 1 and below 65536"),
        ({"K": 65536}, "K = 65536, must be at least 1 and below 65536"),
    ],
)
def test_the_other_limits_of_the_fused_kernels(sizes: dict[str, int], reason: str):
    choice = pick(**{"M": 8, "B": 1} | sizes, cann="9.2")
    assert choice.refused[FUSED] == choice.refused[HEAD_MAJOR] == reason


def test_an_idle_rank_launches_nothing(monkeypatch: pytest.MonkeyPatch):
    assert pick(0, 6).refused == {
        FUSED: "M = 0, must be at least 1",
        HEAD_MAJOR: "M = 0, must be at least 1",
        SGL: "M = 0, must be in 1..1024",
    }
    monkeypatch.setenv("KIMI_K3_NPU_V_UP", FUSED)
    before = CHOSEN.copy()
    with assume(Device("a3", Cann(9, 1))):
        out = v_up.npu(torch.empty(0, 6, 512, dtype=torch.bfloat16), torch.empty(6, 512, 128, dtype=torch.bfloat16))
    assert (out.shape, out.dtype, CHOSEN) == ((0, 6, 128), torch.bfloat16, before)


def test_there_is_no_npu_kernel_on_a_cpu():
    choice = select_v_up(4, 6, 512, 128, dtype=torch.bfloat16, soc="cpu", cann=None)
    assert choice.name == "bmm"
    assert set(choice.refused.values()) == {"there is no NPU", "does not exist on cpu, only on a2 and a3"}


def test_a_forced_kernel_is_used_or_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_NPU_V_UP", SGL)
    assert pick(1, 96).name == SGL
    with pytest.raises(LaunchError, match=r"batch_matmul_transpose refuses: M = 1025, must be in 1\.\.1024"):
        pick(1025, 96)
    with pytest.raises(LaunchError, match="does not exist on a5"):
        pick(1, 96, soc="a5")


def test_forcing_a_kernel_that_does_not_exist_names_those_that_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_NPU_V_UP", "transpose_batch_matmul")
    with pytest.raises(LaunchError, match="bmm; did you mean transpose_batchmatmul"):
        pick(1, 96)


sizes = st.one_of(
    st.sampled_from([0, 1, 6, 12, 96, 127, 128, 512, 520, 1024, 1025, 65535, 65536]), st.integers(1, 70000)
)
cases = st.builds(
    Bmm,
    M=sizes,
    B=sizes.filter(bool),
    K=sizes.filter(bool),
    N=sizes.filter(bool),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    contiguous=st.booleans(),
    device=st.builds(
        Device,
        soc=st.sampled_from(SOCS),
        cann=st.sampled_from([Cann(8, 5), Cann(9, 1), Cann(9, 2, 0, released=False), Cann(9, 2)]),
        packages=st.sampled_from([frozenset(), frozenset({"sgl_kernel_npu"})]),
    ),
)


@given(case=cases)
def test_no_kernel_is_reachable_with_a_case_that_its_documents_exclude(case: Bmm):
    """Written from the documents, not from the limit functions."""
    name = choose("v_up", v_up.kernels, case).name
    event = f"{name} for {case}"
    old = case.device.cann < Cann(9, 2)
    if name in (FUSED, HEAD_MAJOR):
        assert case.M >= 1, event
        assert max(case.B, case.K, case.N) < 65536, event
        assert case.K % 128 == case.N % 128 == 0, event
        assert case.dtype != torch.float64, event
    if name == FUSED and case.device.soc in ("a2", "a3") and old:
        assert case.B * case.K < 65536, event
    if name == SGL:
        assert case.device.soc in ("a2", "a3"), event
        assert case.device.packages, event
        assert 1 <= case.M <= 1024, event
        assert case.contiguous, event
        assert case.dtype in (torch.float16, torch.bfloat16), event


@given(case=cases)
def test_the_choice_is_the_first_candidate_without_a_reason(case: Bmm):
    choice = choose("v_up", v_up.kernels, case)
    names = [candidate.name for candidate in v_up.kernels]
    assert list(choice.refused) == names[: names.index(choice.name)]
    assert all(choice.refused.values())


def test_q_absorption_never_takes_the_kernel_whose_tiling_v_up_would_overwrite():
    choice = select_q_absorb(7, 12, 120, 512, dtype=torch.bfloat16, soc="a3", cann="9.1")
    assert choice.name == "bmm"
    assert choice.refused == {name: "K = 120, must be a multiple of 128" for name in (FUSED, HEAD_MAJOR)}


def test_q_absorption_has_its_own_limit_on_heads():
    assert select_q_absorb(1, 511, 128, 512, dtype=torch.bfloat16, soc="a3", cann="9.1").name == FUSED
    assert select_q_absorb(1, 512, 128, 512, dtype=torch.bfloat16, soc="a3", cann="9.1").name == HEAD_MAJOR


@pytest.mark.parametrize(("op", "name"), [(v_up, "v_up"), (q_absorb, "q_absorb")])
def test_the_operators_multiply_head_by_head(op, name: str):
    x, w = torch.randn(5, 3, 7), torch.randn(3, 7, 4)
    want = torch.einsum("mbk,bkn->mbn", x, w)
    torch.testing.assert_close(op(x, w), want)
    torch.testing.assert_close(op(x.transpose(0, 1).contiguous().transpose(0, 1), w.mT.contiguous().mT), want)
    torch.testing.assert_close(op(x[:, :2], w[:2]), want[:, :2])
    assert op(x, w).is_contiguous()
    assert op(x[:0], w).shape == (0, 3, 4)
    assert name in npu_operators()
    torch.library.opcheck(op.overload, (x.requires_grad_(), w.requires_grad_()))
    torch.testing.assert_close(OPS[name].reference(x, w), op(x, w))


@pytest.mark.parametrize("kernel", [v_up.npu, q_absorb.npu])
@pytest.mark.parametrize(
    ("x", "w"),
    [
        (torch.empty(2, 3, 5), torch.empty(3, 4, 6)),
        (torch.empty(2, 2, 4), torch.empty(3, 4, 6)),
        (torch.empty(3, 4), torch.empty(3, 4, 6)),
        (torch.empty(2, 3, 4), torch.empty(3, 4, 6, dtype=torch.bfloat16)),
    ],
)
def test_operands_that_do_not_fit_are_refused_before_anything_runs(kernel, x: torch.Tensor, w: torch.Tensor):
    with pytest.raises(ValueError, match=r"multiplies \[M, B, K\] by \[B, K, N\] of the same dtype, got"):
        kernel(x, w)


def test_a_launch_is_recorded_and_a_case_that_nothing_takes_is_an_error():
    before = CHOSEN["v_up", "bmm"]
    with assume(Device("cpu")):
        v_up.npu(torch.ones(2, 3, 4), torch.ones(3, 4, 5))
    assert CHOSEN["v_up", "bmm"] == before + 1
    picky = [Kernel("one", lambda case: f"{case} is odd" if case % 2 else None, int)]
    with pytest.raises(LaunchError, match="no kernel for double with 3: one refuses: 3 is odd"):
        choose("double", picky, 3)
    with pytest.raises(LaunchError, match="double has no kernel 'two'; it has one"):
        choose("double", picky, 2, forced="two")

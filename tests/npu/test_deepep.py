"""What SGLang's DeepEP dispatcher delivers, on the NPU's grouped products: the two sides of `engines.sglang.experts`.

SGLang is not installed beside torch_npu here, so its types are stood in for. Its dispatcher gives a rank the rows that
its experts want, sorted by expert, and how many each expert gets: as a list (normal), or as a tensor beside a buffer
with rows to spare that hold anything (low latency). It adds up what comes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.engines.sglang import symbols
from kimi_k3_npu.engines.sglang.experts import DeepEP
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.ops.cases import INT8_ROWS_TWICE, MXFP8_ROWS
from kimi_k3_npu.ops.device import Device, assume
from kimi_k3_npu.ops.op import CHOSEN
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from tests.npu.on_cpu import on_cpu
from tests.npu.test_layouts import A3, A5, BF16, NARROW, emulated, filled

__all__ = ["emulated"]

T, K = 9, 4
SPARE = 5


class Normal(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: list[int]


class LowLatency(NamedTuple):
    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    masked_m: Tensor


@dataclass
class CombineInput:
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


class Dispatcher:
    """One rank's; `form` is set by the test, as SGLang sets it for each pass."""

    form = ""

    def __init__(self, *, group: Any, num_experts: int, num_local_experts: int, **options: object) -> None:
        self.held = range(group.rank * num_local_experts, (group.rank + 1) * num_local_experts)

    def set_quant_config(self, config: dict[str, str]) -> None:
        assert config == {"dispatcher_output_dtype": "bf16"}

    def dispatch(self, hidden_states: Tensor, topk_output: tuple) -> Normal | LowLatency:
        weights, ids, _ = topk_output
        of_each = [(ids == expert).nonzero().tolist() for expert in self.held]
        counts, self.pairs = [len(each) for each in of_each], [pair for each in of_each for pair in each]
        rows = hidden_states[[token for token, _ in self.pairs]]
        if self.form == "normal":
            return Normal(rows, None, ids, weights, counts)
        spare = rows.new_full((SPARE, rows.shape[1]), float("nan"))
        return LowLatency(torch.cat([rows, spare]), None, ids, weights, torch.tensor(counts, dtype=torch.int32))

    def combine(self, given: CombineInput) -> Tensor:
        assert isinstance(given, LowLatencyCombine if self.form == "low latency" else NormalCombine)
        total = given.hidden_states.new_zeros(len(given.topk_ids), given.hidden_states.shape[1], dtype=torch.float32)
        for row, (token, choice) in zip(given.hidden_states, self.pairs, strict=False):
            total[token] += row.float() * given.topk_weights[token, choice]
        return total


class NormalCombine(CombineInput): ...


class LowLatencyCombine(CombineInput): ...


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DeepEPDispatcher": Dispatcher,
        "DeepEPLLDispatchOutput": LowLatency,
        "DeepEPLLCombineInput": LowLatencyCombine,
        "DeepEPNormalCombineInput": NormalCombine,
        "StandardTopKOutput": lambda *fields: fields,
        "get_deepep_mode": lambda: "auto",
    }.items():
        monkeypatch.setitem(vars(symbols), name, value)


def share(whole: Experts, rank: int, ranks: int) -> Experts:
    """The experts of one rank of `ranks`."""
    layout = ParallelLayout(tp=ranks, ep=ranks, moe_dispatch="alltoall")
    part = Experts(NARROW, Mesh.inspect(layout, rank), BF16, whole.format)
    for name, parameter in part.named_parameters():
        parameter.data.copy_(whole.get_parameter(name)[part.first : part.first + len(parameter)])
    return part


def through_deepep(part: Experts, rank: int, ranks: int, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    group = Group("ep", rank, ranks)
    dispatch = DeepEP(NARROW, group, SimpleNamespace(device_group=group), BF16)
    return dispatch(*given, part, T)


#: Format of the experts, a device that has a grouped product of it, and how far that may be from the exact values.
KINDS: dict[str, tuple[Device, str, float]] = {
    "plain": (A3, "grouped_matmul", 0.01),
    "w4a8": (A3, "grouped_matmul_w4a8", INT8_ROWS_TWICE.error),
    "int4x2": (A3, "grouped_matmul_int4", 0.01),
    "mxfp4": (A5, "grouped_matmul_mxfp4", MXFP8_ROWS.error),
}


def case(kind: str) -> tuple[Experts, tuple[Tensor, Tensor, Tensor]]:
    torch.manual_seed(3)
    whole = filled(kind)
    if kind == "plain":
        for parameter in whole.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) / 12)
    ids = torch.stack([torch.randperm(NARROW.num_experts)[:K] for _ in range(T)])
    return whole, (torch.randn(T, NARROW.expert_hidden_size).to(BF16), torch.rand(T, K), ids)


@pytest.mark.parametrize("form", ["normal", "low latency"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_rows_reach_the_grouped_products_and_return(
    name: str, ranks: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, kernel, tolerance = KINDS[name]
    whole, given = case(name)
    wanted = whole(*given).float()
    monkeypatch.setattr(Dispatcher, "form", form)
    parts = [share(whole, rank, ranks) for rank in range(ranks)]
    CHOSEN.clear()
    with on_cpu(), assume(device):
        for part in parts:
            part.prepare()
        found = sum(through_deepep(part, rank, ranks, given) for rank, part in enumerate(parts))
    assert {used: calls for (op, used), calls in CHOSEN.items() if op.startswith("moe_experts")} == {kernel: ranks}
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


@pytest.mark.parametrize("form", ["normal", "low latency"])
def test_a_rank_that_no_row_reaches(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens choose experts of the first rank: the last has nothing but rows to spare, or nothing at all."""
    whole, (z, weights, _) = case("plain")
    given = (z, weights, torch.stack([torch.randperm(4)[:K] for _ in range(T)]))
    monkeypatch.setattr(Dispatcher, "form", form)
    parts = [share(whole, rank, 2) for rank in range(2)]
    with on_cpu(), assume(A3):
        first, last = (through_deepep(part, rank, 2, given) for rank, part in enumerate(parts))
    wanted = whole(*given).float()
    assert (first - wanted).abs().max() <= 0.01 * wanted.abs().max()
    assert torch.equal(last, torch.zeros_like(last))

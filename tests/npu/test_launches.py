"""benchmarks/launches.py: what it counts as a launch, and that no block launches more than is recorded."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from benchmarks.launches import BATCH, LAYOUTS, RESULTS, Count, Counting, count_step, summary, titled
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.ops.device import Device, parse_cann
from kimi_k3_npu.ops.norm import rms_norm
from kimi_k3_npu.ops.op import CHOSEN
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.plan.choices import Situation, layer_kernels, weight_kernels

PACKAGE = frozenset({"sgl_kernel_npu"})
DEVICES = [Device("a3", parse_cann("9.1")), Device("a3", parse_cann("9.1"), PACKAGE)]


def count(run: Callable) -> Count:
    with Counting() as counting:
        run(torch.empty(4, 6, dtype=torch.bfloat16, device="meta"))
    return counting.count


#: x is [4, 6]. What runs, and its launches by operator.
OPERATIONS: dict[str, tuple[Callable, dict[str, int]]] = {
    "views": (lambda x: x.view(24).unflatten(0, (2, 12)).transpose(0, 1)[1:].expand(3, 11, 2), {}),
    "parts": (lambda x: x.split([2, 4], dim=-1)[0].unbind(0), {}),
    "allocation": (lambda x: x.new_empty(3), {}),
    "copies of what is right already": (lambda x: (x.contiguous(), x.reshape(6, 4), x.to(torch.bfloat16)), {}),
    "contiguous": (lambda x: x.t().contiguous(), {"contiguous": 1}),
    "reshape": (lambda x: x.t().reshape(24), {"clone": 1}),
    "cast": (lambda x: x.float(), {"_to_copy": 1}),
    "composed of one": (lambda x: F.linear(x, x), {"matmul": 1}),
    "composed of another": (lambda x: x.square(), {"pow": 1}),
    "composed of some": (
        lambda x: F.rms_norm(x.float(), (6,)),
        {"_to_copy": 1, "pow": 1, "mean": 1, "add_": 1, "rsqrt": 1, "mul": 1},
    ),
    "kernel of the out= form": (lambda x: F.gelu(x), {"gelu": 1}),
    "fill": (lambda x: x.new_zeros(3), {"zero_": 1}),
    "arithmetic": (lambda x: F.silu(x) * 2 + 1, {"silu": 1, "mul": 1, "add": 1}),
    "in place": (lambda x: x.masked_fill_(x > 0, 1.0), {"masked_fill_": 1, "gt": 1}),
    "torch_npu's own": (lambda x: torch.ops.npu.npu_rms_norm(x, x[0]), {"npu_rms_norm": 1}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_a_launch(name: str):
    run, launches = OPERATIONS[name]
    counted = count(run)
    assert {operator: number for (_, operator), number in counted.launches.items()} == launches
    assert not counted.fallbacks


def test_the_source_of_a_launch_is_the_operator_that_it_is_part_of():
    counted = count(lambda x: rms_norm(x, x.new_empty(6), 1e-5).exp())
    assert counted.launches.keys() >= {("exp", "exp")}
    assert {source for source, _ in counted.launches} == {"rms_norm", "exp"}


def test_what_an_npu_lacks_is_named():
    counted = count(lambda x: torch.special.bessel_j0(x.float()))
    assert set(counted.fallbacks) == {"special_bessel_j0"}


STEPS = [(layout, device) for layout in LAYOUTS for device in DEVICES]


@pytest.fixture(scope="module", params=STEPS, ids=[titled(*step, BATCH) for step in STEPS])
def step(request: pytest.FixtureRequest) -> tuple[str, Device, dict, set[tuple[str, str]]]:
    """Layout, device, counts of one step, and the kernels that it chose."""
    layout, device = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("KIMI_K3_NPU_V_UP", raising=False)
        patch.delenv("HCCL_BUFFSIZE", raising=False)
        CHOSEN.clear()
        with torch.inference_mode():
            counted = summary(count_step(published_config(), ParallelLayout.parse(layout), BATCH, device))
    return layout, device, counted, set(CHOSEN)


def test_no_block_launches_more_than_is_recorded(step: tuple):
    layout, device, counted, _ = step
    recorded = json.loads(RESULTS.read_text())[titled(layout, device, BATCH)]
    more = {
        block: (recorded["blocks"][block]["launches"], row["launches"])
        for block, row in counted["blocks"].items()
        if row["most"] > recorded["blocks"][block]["most"]
    }
    assert not more, "more launches than in benchmarks/results: (recorded, now); if that is meant, run launches.py"
    assert counted["launches"] <= recorded["launches"]
    assert counted["collectives"] <= recorded["collectives"]


def test_a_decode_step_never_falls_back_to_the_cpu(step: tuple):
    assert step[2]["fallbacks"] == {}


def test_what_runs_is_what_is_planned(step: tuple):
    layout, device, _, chosen = step
    now = Situation(BATCH, ParallelLayout.parse(layout), device)
    config = published_config().text
    planned = {
        (row.op, row.kernel)
        for row in layer_kernels(config, now) + weight_kernels(config, now)
        if row.phase != "prefill" and not (row.op.startswith("moe_experts_") or row.op == "w8a8_linear")
    }
    assert chosen == planned

"""MC2 expert dispatch: limits, the real operators' contract at full size, and numbers over ranks with emulated ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.ops.device import Device, assume, parse_cann
from kimi_k3_npu.ops.mc2 import (
    MEGABYTE,
    Communicator,
    Exchange,
    buffer_bytes,
    communicator_buffer,
    communicator_name,
    mc2,
    refuse_mc2,
)
from kimi_k3_npu.ops.op import CHOSEN
from kimi_k3_npu.parallel.experts import Mc2
from kimi_k3_npu.parallel.groups import Group
from tests.parallel.launch import SAMPLE_OR_ALL, Take, launch, score_cases

TOLERANCE = 5e-4
LATENT, EXPERTS, TOP_K = 3584, 896, 16
A2, A3, A5 = (Device(soc, parse_cann("9.1")) for soc in ("a2", "a3", "a5"))
FULL = Exchange(64, EXPERTS, 16, LATENT, TOP_K, torch.bfloat16, 1 << 40, A3)
ON_A2 = replace(FULL, device=A2, experts=384)


def test_the_full_size_model_is_taken_on_an_a3():
    assert refuse_mc2(FULL) is None
    assert refuse_mc2(replace(FULL, rows=512)) is None
    assert refuse_mc2(ON_A2) is None
    assert refuse_mc2(replace(ON_A2, rows=256)) is None


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (replace(FULL, device=Device("cpu")), "there is no NPU"),
        (replace(FULL, device=A5), "its limits on a5 are not known, only on a2 and a3"),
        (replace(FULL, rows=513), "513 rows on a rank, must be in 1..512"),
        (replace(ON_A2, rows=257), "257 rows on a rank, must be in 1..256"),
        (replace(FULL, ranks=1), "ep = 1, must be in 2..768"),
        (replace(ON_A2, ranks=8), "ep = 8, must be one of 16, 32, 64, 128, 256"),
        (replace(FULL, ranks=48), "896 experts, must be a multiple of ep = 48 up to 1024"),
        (replace(FULL, experts=1088), "1088 experts, must be a multiple of ep = 64 up to 1024"),
        (replace(FULL, device=A2), "896 experts, must be a multiple of ep = 64 up to 512"),
        (replace(ON_A2, ranks=16, experts=400), "25 experts a rank, must be at most 24"),
        (replace(FULL, hidden=1023), "rows of 1023, must be in 1024..8192"),
        (replace(FULL, hidden=8193), "rows of 8193, must be in 1024..8192"),
        (replace(ON_A2, hidden=3600), "rows of 3600, must be in 32..7168 in steps of 32"),
        (replace(FULL, top_k=17), "17 experts a token, must be in 1..16"),
        (replace(FULL, dtype=torch.float32), "the row dtype is torch.float32, must be float16 or bfloat16"),
        (
            replace(FULL, rows=128, buffer=200 * MEGABYTE),
            "128 rows on a rank need HCCL_BUFFSIZE=1710, the communicator has 200",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(case: Exchange, reason: str):
    assert refuse_mc2(case) == reason


def test_the_buffer_is_what_the_operators_page_asks_for():
    # 2 * (14 experts * 128 rows * 64 ranks * (7168 + 64 up to a multiple of 512) + (16 + 1) * 128 rows * 7168)
    assert buffer_bytes(replace(FULL, rows=128)) == 2 * (14 * 128 * 64 * 7680 + 17 * 128 * 7168)
    assert buffer_bytes(replace(ON_A2, rows=128)) == 2 * (128 * 64 * 6 * 3584 * 2 + 2 * MEGABYTE)


def test_the_buffer_of_this_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    assert communicator_buffer() == 200 * MEGABYTE
    monkeypatch.setenv("HCCL_BUFFSIZE", "1800")
    assert communicator_buffer() == 1800 * MEGABYTE
    monkeypatch.setenv("HCCL_BUFFSIZE", "2G")
    with pytest.raises(LaunchError, match="HCCL_BUFFSIZE='2G' is not a number of megabytes"):
        communicator_buffer()


def test_the_communicator_is_asked_for_its_name(monkeypatch: pytest.MonkeyPatch):
    asked: list[object] = []
    backend = SimpleNamespace(get_hccl_comm_name=lambda rank: asked.append(rank) or "hccl_7")
    group = SimpleNamespace(_get_backend=lambda device: asked.append(device.type) or backend)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    assert communicator_name(group) == "hccl_7"
    assert asked == ["npu", 5]


@pytest.mark.parametrize("rows", [0, 1, 16, 512])
@pytest.mark.parametrize(("device", "ranks", "experts"), [(A3, 64, EXPERTS), (A3, 2, EXPERTS), (A2, 64, 384)])
def test_contract_at_full_size(device: Device, ranks: int, experts: int, rows: int):
    largest = max(rows, 16) if device is A3 else min(max(rows, 16), 256)
    rows = min(rows, largest)
    seen: list[tuple] = []

    def run(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        seen.append((x.shape, weights.shape, weights.dtype, ids.shape))
        return torch.empty_like(x)

    with FakeTensorMode(), assume(device):
        z = torch.empty(rows, LATENT, dtype=torch.bfloat16, device="npu")
        weights = torch.empty(rows, TOP_K, device="npu")
        ids = torch.empty(rows, TOP_K, dtype=torch.int64, device="npu")
        out = mc2(z, weights, ids, run, largest, Communicator("hccl_7", ranks - 1, ranks, experts))
    assert (out.shape, out.dtype, out.device.type) == (z.shape, torch.bfloat16, "npu")
    room = largest * ranks * min(experts // ranks, TOP_K)
    assert seen == [((room, LATENT), (room, 1), torch.float32, (room, 1))]


def carrier(used: list[str], monkeypatch: pytest.MonkeyPatch, ranks: int = 64) -> Mc2:
    found = Mc2(Group("mc2", 0, ranks), EXPERTS, lambda z, *_: used.append("alltoall") or z)
    found._kernels = (
        replace(found._kernels[0], launch=lambda z, *_: used.append("mc2") or z),
        found._kernels[1],
    )
    monkeypatch.setenv("HCCL_BUFFSIZE", "8000")
    return found


def test_too_many_rows_on_any_rank_take_the_all_to_all(monkeypatch: pytest.MonkeyPatch, recwarn):
    used: list[str] = []
    found = carrier(used, monkeypatch)
    CHOSEN.clear()
    with FakeTensorMode(), assume(A3):
        z, ids = torch.empty(3, LATENT, dtype=torch.bfloat16), torch.empty(3, TOP_K, dtype=torch.int64)
        for largest in (3, 512, 513, 0):
            assert found(z, torch.empty(3, TOP_K), ids, lambda *_: z, largest) is z
    assert used == ["mc2", "mc2", "alltoall"]  # and nothing at all when no rank has a row
    assert dict(CHOSEN) == {("moe_dispatch", "mc2"): 2, ("moe_dispatch", "alltoall"): 1}
    assert not recwarn.list


def test_what_can_never_work_is_said(monkeypatch: pytest.MonkeyPatch):
    used: list[str] = []
    found = carrier(used, monkeypatch)
    z, ids = torch.empty(3, 32), torch.empty(3, 4, dtype=torch.int64)
    with assume(A3), pytest.warns(UserWarning, match="dispatch=mc2 is never used here, alltoall .*: rows of 32, must"):
        found(z, torch.empty(3, 4), ids, lambda *_: z, 3)
    assert used == ["alltoall"]


@pytest.mark.slow
@SAMPLE_OR_ALL
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_gives_the_oracles_logits(world: int, take: Take, tmp_path: Path):
    cases = [*take(score_cases(world, ["mc2"]))]
    # All 82 rows on the first replica are too many on a rank; 71 there and 11 on the last are not.
    too_many = {"what": "score", "oracle": "k3", "layout": f"tp={world},dp=2,dispatch=mc2", "mc2_rows": 2 * 75 // world}
    cases.append(too_many)
    results = launch(world, cases, tmp_path, emulate_npu=True)
    for case, ranks in zip(cases, results, strict=True):
        assert max(rank["worst"] for rank in ranks) <= TOLERANCE, case
        used = ["alltoall", "mc2"] if case is too_many else ["mc2"]
        assert [rank["dispatch"] for rank in ranks] == [used] * world, case


@pytest.mark.slow
def test_rows_reach_their_experts_and_come_back(tmp_path: Path):
    spread = {"uneven": [5, 1, 3], "a rank without": [4, 0, 2], "one rank": [0, 7, 0], "none": [0, 0, 0]}
    cases = [
        {"what": "dispatch", "how": "mc2", "rows": rows, "ids": ids, "soc": soc}
        for rows in spread.values()
        for ids in ("random", "one")
        for soc in ("a2", "a3")
    ]
    for case, ranks in zip(cases, launch(3, cases, tmp_path, emulate_npu=True), strict=True):
        assert [rank["shape"] for rank in ranks] == [[n, 8] for n in case["rows"]], case
        assert max(rank["worst"] for rank in ranks) < 1e-5, case

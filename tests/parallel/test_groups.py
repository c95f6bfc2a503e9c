"""The collectives of a group, expert dispatch and the split vocabulary, on three processes: nothing divides evenly."""

from __future__ import annotations

import socket
from collections import Counter
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from kimi_k3_npu.engines.groups import process_groups
from kimi_k3_npu.errors import LaunchError, LayoutError
from kimi_k3_npu.parallel.agreement import problems_of_all
from kimi_k3_npu.parallel.groups import Group
from kimi_k3_npu.parallel.layout import AxisName, ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from tests.parallel.launch import Case, launch

COUNTS = {"even": [2, 2, 2], "uneven": [1, 4, 2], "a zero": [3, 0, 2], "one rank": [0, 0, 5], "nothing": [0, 0, 0]}
ROWS = {"uneven": [5, 1, 3], "a rank without": [4, 0, 2], "one rank": [0, 7, 0], "none": [0, 0, 0]}
TABLES = {
    # (layout, vocabulary, rows of each replica): two tokens over three ranks leave one with padding only.
    "padded": ("tp=3", 7, [4]),
    "more ranks than tokens": ("tp=3", 2, [3]),
    "replicas": ("tp=3,dp=3", 2, [3, 0, 1]),
    "within replicas": ("tp=3,dp=3,lm_head=dp", 2, [0, 2, 3]),
    "no rows": ("tp=3,dp=3", 7, [0, 0, 0]),
}
#: What is wrong on each of three ranks, and what all of them then know.
PROBLEMS = {
    "none": (["", "", ""], ""),
    "one": (["", "no such file", ""], "no such file"),
    "some": (["torn", "no such file", "torn"], "torn; no such file"),
}
#: HCCL_BUFFSIZE of three ranks.
BUFFERS = {"alike": ["1800"] * 3, "one differs": ["1800", "", "1800"], "one is no number": ["1800", "1800", "2G"]}


def cases_of() -> dict[tuple[str, str], Case]:
    cases: dict[tuple[str, str], Case] = {}
    for name, counts in COUNTS.items():
        cases["collectives", name] = {"what": "collectives", "counts": counts}
    for name, rows in ROWS.items():
        for ids in ("random", "one"):
            cases["dispatch", f"{name}, {ids}"] = {"what": "dispatch", "how": "alltoall", "rows": rows, "ids": ids}
    for name, (layout, vocab, counts) in TABLES.items():
        cases["vocabulary", name] = {"what": "vocabulary", "layout": layout, "vocab": vocab, "counts": counts}
    cases["mc2", "three ranks"] = {"what": "groups_of_mc2", "layout": "tp=3,dispatch=mc2"}
    cases["mc2", "stages"] = {"what": "groups_of_mc2", "layout": "pp=3,dispatch=mc2"}
    cases["mesh", "too large"] = {"what": "refused_mesh", "layout": "tp=2,pp=2"}
    for name, (problems, _) in PROBLEMS.items():
        cases["problems", name] = {"what": "told", "problems": problems}
    for name, buffers in BUFFERS.items():
        cases["mesh", name] = {"what": "refused_mesh", "layout": "tp=3,dispatch=mc2", "buffers": buffers}
    return cases


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list]:
    """What each of three ranks returned for every case."""
    cases = cases_of()
    returned = launch(3, list(cases.values()), tmp_path_factory.mktemp("ranks"))
    return dict(zip(cases, returned, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_collectives(results: dict, name: str) -> None:
    counts = COUNTS[name]
    total = sum(counts)
    starts = [sum(counts[:rank]) for rank in range(3)]
    summed = [[300 + 3 * j, -3] for j in range(total)]
    for rank, got in enumerate(results["collectives", name]):
        rows = slice(starts[rank], starts[rank] + counts[rank])
        assert got["all_reduce"] == summed
        assert got["all_gather"] == [[100 * r + j, -1] for r in range(3) for j in range(counts[r])]
        assert got["all_gather_nothing_wide"] == [total, 0]
        assert got["reduce_scatter"] == summed[rows]
        assert got["received"] == [(rank + other) % 3 for other in range(3)]
        skipped = [sum((other + r) % 3 for r in range(rank)) for other in range(3)]
        assert got["all_to_all"] == [
            100 * other + skipped[other] + j for other in range(3) for j in range((rank + other) % 3)
        ]
        assert got["gather_value"] == [0, 7, 14]
        assert got["bounds"] == [rows.start, rows.stop]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("ids", ["random", "one"])
def test_rows_reach_their_experts_and_come_back(results: dict, name: str, ids: str) -> None:
    rows, ranks = ROWS[name], results["dispatch", f"{name}, {ids}"]
    assert [rank["shape"] for rank in ranks] == [[n, 8] for n in rows]
    assert max(rank["worst"] for rank in ranks) < 1e-5
    assert sum(rank["seen"] for rank in ranks) == 2 * sum(rows)  # each of a token's two experts saw it once
    if ids == "one":
        assert ranks[2]["seen"] >= sum(rows)  # the last expert is on the last rank


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_a_split_vocabulary_is_the_whole_one(results: dict, name: str) -> None:
    layout, vocab, _ = TABLES[name]
    ranks = results["vocabulary", name]
    for rank in ranks:
        assert rank["embed"] == 0.0
        assert rank["logits"] < 1e-6
    assert sum(rank["held"] for rank in ranks) == vocab * 4 * (3 if "lm_head" in layout else 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["three ranks", "stages"])
def test_the_operators_that_communicate_have_a_process_group_of_their_own(results: dict, name: str) -> None:
    assert results["mc2", name] == [[], [], []]


@pytest.mark.slow
def test_a_layout_for_another_number_of_ranks(results: dict) -> None:
    assert results["mesh", "too large"] == ["layout tp=2,pp=2 is for 4 ranks, torch.distributed has 3"] * 3


@pytest.mark.slow
def test_ranks_agree_on_the_dispatch_before_anything_runs(results: dict) -> None:
    """Each alone would choose MC2 or the all-to-all by its own buffer, and wait for the others for ever."""
    zero, one, two = (f"{rank} ({socket.gethostname()})" for rank in range(3))
    found = {
        "one differs": f"1800 on ranks {zero}, {two}, 200 on rank {one}",
        "one is no number": f"1800 on ranks {zero}, {one}, not valid (HCCL_BUFFSIZE='2G' is not a number of megabytes) "
        f"on rank {two}",
    }
    assert results["mesh", "alike"] == ["nothing was raised"] * 3
    for name, values in found.items():
        wanted = f"dispatch=mc2 needs the same on all ranks: HCCL_BUFFSIZE is {values}; set it alike on every node"
        assert results["mesh", name] == [wanted] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
def test_all_ranks_hear_of_the_problems_of_any(results: dict, name: str) -> None:
    assert results["problems", name] == [PROBLEMS[name][1]] * 3


def test_a_rank_by_itself_has_its_own_problem() -> None:
    assert [problems_of_all(problem, None) for problem in ("", "torn")] == ["", "torn"]


def test_a_mesh_over_groups_that_an_engine_has_made() -> None:
    """Each axis finds its group by the ranks in it, in order; of two groups of the same ranks the first is taken."""
    layout = ParallelLayout.parse("tp=4,dp=2,pp=2")
    made: Any = [([4, 5, 6, 7], "stage"), ([6, 7], "replica"), ([4, 5, 6, 7], "again"), ([0, 1], "others")]
    groups = process_groups(SimpleNamespace(ranks=ranks, device_group=name) for ranks, name in made)
    mesh = Mesh.over(layout, 7, groups, "Motor", unused=["dp"])
    assert (mesh.stage, mesh.tp.rank, mesh.attn_tp.rank, mesh.dp.rank) == (1, 3, 1, 1)
    carried = {axis: getattr(mesh, axis).process_group for axis in get_args(AxisName)}
    assert carried == {
        **dict.fromkeys(("tp", "moe_tp", "shared", "dense", "vocab"), "stage"),
        **{"attn_tp": "replica", "dp": None, "ep": None},
    }
    wanted = r"^Motor has no process group of ranks \[5, 7\], which dp = 2 needs in layout tp=4,dp=2,pp=2$"
    with pytest.raises(LaunchError, match=wanted):
        Mesh.over(layout, 7, groups, "Motor")


def test_one_rank_needs_no_process_group() -> None:
    group, x = Group("tp"), torch.arange(3.0)
    assert group.all_reduce(x) is x
    assert group.all_gather(x, [3]) is x
    assert group.reduce_scatter(x, [3]) is x
    assert group.all_to_all(x, [3], [3]) is x
    assert group.gather_value(5, x.device) == [5]


def test_a_model_that_was_only_built_to_be_looked_at_says_so_when_run() -> None:
    mesh = Mesh.inspect(ParallelLayout.parse("tp=4"), 1)
    with pytest.raises(LayoutError, match=r"tp spans 4 ranks but has no process group: .*Mesh\.distributed"):
        mesh.tp.all_reduce(torch.ones(2))


def test_without_torch_distributed_there_is_no_mesh() -> None:
    with pytest.raises(LayoutError, match="call init_process_group before"):
        Mesh.distributed(ParallelLayout.parse("tp=2"))


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_the_layout_does_not_have(rank: int) -> None:
    with pytest.raises(LayoutError, match=rf"rank {rank} is outside 0\.\.7 of layout tp=4,pp=2"):
        Mesh.inspect(ParallelLayout.parse("tp=4,pp=2"), rank)


@pytest.mark.parametrize("total", [1, 2, 3, 7, 64, 163840])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 48])
def test_padded_parts_cover_everything_once(total: int, size: int) -> None:
    held: Counter[int] = Counter()
    for rank in range(size):
        share, part = Group("vocab", rank, size).padded_part(total)
        assert share * size >= total
        assert 0 <= part.stop - part.start <= share
        assert part.start == min(rank * share, total)
        held.update(range(part.start, part.stop))
    assert held == Counter(range(total))


def test_a_part_that_is_not_whole() -> None:
    with pytest.raises(
        LayoutError, match=r"heads = 96 does not split over attn_tp = 5; sizes that do: 1, 2, 3, 4, 6, 8$"
    ):
        Group("attn_tp", 0, 5).part(96, "heads")


@pytest.mark.parametrize("rows", [0, 1, 5, 6])
def test_rows_are_dealt_out_evenly(rows: int) -> None:
    chunks = Group("attn_tp", 0, 3).chunks(rows)
    assert sum(chunks) == rows
    assert max(chunks) - min(chunks) <= 1

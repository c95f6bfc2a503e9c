"""`plan`: recipes, layouts, the search, the dry run, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.tiny import write_tiny

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["plan", *args])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return int(end.value.code or 0), out, err

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    write_tiny(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_recipe(run: Run) -> None:
    code, out, _ = run("sglang-a3-4node-dspark", "--draft-gb", "2", "--reserved-gib", "3")
    assert code == 0
    for text in (
        "one rank, 65.5 GB:",
        "a token takes 27,648 bytes of cache, a state slot 28.1 MB",
        "  weights                  43.34  ████",
        "decode of 128     MLA         v_up              transpose_batchmatmul",
        "grouped_matmul_w4a8",
    ):
        assert text in out


def test_sizes_are_of_the_engine(run: Run) -> None:
    code, out, _ = run(
        "sglang-a3-4node-dspark", "--context", "65536", "--concurrency", "32", "--chunk", "1024", "--json"
    )
    assert code == 0
    serving = json.loads(out)["plans"][0]["serving"]
    assert (serving["context"], serving["requests"], serving["chunk"]) == (65536, 8, 1024)
    out = run("vllm-a3-4node", "--concurrency", "32", "--chunk", "1024", "--json")[1]
    serving = json.loads(out)["plans"][0]["serving"]
    assert (serving["requests"], serving["chunk"]) == (8, 1024)


def test_json(run: Run) -> None:
    code, out, _ = run("sglang-a3-2p4d", "--json")
    assert code == 0
    prefill, decode = json.loads(out)["plans"]
    assert (prefill["role"], decode["role"]) == ("prefill", "decode")
    memory = decode["memory"][0]
    assert memory["kv_bytes_per_token"] == 27_648
    assert memory["weight_bytes"] == sum(sum(block.values()) for block in memory["weights"].values())
    assert {use["phase"] for use in decode["kernels"]} == {"decode"}


def test_errors_end_in_one(run: Run) -> None:
    code, out, _ = run("sglang-a3-4node", "--set", "shared-experts-tp-size=5")
    assert code == 1
    assert "error [layout]: shared_experts_tp_size = 5 does not divide attn_tp = 16" in out


def test_layout(run: Run) -> None:
    layout = "tp=64,dp=4,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp"
    out = run("--layout", layout, "--json")[1]
    assert round(json.loads(out)["plans"][0]["memory"][0]["weights"]["routed experts"]["elements"] / 1e9, 1) == 21.3
    code, out, err = run("--layout", "tp=64")
    assert code == 1
    assert "96 attention heads do not split over attn_tp = 64" in out + err


def test_dry_run_of_a_small_model(run: Run, tiny: str) -> None:
    code, out, _ = run("--layout", "tp=4,dp=2,dispatch=alltoall", "--format", "mxfp4", "--config", tiny, "--dry-run")
    assert "dry run:" in out
    assert "prefill: 1 requests x 2048 tokens a replica" in out
    assert "at least" in out
    assert code in (0, 1)  # a tiny model's kernels are refused


def test_dry_run_shows_what_was_published(run: Run, tiny: str) -> None:
    out = run("sglang-a3-4node-dspark", "--dry-run", "--config", tiny)[1]
    assert "attention heads do not split" in out  # the recipe is for the full size


@pytest.mark.slow
def test_full_dry_run(run: Run) -> None:
    code, out, _ = run("sglang-a3-4node-dspark", "--dry-run")
    assert code == 0
    assert "published: 8K in, 1K out, no prefix cache: tpot_ms_low 15.2, tpot_ms_high 15.54" in out
    assert "ms a token, when all 8 rows of a request are accepted" in out
    assert "arXiv:2506.12708" in out


def test_figures_that_are_not_published(run: Run, tiny: str) -> None:
    layout = ("--layout", "tp=2,dispatch=alltoall", "--soc", "a2", "--format", "mxfp4", "--config", tiny, "--dry-run")
    _, out, err = run(*layout)
    assert "no bound: 910b has figures that are not published; give --memory-tbps (such as 1.6)" in err
    assert "at least" not in out
    out = run(*layout, "--memory-tbps", "1.6", "--bf16-tflops", "350", "--link-gbps", "25")[1]
    assert "at least" in out


def test_search(run: Run, tiny: str) -> None:
    args = ("--search", "--nodes", "1", "--config", tiny, "--context", "4096", "--chunk", "256", "--json")
    code, out, _ = run(*args)
    assert code == 0
    found = json.loads(out)["layouts"]
    steps = [one["step_seconds"] for one in found]
    assert steps == sorted(steps)
    assert any("pp=" in one["layout"] for one in found)
    assert any("dispatch=alltoall" in one["layout"] for one in found)


@pytest.mark.slow
def test_full_search(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On four nodes the published layout is among the best; whole shared experts leave too little room."""
    monkeypatch.setattr("kimi_k3_npu.plan.search.STAGES", (1,))
    cluster = ("--nodes", "4", "--soc", "a3", "--format", "w4a8", "--model-impl", "auto")
    code, out, _ = run("--search", *cluster, "--context", "131072", "--concurrency", "16", "--json")
    assert code == 0
    found = json.loads(out)
    best = [one["layout"] for one in found["layouts"]]
    recipe = "tp=64,dp=4,ep=64,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp"
    assert best.index(recipe) < 5
    refused = {one["layout"]: one["reason"] for one in found["refused"]}
    assert refused["tp=64,dp=4,ep=64,dispatch=alltoall,dense=attn_tp,lm_head=dp"].startswith("room for 3 requests")


def test_nothing_fits(run: Run, tiny: str) -> None:
    code, _, err = run("--search", "--nodes", "1", "--config", tiny, "--memory-gib", "0.001")
    assert code == 1
    assert "no layout over 1 nodes fits; use more nodes" in err


@pytest.mark.parametrize("args", [(), ("sglang-a3-4node", "--layout", "tp=1"), ("--search",)])
def test_wrong_usage(run: Run, args: tuple[str, ...]) -> None:
    assert run(*args)[0] == 2

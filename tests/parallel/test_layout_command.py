"""`kimi-k3-npu layout`: what it prints, and that every refusal is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.plan.weights import rank_weights
from tests.parallel.launch import ORACLES

Run = Callable[..., tuple[int, str, str]]
A3 = ("--tp", "64", "--dp", "4", "--dispatch", "alltoall")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`layout` with these arguments: exit code, standard output, standard error."""
    for variable in ("SGLANG_K3_SHARED_EXPERTS_ATTN_TP", "SGLANG_K3_DENSE_MLP_ATTN_TP"):
        monkeypatch.delenv(variable, raising=False)

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["layout", *map(str, args)])
        return int(end.value.code or 0), *capfd.readouterr()

    return run


def test_the_table(run: Run) -> None:
    code, out, err = run(*A3, "--shared", "attn_tp", "--dense", "attn_tp", "--rank", 17)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "tp=64,dp=4,ep=64,dispatch=alltoall,shared=attn_tp,dense=attn_tp: 64 ranks, attn_tp = 16"
    assert lines[1] == "rank 17: layers 0..92 (stage 0 of 1), replica 1 of 4, rank 1 of 16 in it"
    cells = {line.split("  ")[1].strip(): line.split() for line in lines[2:] if line.startswith("  ")}
    assert cells["routed experts"][-8:] == ["experts", "238..251", "of", "896", "22.601", "-", "-", "22.601"]
    assert cells["shared experts"][2:5] == ["attn_tp", "=", "16"]
    assert cells["shared experts"][-4:] == ["1.519", "-", "-", "1.519"]
    assert cells["latent projections"][2:] == ["-", "all", "-", "9.455", "-", "9.455"]
    total = rank_weights(published_config(), ParallelLayout.parse(f"{lines[0].partition(':')[0]}"), 17).total
    assert cells["total"][-1] == f"{total / 1e9:.3f}"


def test_json(run: Run) -> None:
    code, out, _ = run("--layout", "tp=64,dp=4,dispatch=mc2,shared=4", "--rank", 5, "--experts", "bf16", "--json")
    assert code == 0
    found = json.loads(out)
    held = rank_weights(
        published_config(), ParallelLayout.parse("tp=64,dp=4,dispatch=mc2,shared=4"), 5, experts="plain"
    )
    assert found["layout"] == "tp=64,dp=4,ep=64,dispatch=mc2,shared=4"
    assert found["options"]["shared_experts_tp_size"] == 4
    assert (found["ranks"], found["attn_tp"], found["rank"], found["warnings"]) == (64, 16, 5, [])
    assert found["layers"] == {"first": 0, "last": 92}
    assert found["total"] == held.total == sum(block["total"] for block in found["blocks"])
    shared = next(block for block in found["blocks"] if block["block"] == "shared experts")
    assert shared["parts"] == [
        {"axis": "shared_experts_tp", "ways": 4, "unit": "columns", "first": 1536, "last": 3071, "total": 6144}
    ]


def test_a_folder_and_its_dtype(run: Run) -> None:
    """The weights of a folder are counted in the dtype that its config says, plain experts as plain."""
    code, out, _ = run("--tp", 2, "--config", ORACLES / "k3", "--json")
    assert code == 0
    embedding = json.loads(out)["blocks"][0]
    assert (embedding["block"], embedding["sharded"]) == ("embedding", 128 // 2 * 64 * 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--tp", 64), "96 attention heads do not split over attn_tp = 64"),
        (("--tp", 48, "--ep", 48), "896 experts over ep = 48 is 18.67 a rank"),
        (
            ("--tp", 64, "--dp", 2),
            "experts of width 3072 over tp / ep = 64 ranks is 48 a rank, must be a multiple of 32",
        ),
        (("--tp", 4, "--ep", 4, "--shared", "attn_tp"), "need an all-to-all dispatch"),
        ((*A3, "--shared", 3), "shared_experts_tp_size = 3 does not divide attn_tp = 16"),
        ((*A3, "--shared", "all"), "layout: shared=all is not a number"),
        ((*A3, "--rank", 64), "rank 64 is outside 0..63"),
        (("--layout", "tp=2,cp=2"), "layout: unknown key 'cp'"),
        (("--config", ORACLES / "k3", "--experts", "mxfp4"), "its experts are plain, and cannot be mxfp4"),
        (("--config", "nowhere"), "nowhere: no such folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals_are_one_line(run: Run, args: tuple, message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_options_or_a_layout(run: Run) -> None:
    code, _, err = run("--tp", 4, "--layout", "tp=4")
    assert code == 2
    assert "give --layout or --tp, not both" in err


def test_options_without_effect_are_warned_of_once(run: Run) -> None:
    code, out, err = run("--config", ORACLES / "k3", "--tp", 2, "--dense", "attn_tp", "--json")
    note = "enable_dense_mlp_attn_tp changes nothing with dp = 1: attn_tp is tp"
    assert code == 0
    assert err == f"warning: {note}\n"
    assert json.loads(out)["warnings"] == [note]


def test_former_variables(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_K3_SHARED_EXPERTS_ATTN_TP", "1")
    code, out, err = run(*A3, "--json")
    assert code == 0
    assert json.loads(out)["layout"] == "tp=64,dp=4,ep=64,dispatch=alltoall,shared=attn_tp"
    assert err.startswith(
        "warning: SGLANG_K3_SHARED_EXPERTS_ATTN_TP is a former name: use --enable-shared-experts-attn-tp"
    )
    monkeypatch.setenv("SGLANG_K3_DENSE_MLP_ATTN_TP", "1")
    code, _, err = run(*A3, "--dense", "tp")
    assert code == 1
    assert "SGLANG_K3_DENSE_MLP_ATTN_TP=1 contradicts enable_dense_mlp_attn_tp = False" in err


def test_a_broken_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    code, _, err = run("--config", tmp_path)
    assert (code, err.count("\n")) == (1, 1)
    assert "not valid JSON" in err

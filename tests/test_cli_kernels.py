"""`kernels`: which kernel each operator is said to take, and that it is what the choosing functions say. `selftest`
without an NPU."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k3_npu import ops
from kimi_k3_npu.cli import main
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.ops.cases import CASES, EXACT, FP32, Case, Sizes, as_they_are
from kimi_k3_npu.ops.device import Device, parse_cann
from kimi_k3_npu.ops.op import OPS, npu_operators
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.plan.choices import Situation, layer_kernels, weight_kernels
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tiny import write_tiny

for module in pkgutil.iter_modules(ops.__path__):
    importlib.import_module(f"{ops.__name__}.{module.name}")

#: Operators with NPU kernels that no table of a layer has.
NOT_IN_A_LAYER = {
    "add_rms_norm": "attention residuals are mixed, not added",
    "as_nz": "runs once, after loading",
    "dynamic_quant_int8": "part of w8a8_linear",
}


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        return int(end.value.code or 0), *capfd.readouterr()

    return run


@pytest.fixture
def table(run: Callable) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """The rows that `kernels --json` prints, by operator."""

    def table(*args: object) -> dict[str, list[dict[str, Any]]]:
        code, out, err = run("kernels", *args, "--json")
        assert (code, err) == (0, "")
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in json.loads(out)["kernels"]:
            rows.setdefault(row["op"], []).append(row)
        return rows

    return table


def situation(tokens: int, layout: str = "tp=16,ep=16", soc: str = "a3", packages: bool = True) -> Situation:
    device = Device(soc, parse_cann("9.1"), frozenset({"sgl_kernel_npu"} if packages else ()))
    return Situation(tokens, ParallelLayout.parse(layout), device)


def test_every_operator_with_npu_kernels_has_a_row():
    config, now = published_config().text, situation(16, "tp=64,dp=4,ep=64,dispatch=mc2")
    rows = layer_kernels(config, now) + weight_kernels(config, now)
    assert {row.op for row in rows} == set(npu_operators()) - set(NOT_IN_A_LAYER) | {"moe_dispatch"}
    assert set(NOT_IN_A_LAYER) <= set(npu_operators())


def test_full_size(table: Callable):
    rows = table("--attn-tp", 16, "--tokens", "0,1,65536", "--soc", "a3", "--cann", "9.1", "--no-sgl-kernel-npu")
    assert [(row["tokens"], row["kernel"]) for row in rows["v_up"]] == [
        (0, None),
        (1, "transpose_batchmatmul"),
        (65536, "transpose_batchmatmul"),
    ]
    assert rows["v_up"][0]["shape"] == "[T, 6, 512] x [6, 512, 128]"
    assert rows["latent_attention"][1]["kernel"] == "fia_v2_absorbed"
    assert rows["moe_experts_w4a8"][1]["kernel"] == "grouped_matmul_w4a8"
    assert rows["moe_experts_mxfp4"][1]["refused"] == {"grouped_matmul_mxfp4": "a3 has no FP4 hardware"}
    assert all(row["refused"] == {} for row in rows["v_up"])


@pytest.mark.parametrize(
    ("soc", "cann", "kernel"),
    [
        ("a3", "9.1", "transpose_batchmatmul_head_major"),
        ("a2", "8.5", "transpose_batchmatmul_head_major"),
        ("a3", "9.2", "transpose_batchmatmul"),
        ("a5", "9.1", "transpose_batchmatmul"),
    ],
)
def test_more_heads_than_the_fused_operator_takes_token_major(
    table: Callable, tmp_path: Path, soc: str, cann: str, kernel: str
):
    config = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text())
    config["text_config"]["num_attention_heads"] = config["text_config"]["num_key_value_heads"] = 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = table("--config", tmp_path, "--attn-tp", 1, "--tokens", "1025", "--soc", soc, "--cann", cann)
    (row,) = rows["v_up"]
    assert row["kernel"] == kernel
    if kernel.endswith("head_major"):
        assert "K*B = 65536, must be below 65536" in row["refused"]["transpose_batchmatmul"]


def test_the_package_is_assumed_or_not(table: Callable):
    options = ("--attn-tp", 16, "--tokens", 16, "--soc", "a3", "--cann", "9.1")
    for op, kernel in (("mix_residuals", "sgl_mix_fused"), ("kda_chunk", "sgl_chunk_kda_fwd")):
        assert table(*options, "--sgl-kernel-npu")[op][0]["kernel"] == kernel
        (row,) = table(*options, "--no-sgl-kernel-npu")[op]
        assert (row["kernel"], list(row["refused"])) == ("composed", [kernel])


def test_rows_of_all_replicas_reach_gathered_experts(monkeypatch: pytest.MonkeyPatch):
    """The router of a rank sees them; with an all-to-all only the largest share of its own replica's."""
    config, route, seen = published_config().text, OPS["route"], set()
    choice = route.choice
    monkeypatch.setattr(route, "choice", lambda logits, *others: seen.add(len(logits)) or choice(logits, *others))
    for layout, tokens, rows in (("tp=64,dp=4,ep=64", 16, 64), ("tp=64,dp=4,ep=64,dispatch=alltoall", 17, 2)):
        seen.clear()
        layer_kernels(config, situation(tokens, layout))
        assert seen == {rows}
    (dispatch,) = (
        row
        for row in layer_kernels(config, situation(16384, "tp=64,dp=4,ep=64,dispatch=mc2"))
        if row.op == "moe_dispatch"
    )
    assert (dispatch.kernel, dispatch.refused) == ("alltoall", {"mc2": "1024 rows on a rank, must be in 1..512"})


def test_a_model_without_k3s_features_has_none_of_their_rows():
    folder = Path(__file__).with_name("oracle") / "kimi-linear"
    config = KimiK3Config.from_pretrained(folder).text
    ops = {row.op for row in layer_kernels(config, situation(4, "tp=1"))}
    assert ops.isdisjoint({"mix_residuals", "situ_and_mul"})
    assert "kda_gate" in ops


def test_experts_in_a_form_that_a_share_cannot_be_stored_in_are_said_to_have_no_kernel():
    """32 inputs of an expert share a scale: a rank's 24 of its 3072 do not fill a group."""
    rows = {row.op: row for row in weight_kernels(published_config().text, situation(1, "tp=128,dp=8"))}
    assert rows["moe_experts"].kernel == "grouped_matmul"
    assert rows["moe_experts, mxfp4"].kernel is None
    assert "does not split over moe_tp = 128" in rows["moe_experts, mxfp4"].refused["all"]


def test_a_plan_does_not_go_through_its_tokens():
    rows = layer_kernels(published_config().text, situation(2**31 - 1))
    assert {row.tokens for row in rows} == {2**31 - 1}
    (decode,) = (row for row in rows if row.op == "latent_attention")
    assert decode.refused["fia_v2_absorbed"].startswith("the pool has")


def test_token_counts_that_take_the_same_kernel_share_a_line(run: Callable):
    options = ("--attn-tp", 16, "--tokens", "0,1,16,65536", "--soc", "a3", "--cann", "9.1", "--no-sgl-kernel-npu")
    code, out, err = run("kernels", *options)
    assert (code, err) == (0, "")
    assert re.search(r"v_up .* 0 +nothing to launch", out)
    assert re.search(r" 1, 16, 65536 +transpose_batchmatmul", out)
    assert re.search(r"65536 +composed +fia_v2_absorbed: the pool has", out)
    assert out.splitlines()[0].startswith("full, tp=16,ep=16, a3, CANN 9.1.0, no optional kernel packages")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "give one of --attn-tp and --layout"),
        (("--attn-tp", 16, "--layout", "tp=16"), 2, "give one of --attn-tp and --layout"),
        (("--attn-tp", 16, "--tokens", "1,x"), 2, "'1,x' is not a list such as 1,16,1024"),
        (("--attn-tp", 5, "--soc", "a3", "--cann", "9.1"), 1, "96 attention heads do not split over attn_tp = 5"),
        (("--attn-tp", 16, "--soc", "h100", "--cann", "9.1"), 1, "'h100' is not a supported NPU"),
        (("--attn-tp", 16, "--soc", "a3"), 1, "the CANN version for a3 is unknown here"),
        (("--attn-tp", 16), 1, "there is no NPU here; name the one to plan for"),
        (("--attn-tp", 16, "--config", "nowhere", "--soc", "a3", "--cann", "9.1"), 1, "nowhere"),
    ],
)
def test_mistakes(run: Callable, options: tuple, code: int, message: str):
    found, out, err = run("kernels", *options)
    assert (found, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())


# --- the cases of the self-test ---


def test_every_npu_kernel_has_a_case():
    assert set(CASES) == set(npu_operators())
    assert all(tolerance.because for cases in CASES.values() for case in cases for tolerance in [case.tolerance])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Sizes:
    folder = tmp_path_factory.mktemp("small") / "tiny"
    write_tiny(folder)
    return Sizes(KimiK3Config.from_pretrained(folder).text, 16, 1)


@pytest.mark.parametrize(("op", "index"), [(op, i) for op, cases in CASES.items() for i in range(len(cases))])
def test_arguments_are_the_same_in_every_call_and_the_references(small: Sizes, op: str, index: int):
    from torch.utils._pytree import tree_leaves

    case = CASES[op][index]
    first, second = case.arguments(small), case.arguments(small)
    pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
    want = OPS[op].reference(*first)
    assert case.error(want, want) == 0


def test_errors():
    case = Case("op", "name", lambda sizes: (), FP32, {"other": EXACT}, as_they_are, as_they_are)
    want = torch.tensor([1.0, -4.0])
    assert case.error(torch.tensor([1.0, -3.0]), want) == 0.25
    assert case.allowed("other") == EXACT
    assert case.allowed("this") == FP32
    for wrong in (want[:1], want.double(), torch.tensor([1.0, float("nan")])):
        assert case.error(wrong, want) == float("inf")
    assert case.error((want, torch.tensor([1])), (want, torch.tensor([2]))) == float("inf")


@pytest.mark.skipif(find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_self_test_says_that_it_ran_nothing(run: Callable):
    code, out, err = run("selftest")
    assert (code, out) == (2, "")
    assert err.startswith("nothing was run: torch_npu is not installed.")
    assert "make env-npu" in err

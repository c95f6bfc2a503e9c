"""Several ranks give the tokens of one, for every way in which SGLang spreads the model here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.engines.sglang.harness import HERE
from tests.engines.sglang.test_oracles import check

ON_TWO_CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
ON_FOUR = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1", "PYTHONPATH": str(HERE / "deep_ep_stand_in")}


@pytest.mark.parametrize("experts", [{}, {"ep_size": 2}], ids=["width split", "whole experts"])
def test_two_ranks(engine: Callable, oracle: Callable, prompts: Callable, experts: dict[str, Any]) -> None:
    with engine(ON_TWO_CORES, model_path=str(oracle("k3").folder), tp_size=2, **experts) as driver:
        check(driver, *prompts("k3"))
        log = driver.log
    assert len(re.findall(r"TP\d( EP\d)?\] Load weight end.*type=KimiK3ForSGLang", log)) == 2
    read = [(int(part), int(whole)) for part, whole in re.findall(r"read (\d+) of (\d+) bytes", log)]
    assert len(read) == 2
    for part, whole in read:
        assert part < 0.7 * whole, "a rank reads only what it keeps"


@pytest.mark.parametrize("options", [{}, {"enable_dp_lm_head": True}], ids=["head over tp", "head over attn_tp"])
def test_two_replicas_of_one_rank(
    engine: Callable, oracle: Callable, prompts: Callable, options: dict[str, Any]
) -> None:
    """A request alone leaves the other replica idle; nine at once keep both busy."""
    arguments = {"model_path": str(oracle("k3").folder), "tp_size": 2, "attn_dp_size": 2, **options}
    with engine(ON_TWO_CORES, **arguments) as driver:
        check(driver, *prompts("k3"))
        assert "layout tp=2,dp=2" in driver.log


@pytest.mark.parametrize(
    ("dispatch", "env", "options", "said"),
    [
        pytest.param(
            "own",
            {},
            {"enable_shared_experts_attn_tp": True, "enable_dense_mlp_attn_tp": True},
            ["shared=attn_tp,dense=attn_tp", "experts by our all-to-all"],
            id="own",
        ),
        pytest.param(
            "deepep",
            {"SGLANG_K3_DENSE_MLP_ATTN_TP": "1"},
            {"shared_experts_tp_size": 2},
            ["shared=2,dense=attn_tp", "experts by DeepEP", "is a former name: use --enable-dense-mlp-attn-tp"],
            id="SGLang's dispatcher",
        ),
    ],
)
def test_two_replicas_of_two_ranks_with_an_all_to_all(
    engine: Callable,
    oracle: Callable,
    prompts: Callable,
    dispatch: str,
    env: dict[str, str],
    options: dict[str, Any],
    said: list[str],
) -> None:
    """Both attention-TP options, said in two ways; deep_ep is a stand-in that SGLang's own dispatcher drives."""
    env = {**ON_FOUR, **env, "KIMI_K3_NPU_SGLANG_EXPERT_DISPATCH": dispatch}
    arguments = {"model_path": str(oracle("k3").folder), "tp_size": 4, "attn_dp_size": 2, **options}
    with engine(env, moe_a2a_backend="deepep", **arguments) as driver:
        check(driver, *prompts("k3"))
        log = driver.log
    for words in ["layout tp=4,dp=2,ep=4,dispatch=alltoall", *said]:
        assert words in log


def test_two_pipeline_stages(engine: Callable, oracle: Callable, prompts: Callable) -> None:
    """The bank of residuals crosses the boundary between them."""
    with engine(ON_TWO_CORES, model_path=str(oracle("k3").folder), pp_size=2) as driver:
        check(driver, *prompts("k3"))
        log = driver.log
    assert "layout pp=2" in log
    assert "layers 0 to 3" in log
    assert "layers 4 to 8" in log

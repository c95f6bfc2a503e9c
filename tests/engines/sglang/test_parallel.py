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
OPTIONS = {
    "moe_a2a_backend": "deepep",
    "enable_shared_experts_attn_tp": True,
    "enable_dense_mlp_attn_tp": True,
}


def test_two_ranks(engine: Callable, oracle: Callable, prompts: Callable) -> None:
    with engine(ON_TWO_CORES, model_path=str(oracle("k3").folder), tp_size=2) as driver:
        check(driver, *prompts("k3"))
        log = driver.log
    assert len(re.findall(r"TP\d\] Load weight end.*type=KimiK3ForSGLang", log)) == 2
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


@pytest.mark.parametrize("dispatch", ["own", "deepep"])
def test_two_replicas_of_two_ranks_with_an_all_to_all(
    engine: Callable, oracle: Callable, prompts: Callable, dispatch: str
) -> None:
    environment = {**ON_FOUR, "KIMI_K3_NPU_SGLANG_EXPERT_DISPATCH": dispatch}
    arguments = {"model_path": str(oracle("k3").folder), "tp_size": 4, "attn_dp_size": 2, **OPTIONS}
    with engine(environment, **arguments) as driver:
        check(driver, *prompts("k3"))
        log = driver.log
    assert "layout tp=4,dp=2,ep=4,dispatch=alltoall,shared=attn_tp,dense=attn_tp" in log
    assert f"experts by {'DeepEP' if dispatch == 'deepep' else 'our all-to-all'}" in log


def test_two_pipeline_stages(engine: Callable, oracle: Callable, prompts: Callable) -> None:
    """The bank of residuals crosses the boundary between them."""
    with engine(ON_TWO_CORES, model_path=str(oracle("k3").folder), pp_size=2) as driver:
        check(driver, *prompts("k3"))
        log = driver.log
    assert "layout tp=1,pp=2" in log.replace("layout pp=2", "layout tp=1,pp=2")
    assert "layers 0 to 3" in log
    assert "layers 4 to 8" in log

"""The delta rule over pools that somebody else keeps: fresh slots, transposed states, any slots in any order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kimi_k3_npu.model.delta_rule import DeltaRule, KdaForm, StatePools

H, D, W, SLOTS = 2, 16, 4, 5
OWN = torch.tensor([3, 0, 4])
FRESH = torch.tensor([False, True, True])
FORMS = [
    pytest.param([1, 1, 1], "auto", id="step"),
    pytest.param([5, 0, 40], "auto", id="chunk"),
    pytest.param([5, 1, 3], "recurrent", id="recurrent"),
]


@pytest.fixture
def rule() -> DeltaRule:
    return DeltaRule(torch.randn(3 * H * D, W), torch.randn(H), torch.randn(H, D), -5.0)


@pytest.fixture
def pools() -> StatePools:
    """Windows and states as earlier passes left them, but for the slots of fresh sequences, which are zero."""
    windows, states = torch.randn(SLOTS, W - 1, 3 * H * D), torch.randn(SLOTS, H, D, D)
    for pool in (windows, states):
        pool[OWN[FRESH]] = 0
    return StatePools(windows, states, OWN)


def run(rule: DeltaRule, pools: StatePools, lengths: list[int], form: KdaForm = "auto") -> Tensor:
    T = sum(lengths)
    generator = torch.Generator().manual_seed(T)
    mixed, gate, beta = (torch.randn(T, *rest, generator=generator) for rest in ((3 * H * D,), (H, D), (H,)))
    return rule.over_pools(mixed, gate, beta, pools, lengths, form)


def copied(pools: StatePools, **changes: object) -> StatePools:
    return replace(pools, windows=pools.windows.clone(), states=pools.states.clone(), **changes)


@pytest.mark.parametrize(("lengths", "form"), FORMS)
def test_fresh_slots_count_as_zero(rule: DeltaRule, pools: StatePools, lengths: list[int], form: KdaForm) -> None:
    """Bit for bit as in cleared slots, whatever is in them; without the mask, NaN comes out."""
    dirty = copied(pools, fresh=FRESH)
    for pool in (dirty.windows, dirty.states):
        pool[OWN[FRESH]] = float("nan")
    careless = copied(dirty, fresh=None)
    assert torch.equal(run(rule, dirty, lengths, form), run(rule, pools, lengths, form))
    assert torch.equal(dirty.windows, pools.windows)
    assert torch.equal(dirty.states, pools.states)
    assert run(rule, careless, lengths, form)[lengths[0] :].isnan().all()


@pytest.mark.parametrize(("lengths", "form"), FORMS)
def test_transposed_states(rule: DeltaRule, pools: StatePools, lengths: list[int], form: KdaForm) -> None:
    turned = copied(pools, transposed=True)
    turned.states.copy_(pools.states.mT)
    expected = run(rule, pools, lengths, form)
    torch.testing.assert_close(run(rule, turned, lengths, form), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(turned.states.mT, pools.states, rtol=0, atol=1e-5)
    assert torch.equal(turned.windows, pools.windows)


def test_a_slice_is_as_good_as_an_index(rule: DeltaRule, pools: StatePools) -> None:
    by_index, by_slice = copied(pools, own=torch.tensor([1, 2, 3])), copied(pools, own=slice(1, 4))
    assert torch.equal(run(rule, by_slice, [2, 1, 7]), run(rule, by_index, [2, 1, 7]))
    assert torch.equal(by_slice.states, by_index.states)
    assert torch.equal(by_slice.windows, by_index.windows)


def test_other_slots_are_left_alone(rule: DeltaRule, pools: StatePools) -> None:
    before = copied(pools)
    run(rule, pools, [1, 1, 1])
    for pool, old in ((pools.windows, before.windows), (pools.states, before.states)):
        assert [torch.equal(a, b) for a, b in zip(pool, old, strict=True)] == [False, True, True, False, False]


def test_pools_of_another_dtype(rule: DeltaRule, pools: StatePools) -> None:
    """What is kept is rounded; the rule computes in fp32."""
    half = replace(pools, windows=pools.windows.bfloat16(), states=pools.states.bfloat16())
    rounded = replace(pools, windows=half.windows.float(), states=half.states.float())
    assert torch.equal(run(rule, half, [1, 1, 1]), run(rule, rounded, [1, 1, 1]))
    assert torch.equal(half.states, rounded.states.bfloat16())

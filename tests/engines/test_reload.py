"""Other weights for a running model: every rank does what the worst of them can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines.reload import Reload, addresses
from kimi_k3_npu.engines.weights import Source


class Rank:
    """One of two ranks: what it loads, while `elsewhere` says what is wrong on the other at each agreement in turn."""

    def __init__(self, network: Any, elsewhere: list[str]) -> None:
        self.loaded: list[str] = []
        self.elsewhere = iter(elsewhere)
        self.reload = Reload(
            network, self.open, lambda source: self.loaded.append(source.checkpoint.folder.name), self.agree
        )

    def open(self, path: str, config: KimiK3Config) -> Source:
        return Source.open(Path(path), config)

    def agree(self, problem: str) -> str:
        return problem or next(self.elsewhere)


@pytest.fixture
def rank(oracle: Callable) -> Callable[[list[str]], Rank]:
    return lambda elsewhere: Rank(oracle("k3").model, elsewhere)


def test_new_weights_are_loaded_when_every_rank_can(rank: Callable, oracle: Callable) -> None:
    mine, folder = rank(["", ""]), str(oracle("k3").folder)
    assert mine.reload(folder, "served") == ""
    assert mine.loaded == ["k3"]


def test_a_rank_that_cannot_open_them_keeps_all_from_loading(rank: Callable, oracle: Callable) -> None:
    mine = rank(["torn elsewhere"])
    assert mine.reload(str(oracle("k3").folder), "served") == (
        "torn elsewhere. Nothing was changed; still serving served."
    )
    other = str(oracle("k3-router").folder)
    assert mine.reload(other, "served").startswith(
        f"{other} is another network than the one that runs: its config.json differs in text. Nothing was changed"
    )
    assert mine.loaded == []


def test_a_rank_that_cannot_read_them_takes_all_back(rank: Callable, oracle: Callable) -> None:
    mine, folder = rank(["", "torn elsewhere", ""]), str(oracle("k3").folder)
    assert mine.reload(folder, folder) == f"Failed to update weights: torn elsewhere. Still serving {folder}."
    assert mine.loaded == ["k3", "k3"]


def test_a_model_that_has_neither_weights_ends(rank: Callable, oracle: Callable) -> None:
    mine, folder = rank(["", "torn elsewhere"]), str(oracle("k3").folder)
    with pytest.raises(
        RuntimeError, match=r"torn elsewhere; and the weights served before cannot be read again: .*gone"
    ):
        mine.reload(folder, "gone")


def test_addresses_tell_whether_a_captured_graph_still_reads_the_weights(oracle: Callable) -> None:
    network = oracle("k3").model
    before = addresses(network)
    assert addresses(network) == before
    kept = network.norm.weight.data
    network.norm.weight.data = kept.clone()
    assert addresses(network) != before
    network.norm.weight.data = kept
    assert addresses(network) == before

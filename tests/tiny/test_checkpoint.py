"""The trained checkpoint in weights/tiny: it answers rightly, in every format, and says so where people look."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k3_npu import load_model
from kimi_k3_npu.checkpoint.convert import convert
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.engines.offline import open_engine
from kimi_k3_npu.evaluation.answers import EngineAnswers
from kimi_k3_npu.evaluation.gsm import Marked, differing, mark, read_problems
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model import delta_rule
from kimi_k3_npu.ops.experts import ExpertCall, by_expert
from kimi_k3_npu.ops.experts_int4 import w4a8_matrix
from kimi_k3_npu.ops.kda import kda_gate
from kimi_k3_npu.recipes.offline import BatchSettings
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tokenizer import load_tokenizer

TINY = resource_path("weights", "tiny", "model")
#: So many of the 500 are asked here; the model card has the scores of all.
ASKED = 64


@pytest.fixture(scope="module")
def answers() -> Callable[..., list[Marked]]:
    """What a checkpoint folder answers."""
    problems = read_problems(resource_path("weights", "tiny", "test.jsonl"))[:ASKED]

    @cache
    def ask(folder: Path, effort: str | None = None, **options: str) -> list[Marked]:
        settings = BatchSettings(
            model=str(folder),
            engine="transformers",
            max_new_tokens=200,
            temperature=0.0,
            top_p=None,
            seed=None,
            thinking=True,
        )
        running = open_engine("transformers", folder, options)
        asked = EngineAnswers(running, load_tokenizer(folder), settings, window=ASKED, effort=effort)
        replies = dict(asked.ask([[{"role": "user", "content": problem.question}] for problem in problems]))
        asked.close()
        return [mark(problem, replies[i]) for i, problem in enumerate(problems)]

    return ask


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(form: str) -> Path:
        folder = tmp_path_factory.mktemp("converted") / form
        convert(TINY, folder, form)
        return folder

    return make


def share_right(marked: Sequence[Marked]) -> float:
    return sum(one.right for one in marked) / len(marked)


def test_it_is_small_and_whole() -> None:
    assert sum(file.stat().st_size for file in TINY.iterdir()) < 4e6
    assert not verify(TINY).faults
    model = load_model(TINY)
    assert (model.experts, model.config.text.num_experts) == ("mxfp4", 8)
    kinds = {type(layer.self_attn).__name__ for layer in model.layers.values()}
    assert kinds == {"KimiDeltaAttention", "MultiHeadLatentAttention"}


def test_unseen_problems(answers: Callable) -> None:
    marked = answers(TINY)
    assert share_right(marked) >= 0.98
    assert all(one.finished for one in marked)
    # the steps lead to the number, and are not decoration
    assert all(re.findall(r"\d+", one.thinking)[-1] == one.answer for one in marked)


def test_told_how_much_to_think(answers: Callable) -> None:
    """As servers tell it unless they are asked not to."""
    assert share_right(answers(TINY, "max")) >= 0.98


@pytest.mark.slow
def test_a_mistake_shows(answers: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi-Linear's decay, where K3's is bounded: a third of the answers are then wrong."""
    monkeypatch.setattr(delta_rule, "kda_gate", lambda f, A_log, dt_bias, _: kda_gate(f, A_log, dt_bias, None))
    assert share_right(answers.__wrapped__(TINY)) < 0.8


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bf16", "int4x2"])
def test_the_same_answers_in_another_format(answers: Callable, converted: Callable, form: str) -> None:
    assert differing(answers(TINY), answers(converted(form))) == []


def test_the_same_answers_with_experts_expanded(answers: Callable) -> None:
    assert differing(answers(TINY), answers(TINY, expert_weights="bf16")) == []


@pytest.mark.slow
def test_w4a8_with_rows_rounded_to_int8(
    answers: Callable, converted: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an NPU computes it; the reference leaves the rows as they are. Costs under 5 points."""
    prompt = [torch.arange(256)]
    exact = load_model(converted("w4a8")).score(prompt)[0]
    monkeypatch.setattr(type(FORMATS["w4a8"]), "product", staticmethod(w4a8_on_int8_rows))
    assert not torch.equal(load_model(converted("w4a8")).score(prompt)[0], exact)
    assert share_right(answers(converted("w4a8"))) > share_right(answers(TINY)) - 0.05


class Int8Rows(ExpertCall):
    def activation(self, gate_up: Tensor) -> Tensor:
        return int8_rows(super().activation(gate_up))


def w4a8_on_int8_rows(*arguments: Any) -> Tensor:
    """`moe_experts_w4a8` with the rows of each product rounded to int8, under one scale a row."""
    call = Int8Rows(*arguments)
    call = call._replace(x=int8_rows(call.x))

    def matrices(e: int) -> Iterator[Tensor]:
        return (w4a8_matrix(codes[e], scale[e], call.x.dtype) for codes, scale, _ in (call.w13, call.w2))

    return by_expert(call, len(call.w13[0]), matrices)


def int8_rows(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return ((x.float() / scale).round() * scale).to(x.dtype)

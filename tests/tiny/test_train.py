"""Training the tiny checkpoint: interrupted or not it ends with the same weights, and those are what it ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from kimi_k3_npu import load_model
from kimi_k3_npu.chat.parse import parse_answer
from kimi_k3_npu.checkpoint.manifest import load_manifest
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.ops.quant import mxfp4_dequantize, mxfp4_quantize
from kimi_k3_npu.tiny import write_weights
from weights.tiny import train
from weights.tiny.problems import distinct

SETTINGS = train.Settings(steps=4, batch=2, warmup=1, save_every=2, check_every=4, checked=4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> train.Training:
    """Four steps."""
    training = train.Training(tmp_path_factory.mktemp("train") / "run", SETTINGS)
    training.run()
    return training


def test_it_leaves_a_log_and_a_curve(run: train.Training) -> None:
    records = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["accuracy"] == 0
    assert (run.folder / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_ends_with_the_same_weights(
    run: train.Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train.Training._step

    def interrupted(self: train.Training, number: int) -> float:
        if number == 3:
            raise KeyboardInterrupt
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(train.Training, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.Training(tmp_path, SETTINGS).run()
    again = train.Training(tmp_path, SETTINGS)
    assert len(again.history) == 2
    again.run()
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name]), name
    assert [record["loss"] for record in again.history] == [record["loss"] for record in run.history]


def test_a_run_is_not_mixed_with_another(run: train.Training) -> None:
    with pytest.raises(SystemExit, match="was begun with"):
        train.Training(run.folder, train.Settings(steps=5))


def test_what_is_shipped_is_what_was_trained(run: train.Training, tmp_path: Path) -> None:
    shipped = train.shipped(run.model)
    train.write_settings(tmp_path, train.raw_config())
    write_weights(tmp_path, shipped)
    loaded = load_model(tmp_path, expert_weights="bf16")
    for name, value in shipped.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    experts = run.model.get_submodule("layers.1.mlp.experts")
    master = experts.parametrizations.w13.original
    assert torch.equal(loaded.get_parameter("layers.1.mlp.experts.w13").float(), experts.w13)
    assert not torch.equal(experts.w13, master)
    assert torch.equal(experts.w13, mxfp4_dequantize(*mxfp4_quantize(master), torch.float32))


def test_published_names(run: train.Training, tmp_path: Path) -> None:
    write_weights(tmp_path, train.shipped(run.model))
    published = {pattern.name for pattern in load_manifest("kimi-k3-mxfp4").patterns if "vi" not in pattern.name[:3]}
    found = {
        ".".join("#" if part.isdigit() else part for part in entry.name.split("."))
        for entry in Checkpoint.open(tmp_path).entries.values()
    }
    text = {name for name in published if name.startswith("language_model.")}
    assert found == {".".join("#" if part[0] == "{" else part for part in name.split(".")) for name in text}


def test_the_gradient_passes_through_the_rounding() -> None:
    weight = torch.randn(3, 64, requires_grad=True)
    rounded = train.Mxfp4Rounded()(weight)
    factor = torch.randn(3, 64)
    (rounded * factor).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, factor)
    assert not torch.equal(rounded, weight)


def test_idle_experts_are_called(run: train.Training) -> None:
    """The bias of a router moves by the speed for each step, up or down, or not at all."""
    gate = run.model.get_submodule("layers.1.mlp.gate")
    steps = gate.bias / SETTINGS.balance
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert 0 < steps.abs().max() <= SETTINGS.steps


def test_targets_are_what_the_model_is_to_say(run: train.Training) -> None:
    chosen = distinct("train", 5, 3)
    for effort in (None, "max"):
        batch = train.make_batch(run.tokenizer, chosen, effort)
        assert torch.equal(batch.ids[batch.places + 1], batch.targets)
        for i, problem in enumerate(chosen):
            answer = parse_answer(run.tokenizer.pieces(batch.targets[batch.of == i].tolist()))
            assert (answer.reasoning, answer.content, answer.finished) == (problem.steps, str(problem.answer), True)
            before = run.tokenizer.decode(batch.ids[: batch.places[batch.of == i][0] + 1].tolist())
            assert before.endswith("<|open|>think<|sep|>")
            assert ("thinking_effort" in before) == (effort is not None)


def test_accuracy_counts_whole_answers(run: train.Training, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = train.make_batch(run.tokenizer, distinct("train", 5, 4))
    right = torch.ones(len(batch.targets), dtype=torch.bool)
    right[(batch.of == 2).nonzero()[:2]] = False
    monkeypatch.setattr(train, "loss_of", lambda *_: (torch.zeros(()), right))
    assert train.accuracy(nn.Linear(1, 1), [batch]) == 0.75

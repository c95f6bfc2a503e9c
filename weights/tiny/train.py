"""Train the tiny checkpoint: Kimi-K3's own modules, made small, on arithmetic word problems.

`python -m weights.tiny.train RUN` writes its progress to the folder RUN and, at the end, the checkpoint RUN/model. Run
again after an interruption, it goes on from the last save and ends with the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kimi_k3_npu.chat.render import encode, render
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.model.moe import Router
from kimi_k3_npu.model.uncached import UncachedAttention
from kimi_k3_npu.ops.quant import mxfp4_dequantize, mxfp4_quantize
from kimi_k3_npu.tiny import tiny_config, write_settings, write_weights
from kimi_k3_npu.tokenizer import Tokenizer, load_tokenizer
from weights.tiny.curve import draw_curve
from weights.tiny.problems import Problem, distinct, problems

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "attn_res_block_size": 2,
    "intermediate_size": 256,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
    },
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
    "max_position_embeddings": 2048,
}

#: Parameters that a published checkpoint has in fp32. Routers and mixers are fp32 in memory only.
PUBLISHED_IN_FP32 = ("A_log", "dt_bias", "o_norm", "conv_weight", "bias")

#: A batch in eight says how much to think, as servers do unless they are told otherwise. It changes nothing here.
EFFORTS = (None,) * 21 + ("max", "low", "high")


@dataclass(frozen=True)
class Settings:
    """Of one training. Every `check_every` steps `checked` held-out problems are asked."""

    seed: int = 0
    steps: int = 900
    batch: int = 32
    learning_rate: float = 4e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0
    balance: float = 1e-3
    check_every: int = 100
    checked: int = 128
    save_every: int = 50


@dataclass(frozen=True)
class Batch:
    """Problems as the model reads and answers them, laid end to end: ids [T] of sequences of `lengths` tokens. The
    tokens `targets` [n] follow the places `places` [n]; `of` [n] is whose they are."""

    ids: Tensor
    lengths: list[int]
    places: Tensor
    targets: Tensor
    of: Tensor


def make_batch(tokenizer: Tokenizer, chosen: Iterable[Problem], effort: str | None = None) -> Batch:
    """Targets are what the model is to generate: the steps as its thinking, the number, and the end of its message."""
    ids: list[int] = []
    lengths, places, of = [], [], []
    for i, problem in enumerate(chosen):
        question = {"role": "user", "content": problem.question}
        answer = {"role": "assistant", "reasoning_content": problem.steps, "content": str(problem.answer)}
        prompt = encode(tokenizer, render([question], effort=effort))
        whole = encode(tokenizer, render([question, answer], effort=effort, add_generation_prompt=False))
        assert whole[: len(prompt)] == prompt
        generated = len(whole) - len(prompt)
        # the last token predicts nothing, so it is left out
        places += range(len(ids) + len(prompt) - 1, len(ids) + len(whole) - 1)
        of += [i] * generated
        ids += whole
        lengths.append(len(whole))
    tokens, before = torch.tensor(ids), torch.tensor(places)
    return Batch(tokens, lengths, before, tokens[before + 1], torch.tensor(of))


class _RoundToMxfp4(torch.autograd.Function):
    """Values as MXFP4 holds them; the gradient passes as if nothing were rounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return mxfp4_dequantize(*mxfp4_quantize(weight), weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Mxfp4Rounded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return _RoundToMxfp4.apply(weight)


def raw_config() -> dict[str, Any]:
    """The `config.json`: the published one with small sizes, and without vision."""
    raw = tiny_config("mxfp4")
    raw["text_config"] |= SIZES
    return raw | {"vision_config": None}


def new_model(seed: int) -> KimiK3ForCausalLM:
    """A model in fp32 that computes with its experts' weights rounded to MXFP4."""
    model = KimiK3ForCausalLM(KimiK3Config.from_hf(raw_config()), dtype=torch.float32)
    initialise(model, torch.Generator().manual_seed(seed))
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("w13", "w2"):
                parametrize.register_parametrization(module, name, Mxfp4Rounded())
        elif isinstance(module, Router):
            module.bias.requires_grad_(False)  # moved by `Balance`
    return model


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator) -> None:
    """Norms at 1, mixers even, decays from fast to nearly none, matrices so that they keep the size of what they
    take."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.fill_(1)
        elif name.endswith("dt_bias"):
            parameter.copy_(torch.rand(parameter.shape, generator=generator) * 7 - 8)
        elif parameter.ndim == 1:
            parameter.zero_()
        elif name == "lm_head.weight":
            parameter.copy_(0.02 * noise)
        else:
            parameter.copy_(noise * (1 if name == "embed_tokens.weight" else parameter.shape[-1] ** -0.5))


class Balance:
    """Keeps the experts of each layer equally busy: before a step their router's bias moves up for those that had less
    than their share of the last one, down for the others."""

    def __init__(self, model: KimiK3ForCausalLM, speed: float) -> None:
        self._speed = speed
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._move)

    @torch.no_grad()
    def _move(self, router: Router, _: Any, routed: tuple[Tensor, Tensor]) -> None:
        if router.training:
            busy = torch.bincount(routed[1].flatten(), minlength=len(router.bias)).float()
            router.bias += self._speed * (busy.mean() - busy).sign()


def loss_of(model: KimiK3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """The mean cross-entropy of the targets, and of each [n] whether it was the likeliest token."""
    hidden = model(batch.ids, UncachedAttention(batch.lengths), counts=[len(batch.ids)])
    logits = model.logits(hidden[batch.places])
    return F.cross_entropy(logits, batch.targets), logits.argmax(-1) == batch.targets


@torch.no_grad()
def accuracy(model: KimiK3ForCausalLM, batches: list[Batch]) -> float:
    """The part of problems of which every target is the likeliest token, so that greedy generation answers just so."""
    model.eval()
    right = 0
    for batch in batches:
        missed = batch.of[~loss_of(model, batch)[1]]
        right += len(batch.lengths) - len(missed.unique())
    model.train()
    return right / sum(len(batch.lengths) for batch in batches)


def optimizer_of(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98))


def learning_rate(step: int, settings: Settings) -> float:
    """Up in a line, then down along a cosine to a fiftieth."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)


class Training:
    """One run and its folder: state.pt to go on from, log.jsonl, curve.png, and at the end the checkpoint."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings
        write_settings(folder / "model", raw_config())
        self.tokenizer = load_tokenizer(folder / "model")
        self.model = new_model(settings.seed)
        self.optimizer = optimizer_of(self.model, settings)
        self.balance = Balance(self.model, settings.balance)
        self.history: list[dict[str, float]] = []
        self.seconds = 0.0
        if (folder / "state.pt").exists():
            self._load()

    def run(self) -> None:
        held_out = distinct("test", "while training", self.settings.checked)
        half = len(held_out) // 2
        checks = [make_batch(self.tokenizer, held_out[:half]), make_batch(self.tokenizer, held_out[half:], "max")]
        started = time.perf_counter() - self.seconds
        for step in range(len(self.history), self.settings.steps):
            loss = self._step(step)
            self.seconds = time.perf_counter() - started
            record = {"step": step + 1, "loss": round(loss, 5), "seconds": round(self.seconds, 1)}
            last = step + 1 == self.settings.steps
            if last or (step + 1) % self.settings.check_every == 0:
                record["accuracy"] = accuracy(self.model, checks)
            self.history.append(record)
            if (step + 1) % 10 == 0 or "accuracy" in record:
                print(json.dumps(record), flush=True)
            if last or (step + 1) % self.settings.save_every == 0:
                self._save()

    def _step(self, step: int) -> float:
        seed = f"{self.settings.seed} {step}"
        chosen = islice(problems("train", seed), self.settings.batch)
        batch = make_batch(self.tokenizer, chosen, random.Random(seed).choice(EFFORTS))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.settings)
        loss, _ = loss_of(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self.optimizer.step()
        return loss.item()

    def _save(self) -> None:
        state = {
            "settings": vars(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "seconds": self.seconds,
        }
        part = self.folder / "state.part"
        torch.save(state, part)
        part.replace(self.folder / "state.pt")
        (self.folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in self.history))
        draw_curve(self.history, self.folder / "curve.png")

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=True)
        if state["settings"] != vars(self.settings):
            raise SystemExit(
                f"{self.folder}: was begun with {state['settings']}, not {vars(self.settings)}; go on with the same, "
                "or give a new folder"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history, self.seconds = state["history"], state["seconds"]


@torch.no_grad()
def shipped(model: KimiK3ForCausalLM) -> KimiK3ForCausalLM:
    """A copy in bf16, whose experts hold what MXFP4 holds."""
    copy = KimiK3ForCausalLM(model.config, dtype=torch.bfloat16)
    for path, layer in copy.named_modules():
        source = model.get_submodule(path)
        for name, parameter in layer.named_parameters(recurse=False):
            value = getattr(source, name)
            parameter.copy_(value if name in PUBLISHED_IN_FP32 else value.to(torch.bfloat16))
    return copy


def main() -> None:
    defaults = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    training = Training(args.folder, Settings(seed=args.seed, steps=args.steps, batch=args.batch))
    training.run()
    write_weights(args.folder / "model", shipped(training.model))


if __name__ == "__main__":
    main()

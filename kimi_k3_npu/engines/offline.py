"""What can generate for a batch: transformers in this process, or SGLang or vLLM through their Python interfaces.

All of them take and give token ids, so the tokenizer is this package's whatever the engine.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kimi_k3_npu.engines.launch import IMPL
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.recipes.offline import BatchSettings, Generated, OfflineEngine, Request

EngineChoice = Literal["transformers", "sglang", "vllm"]


def open_engine(name: EngineChoice, model: Path, options: Mapping[str, Any]) -> OfflineEngine:
    """Start an engine for a checkpoint folder. `options` are the engine's own arguments.

    Raises:
        LaunchError: The engine is not installed.
    """
    if name == "transformers":
        return Transformers(model, options)
    return Sglang(model, options) if name == "sglang" else Vllm(model, options)


def seed_of(request: Request, settings: BatchSettings) -> int | None:
    """A request's own seed: its answer depends neither on the batch it was in nor on an earlier interruption."""
    if (own := dict(request.changes).get("seed")) is not None:
        return int(own)
    return None if settings.seed is None else (settings.seed * 1_000_003 + request.line) % 2**31


class Transformers:
    """transformers' generation over this package's model. Greedy prompts share a pass; sampled ones go one by one,
    since transformers samples a batch from one stream of random numbers."""

    def __init__(self, model: Path, options: Mapping[str, Any]) -> None:
        from kimi_k3_npu.engines.generation import check_folder
        from kimi_k3_npu.engines.transformers import KimiK3ForGeneration

        check_folder(model)
        self._network: Any = KimiK3ForGeneration.from_pretrained(model, **options)

    def generate(self, requests: Sequence[Request], settings: BatchSettings) -> Iterator[tuple[Request, Generated]]:
        for group in self._groups(requests, settings):
            yield from zip(group, self._generate(group, group[0].settings(settings)), strict=True)

    def close(self) -> None:
        del self._network

    def _groups(self, requests: Sequence[Request], settings: BatchSettings) -> list[list[Request]]:
        greedy: dict[Any, list[Request]] = {}
        sampled = []
        for request in requests:
            if request.settings(settings).temperature:
                sampled.append([request])
            else:
                greedy.setdefault(request.changes, []).append(request)
        return [*greedy.values(), *sampled]

    def _generate(self, requests: Sequence[Request], settings: BatchSettings) -> list[Generated]:
        import torch
        from transformers import set_seed

        if settings.temperature and (seed := seed_of(requests[0], settings)) is not None:
            set_seed(seed)
        longest = max(len(request.token_ids) for request in requests)
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, longest - len(request.token_ids) :] = torch.tensor(request.token_ids)
            mask[row, longest - len(request.token_ids) :] = 1
        device = self._network.device
        output = self._network.generate(ids.to(device), attention_mask=mask.to(device), **self._sampling(settings))
        return [self._cut(row) for row in output[:, longest:].tolist()]

    def _sampling(self, settings: BatchSettings) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "max_new_tokens": settings.max_new_tokens,
            "do_sample": settings.temperature > 0,
        }
        if settings.temperature:
            chosen |= {"temperature": settings.temperature, "top_k": self._network.generation_config.top_k or 0}
            if settings.top_p is not None:
                chosen["top_p"] = settings.top_p
        return chosen

    def _cut(self, tokens: list[int]) -> Generated:
        """The row up to its end token; what follows it fills up the batch."""
        ids = self._network.generation_config.eos_token_id
        stops = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
        for place, token in enumerate(tokens):
            if token in stops:
                return Generated(tuple(tokens[: place + 1]), "stop")
        return Generated(tuple(tokens), "length")


class Sglang:
    """`sglang.Engine`, with this package's model class unless the options say otherwise."""

    def __init__(self, model: Path, options: Mapping[str, Any]) -> None:
        engine = _import("sglang").Engine
        self._engine = engine(**{"model_path": str(model), "model_impl": IMPL, **options})

    def generate(self, requests: Sequence[Request], settings: BatchSettings) -> Iterator[tuple[Request, Generated]]:
        outputs = self._engine.generate(
            input_ids=[list(request.token_ids) for request in requests],
            sampling_params=[self._sampling(request, settings) for request in requests],
        )
        for request, output in zip(requests, outputs, strict=True):
            reason = (output["meta_info"].get("finish_reason") or {}).get("type", "stop")
            if reason not in ("stop", "length"):
                raise LaunchError(f"SGLang ended line {request.line} with {output['meta_info']['finish_reason']}")
            yield request, Generated(tuple(output["output_ids"]), reason)

    def close(self) -> None:
        self._engine.shutdown()

    def _sampling(self, request: Request, settings: BatchSettings) -> dict[str, Any]:
        settings = request.settings(settings)
        chosen: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        if settings.top_p is not None:
            chosen["top_p"] = settings.top_p
        if (seed := seed_of(request, settings)) is not None:
            chosen["sampling_seed"] = seed
        return chosen


class Vllm:
    """`vllm.LLM`."""

    def __init__(self, model: Path, options: Mapping[str, Any]) -> None:
        self._vllm = _import("vllm")
        self._engine = self._vllm.LLM(**{"model": str(model), **options})

    def generate(self, requests: Sequence[Request], settings: BatchSettings) -> Iterator[tuple[Request, Generated]]:
        outputs = self._engine.generate(
            [{"prompt_token_ids": list(request.token_ids)} for request in requests],
            [self._sampling(request, settings) for request in requests],
            use_tqdm=False,
        )
        for request, output in zip(requests, outputs, strict=True):
            first = output.outputs[0]
            yield request, Generated(tuple(first.token_ids), first.finish_reason or "stop")

    def close(self) -> None:
        del self._engine

    def _sampling(self, request: Request, settings: BatchSettings) -> Any:
        settings = request.settings(settings)
        chosen: dict[str, Any] = {"max_tokens": settings.max_new_tokens, "temperature": settings.temperature}
        if settings.top_p is not None:
            chosen["top_p"] = settings.top_p
        return self._vllm.SamplingParams(**chosen, seed=seed_of(request, settings))


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise LaunchError(f"{name} is not installed here; install it, or use --engine transformers") from None

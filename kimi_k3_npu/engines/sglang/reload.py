"""Other weights for a running model: `/update_weights_from_disk`."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.sglang.weights import LOAD_FORMATS, Source
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

_log = logging.getLogger(__name__)


def reload(
    updater: Any, model_path: str, load_format: str, weight_name_filter: Any = None, recapture_cuda_graph: bool = False
) -> tuple[bool, str]:
    """Load `model_path` in place of what is served, on all ranks or on none. Returns success, and a message.

    Weights change in place, so captured graphs stay valid.
    """
    if refusal := _refusal(load_format, weight_name_filter):
        return False, refusal
    model, served = updater.get_model(), engine.get_model().model_path
    problem = _everywhere(_try_to_load(model, model_path, check=True))
    if problem:
        _log.error("%s; going back to %s", problem, served)
        back = _everywhere(_try_to_load(model, served, check=False))
        if back:
            raise RuntimeError(f"{problem}; and the weights served before cannot be read again: {back}")
        return False, f"Failed to update weights: {problem}. Still serving {served}."
    updater.model_config.model_path = model_path
    config = engine.LoadConfig(load_format=load_format)
    updater.update_model_fields(model, model_path=model_path, load_format=load_format, load_config=config)
    return True, "Succeeded to update model weights."


def _refusal(load_format: str, weight_name_filter: Any) -> str | None:
    if engine.get_parallel().pp_size > 1:
        return "Pipeline stages load one after the other and cannot agree; restart the server with the new weights."
    if str(getattr(load_format, "value", load_format)) not in LOAD_FORMATS[:2]:
        return f"load_format {load_format} is not implemented by this model; choices: {', '.join(LOAD_FORMATS[:2])}."
    if weight_name_filter is not None:
        return "This model loads whole checkpoints, not a selection of names."
    return None


def _try_to_load(model: Any, path: str, *, check: bool) -> str:
    """Load and return "", or what is wrong."""
    try:
        network = model.network
        source = Source.open(path, network.config)
        if check and (difference := _difference(network, source)):
            return f"{path} is another network than the one that runs: {difference}"
        model.load(source)
    except Exception as error:  # whatever it is, the ranks must agree on what to do
        _log.exception("loading %s failed", path)
        return str(error)
    return ""


def _difference(network: KimiK3ForCausalLM, source: Source) -> str:
    new = KimiK3Config.from_pretrained(source.checkpoint.folder)
    parts = ("text", "vision") if network.vision_tower is not None else ("text",)
    changed = [part for part in parts if getattr(network.config, part) != getattr(new, part)]
    if changed:
        return f"its config.json differs in {' and '.join(changed)}"
    if source.experts != network.experts:
        return f"its experts would be kept as {source.experts}, not as {network.experts}"
    return ""


def _everywhere(problem: str) -> str:
    """The problems of all ranks: one that succeeded must not keep weights that another could not read."""
    group = engine.get_parallel().tp_group
    if group.world_size == 1:
        return problem
    problems: list[str] = [""] * group.world_size
    dist.all_gather_object(problems, problem, group=group.cpu_group)
    return "; ".join(dict.fromkeys(problem for problem in problems if problem))

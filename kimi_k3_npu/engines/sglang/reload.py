"""Other weights for a running model: `/update_weights_from_disk`."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.sglang.weights import LOAD_FORMATS, Source, check
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM

_log = logging.getLogger(__name__)


def reload(
    updater: Any, model_path: str, load_format: str, weight_name_filter: Any = None, recapture_cuda_graph: bool = False
) -> tuple[bool, str]:
    """Load `model_path` in place of what is served, on all ranks or on none. Returns success, and a message.

    What shows before weights are read is found before anything changes. Weights change in place wherever the device
    can do that; where some had to move, graphs that were captured are captured again, as they are on request.
    """
    if refusal := _refusal(load_format, weight_name_filter):
        return False, refusal
    model, served = updater.get_model(), engine.get_model().model_path
    source, problem = _open(model, model_path)
    if problem := _everywhere(problem):
        return False, f"{problem}. Nothing was changed; still serving {served}."
    assert source is not None
    places = _places(model.network)
    if problem := _everywhere(_load(model, source)):
        _log.error("%s; going back to %s", problem, served)
        former, reason = _open(model, served)
        back = _everywhere(reason or _load(model, former))
        if back:
            raise RuntimeError(f"{problem}; and the weights served before cannot be read again: {back}")
        _capture_again(updater, places)
        return False, f"Failed to update weights: {problem}. Still serving {served}."
    updater.model_config.model_path = model_path
    config = engine.LoadConfig(load_format=load_format)
    updater.update_model_fields(model, model_path=model_path, load_format=load_format, load_config=config)
    _capture_again(updater, () if recapture_cuda_graph else places)
    return True, "Succeeded to update model weights."


def _refusal(load_format: str, weight_name_filter: Any) -> str | None:
    if engine.get_parallel().pp_size > 1:
        return "Pipeline stages load one after the other and cannot agree; restart the server with the new weights."
    if str(getattr(load_format, "value", load_format)) not in LOAD_FORMATS[:2]:
        return f"load_format {load_format} is not implemented by this model; choices: {', '.join(LOAD_FORMATS[:2])}."
    if weight_name_filter is not None:
        return "This model loads whole checkpoints, not a selection of names."
    return None


def _open(model: Any, path: str) -> tuple[Source | None, str]:
    """The weights of `path`, which nothing is changed by, or what keeps them from being loaded."""
    network = model.network
    try:
        source = Source.open(path, network.config)
        if difference := _difference(network, source):
            return None, f"{path} is another network than the one that runs: {difference}"
        check(network, source)
    except Exception as error:  # whatever it is, the ranks must agree on what to do
        _log.exception("opening %s failed", path)
        return None, str(error)
    return source, ""


def _load(model: Any, source: Source | None) -> str:
    """Load and return "", or what is wrong."""
    assert source is not None
    try:
        model.load(source)
    except Exception as error:  # as above
        _log.exception("loading %s failed", source.checkpoint.folder)
        return str(error)
    return ""


def _places(network: KimiK3ForCausalLM) -> tuple[int, ...]:
    """Where what a captured graph reads lies."""
    return tuple(tensor.data_ptr() for tensor in (*network.parameters(), *network.buffers()))


def _capture_again(updater: Any, places: tuple[int, ...]) -> None:
    """Capture SGLang's graphs again, if there are any, unless on every rank all weights lie at `places`."""
    moved = _everywhere("moved" if _places(updater.get_model().network) != places else "")
    if moved and updater.device != "cpu" and engine.get_exec().graph.cuda_graph_config.decode.backend != "disabled":
        _log.info("weights have moved: capturing graphs again")
        updater.recapture_cuda_graph()


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

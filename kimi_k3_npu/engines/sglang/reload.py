"""Other weights for a running server: `/update_weights_from_disk`."""

from __future__ import annotations

import logging
from typing import Any

from kimi_k3_npu.engines.options import LOAD_FORMATS
from kimi_k3_npu.engines.reload import Reload, addresses
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.sglang.checkpoint import open_source
from kimi_k3_npu.parallel.agreement import problems_of_all

#: Those that read files.
RELOAD_FORMATS = LOAD_FORMATS[:2]

_log = logging.getLogger(__name__)


def reload(
    updater: Any, model_path: str, load_format: str, weight_name_filter: Any = None, recapture_cuda_graph: bool = False
) -> tuple[bool, str]:
    """Load `model_path` in place of what is served, on all ranks or on none. Returns success, and a message.

    Where weights had to move, graphs that were captured are captured again, as they are on request.
    """
    if refusal := _refusal(load_format, weight_name_filter):
        return False, refusal
    model, served = updater.get_model(), engine.get_model().model_path
    before = addresses(model.network)
    if problem := Reload(model.network, open_source, model.load, _agree)(model_path, served):
        _capture_again(updater, before)
        return False, problem
    updater.model_config.model_path = model_path
    config = engine.LoadConfig(load_format=load_format)
    updater.update_model_fields(model, model_path=model_path, load_format=load_format, load_config=config)
    _capture_again(updater, () if recapture_cuda_graph else before)
    return True, "Succeeded to update model weights."


def _refusal(load_format: str, weight_name_filter: Any) -> str | None:
    if engine.get_parallel().pp_size > 1:
        return "Pipeline stages load one after the other and cannot agree; restart the server with the new weights."
    if str(getattr(load_format, "value", load_format)) not in RELOAD_FORMATS:
        return f"load_format {load_format} is not implemented by this model; choices: {', '.join(RELOAD_FORMATS)}."
    if weight_name_filter is not None:
        return "This model loads whole checkpoints, not a selection of names."
    return None


def _agree(problem: str) -> str:
    """One rank that succeeded must not keep weights that another could not read."""
    group = engine.get_parallel().tp_group
    return problems_of_all(problem, group.cpu_group if group.world_size > 1 else None)


def _capture_again(updater: Any, before: tuple[int, ...]) -> None:
    """Capture SGLang's graphs again, if there are any, unless on every rank all weights lie where they did before."""
    moved = _agree("moved" if addresses(updater.get_model().network) != before else "")
    if moved and updater.device != "cpu" and engine.get_exec().graph.cuda_graph_config.decode.backend != "disabled":
        _log.info("weights have moved: capturing graphs again")
        updater.recapture_cuda_graph()

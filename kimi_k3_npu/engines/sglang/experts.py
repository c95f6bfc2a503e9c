"""Tokens to experts and back by SGLang's DeepEP dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k3_npu.config import TextConfig
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.ops.grouped import owners
from kimi_k3_npu.ops.mc2 import ExpertsFunction
from kimi_k3_npu.parallel.groups import Group


class DeepEP:
    """SGLang's dispatcher, one a layer. Rows travel unquantised unless deep_ep's own settings quantise them.

    It picks its normal or its low-latency form for each pass. Both deliver rows sorted by the expert that they are for,
    a row for each pair of token and expert, and how many each expert gets; the weights are applied where rows return.
    """

    def __init__(self, config: TextConfig, group: Group, coordinator: Any, dtype: torch.dtype) -> None:
        held = config.num_experts // group.size
        self.first = group.rank * held
        self.dispatcher = engine.DeepEPDispatcher(
            group=coordinator.device_group,
            router_topk=config.num_experts_per_token,
            permute_fusion=True,
            num_experts=config.num_experts,
            num_local_experts=held,
            hidden_size=config.expert_hidden_size,
            params_dtype=dtype,
            deepep_mode=engine.get_deepep_mode(),
            async_finish=True,
            return_recv_hook=True,
        )
        self.dispatcher.set_quant_config({"dispatcher_output_dtype": "bf16"})

    def __call__(self, z: Tensor, weights: Tensor, ids: Tensor, experts: ExpertsFunction, largest: int) -> Tensor:
        routing = engine.StandardTopKOutput(weights, ids, None)
        sent = self.dispatcher.dispatch(hidden_states=z, topk_output=routing)
        low_latency = isinstance(sent, engine.DeepEPLLDispatchOutput)
        counts = sent.masked_m if low_latency else sent.num_recv_tokens_per_expert
        rows = sent.hidden_states
        if sent.hidden_states_scale is not None:  # DEEP_NORMAL_MODE_USE_INT8_QUANT: a scale a row
            rows = (rows.float() * sent.hidden_states_scale.unsqueeze(1)).to(z.dtype)
        owner = owners(torch.as_tensor(counts, device=rows.device), rows.shape[0], self.first)
        results = experts(rows, torch.ones_like(owner, dtype=torch.float32), owner)
        combine = engine.DeepEPLLCombineInput if low_latency else engine.DeepEPNormalCombineInput
        return self.dispatcher.combine(combine(results, sent.topk_ids, sent.topk_weights))

"""Every name of SGLang that this package uses. Nothing else here imports SGLang.

`from kimi_k3_npu.engines.sglang import symbols as engine`, then `engine.RadixAttention`: each is imported when first
used. A name that the installed SGLang does not have is a LaunchError that says so.
"""

from __future__ import annotations

from typing import Any

from kimi_k3_npu.engines.launch import Engine

#: The tested version is also the first that has every name below.
SGLANG = Engine(
    name="SGLang",
    package="sglang",
    tested="0.5.23",
    model_option="--model-path",
    images_option="--enable-multimodal",
)
find = SGLANG.find

#: Name here -> module and attribute there.
SYMBOLS = {
    # plugins
    "HookRegistry": "sglang.srt.plugins.hook_registry:HookRegistry",
    "HookType": "sglang.srt.plugins.hook_registry:HookType",
    # what was asked for, and where this process stands
    "ModelImpl": "sglang.srt.configs.model_config:ModelImpl",
    "engine_envs": "sglang.srt.environ:envs",
    "attention_backends": "sglang.srt.runtime_context:attention_backends",
    "get_exec": "sglang.srt.runtime_context:get_exec",
    "get_lora": "sglang.srt.runtime_context:get_lora",
    "get_mm": "sglang.srt.runtime_context:get_mm",
    "get_model": "sglang.srt.runtime_context:get_model",
    "get_parallel": "sglang.srt.runtime_context:get_parallel",
    # layers
    "RadixAttention": "sglang.srt.layers.radix_attention:RadixAttention",
    "RadixLinearAttention": "sglang.srt.layers.radix_linear_attention:RadixLinearAttention",
    "VocabParallelEmbeddingShardIndices": (
        "sglang.srt.layers.vocab_parallel_embedding:VocabParallelEmbeddingShardIndices"
    ),
    "LogitsProcessor": "sglang.srt.layers.logits_processor:LogitsProcessor",
    "PPProxyTensors": "sglang.srt.model_executor.forward_batch_info:PPProxyTensors",
    "get_token_to_kv_pool": "sglang.srt.model_executor.forward_context:get_token_to_kv_pool",
    # attention backends
    "MambaAttnBackendBase": "sglang.srt.layers.attention.hybrid_linear_attn_backend:MambaAttnBackendBase",
    "HybridLinearAttnBackend": "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend",
    # images
    "pad_mm_tokens": "sglang.srt.managers.mm_utils:pad_mm_tokens",
    "prepare_mm_inputs": "sglang.srt.managers.mm_utils:prepare_mm_inputs",
    # weights
    "LoadConfig": "sglang.srt.configs.load_config:LoadConfig",
    "DefaultModelLoader": "sglang.srt.model_loader.loader:DefaultModelLoader",
    # expert parallelism
    "DeepEPDispatcher": "sglang.srt.layers.moe.token_dispatcher.deepep:DeepEPDispatcher",
    "DeepEPLLCombineInput": "sglang.srt.layers.moe.token_dispatcher.deepep:DeepEPLLCombineInput",
    "DeepEPLLDispatchOutput": "sglang.srt.layers.moe.token_dispatcher.deepep:DeepEPLLDispatchOutput",
    "DeepEPNormalCombineInput": "sglang.srt.layers.moe.token_dispatcher.deepep:DeepEPNormalCombineInput",
    "StandardTopKOutput": "sglang.srt.layers.moe.topk:StandardTopKOutput",
    "get_deepep_mode": "sglang.srt.layers.moe.utils:get_deepep_mode",
}

#: What is hooked: dotted paths as SGLang's registry takes them.
MODEL_CONFIG = "sglang.srt.configs.model_config.ModelConfig.__init__"
MODEL_ARCHITECTURE = "sglang.srt.model_loader.utils.get_model_architecture"
QUANTIZATION = "sglang.srt.model_loader.loader._get_quantization_config"
ATTENTION_BACKEND = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"
WEIGHT_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
UPDATE_FROM_DISK = f"{WEIGHT_UPDATER}.update_weights_from_disk"
HOOKED = (MODEL_CONFIG, MODEL_ARCHITECTURE, QUANTIZATION, ATTENTION_BACKEND, UPDATE_FROM_DISK)


def __getattr__(name: str) -> Any:
    if name not in SYMBOLS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = find(SYMBOLS[name])
    return value

"""What is hooked in SGLang. Every hook does nothing unless `--model-impl kimi_k3_npu` was asked for.

Two hooks are always placed, and the others when the first model of ours is looked up. Importing this loads no torch.
"""

from __future__ import annotations

from typing import Any

from kimi_k3_npu.engines.launch import IMPL, is_ours
from kimi_k3_npu.engines.sglang import options
from kimi_k3_npu.engines.sglang import symbols as engine
from kimi_k3_npu.engines.sglang.registry import Hook, apply, place
from kimi_k3_npu.errors import LaunchError

ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")


def model_config(original: Hook, self: Any, *args: Any, **kwargs: Any) -> None:
    """Images are taken if the folder has what they need: SGLang would ask every folder for an image processor."""
    if not is_ours(kwargs.get("model_impl")) or kwargs.get("is_draft_model"):
        original(self, *args, **kwargs)
        return
    from kimi_k3_npu.engines.processing import register_auto_classes
    from kimi_k3_npu.engines.sglang import images

    model_path = args[0] if args else kwargs["model_path"]
    kwargs["enable_multimodal"] = images.wanted(model_path, kwargs.get("enable_multimodal"), kwargs.get("revision"))
    original(self, *args, **kwargs)
    setattr(self.hf_config, images.TAKES_IMAGES, kwargs["enable_multimodal"])
    register_auto_classes(type(self.hf_config))  # where a folder names our tokenizer and processor


def model_architecture(original: Hook, model_config: Any) -> Any:
    if not asked_for(model_config):
        return original(model_config)
    place(WHEN_USED)
    apply()
    from kimi_k3_npu.engines.sglang.model import KimiK3ForSGLang

    names = list(getattr(model_config.hf_config, "architectures", None) or [])
    known = [name for name in names if name in ARCHITECTURES]
    if not known:
        raise LaunchError(
            f"--model-impl {IMPL} serves {' and '.join(ARCHITECTURES)}; config.json of {model_config.model_path} has "
            f"architectures {names}"
        )
    model_config._resolved_model_arch = known[0]
    model_config._resolved_model_impl = engine.ModelImpl.SGLANG
    return KimiK3ForSGLang, known[0]


def quantization(original: Hook, model_config: Any, load_config: Any) -> Any:
    """Formats are read by our loader; SGLang's quantisation would only reshape layers that we do not use."""
    if not asked_for(model_config):
        return original(model_config, load_config)
    options.QUANTIZATION.check(model_config.quantization)
    return None


def attention_backend(original: Hook, runner: Any, full_attention: Any) -> Any:
    """On a CPU, where SGLang has no kernels for KDA, ours over SGLang's own state pools."""
    if runner.device != "cpu" or runner.is_draft_worker or not asked_for(runner.model_config):
        return original(runner, full_attention)
    from kimi_k3_npu.engines.sglang.kda_backend import TorchKdaBackend

    layers = runner.model_config.hf_text_config.full_attention_layer_ids
    return engine.HybridLinearAttnBackend(full_attention, TorchKdaBackend(runner), layers)


def update_from_disk(original: Hook, self: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any) -> Any:
    """SGLang would offer our model an iterator that it does not read, and report success."""
    from kimi_k3_npu.engines.sglang.model import KimiK3ForSGLang
    from kimi_k3_npu.engines.sglang.reload import reload

    if not isinstance(self.get_model(), KimiK3ForSGLang):
        return original(self, model_path, load_format, *args, **kwargs)
    return reload(self, model_path, load_format, *args, **kwargs)


def asked_for(model_config: Any) -> bool:
    """Whether `model_config` is of a target model that is to be ours. A draft model inherits the target's option.

    Raises:
        LaunchError: The option is ours but for its spelling; SGLang would take it for its own class.
    """
    return is_ours(model_config.model_impl) and not model_config.is_draft_model


ALWAYS: dict[str, Hook] = {engine.MODEL_CONFIG: model_config, engine.MODEL_ARCHITECTURE: model_architecture}
WHEN_USED: dict[str, Hook] = {
    engine.QUANTIZATION: quantization,
    engine.ATTENTION_BACKEND: attention_backend,
    engine.UPDATE_FROM_DISK: update_from_disk,
}

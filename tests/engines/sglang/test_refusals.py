"""A launch that asks for kimi_k3_npu and cannot have it fails, and says why. It never runs another class."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engines.sglang.harness import ARGUMENTS, ORACLES, EngineFailed, Server, as_options

#: The platform of these tests is a plugin as well, and SGLANG_PLUGINS leaves platforms out too unless one is named.
PLATFORM = {"SGLANG_PLATFORM": "cpu_platform"}

BREAK_IMPORT = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "kimi_k3_npu.engines.sglang.hooks":
            raise ImportError("broken on purpose")

sys.meta_path.insert(0, Broken())
"""

#: Runs when SGLang's registry has been imported, and lets it fail for targets that hold a word.
BREAK_HOOK = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        registry = sys.modules.get("sglang.srt.plugins.hook_registry")
        if registry is not None and hasattr(registry, "_wrap_fn") and not hasattr(registry, "broken"):
            registry.broken = True
            apply = registry.HookRegistry._apply_target.__func__

            def broken(cls, target, hooks):
                if "{word}" in target:
                    raise RuntimeError("broken on purpose")
                return apply(cls, target, hooks)

            registry.HookRegistry._apply_target = classmethod(broken)

sys.meta_path.insert(0, Broken())
"""


def launch(folder: Path, *options: str, **env: str) -> str:
    """The log of a launch that must fail."""
    arguments = as_options({"model_path": ORACLES / "k3", **ARGUMENTS})
    server = Server(folder, *arguments, *options, **env)
    try:
        with pytest.raises(EngineFailed) as failure:
            server.wait()
        assert server.process.returncode != 0
        return str(failure.value)
    finally:
        server.close()


def test_plugin_disabled(tmp_path: Path) -> None:
    log = launch(tmp_path, SGLANG_PLUGINS="none", **PLATFORM)
    assert "--model-impl kimi_k3_npu was asked for" in log
    assert "SGLANG_PLUGINS=none leaves the plugin out" in log
    assert "Load weight" not in log


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        pytest.param(BREAK_IMPORT, "ImportError: broken on purpose", id="register fails"),
        pytest.param(BREAK_HOOK.replace("{word}", "get_model_arch"), "could not apply", id="its hook is not applied"),
        pytest.param(
            BREAK_HOOK.replace("{word}", "WeightUpdater"), "did not apply the hooks", id="a later hook is not"
        ),
    ],
)
def test_plugin_broken(tmp_path: Path, code: str, reason: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(code)
    log = launch(tmp_path, PYTHONPATH=str(tmp_path))
    assert reason in log
    assert "Load weight end" not in log


def test_options_of_the_model_are_checked_at_the_launch(tmp_path: Path) -> None:
    log = launch(tmp_path, "--load-format", "layered", KIMI_K3_NPU_SGLANG_EXPERT_DISPATCH="own")
    assert "--load-format layered is not implemented" in log


# What follows needs no launch.


def config(**values: Any) -> SimpleNamespace:
    defaults = {
        "model_impl": "kimi_k3_npu",
        "is_draft_model": False,
        "model_path": "somewhere",
        "quantization": None,
        "hf_config": SimpleNamespace(architectures=["KimiK3ForConditionalGeneration"]),
    }
    return SimpleNamespace(**{**defaults, **values})


def test_other_implementations_are_left_alone() -> None:
    from kimi_k3_npu.engines.sglang import hooks

    for other in (config(model_impl="auto"), config(model_impl="sglang"), config(is_draft_model=True)):
        assert hooks.model_architecture(lambda _: "theirs", other) == "theirs"
        assert hooks.quantization(lambda *_: "theirs", other, None) == "theirs"
    seen: dict[str, Any] = {}
    hooks.model_config(lambda _, **kwargs: seen.update(kwargs), None, model_impl="auto", enable_multimodal=None)
    assert seen["enable_multimodal"] is None


def test_a_misspelt_name_is_refused() -> None:
    from kimi_k3_npu.engines.sglang import hooks
    from kimi_k3_npu.errors import LaunchError

    with pytest.raises(LaunchError, match="the name of this implementation is kimi_k3_npu"):
        hooks.model_architecture(lambda _: "theirs", config(model_impl="kimi-k3-npu"))


def test_what_would_be_ignored_is_refused() -> None:
    from kimi_k3_npu.engines.sglang import hooks
    from kimi_k3_npu.errors import LaunchError

    with pytest.raises(LaunchError, match="--quantization fp8 is not applied"):
        hooks.quantization(lambda *_: None, config(quantization="fp8"), None)
    with pytest.raises(LaunchError, match="has no vision weights"):
        hooks.model_config(lambda *_: None, None, str(ORACLES / "k3"), model_impl="kimi_k3_npu", enable_multimodal=True)


def test_a_missing_name_of_sglang_is_named() -> None:
    from kimi_k3_npu.engines.sglang import symbols
    from kimi_k3_npu.errors import LaunchError

    with pytest.raises(LaunchError, match=r"has no sglang.srt.layers.radix_attention.Gone .* tested with SGLang 0"):
        symbols.find("sglang.srt.layers.radix_attention:Gone")


def test_tensors_are_refused() -> None:
    """What would hand the model tensors is refused by SGLang itself, with the model's reason."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import (
        _unsupported_derived_weight_cache_error,
    )
    from torch import nn

    from kimi_k3_npu.engines.sglang.model import KimiK3ForSGLang
    from kimi_k3_npu.errors import LaunchError

    model = KimiK3ForSGLang.__new__(KimiK3ForSGLang)
    nn.Module.__init__(model)
    assert "/update_weights_from_disk" in str(_unsupported_derived_weight_cache_error(model))
    with pytest.raises(LaunchError, match="takes no tensors"):
        model.load_weights([("model.norm.weight", None)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"moe_a2a_backend": "mooncake"}, "--moe-a2a-backend mooncake is not implemented here; choices: none, deepep"),
        ({"attn_cp_size": 2}, "--attn-cp-size 2"),
        ({"moe_dense_tp_size": 1}, "--moe-dense-tp-size 1"),
        ({"enable_eplb": True}, "--enable-eplb True"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap True"),
        ({"cpu_offload_gb": 8}, "--cpu-offload-gb 8"),
        ({"enable_lora": True}, "--enable-lora True"),
        ({"enable_shared_experts_attn_tp": True}, "need an all-to-all dispatch"),
        ({"shared_experts_tp_size": 3, "moe_a2a_backend": "deepep", "moe_ep_size": 4}, "does not divide attn_tp = 2"),
    ],
)
def test_parallel_options_that_would_be_ignored(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    from kimi_k3_npu.engines.sglang import layout, symbols
    from kimi_k3_npu.errors import KimiK3Error

    values: dict[str, Any] = {
        **{"tp_size": 4, "attn_dp_size": 2, "moe_ep_size": 1, "pp_size": 1, "attn_cp_size": 1, "dcp_size": 1},
        **{"moe_dp_size": 1, "moe_dense_tp_size": None, "enable_dp_lm_head": False, "shared_experts_tp_size": None},
        **{"enable_shared_experts_attn_tp": False, "enable_dense_mlp_attn_tp": False, "moe_a2a_backend": "none"},
        **{"ep_num_redundant_experts": 0, "enable_eplb": False, "init_expert_location": "trivial"},
        **{"enable_two_batch_overlap": False, "cpu_offload_gb": 0, "offload_group_size": -1, "enable_lora": None},
    }
    bag = SimpleNamespace(**values)
    bag.moe = bag.overlap = bag.offload = bag
    for getter in ("get_parallel", "get_exec", "get_lora"):
        monkeypatch.setattr(symbols, getter, lambda: bag, raising=False)
    assert str(layout.engine_layout()) == "tp=4,dp=2"
    for name, value in change.items():
        setattr(bag, name, value)
    with pytest.raises(KimiK3Error, match=re.escape(message)):
        layout.engine_layout()

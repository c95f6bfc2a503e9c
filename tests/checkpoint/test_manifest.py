"""The manifest of the published checkpoint expands to exactly its tensors."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kimi_k3_npu import resources
from kimi_k3_npu.checkpoint.manifest import Extent, TensorSpec, expand, load_manifest
from kimi_k3_npu.errors import ConfigError
from kimi_k3_npu.resources import resource_path

# 0-based; written out here rather than read from the config, which lists them 1-based.
MLA = (*range(3, 92, 4), 92)
K3 = Extent(
    num_layers=93,
    kda_layers=tuple(layer for layer in range(93) if layer not in MLA),
    mla_layers=MLA,
    dense_layers=(0,),
    moe_layers=tuple(range(1, 93)),
    num_experts=896,
    num_vision_blocks=27,
)


def test_the_published_checkpoint() -> None:
    manifest = load_manifest("kimi-k3-mxfp4")
    specs = list(expand(manifest, K3))
    by_name = {spec.name: spec for spec in specs}
    assert len(specs) == len(by_name) == manifest.total_tensors == 497_220
    total = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    assert total == manifest.total_bytes == 1_560_860_324_864
    assert manifest.shards == 96
    assert Counter(spec.dtype for spec in specs) == {
        torch.uint8: 92 * 896 * 6,
        torch.float32: 69 * 6 + 92,
        torch.bfloat16: 497_220 - 92 * 896 * 6 - 69 * 6 - 92,
    }
    assert not [name for name in by_name if "{" in name]
    layer = "language_model.model.layers."
    for spec in (
        TensorSpec(layer + "90.self_attn.A_log", (128,), torch.float32),
        TensorSpec(layer + "92.self_attn.kv_b_proj.weight", (24576, 512), torch.bfloat16),
        TensorSpec(layer + "0.mlp.down_proj.weight", (7168, 33792), torch.bfloat16),
        TensorSpec(layer + "1.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536), torch.uint8),
        TensorSpec("vision_tower.encoder.blocks.26.wqkv.weight", (4608, 1024), torch.bfloat16),
        TensorSpec("mm_projector.post_norm.weight", (7168,), torch.bfloat16),
    ):
        assert by_name[spec.name] == spec
    assert layer + "92.self_attn.A_log" not in by_name
    assert layer + "0.block_sparse_moe.gate.weight" not in by_name


def test_the_published_config_has_the_same_extent() -> None:
    file = resource_path("weights", "manifests", "kimi-k3-config.json")
    config = json.loads(file.read_text(encoding="utf-8"))
    text, attention = config["text_config"], config["text_config"]["linear_attn_config"]
    assert text["num_hidden_layers"] == K3.num_layers
    assert tuple(layer - 1 for layer in attention["kda_layers"]) == K3.kda_layers
    assert tuple(layer - 1 for layer in attention["full_attn_layers"]) == K3.mla_layers
    assert text["first_k_dense_replace"] == len(K3.dense_layers)
    assert text["num_experts"] == K3.num_experts
    assert config["vision_config"]["vt_num_hidden_layers"] == K3.num_vision_blocks


@pytest.mark.parametrize(
    ("change", "pattern", "count"),
    [
        ({"num_layers": 92}, "input_layernorm.weight", 92),
        ({"kda_layers": K3.kda_layers[1:]}, "q_proj.weight", 68),
        ({"mla_layers": (*MLA, 93)}, "q_a_proj.weight", 25),
        ({"dense_layers": ()}, "mlp.gate_proj.weight", 0),
        ({"num_experts": 895}, "w1.weight_packed", 92 * 895),
        ({"num_vision_blocks": 26}, "norm0.weight", 26),
    ],
)
def test_another_model_is_refused(change: dict, pattern: str, count: int) -> None:
    with pytest.raises(ConfigError, match=rf"manifest kimi-k3-mxfp4 has \d+ tensors .*{pattern}, .* makes {count}$"):
        list(expand(load_manifest("kimi-k3-mxfp4"), replace(K3, **change)))


def test_an_unknown_manifest_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no manifest 'kimi-k4'; there are: .*kimi-k3-mxfp4"):
        load_manifest("kimi-k4")


def test_resources_of_a_checkout_and_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "kimi_k3_npu"
    monkeypatch.setattr(resources, "_PACKAGE", package)
    assert resource_path("weights", "x.json") == package / "data" / "weights" / "x.json"
    (tmp_path / "pyproject.toml").touch()
    assert resource_path("weights", "x.json") == tmp_path / "weights" / "x.json"

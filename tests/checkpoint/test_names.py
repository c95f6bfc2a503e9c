"""The name map covers the published checkpoint: each tensor fills one place and every place is filled."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

from kimi_k3_npu.checkpoint.manifest import Extent, TensorSpec, expand, load_manifest
from kimi_k3_npu.checkpoint.names import NameMap, Target, normalise
from kimi_k3_npu.checkpoint.plan import Assignment, LoadPlan, plan_loading, records_of
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import Storage
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.formats import FORMATS, Format
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.resources import resource_path

if TYPE_CHECKING:
    from tests.conftest import Oracle

Tensors = dict[str, TensorSpec]

PLAIN, MXFP4 = FORMATS["plain"], FORMATS["mxfp4"]


# --- the published checkpoint, at full size on the meta device ---


@pytest.fixture(scope="module")
def k3() -> KimiK3ForCausalLM:
    raw = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text())
    with torch.device("meta"):
        return KimiK3ForCausalLM(KimiK3Config.from_hf(raw), experts="mxfp4")


@pytest.fixture(scope="module")
def published(k3: KimiK3ForCausalLM) -> Tensors:
    text, vision = k3.config.text, k3.config.vision
    assert vision is not None
    extent = Extent(
        num_layers=text.num_hidden_layers,
        kda_layers=text.kda_layers,
        mla_layers=text.mla_layers,
        dense_layers=tuple(layer for layer in range(text.num_hidden_layers) if not text.is_moe(layer)),
        moe_layers=text.moe_layers,
        num_experts=text.num_experts,
        num_vision_blocks=vision.vt_num_hidden_layers,
    )
    return {spec.name: spec for spec in expand(load_manifest("kimi-k3-mxfp4"), extent)}


@pytest.fixture(scope="module")
def plan(k3: KimiK3ForCausalLM, published: Tensors) -> LoadPlan:
    return plan_loading(k3, published, Storage("mxfp4", MXFP4).names(MXFP4))


def parameter(a: Assignment) -> str:
    """The parameter that a tensor fills a piece of: a packed expert and its scales have one each."""
    kept = a.target.part.suffix.removeprefix(".weight") if a.target.row.is_expert else ""
    return a.target.parameter + kept


@pytest.mark.slow
def test_every_published_tensor_has_exactly_one_place(plan: LoadPlan, published: Tensors) -> None:
    assert plan.faults == []
    assert plan.elsewhere == []
    assert len(published) == 497_220
    assert {assignment.name for assignment in plan.assignments} == published.keys()
    places = {(parameter(a), a.target.piece) for a in plan.assignments}
    assert len(places) == len(plan.assignments) == 497_220


@pytest.mark.slow
def test_the_bytes_are_those_of_the_published_checkpoint(plan: LoadPlan, published: Tensors) -> None:
    specs = [published[assignment.name] for assignment in plan.assignments]
    assert sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs) == 1_560_860_324_864


@pytest.mark.slow
def test_every_parameter_is_filled_once_and_completely(plan: LoadPlan, k3: KimiK3ForCausalLM) -> None:
    """The places of a parameter are different boxes whose sizes add up to it. Residual mixers are products of two whole
    tensors."""
    boxes: dict[str, list[tuple[tuple[int, int], ...]]] = defaultdict(list)
    products = set()
    parameters, records = dict(k3.named_parameters()), records_of(k3)
    for a in plan.assignments:
        name = parameter(a)
        shape, target = parameters[name].shape, records[name][a.target.piece].target
        target = (*target, *(slice(None),) * (len(shape) - len(target)))
        boxes[name].append(tuple(part.indices(size)[:2] for part, size in zip(target, shape, strict=True)))
        if a.target.row.multiply:
            products.add(name)
    assert boxes.keys() == parameters.keys()
    assert len(products) == 2 * 93 + 1
    for name, values in parameters.items():
        filled = sum(math.prod(stop - start for start, stop in box) for box in boxes[name])
        if name in products:
            assert filled == 2 * values.numel(), name
        else:
            assert filled == values.numel(), name
            assert len(set(boxes[name])) == len(boxes[name]), name


@pytest.mark.slow
def test_what_a_place_takes_is_what_the_tensor_has(plan: LoadPlan, published: Tensors) -> None:
    """But for A_log, of whose 128 published values 96 are those of the heads."""
    for a in plan.assignments:
        if a.name.endswith("A_log"):
            assert published[a.name].shape == (128,)
            assert a.record.shape == (96,)
        else:
            assert a.target.part.shapes(a.record.shape) == [published[a.name].shape]


def test_the_experts_can_be_expanded_while_loading(published: Tensors, k3: KimiK3ForCausalLM) -> None:
    """Then a packed tensor and its scales fill one place together. Two layers show it."""
    with torch.device("meta"):
        model = KimiK3ForCausalLM(k3.config.with_text(num_hidden_layers=2, layer_kinds=("kda", "kda")))
    # of layers 0 and 1, and of what is not in a layer
    tensors = {name: spec for name, spec in published.items() if _layer(name) < 2}
    plan = plan_loading(model, tensors, Storage("mxfp4", MXFP4).names(PLAIN))
    assert plan.faults == []
    experts = [a for a in plan.assignments if ".experts." in a.name]
    places = defaultdict(set)
    for a in experts:
        places[a.target.parameter, a.target.piece].add(a.target.part.suffix)
    assert len(places) == 3 * 896
    assert set(map(frozenset, places.values())) == {frozenset({".weight_packed", ".weight_scale"})}


def _layer(name: str) -> int:
    return int(name.split("layers.")[1].split(".")[0]) if ".layers." in name else -1


# --- names ---

PUBLISHED = [
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.10.block_sparse_moe.experts.15.w1.weight",
    "model.layers.10.block_sparse_moe.gate.e_score_correction_bias",
    "model.layers.10.block_sparse_moe.shared_experts.up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.embed_tokens.weight",
    "lm_head.weight",
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_aliases_go_to_the_same_place(name: str) -> None:
    names = NameMap()
    other = name.replace(".block_sparse_moe.", ".mlp.")
    target = names.target(name)
    assert isinstance(target, Target)
    for alias in (other, f"language_model.{name}", f"language_model.{other}"):
        assert names.target(alias) == target
        assert normalise(alias) == normalise(name)


@pytest.mark.parametrize(
    ("folder", "storage", "kept"),
    [
        ("k3", Storage("plain"), PLAIN),
        ("k3-vision", Storage("plain"), PLAIN),
        ("kimi-linear-flat", Storage("plain"), PLAIN),
        ("k3-mxfp4", Storage("mxfp4", MXFP4), PLAIN),
        ("k3-mxfp4", Storage("mxfp4", MXFP4), MXFP4),
    ],
)
def test_the_map_goes_both_ways(oracle: Callable[[str], Oracle], folder: str, storage: Storage, kept: Format) -> None:
    names = storage.names(kept)
    for name in Checkpoint.open(oracle(folder).folder).entries:
        target = names.target(name)
        assert isinstance(target, Target)
        assert (target, normalise(name)) in names.sources(target.first, target.piece)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.x.input_layernorm.weight",
        "model.layers.0.input_layernorm.weight.extra",
        "xmodel.layers.0.input_layernorm.weight",
        "model.layers.0.input_layernorm",
        "",
    ],
)
def test_patterns_are_anchored(name: str) -> None:
    assert NameMap().target(name) == "no tensor of that name belongs to this model"


# --- faults ---


@pytest.fixture
def tiny(oracle: Callable[[str], Oracle]) -> tuple[KimiK3ForCausalLM, Tensors]:
    """The k3 oracle's model, and its tensors' names, shapes and dtypes."""
    entries = Checkpoint.open(oracle("k3").folder).entries
    return oracle("k3").model, {name: TensorSpec(name, entry.shape, entry.dtype) for name, entry in entries.items()}


LAYER = "language_model.model.layers"


def faults(tiny: tuple[KimiK3ForCausalLM, Tensors]) -> list[tuple[str, str, str]]:
    model, tensors = tiny
    plan = plan_loading(model, tensors, NameMap())
    return [(fault.kind, fault.name, fault.detail) for fault in plan.faults]


def test_no_fault(tiny: tuple[KimiK3ForCausalLM, Tensors]) -> None:
    assert faults(tiny) == []


def add(tensors: Tensors, name: str, like: str) -> None:
    tensors[name] = tensors[like]._replace(name=name)


def test_a_tensor_under_two_names(tiny: tuple[KimiK3ForCausalLM, Tensors]) -> None:
    gate, alias = f"{LAYER}.1.block_sparse_moe.gate.weight", f"{LAYER}.1.mlp.gate.weight"
    add(tiny[1], alias, gate)
    add(tiny[1], "model.norm.weight", "language_model.model.norm.weight")
    twice = "are names of the same tensor"
    assert faults(tiny) == [
        ("tensor given twice", alias, f"it and {gate} {twice}"),
        ("tensor given twice", "model.norm.weight", f"it and language_model.model.norm.weight {twice}"),
    ]


@pytest.mark.parametrize(
    ("name", "like", "why"),
    [
        (f"{LAYER}.0.self_attn.rotary_emb.inv_freq", f"{LAYER}.0.self_attn.A_log", "no tensor of that name belongs to"),
        (f"{LAYER}.9.input_layernorm.weight", f"{LAYER}.8.input_layernorm.weight", "layer 9, but config.json has num_"),
        (
            f"{LAYER}.1.block_sparse_moe.experts.16.w1.weight",
            f"{LAYER}.1.block_sparse_moe.experts.15.w1.weight",
            "config.json has num_experts = 16",
        ),
        (
            f"{LAYER}.3.self_attn.A_log",
            f"{LAYER}.2.self_attn.A_log",
            "layer 3 of this config has none (mla attention, ex",
        ),
        (
            f"{LAYER}.3.self_attn.q_proj.weight",
            f"{LAYER}.2.self_attn.q_proj.weight",
            "its layer has none (mla attention",
        ),
        (f"{LAYER}.0.mlp.gate.weight", f"{LAYER}.1.block_sparse_moe.gate.weight", "(kda attention, dense MLP)"),
        ("vision_tower.patch_embed.proj.weight", "language_model.lm_head.weight", "config.json has no vision_config"),
    ],
)
def test_a_tensor_that_has_no_place(tiny: tuple[KimiK3ForCausalLM, Tensors], name: str, like: str, why: str) -> None:
    add(tiny[1], name, like)
    ((kind, named, detail),) = faults(tiny)
    assert (kind, named) == ("unknown tensor", name)
    assert why in detail


@pytest.mark.parametrize(
    "name",
    [
        "language_model.lm_head.weight",
        "language_model.model.output_attn_res_proj.weight",
        f"{LAYER}.0.mlp.up_proj.weight",
        f"{LAYER}.0.self_attn.dt_bias",
        f"{LAYER}.3.self_attn.kv_b_proj.weight",
        f"{LAYER}.4.block_sparse_moe.gate.e_score_correction_bias",
        f"{LAYER}.4.block_sparse_moe.routed_expert_norm.weight",
        f"{LAYER}.4.block_sparse_moe.shared_experts.down_proj.weight",
        f"{LAYER}.4.block_sparse_moe.experts.7.w2.weight",
    ],
)
def test_a_missing_tensor_is_named_as_published(tiny: tuple[KimiK3ForCausalLM, Tensors], name: str) -> None:
    del tiny[1][name]
    assert faults(tiny) == [("missing tensor", name, "the model needs it and no shard has it")]


def test_wrong_shapes_and_dtypes(tiny: tuple[KimiK3ForCausalLM, Tensors]) -> None:
    tensors = tiny[1]
    shape, dtype = f"{LAYER}.0.self_attn.q_proj.weight", f"{LAYER}.1.self_attn.q_proj.weight"
    tensors[shape] = tensors[shape]._replace(shape=(64, 65))
    tensors[dtype] = tensors[dtype]._replace(dtype=torch.int8)
    assert sorted(faults(tiny)) == [
        ("wrong dtype", dtype, "is int8, expected bfloat16 or float16 or float32"),
        ("wrong shape", shape, "is [64, 65], expected [64, 64]"),
    ]


def test_all_faults_are_found_together(tiny: tuple[KimiK3ForCausalLM, Tensors]) -> None:
    tensors = tiny[1]
    del tensors["language_model.model.norm.weight"]
    one_layer = {name for name in tensors if name.startswith(f"{LAYER}.5.")}
    for name in one_layer:
        del tensors[name]
    add(tensors, "lm_head.weight", "language_model.lm_head.weight")
    add(tensors, "surplus", "language_model.lm_head.weight")
    found = faults(tiny)
    kinds = [kind for kind, _, _ in found]
    assert kinds.count("tensor given twice") == kinds.count("unknown tensor") == 1
    missing = {name for kind, name, _ in found if kind == "missing tensor"}
    assert missing == one_layer | {"language_model.model.norm.weight"}

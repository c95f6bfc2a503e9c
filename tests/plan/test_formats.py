"""Weight bytes in every format, against published sizes and against the modules that are really allocated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.plan.formats import EXPERT_FORMS, Held, held_blocks, held_parameters
from kimi_k3_npu.plan.weights import rank_weights
from kimi_k3_npu.tiny import write_tiny
from tests.parallel.launch import launch

ATTN_TP_16 = "tp=64,dp=4,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp"
REPLICATED = "tp=64,dp=4,dispatch=alltoall,dense=attn_tp,lm_head=dp"


def blocks(config: KimiK3Config, layout: str, form: str, rank: int = 0, *, own_model: bool = False) -> dict[str, Held]:
    mesh = Mesh.inspect(ParallelLayout.parse(layout), rank)
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, mesh, experts=EXPERT_FORMS[form])
    return held_blocks(held_parameters(model, form, own_model=own_model), config.text)


def gigabytes(held: Held) -> float:
    return round(held.elements / 1e9, 1)


class TestPublished:
    """The figures that are known of the full-size model."""

    def test_codes_of_routed_experts(self, full: KimiK3Config) -> None:
        assert gigabytes(blocks(full, ATTN_TP_16, "w4a8")["routed experts"]) == 21.3
        assert gigabytes(blocks(full, ATTN_TP_16, "mxfp4")["routed experts"]) == 21.3
        assert gigabytes(blocks(full, ATTN_TP_16, "int4x2")["routed experts"]) == 42.5
        assert gigabytes(blocks(full, "tp=48", "w4a8")["routed experts"]) == 28.4

    def test_mxfp4_with_scales(self, full: KimiK3Config) -> None:
        experts = blocks(full, "tp=32,dispatch=alltoall,shared=attn_tp", "mxfp4")["routed experts"]
        assert round(experts.total / 1e9, 1) == 45.2

    def test_shared_experts(self, full: KimiK3Config) -> None:
        for form, whole, split in (("bf16", 24.3, 1.5), ("mxfp4", 24.3, 1.5), ("w4a8", 12.2, 0.8)):
            assert gigabytes(blocks(full, REPLICATED, form)["shared experts"]) == whole
            assert gigabytes(blocks(full, ATTN_TP_16, form)["shared experts"]) == split

    def test_own_model_keeps_linear_layers_plain(self, full: KimiK3Config) -> None:
        """It has no int8 linear layers yet: those of a W4A8 checkpoint are expanded, 5.4 GB a rank of the recipe."""
        engine, own = (blocks(full, ATTN_TP_16, "w4a8", own_model=own) for own in (False, True))
        assert gigabytes(own["shared experts"]) == 1.5
        assert round(sum(own[name].total - engine[name].total for name in own) / 1e9, 1) == 5.5
        assert own["routed experts"] == engine["routed experts"]

    def test_latent_projections_and_dense(self, full: KimiK3Config) -> None:
        plain, quantised = (blocks(full, ATTN_TP_16, form) for form in ("bf16", "w4a8-attn8"))
        assert round(plain["latent projections"].elements / 1e9, 2) == 9.45
        assert gigabytes(quantised["latent projections"]) == 4.7
        assert round(plain["dense MLP"].elements / 1e9, 2) == 0.09

    @pytest.mark.parametrize(("form", "published"), [("w4a8", 1486.26), ("w4a8-attn8", 1466.40)])
    def test_size_of_the_checkpoint(self, full: KimiK3Config, form: str, published: float) -> None:
        """What is stored beyond what a rank keeps: offsets of every quantised row, the corrections as they were split,
        what is kept in fp32 although it is stored in bf16; and less: two tensors of each mixer are one."""
        held = blocks(full, "tp=1", form)
        text = full.text
        visits = text.num_experts * len(text.moe_layers)
        width, inner = text.expert_hidden_size, text.moe_intermediate_size
        in_memory = 8 * (2 * inner + width)  # scale and correction of every row
        on_disk = 12 * 2 * inner + 72 * width  # scale, offset and correction, which w2 has in 16 parts
        total = sum(block.total for block in held.values()) + visits * (on_disk - in_memory)
        total += sum(block.scales for name, block in held.items() if name != "routed experts")  # offsets of W8A8
        total -= 2 * text.num_experts * text.hidden_size * len(text.moe_layers)  # the router is stored in bf16
        total -= 24 * text.num_attention_heads * text.kv_lora_rank * text.v_head_dim * 2  # the copy for v-up
        if form == "w4a8-attn8":  # rotated, with a matrix that rotates image features
            total += 2 * text.hidden_size**2
        assert total / 1e9 == pytest.approx(published, abs=0.03)


@pytest.mark.parametrize("form", ["plain", "mxfp4", "w4a8", "int4x2"])
@pytest.mark.parametrize("layout", [ATTN_TP_16, REPLICATED, "tp=8,pp=2", "tp=16,ep=16"])
def test_equals_what_the_modules_allocate(full: KimiK3Config, form: str, layout: str) -> None:
    """This package's model: no format is counted beside the modules."""
    held = rank_weights(full, ParallelLayout.parse(layout), 1, experts=form)
    assert {block.block: block.total for block in held.blocks} == {
        name: bytes_.total
        for name, bytes_ in blocks(full, layout, {"plain": "bf16"}.get(form, form), 1, own_model=True).items()
    }


STORED = ("mxfp4", "bf16")
OVER_FOUR = ("tp=4,ep=4", "tp=4,dp=2,dispatch=alltoall,shared=attn_tp,dense=attn_tp,lm_head=dp")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], tuple[Path, list[dict[str, int]]]]:
    """By storage and layout: a tiny checkpoint, and the bytes of every parameter of the four ranks that loaded it."""
    folder = tmp_path_factory.mktemp("four")
    for storage in STORED:
        write_tiny(folder / storage, storage=storage)
    keys = [(storage, layout) for storage in STORED for layout in OVER_FOUR]
    cases = [{"what": "held", "folder": str(folder / storage), "layout": layout} for storage, layout in keys]
    ranks = launch(4, cases, folder)
    return {key: (folder / key[0], held) for key, held in zip(keys, ranks, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("storage", STORED)
@pytest.mark.parametrize("layout", OVER_FOUR)
def test_equals_what_four_ranks_hold(loaded: dict, storage: str, layout: str) -> None:
    """Loaded over gloo: every parameter of every rank has the bytes of the plan."""
    folder, held = loaded[storage, layout]
    config = KimiK3Config.from_pretrained(folder)
    for rank in range(4):
        with torch.device("meta"):
            mesh = Mesh.inspect(ParallelLayout.parse(layout), rank)
            model = KimiK3ForCausalLM(config, mesh, experts=EXPERT_FORMS[storage])
            planned = held_parameters(model, storage, own_model=True)
        assert held[rank] == {path: bytes_.total for path, bytes_ in planned.items()}


def test_every_rule_is_used(full: KimiK3Config) -> None:
    """A pattern that matched nothing would leave weights in bf16 in silence."""
    plain = blocks(full, ATTN_TP_16, "bf16")
    for form, smaller in (
        ("mxfp4", {"routed experts"}),
        ("int4x2", {"routed experts"}),
        ("w4a8", {"routed experts", "shared experts", "latent projections"}),
        ("w4a8-attn8", {"routed experts", "shared experts", "latent projections", "KDA", "MLA", "dense MLP"}),
    ):
        found = blocks(full, ATTN_TP_16, form)
        assert {name for name in found if found[name].elements < plain[name].elements} == smaller

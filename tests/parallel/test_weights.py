"""Bytes of every rank, counted on the real modules: at full size, against the files, and against loaded models."""

from __future__ import annotations

import json
import time
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kimi_k3_npu import load_model
from kimi_k3_npu.config import KimiK3Config
from kimi_k3_npu.config.published import published_config
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.model.causal_lm import KimiK3ForCausalLM
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.parallel.shard import Piece, layers
from kimi_k3_npu.plan.weights import BLOCKS, RankWeights, rank_weights
from tests.parallel.launch import ORACLES, legal_layouts

A3 = "tp=64,dp=4,dispatch=alltoall"
REPLICATED = {"vision", "router", "latent projections", "norms and mixers"}


@cache
def of(layout: str, rank: int = 0, **options: object) -> RankWeights:
    """Rank `rank` of the published model."""
    return rank_weights(published_config(), ParallelLayout.parse(layout), rank, **options)


# At full size.


def test_sharing_the_shared_experts_over_attn_tp_saves_22_8_gb_a_rank() -> None:
    whole, split = (of(A3 + shared)["shared experts"] for shared in ("", ",shared=attn_tp"))
    assert (whole.sharded, whole.parts) == (0, ())
    assert whole.replicated == 92 * 3 * 7168 * 6144 * 2 == 24_310_185_984
    assert split.replicated == 0
    assert split.sharded == whole.replicated // 16 == 1_519_386_624
    assert [str(part) for part in split.parts] == ["columns 0..383 of 6144"]
    assert of(f"{A3},shared=4")["shared experts"].total == whole.replicated // 4


def test_routed_experts_packed_over_64_ranks() -> None:
    routed = of(A3)["routed experts"]
    values, scales = 14 * 92 * 3 * 3072 * 3584 // 2, 14 * 92 * 3 * 3072 * 3584 // 32
    assert routed.sharded == routed.total == values + scales
    assert round(routed.total / 1e9, 1) == 22.6
    assert [(part.axis, part.ways, part.first, part.last, part.total) for part in routed.parts] == [
        ("ep", 64, 0, 13, 896)
    ]
    assert of(A3, experts="plain")["routed experts"].total == 4 * values


def test_the_dense_mlp_over_tp_or_attn_tp() -> None:
    (over_tp, over_attn_tp) = (of(f"{A3}{dense}")["dense MLP"] for dense in ("", ",dense=attn_tp"))
    assert over_tp.total * 64 == over_attn_tp.total * 16 == 3 * 7168 * 33792 * 2
    assert (over_tp.parts[0].axis, over_attn_tp.parts[0].axis) == ("tp", "attn_tp")


def test_what_every_rank_holds_whole() -> None:
    held = of(A3)
    assert {block.block for block in held.blocks if not block.parts} == REPLICATED | {"shared experts"}
    assert held["latent projections"].total == 92 * (2 * 7168 * 3584 + 3584) * 2
    assert all(held[block].sharded == 0 for block in REPLICATED)


def test_one_rank_of_one_holds_the_published_checkpoint() -> None:
    """But for what is kept in fp32 that is published in bf16 (the router), what is folded, and the derived copies."""
    held = of("tp=1")
    assert {block.block for block in held.blocks} == set(BLOCKS)
    assert held["routed experts"].total == 896 * 92 * 3 * 3072 * 3584 * 17 // 32
    assert abs(held.total - 1_560_860_324_864) < 2e-3 * held.total


@pytest.mark.parametrize("layout", [A3, f"{A3},shared=attn_tp,dense=attn_tp,lm_head=dp", "tp=16,ep=4", "tp=32,dp=2"])
def test_what_is_split_adds_up(layout: str) -> None:
    """Over the ranks that a block is split over, its sharded bytes are those of one rank of one (nothing is padded)."""
    whole, held = of("tp=1"), of(layout)
    for block in held.blocks:
        ways = 1
        for part in block.parts:
            ways *= part.ways
        assert block.sharded * ways + block.replicated == whole[block.block].total - whole[block.block].derived


def test_ranks_of_one_stage_hold_as_much(recwarn: pytest.WarningsRecorder) -> None:
    totals = {of(f"{A3},shared=attn_tp", rank).total for rank in (0, 1, 17, 63)}
    assert len(totals) == 1
    assert [str(part) for part in of(A3, 17)["KDA"].parts] == ["heads 6..11 of 96"]


def test_stages_hold_the_ends_of_the_model_once() -> None:
    first, last = of("tp=32,pp=2,dp=2"), of("tp=32,pp=2,dp=2", 63)
    assert (first.layers, last.layers) == (range(48), range(48, 93))
    ends = [
        {block.block for block in held.blocks} & {"vision", "embedding", "dense MLP", "head"} for held in (first, last)
    ]
    assert ends == [{"vision", "embedding", "dense MLP"}, {"head"}]
    with pytest.raises(KeyError):
        last["embedding"]


@pytest.mark.parametrize("layout", [A3, "tp=1"])
def test_it_takes_seconds(layout: str) -> None:
    start = time.process_time()
    of.__wrapped__(layout)
    assert time.process_time() - start < 10


def test_refusals_come_before_anything_is_built() -> None:
    with pytest.raises(LayoutError, match="896 experts over ep = 48"):
        of("tp=48,ep=48")
    with pytest.raises(LayoutError, match=r"rank 64 is outside 0\.\.63"):
        of(A3, 64)


def test_plain_experts_cannot_be_held_packed() -> None:
    config = KimiK3Config.from_pretrained(ORACLES / "k3")
    with pytest.raises(LayoutError, match="its experts are plain, and cannot be mxfp4"):
        rank_weights(config, ParallelLayout())


def test_a_dtype_that_no_model_has() -> None:
    raw = json.loads((ORACLES / "k3" / "config.json").read_text()) | {"dtype": "float8"}
    with pytest.raises(LayoutError, match="dtype is 'float8'; supported: float32, bfloat16, float16"):
        rank_weights(KimiK3Config.from_hf(raw), ParallelLayout(), experts="plain")


# Against models.


@pytest.mark.parametrize("name", ["k3", "k3-mxfp4", "k3-router", "k3-vision", "kimi-linear"])
@pytest.mark.parametrize("layout", ["tp=1", "tp=2,dp=2,dispatch=alltoall", "tp=2,ep=2,pp=2"])
def test_every_parameter_and_buffer_is_counted_once(name: str, layout: str) -> None:
    config, parsed = KimiK3Config.from_pretrained(ORACLES / name), ParallelLayout.parse(layout)
    experts = config.quantization or "plain"
    for rank in range(parsed.world):
        held = rank_weights(config, parsed, rank, experts=experts, vision=True)
        with torch.device("meta"):
            model = KimiK3ForCausalLM(config, Mesh.inspect(parsed, rank), dtype=torch.float32, experts=experts)
        assert held.total == sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
        assert held.total == sum(block.sharded + block.replicated + block.derived for block in held.blocks)


@pytest.mark.parametrize("layout", legal_layouts(4, "k3"))
def test_tensors_that_no_rank_shares_are_those_that_records_call_replicated(layout: str) -> None:
    """A published tensor is replicated exactly when every rank reads all of it."""
    config, parsed = KimiK3Config.from_pretrained(ORACLES / "k3"), ParallelLayout.parse(layout)
    readers: Counter[tuple[str, str]] = Counter()
    replicated: Counter[tuple[str, str]] = Counter()
    for rank in range(4):
        with torch.device("meta"):
            model = KimiK3ForCausalLM(config, Mesh.inspect(parsed, rank), dtype=torch.float32)
        for path, layer in layers(model):
            for name, _ in layer.named_parameters(recurse=False):
                for key, piece in layer.pieces(name).items():
                    tensor = (f"{path}.{name}", key)
                    whole = torch.empty(piece.shape, device="meta")
                    assert whole[piece.source].numel() == piece.numel
                    readers[tensor] += piece.numel == whole.numel()
                    replicated[tensor] += piece.is_replicated
    assert {tensor for tensor, n in readers.items() if n == 4} == {tensor for tensor, n in replicated.items() if n}
    assert set(replicated.values()) == {0, 4}


@pytest.mark.parametrize("layout", ["tp=1", "tp=2,ep=2", "tp=4,dp=2,dispatch=alltoall,shared=attn_tp"])
@pytest.mark.parametrize(("kept", "form"), [("packed", "mxfp4"), ("bf16", "plain"), ("int4x2", "int4x2")])
def test_a_loaded_rank_holds_what_was_predicted(kept: str, form: str, layout: str) -> None:
    parsed = ParallelLayout.parse(layout)
    model = load_model(ORACLES / "k3-mxfp4", layout=parsed, rank=parsed.world - 1, expert_weights=kept)
    held = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    assert held == rank_weights(model.config, parsed, parsed.world - 1, experts=form).total


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_without_a_token_of_the_vocabulary(rank: int, tmp_path: Path) -> None:
    """5 tokens over 4 ranks are shares of 2: two ranks read 2 rows, one reads 1 and one none; padding is zero."""
    folder, table = tmp_path, torch.empty(0)
    raw = json.loads((ORACLES / "k3" / "config.json").read_text())
    (raw.get("text_config") or raw)["vocab_size"] = 5
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {}
    for shard in sorted((ORACLES / "k3").glob("model*.safetensors")):
        tensors |= load_file(shard)
    for name in tensors:
        if "embed_tokens" in name or "lm_head" in name:
            tensors[name] = tensors[name][:5].clone()
            table = tensors[name] if "lm_head" in name else table
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = load_model(folder, layout=ParallelLayout.parse("tp=4"), rank=rank)
    weight = model.lm_head.weight
    mine = table[2 * rank : 2 * rank + 2]
    assert torch.equal(weight[: len(mine)], mine)
    assert torch.equal(weight[len(mine) :], torch.zeros(2 - len(mine), 64))
    held = rank_weights(model.config, ParallelLayout.parse("tp=4"), rank, experts="plain")
    assert held["head"].total == weight.numel() * 4
    words = ["rows 0..1 of 5", "rows 2..3 of 5", "rows 4..4 of 5", "no rows of 5, only padding"]
    assert [str(part) for part in held["head"].parts] == [words[rank]]


def test_a_record_says_what_it_keeps() -> None:
    assert Piece((4, 6)).is_replicated
    assert Piece((4, 6), (slice(0, 4), slice(None))).is_replicated
    assert not Piece((4, 6), (slice(0, 2),)).is_replicated
    assert not Piece((4, 6), dealt=2).is_replicated
    assert [
        Piece((4, 6), source).numel for source in ((), (slice(1, 3),), (slice(None), slice(0, 3)), (slice(4, 4),))
    ] == [
        24,
        12,
        12,
        0,
    ]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")

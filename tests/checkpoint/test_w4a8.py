"""ModelSlim's W4A8: what its tensors mean, both published mixes, and how ranks share it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kimi_k3_npu import CheckpointError, KimiK3ForCausalLM, load_model
from kimi_k3_npu.checkpoint.load import empty_model
from kimi_k3_npu.checkpoint.plan import plan_loading
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.storage import read_storage
from kimi_k3_npu.errors import LayoutError
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from tests.checkpoint.corpus import EXPERT, LAYER, MOE, Draft
from tests.parallel.launch import launch

if TYPE_CHECKING:
    from tests.conftest import Oracle

W4A8 = FORMATS["w4a8"]

TOLERANCE, BROKEN = 5e-4, 1e-2

Change = Callable[[Draft], object]


@pytest.fixture
def rewritten(tmp_path: Path) -> Callable[..., Path]:
    """An oracle's folder after a change."""

    def rewrite(change: Change, oracle: str = "k3-w4a8") -> Path:
        draft = Draft(oracle)
        change(draft)
        draft.write(tmp_path / "changed")
        return tmp_path / "changed"

    return rewrite


def error(model: KimiK3ForCausalLM, oracle: Oracle) -> float:
    """The largest difference from the oracle's logits, each prompt alone and all in one batch."""
    prompts, wanted = oracle.expected.prompts, oracle.expected.logits
    alone = [model.score([prompt])[0] for prompt in prompts]
    pairs = zip([*alone, *model.score(prompts)], [*wanted, *wanted], strict=True)
    return max((found - logits).abs().max().item() for found, logits in pairs)


def signed(nibble: int) -> int:
    return nibble - 16 if nibble > 7 else nibble


# --- what the tensors mean ---


def test_even_rows_are_low_nibbles_in_twos_complement() -> None:
    codes = torch.tensor([[0x10, -1], [0x7F, -0x80]], dtype=torch.int8)  # bytes 10 ff 7f 80
    parts = {".weight": codes, ".weight_scale": torch.tensor([[1.0], [2.0], [3.0], [4.0]])}
    assert W4A8.values(parts, torch.float32).tolist() == [[0, -1], [2, -2], [-3, 0], [28, -32]]


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_scale_bias_is_eight_times_the_sum_by_segment(name: str) -> None:
    tensors = Draft("k3-w4a8").tensors
    packed, scale, bias = (tensors[f"{EXPERT}{name}.{part}"] for part in ("weight", "weight_scale", "scale_bias"))
    segments = 16 if name == "w2" else 1
    assert bias.shape == (2 * packed.shape[0], segments)
    width = packed.shape[1] // segments
    for row in (0, 1, 14, 31):
        nibbles = [signed((byte >> (4 * (row % 2))) & 0xF) for byte in (packed[row // 2].int() & 0xFF).tolist()]
        for segment in range(segments):
            total = sum(nibbles[segment * width : (segment + 1) * width])
            assert bias[row, segment].item() == pytest.approx(8 * total * scale[row].item(), rel=1e-5, abs=1e-6)


# --- the oracle ---


@pytest.mark.parametrize("expert_weights", ["auto", "packed", "bf16"])
def test_the_oracles_logits(oracle: Callable[[str], Oracle], expert_weights: str) -> None:
    source = oracle("k3-w4a8")
    model = source.load(source.folder, expert_weights=expert_weights)
    assert model.experts == ("plain" if expert_weights == "bf16" else "w4a8")
    assert error(model, source) <= TOLERANCE


def test_experts_stay_packed(oracle: Callable[[str], Oracle]) -> None:
    """4 bits a weight, and two fp32 values an output."""
    experts = [module for module in oracle("k3-w4a8").model.modules() if isinstance(module, Experts)]
    config = oracle("k3-w4a8").model.config.text
    latent, inner, count = config.expert_hidden_size, config.moe_intermediate_size, config.num_experts
    held = [sum(p.nbytes for p in module.parameters()) for module in experts]
    assert {module.format.name for module in experts} == {"w4a8"}
    assert held == [count * (3 * latent * inner // 2 + (2 * inner + latent) * 2 * 4)] * len(config.moe_layers)


def test_another_nibble_order_would_show(oracle: Callable[[str], Oracle], rewritten: Callable[..., Path]) -> None:
    """Were it not for scale_bias, which is made to fit here."""

    def high_first(draft: Draft) -> None:
        for name in [name for name in draft.tensors if name.startswith(f"{MOE}experts.") and name.endswith(".weight")]:
            stem = name.removesuffix(".weight")
            draft.tensors[name] = (draft.tensors[name] << 4) | ((draft.tensors[name] >> 4) & 0xF)
            parts = {part: draft.tensors[stem + part] for part in (".weight", ".weight_scale")}
            segments = draft.tensors[f"{stem}.scale_bias"].shape[1]
            values = W4A8.values(parts, torch.float32).unflatten(1, (segments, -1))
            draft.tensors[f"{stem}.scale_bias"] = 8 * values.sum(-1)

    assert error(load_model(rewritten(high_first)), oracle("k3-w4a8")) > BROKEN


def test_one_segment_will_do(oracle: Callable[[str], Oracle], rewritten: Callable[..., Path]) -> None:
    def summed(draft: Draft) -> None:
        draft.tensors[f"{EXPERT}w2.scale_bias"] = draft.tensors[f"{EXPERT}w2.scale_bias"].sum(1, keepdim=True)

    assert error(load_model(rewritten(summed)), oracle("k3-w4a8")) <= TOLERANCE


# --- the other published mix ---


def quantize_w8a8(draft: Draft, weight: str) -> Tensor:
    """Make a plain weight W8A8_DYNAMIC, and return what it then stands for."""
    plain = draft.tensors[weight]
    scale = plain.abs().amax(dim=1, keepdim=True) / 127
    draft.tensors[weight] = torch.round(plain / scale).to(torch.int8)
    draft.add(f"{weight}_scale", scale)
    draft.add(f"{weight}_offset", torch.zeros_like(scale))
    assert draft.description is not None
    draft.description |= dict.fromkeys((weight, f"{weight}_scale", f"{weight}_offset"), "W8A8_DYNAMIC")
    return draft.tensors[weight] * scale


def test_a_mix_that_splits_fused_projections(rewritten: Callable[..., Path], tmp_path: Path) -> None:
    """q, k and v of KDA are int8, the gate beside them in one matrix is not; likewise q_a and kv_a of MLA."""
    original = Draft("k3-w4a8")
    projections = ("q_proj", "k_proj", "v_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")
    mixed = [f"{LAYER}{layer}.self_attn.{name}.weight" for layer in range(5) for name in projections]
    mixed += [f"{LAYER}0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    mixed = [name for name in mixed if name in original.tensors]
    assert len(mixed) == 3 * 3 + 2 * 3 + 3
    values: dict[str, Tensor] = {}

    def quantize(draft: Draft) -> None:
        values.update({name: quantize_w8a8(draft, name) for name in mixed})

    folder = rewritten(quantize)
    original.tensors |= values
    original.write(tmp_path / "plain")
    found, wanted = load_model(folder).state_dict(), load_model(tmp_path / "plain").state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_shared_experts_as_w4a8(oracle: Callable[[str], Oracle], rewritten: Callable[..., Path]) -> None:
    """As ModelSlim's newer recipe has them: any linear layer can be in any form. Halving a scale doubles the codes."""
    weight = f"{MOE}shared_experts.up_proj.weight"

    def requantize(draft: Draft) -> None:
        codes = (draft.tensors[weight] % 4).to(torch.int8)  # small enough for four bits
        scale = draft.tensors[f"{weight}_scale"]
        draft.tensors[weight] = (codes[0::2] & 0xF) | (codes[1::2] << 4)
        draft.add(f"{weight.removesuffix('.weight')}.scale_bias", 8 * (codes * scale).sum(1, keepdim=True))
        values["exact"] = codes * scale
        assert draft.description is not None
        stem = weight.removesuffix("weight")
        for part in ("weight", "weight_scale", "weight_offset", "scale_bias"):
            draft.description[stem + part] = "W4A8_DYNAMIC"

    values: dict[str, Tensor] = {}
    model = load_model(rewritten(requantize))
    rows = len(values["exact"])
    stacked = model.layers["1"].mlp.shared_experts.gate_up_proj.weight
    assert torch.equal(stacked[rows:], values["exact"])


# --- how ranks share it ---


@pytest.mark.parametrize("layout", ["tp=2,ep=2", "tp=2", "tp=4,ep=2", "tp=4,ep=4", "tp=2,dp=2,dispatch=alltoall"])
def test_ranks_hold_the_parts_of_the_whole(oracle: Callable[[str], Oracle], layout: str) -> None:
    """Summed over the ranks, the experts give what they give on one; each rank's bias is that of its own inputs."""
    source, parsed = oracle("k3-w4a8"), ParallelLayout.parse(layout)
    whole = source.model.layers["2"].mlp.experts
    x = torch.randn(5, source.model.config.text.expert_hidden_size)
    weights, ids = torch.rand(5, 4), torch.stack([torch.randperm(16)[:4] for _ in range(5)])
    total, bias = torch.zeros_like(x), torch.zeros_like(whole.w2_bias)
    for rank in range(parsed.tp):
        part = load_model(source.folder, layout=parsed, rank=rank).layers["2"].mlp.experts
        total += part(x, weights, ids)
        bias[part.first : part.first + len(part.w2_bias)] += part.w2_bias
    torch.testing.assert_close(total, whole(x, weights, ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias, whole.w2_bias, rtol=1e-5, atol=1e-5)


def test_a_rank_reads_its_own_segments(oracle: Callable[[str], Oracle]) -> None:
    source = oracle("k3-w4a8")
    checkpoint, layout = Checkpoint.open(source.folder), ParallelLayout(tp=4)
    storage = read_storage(checkpoint, source.model.config)
    with torch.device("meta"):
        model = empty_model(source.model.config, checkpoint, Mesh.inspect(layout, 1), experts="w4a8")
    found = {a.name: a.source for a in plan_loading(model, checkpoint.entries, storage.names(W4A8)).assignments}
    assert found[f"{EXPERT}w2.scale_bias"] == (slice(None), slice(4, 8))
    assert found[f"{EXPERT}w2.weight"] == (slice(None), slice(8, 16))
    assert found[f"{EXPERT}w2.weight_scale"] == (slice(None), slice(None))
    assert found[f"{EXPERT}w1.weight"] == (slice(4, 8), slice(None))
    assert found[f"{EXPERT}w1.scale_bias"] == (slice(8, 16), slice(None))


def test_shares_that_are_no_whole_segments_or_bytes() -> None:
    bias, codes = W4A8.part(".scale_bias"), W4A8.part(".weight")
    assert bias is not None
    assert codes is not None
    assert bias.source("w2", (slice(None), slice(0, 16)), (8, 48), (8, 16)) == (slice(None), slice(0, 0))
    assert bias.source("w2", (slice(None), slice(0, 24)), (8, 48), (8, 16)) == (slice(None), slice(0, 8))
    assert bias.source("w2", (slice(None), slice(0, 24)), (8, 48), (8, 1)) == (slice(None), slice(0, 0))
    with pytest.raises(LayoutError, match=r"w1: elements 3\.\.5 of a rank are no whole groups of 2"):
        codes.source("w1", (slice(3, 6),), (12, 48), (6, 48))


@pytest.mark.slow
def test_two_processes_give_the_oracles_logits(tmp_path: Path) -> None:
    layouts = ("tp=2,ep=2", "tp=2", "tp=2,dp=2,dispatch=alltoall")
    cases = [{"what": "score", "oracle": "k3-w4a8", "layout": layout} for layout in layouts]
    for case, ranks in zip(cases, launch(2, cases, tmp_path), strict=True):
        assert max(rank["worst"] for rank in ranks) <= TOLERANCE, case


# --- descriptions, and the rotation for images ---


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: name.removeprefix("language_model."),
        lambda name: name.replace(".block_sparse_moe.", ".mlp."),
    ],
    ids=["without language_model", "mlp for block_sparse_moe"],
)
def test_a_description_in_another_spelling(
    oracle: Callable[[str], Oracle], rewritten: Callable[..., Path], spell: Callable[[str], str]
) -> None:
    def respell(draft: Draft) -> None:
        assert draft.description is not None
        draft.description = {spell(name): kind for name, kind in draft.description.items()}

    assert error(load_model(rewritten(respell)), oracle("k3-w4a8")) <= TOLERANCE


def test_a_description_of_codes_alone(oracle: Callable[[str], Oracle], rewritten: Callable[..., Path]) -> None:
    def codes_only(draft: Draft) -> None:
        assert draft.description is not None
        others = (".weight_scale", ".weight_offset", ".scale_bias")
        draft.description = {name: kind for name, kind in draft.description.items() if not name.endswith(others)}

    assert error(load_model(rewritten(codes_only)), oracle("k3-w4a8")) <= TOLERANCE


@pytest.mark.parametrize(
    ("folder", "told", "message"),
    [
        (
            "k3-w4a8",
            "mxfp4",
            "asked to be read as mxfp4, but it is ModelSlim's by its quant_model_description.json; use modelslim",
        ),
        ("k3-w4a8", "plain", "asked to be read as plain, but it is ModelSlim's"),
        (
            "k3-mxfp4",
            "modelslim",
            "asked to be read as modelslim, but it is MXFP4 by the quantization_config in its config",
        ),
        (
            "k3",
            "modelslim",
            "but it is not quantised: it has neither a quantization_config in config.json nor a quant_model_d",
        ),
    ],
)
def test_a_wrong_quantization_flag(oracle: Callable[[str], Oracle], folder: str, told: str, message: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        load_model(oracle(folder).folder, quantization=told)  # type: ignore[arg-type]
    assert message in str(refused.value)
    load_model(oracle("k3-w4a8").folder, quantization="modelslim")


@pytest.mark.parametrize("name", ["mm_projector.rot_proj.weight", None], ids=["rotated", "not rotated"])
def test_images_follow_a_rotated_text_model(
    oracle: Callable[[str], Oracle], rewritten: Callable[..., Path], name: str | None
) -> None:
    rotation = torch.linalg.qr(torch.randn(64, 64)).Q
    folder = rewritten((lambda draft: draft.add(name, rotation)) if name else (lambda draft: None), "k3-vision")
    projector, plain = load_model(folder).mm_projector, oracle("k3-vision").model.mm_projector
    assert projector is not None
    assert plain is not None
    features = torch.randn(3, 4, 32)
    wanted = plain(features) @ rotation.T if name else plain(features)
    torch.testing.assert_close(projector(features), wanted)


def test_a_rotation_needs_its_tower(rewritten: Callable[..., Path]) -> None:
    """Without one it turns nothing, and is left out with a warning; the text is the same."""
    folder = rewritten(lambda draft: draft.add("mm_projector.rot_proj.weight", torch.eye(64)), "k3")
    with pytest.warns(UserWarning, match=r"left out: mm_projector\.rot_proj\.weight: .* there is no vision tower"):
        assert load_model(folder).mm_projector is None


def test_what_the_layer_of_an_expert_is_told(rewritten: Callable[..., Path]) -> None:
    """One expert that is not like the others cannot be kept like them; expanded, all can be of any form."""

    def expand(draft: Draft) -> None:
        parts = {part: draft.tensors[f"{EXPERT}w2{part}"] for part in (".weight", ".weight_scale")}
        values = W4A8.values(parts, torch.float32)
        draft.remove(f"{EXPERT}w2.")
        draft.add(f"{EXPERT}w2.weight", values)
        assert draft.description is not None
        draft.description[f"{EXPERT}w2.weight"] = "FLOAT"

    folder = rewritten(expand)
    model = load_model(folder)
    assert model.experts == "plain"
    assert torch.equal(
        model.layers["1"].mlp.experts.w2[3], load_model(folder, expert_weights="bf16").layers["1"].mlp.experts.w2[3]
    )

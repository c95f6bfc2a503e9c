"""Loading takes every published way of writing the tensors down, and refuses a checkpoint that is not the model's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kimi_k3_npu import CheckpointError, ConfigError, KimiK3ForCausalLM, load_model
from kimi_k3_npu.model.experts import Experts
from kimi_k3_npu.parallel.layout import ParallelLayout

if TYPE_CHECKING:
    from tests.conftest import Oracle

LAYER = "language_model.model.layers"
INDEX = "model.safetensors.index.json"
FP32 = ("gate.weight", "gate.bias", "A_log", "dt_bias", "o_norm", "conv_weight", "_res.weight")

Change = Callable[[dict[str, Tensor]], None]


@pytest.fixture
def rewritten(oracle: Callable[[str], Oracle], tmp_path: Path) -> Callable[..., Path]:
    """A copy of an oracle as one file, after a change of its tensors."""

    def rewrite(change: Change, name: str = "k3") -> Path:
        tensors: dict[str, Tensor] = {}
        for shard in oracle(name).folder.glob("model*.safetensors"):
            tensors |= load_file(shard)
        change(tensors)
        shutil.copy(oracle(name).folder / "config.json", tmp_path)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return rewrite


def refused(folder: Path, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as error:
        load_model(folder, **options)
    assert str(folder) in str(error.value)
    return error.value


def same(a: KimiK3ForCausalLM, b: KimiK3ForCausalLM) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())


# --- dtypes and forms in memory ---


def test_dtype_is_the_configs_unless_given(oracle: Callable[[str], Oracle]) -> None:
    folder = oracle("k3").folder
    assert load_model(folder).dtype == torch.float32
    assert load_model(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_stays_fp32(oracle: Callable[[str], Oracle], dtype: torch.dtype) -> None:
    """Router, gates and mixers; and the model still computes something near the oracle."""
    model = load_model(oracle("k3").folder, dtype=dtype)
    exact = oracle("k3").model.state_dict()
    for name, parameter in model.named_parameters():
        expected = torch.float32 if name.endswith(FP32) else dtype
        assert parameter.dtype == expected, name
        assert torch.equal(parameter, exact[name].to(expected)), name
    (logits,) = model.score([oracle("k3").expected.prompts[0]])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_parameters_are_frozen_and_the_model_evaluates(oracle: Callable[[str], Oracle]) -> None:
    model = load_model(oracle("k3").folder)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize(("expert_weights", "kept"), [("auto", "mxfp4"), ("packed", "mxfp4"), ("bf16", "plain")])
def test_mxfp4_experts_in_memory(oracle: Callable[[str], Oracle], expert_weights: Any, kept: str) -> None:
    model = load_model(oracle("k3-mxfp4").folder, expert_weights=expert_weights)
    assert {module.format.name for module in model.modules() if isinstance(module, Experts)} == {kept}


def test_expanded_experts_have_the_models_dtype(oracle: Callable[[str], Oracle]) -> None:
    folder = oracle("k3-mxfp4").folder
    exact = load_model(folder, expert_weights="bf16").state_dict()
    rounded = load_model(folder, expert_weights="bf16", dtype=torch.bfloat16).state_dict()
    experts = [name for name in exact if ".experts." in name]
    assert experts
    for name in experts:
        assert rounded[name].dtype == torch.bfloat16
        assert torch.equal(rounded[name].float(), exact[name])  # MXFP4 values are exact in bf16


def test_expert_weights_that_cannot_be(oracle: Callable[[str], Oracle]) -> None:
    plain, packed = oracle("k3").folder, oracle("k3-mxfp4").folder
    assert "its experts are not packed; use expert_weights 'auto' or 'bf16'" in str(
        refused(plain, expert_weights="packed")
    )
    assert "do not expand to float16" in str(refused(packed, dtype=torch.float16))


def test_config_and_tensors_disagree_on_the_format(
    oracle: Callable[[str], Oracle], rewritten: Callable[..., Path]
) -> None:
    folder = rewritten(lambda tensors: None, "k3-mxfp4")
    shutil.copy(oracle("k3").folder / "config.json", folder)
    assert "no quantization_config says MXFP4, but 384 tensors are named *.weight_packed" in str(refused(folder))
    folder = rewritten(lambda tensors: None, "k3")
    shutil.copy(oracle("k3-mxfp4").folder / "config.json", folder)
    assert "quantization_config says MXFP4, but no tensor is named *.weight_packed" in str(refused(folder))


# --- ways to write the tensors down ---


def rename(tensors: dict[str, Tensor], new: Callable[[str], str]) -> None:
    for name in list(tensors):
        tensors[new(name)] = tensors.pop(name)


ALIASES: dict[str, Callable[[str], str]] = {
    "published": lambda name: name,
    "without language_model": lambda name: name.removeprefix("language_model."),
    "mlp for block_sparse_moe": lambda name: name.replace(".block_sparse_moe.", ".mlp."),
    "both": lambda name: name.removeprefix("language_model.").replace(".block_sparse_moe.", ".mlp."),
    "block_sparse_moe for mlp": lambda name: name.replace(".mlp.", ".block_sparse_moe."),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("name", ["k3", "k3-mxfp4"])
def test_aliases(oracle: Callable[[str], Oracle], rewritten: Callable[..., Path], alias: str, name: str) -> None:
    folder = rewritten(lambda tensors: rename(tensors, ALIASES[alias]), name)
    assert same(load_model(folder), oracle(name).model)


def reshape_A_log(tensors: dict[str, Tensor], shape: Callable[[Tensor], Tensor]) -> None:
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = shape(tensors[name][:4])  # k3 has 4 heads, and 16 values here


@pytest.mark.filterwarnings("ignore:.*former shape")
@pytest.mark.parametrize(
    "shape",
    [
        lambda heads: heads,
        lambda heads: heads.view(1, 1, 4, 1),
        lambda heads: torch.cat([heads, torch.zeros(12)]),
        lambda heads: torch.cat([heads, torch.zeros(1)]),
        lambda heads: torch.cat([heads, -torch.zeros(3)]),
    ],
    ids=["[h]", "[1, 1, h, 1]", "zero tail", "short tail", "minus zeros"],
)
def test_shapes_of_A_log(
    oracle: Callable[[str], Oracle], rewritten: Callable[..., Path], shape: Callable[[Tensor], Tensor]
) -> None:
    folder = rewritten(lambda tensors: reshape_A_log(tensors, shape))
    assert same(load_model(folder), oracle("k3").model)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (lambda heads: torch.cat([heads, torch.tensor([0, 0, 0.5, 0])]), "1 non-zero values after the first 4 (heads)"),
        (lambda heads: torch.cat([heads, torch.tensor([float("nan")])]), "1 non-zero values after the first 4 (heads)"),
        (lambda heads: heads[:3], "shape [3], expected [4], [1, 1, 4, 1] or [4] and zeros"),
        (lambda heads: heads.view(2, 2), "shape [2, 2], expected [4]"),
        (lambda heads: heads.view(1, 4, 1, 1), "shape [1, 4, 1, 1], expected [4]"),
        (lambda heads: torch.cat([heads, torch.zeros(4)]).view(1, 1, 8, 1), "shape [1, 1, 8, 1], expected [4]"),
    ],
    ids=["non-zero tail", "NaN tail", "too short", "2-D", "4-D in another order", "4-D and too long"],
)
def test_shapes_of_A_log_that_are_refused(
    rewritten: Callable[..., Path], shape: Callable[[Tensor], Tensor], message: str
) -> None:
    """All six KDA layers at once."""
    error = refused(rewritten(lambda tensors: reshape_A_log(tensors, shape)))
    wrong = [fault.detail for fault in error.faults if fault.kind == "wrong content"]
    assert len(wrong) == 6
    assert message in wrong[0]
    assert "wrong content (6):" in str(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_published_in_another_dtype(
    oracle: Callable[[str], Oracle], rewritten: Callable[..., Path], dtype: torch.dtype
) -> None:
    def convert(tensors: dict[str, Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)

    with pytest.warns(UserWarning, match=r"less precise than published: .*A_log: is .*, published as float32 \(and"):
        model = load_model(rewritten(convert))
    assert model.dtype == torch.float32
    exact = oracle("k3").model.state_dict()
    for name, tensor in model.state_dict().items():
        if not name.endswith("_res.weight"):  # a product of two tensors
            assert torch.equal(tensor, exact[name].to(dtype).float()), name


# --- faults ---


def drop(tensors: dict[str, Tensor], *names: str) -> None:
    for name in names:
        del tensors[name]


def test_each_kind_of_fault(rewritten: Callable[..., Path]) -> None:
    """All in one message, grouped, with every name."""
    q_proj, A_log = f"{LAYER}.0.self_attn.q_proj.weight", f"{LAYER}.1.self_attn.A_log"
    gone = [f"{LAYER}.5.block_sparse_moe.experts.3.w1.weight", "language_model.model.norm.weight"]

    def spoil(tensors: dict[str, Tensor]) -> None:
        drop(tensors, *gone)
        tensors["language_model.model.surplus.weight"] = torch.zeros(1)
        tensors["lm_head.weight"] = tensors["language_model.lm_head.weight"].clone()
        tensors[q_proj] = tensors[q_proj][:-1]
        tensors[A_log] = torch.ones(16)
        tensors[f"{LAYER}.2.self_attn.o_proj.weight"] = torch.zeros(64, 64, dtype=torch.int8)

    error = refused(rewritten(spoil))
    assert {(fault.kind, fault.name) for fault in error.faults} == {
        *(("missing tensor", name) for name in gone),
        ("unknown tensor", "language_model.model.surplus.weight"),
        ("tensor given twice", "lm_head.weight"),
        ("wrong shape", q_proj),
        ("wrong content", A_log),
        ("wrong dtype", f"{LAYER}.2.self_attn.o_proj.weight"),
    }
    message = str(error)
    assert "7 faults in this checkpoint" in message
    assert "missing tensor (2):" in message
    for fault in error.faults:
        assert f"    {fault.name}: {fault.detail}" in message


def test_a_long_list_is_cut_in_the_message_only(rewritten: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        drop(tensors, *[name for name in tensors if ".experts." in name])

    error = refused(rewritten(spoil))
    assert len(error.faults) == 8 * 16 * 3
    assert "missing tensor (384):" in str(error)
    assert "... and 364 more" in str(error)


def test_an_mxfp4_expert_without_its_scales(rewritten: Callable[..., Path]) -> None:
    name = f"{LAYER}.3.block_sparse_moe.experts.2.w3.weight_scale"
    folder = rewritten(lambda tensors: drop(tensors, name), "k3-mxfp4")
    for expert_weights in ("packed", "bf16"):
        (fault,) = refused(folder, expert_weights=expert_weights).faults
        assert (fault.kind, fault.name) == ("missing tensor", name)


def test_packed_tensors_of_the_wrong_shape(rewritten: Callable[..., Path]) -> None:
    packed, scale = (f"{LAYER}.3.block_sparse_moe.experts.2.w3.weight_{part}" for part in ("packed", "scale"))

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[packed] = tensors[packed][:, :-1]
        tensors[scale] = tensors[scale].repeat(1, 2)

    folder = rewritten(spoil, "k3-mxfp4")
    for expert_weights in ("packed", "bf16"):
        found = {
            (fault.kind, fault.name, fault.detail) for fault in refused(folder, expert_weights=expert_weights).faults
        }
        assert found == {
            ("wrong shape", packed, "is [32, 15], expected [32, 16]"),
            ("wrong shape", scale, "is [32, 2], expected [32, 1]"),
        }


@pytest.fixture
def copied(oracle: Callable[[str], Oracle], tmp_path: Path) -> Path:
    return shutil.copytree(oracle("k3").folder, tmp_path / "k3", copy_function=shutil.copyfile)


def test_files_that_are_not_whole(copied: Path) -> None:
    """A missing and a cut shard are found before anything is loaded, both together."""
    first, second = sorted(copied.glob("model-*.safetensors"))
    first.unlink()
    content = second.read_bytes()
    second.write_bytes(content[: len(content) // 2])
    assert {(fault.kind, fault.name) for fault in refused(copied).faults} >= {("missing shard", first.name)}
    assert second.name in str(refused(copied))


def test_a_folder_without_weights(copied: Path) -> None:
    for file in copied.glob("*.safetensors*"):
        file.unlink()
    assert "no safetensors checkpoint" in str(refused(copied))


def test_no_folder_and_no_config(copied: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_model(copied / "nowhere")
    (copied / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: missing"):
        load_model(copied)


def test_a_dtype_that_is_not_known(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"dtype": "float8_e4m3fn"}))
    with pytest.raises(CheckpointError, match="dtype is 'float8_e4m3fn'; supported: float32, bfloat16, float16"):
        load_model(copied)
    assert load_model(copied, dtype=torch.float32).dtype == torch.float32


def test_vision_tensors(rewritten: Callable[..., Path]) -> None:
    """All of them, or none: a checkpoint cut down to its text is a text model."""
    vision = ("vision_tower.", "mm_projector.")

    def text_only(tensors: dict[str, Tensor]) -> None:
        drop(tensors, *[name for name in tensors if name.startswith(vision)])

    model = load_model(rewritten(text_only, "k3-vision"))
    assert model.vision_tower is None
    assert model.mm_projector is None
    folder = rewritten(lambda tensors: drop(tensors, "mm_projector.proj.2.weight"), "k3-vision")
    ((kind, name),) = [(fault.kind, fault.name) for fault in refused(folder).faults]
    assert (kind, name) == ("missing tensor", "mm_projector.proj.2.weight")


# --- progress ---


@pytest.mark.parametrize("layout", [None, ParallelLayout(tp=2), ParallelLayout(tp=4, ep=4)])
@pytest.mark.parametrize("name", ["k3", "kimi-linear-flat"])
def test_progress_reaches_its_total(oracle: Callable[[str], Oracle], name: str, layout: ParallelLayout | None) -> None:
    """Also for a rank that reads slices, and skips bytes between them."""
    seen: list[tuple[int, int]] = []
    load_model(oracle(name).folder, layout=layout, progress=lambda done, total: seen.append((done, total)))
    done = [count for count, _ in seen]
    assert done == sorted(done)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]
    if layout is None:
        files = oracle(name).folder.glob("model*.safetensors")
        assert seen[-1][1] == sum(tensor.nbytes for file in files for tensor in load_file(file).values())

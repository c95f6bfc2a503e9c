"""Converting changes the form of the experts and nothing else, and what a kill leaves can be gone on with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from kimi_k3_npu import CheckpointError, load_model
from kimi_k3_npu.checkpoint.convert import REPORT, WORK, convert
from kimi_k3_npu.checkpoint.error_report import ErrorReport
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.ops.int4 import unpack_rows
from kimi_k3_npu.ops.quant import mxfp4_dequantize
from tests.checkpoint.corpus import EXPERT, KDA, MOE, Draft, swapped
from tests.patience import PATIENCE

if TYPE_CHECKING:
    from tests.conftest import Oracle

TOLERANCE = 5e-4
MXFP4, INT4X2, W4A8 = (FORMATS[name] for name in ("mxfp4", "int4x2", "w4a8"))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def worst(folder: Path, oracle: Oracle, **options: str) -> float:
    model = load_model(folder, **options)  # type: ignore[arg-type]
    pairs = zip(model.score(oracle.expected.prompts), oracle.expected.logits, strict=True)
    return max((found - logits).abs().max().item() for found, logits in pairs)


# --- forms ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_of_int4_are_mxfp4s_values_to_the_bit(dtype: torch.dtype) -> None:
    """Every byte with scales from the smallest to the largest that does not overflow."""
    scales = torch.tensor([0, 1, 2, 3, 60, 64, 100, 126, 127, 128, 129, 190, 200, 250, 251, 252], dtype=torch.uint8)
    packed = torch.arange(256, dtype=torch.uint8).repeat(len(scales), 1)
    scale = scales[:, None].expand(-1, 16).contiguous()
    parts = {".weight_packed": packed, ".weight_scale": scale}
    wanted = mxfp4_dequantize(packed, scale, dtype)
    kept = {f".weight{name}": tensor for name, tensor in INT4X2.takes["mxfp4"](parts).items()}
    for pairs in (kept, INT4X2.quantize("w", wanted.float())):
        assert {name: (x.dtype, x.shape) for name, x in pairs.items()} == {
            ".weight_first": (torch.int32, (512, 2)),
            ".weight_second": (torch.int32, (512, 2)),
            ".weight_scale": (torch.bfloat16, (16, 16)),
        }
        assert torch.equal(INT4X2.values(pairs, dtype), wanted)


def test_w4a8_takes_the_best_clip() -> None:
    """Its squared error is no more than without clipping, row by row, and codes and bias are those of the scale."""
    weight = torch.randn(64, 128) * torch.linspace(0.1, 3, 64)[:, None]
    weight[3, 5] = 40.0  # an outlier that is better clipped
    weight[7] = 0.0
    parts = W4A8.quantize("experts.0.w2.weight", weight)
    error = (W4A8.values(parts, torch.float32) - weight).square().sum(1)
    plain = weight.abs().amax(1, keepdim=True).clamp_min(1e-9) / 7
    unclipped = (torch.round(weight / plain).clamp(-8, 7) * plain - weight).square().sum(1)
    assert (error <= unclipped * (1 + 1e-6)).all()
    assert error.sum() < 0.95 * unclipped.sum()
    assert error[7] == 0
    codes = unpack_rows(parts[".weight"])
    assert codes.shape == weight.shape
    assert parts[".scale_bias"].shape == (64, 16)
    assert W4A8.fault(parts) is None
    assert not parts[".weight_offset"].any()


def test_mxfp4_is_a_fixed_point() -> None:
    once = MXFP4.values(MXFP4.quantize("w", torch.randn(8, 64)), torch.float32)
    assert torch.equal(MXFP4.values(MXFP4.quantize("w", once), torch.float32), once)


# --- whole checkpoints ---


@pytest.mark.parametrize(("to", "kept"), [("bf16", "plain"), ("int4x2", "int4x2")])
def test_mxfp4_loses_nothing(oracle: Callable[[str], Oracle], tmp_path: Path, to: str, kept: str) -> None:
    source = oracle("k3-mxfp4")
    report = convert(source.folder, tmp_path / "out", to)  # type: ignore[arg-type]
    assert report.total.weights == 8 * 16 * 3
    assert (report.total.relative, report.total.cosine) == (0, 1)
    assert not verify(tmp_path / "out").faults
    assert load_model(tmp_path / "out").experts == kept
    expanded = source.load(source.folder, expert_weights="bf16").state_dict()
    for name, tensor in load_model(tmp_path / "out", expert_weights="bf16").state_dict().items():
        assert torch.equal(tensor, expanded[name]), name
    assert worst(tmp_path / "out", source) <= TOLERANCE
    assert torch.equal(
        load_model(tmp_path / "out").score(source.expected.prompts[:1])[0],
        source.model.score(source.expected.prompts[:1])[0],
    )


def test_mxfp4_in_memory_as_int4_pairs(oracle: Callable[[str], Oracle]) -> None:
    source = oracle("k3-mxfp4")
    assert load_model(source.folder, expert_weights="int4x2").experts == "int4x2"
    assert worst(source.folder, source, expert_weights="int4x2") <= TOLERANCE


@pytest.mark.parametrize("name", ["k3", "k3-mxfp4"])
def test_w4a8_has_the_published_tensors(oracle: Callable[[str], Oracle], tmp_path: Path, name: str) -> None:
    source, out = oracle(name), tmp_path / "out"
    report = convert(source.folder, out, "w4a8", jobs=2)
    assert 0.02 < report.total.relative < 0.12
    assert report.total.cosine > 0.99
    assert not verify(out).faults
    converted, like = tensors_of(out), Draft("k3-w4a8").tensors
    for part in ("w1.weight", "w2.weight", "w2.weight_scale", "w2.weight_offset", "w1.scale_bias", "w2.scale_bias"):
        found, published = converted[EXPERT + part], like[EXPERT + part]
        assert (found.dtype, found.shape) == (published.dtype, published.shape), part
    description = json.loads((out / "quant_model_description.json").read_text())
    assert description.keys() - converted.keys() == {"model_quant_type", "version", "group_size"}
    assert description[f"{EXPERT}w2.scale_bias"] == "W4A8_DYNAMIC"
    assert description[f"{KDA}self_attn.q_proj.weight"] == "FLOAT"
    assert "quantization_config" not in json.loads((out / "config.json").read_text())["text_config"]
    assert load_model(out).experts == "w4a8"


@pytest.mark.parametrize("to", ["bf16", "mxfp4", "int4x2"])
def test_from_w4a8(oracle: Callable[[str], Oracle], tmp_path: Path, to: str) -> None:
    """W8A8 linears become bf16, all else but the experts stays as it is, byte for byte."""
    source, out = oracle("k3-w4a8"), tmp_path / "out"
    report = convert(source.folder, out, to)  # type: ignore[arg-type]
    assert report.total.weights == 4 * 16 * 3 + 4 * 5
    linear = f"{MOE}shared_experts.up_proj.weight"
    assert report.blocks[f"model.layers.1.mlp.{linear.partition('moe.')[2]}"].relative < 3e-3
    assert not verify(out).faults
    before, after = tensors_of(source.folder), tensors_of(out)
    assert after[linear].dtype == torch.bfloat16
    plain = [name for name in before if ".experts." not in name and f"{name}_scale" not in before and name in after]
    assert len(plain) > 100
    for name in plain:
        assert torch.equal(after[name], before[name]), name
    assert not any(name.endswith(("_offset", "scale_bias")) for name in after)


def test_other_files_go_along(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    draft = Draft("k3")
    draft.write(tmp_path / "in")
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    (tmp_path / "in" / "job.json").write_text("mine")
    (tmp_path / "in" / "notes.safetensors").write_bytes((oracle("k3").folder / "expected.safetensors").read_bytes())
    convert(tmp_path / "in", tmp_path / "out", "mxfp4")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    shards = {f"model-0000{n}-of-000002.safetensors" for n in (1, 2)}
    assert names == shards | {"config.json", "tokenizer.json", "job.json", REPORT, "model.safetensors.index.json"}
    assert (tmp_path / "out" / "job.json").read_text() == "mine"


def test_what_systems_leave_is_neither_converted_nor_in_the_way(
    oracle: Callable[[str], Oracle], tmp_path: Path
) -> None:
    Draft("k3").write(tmp_path / "in")
    (tmp_path / "out").mkdir()
    for folder, name in (("in", "._config.json"), ("in", ".DS_Store"), ("out", ".DS_Store"), ("out", "lost+found")):
        (tmp_path / folder / name).write_text("of another system")
    convert(tmp_path / "in", tmp_path / "out", "mxfp4")
    convert(oracle("k3").folder, tmp_path / "wanted", "mxfp4")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names - {".DS_Store", "lost+found"} == {file.name for file in (tmp_path / "wanted").iterdir()}
    assert (tmp_path / "out" / ".DS_Store").read_text() == "of another system"


def test_parts_of_a_weight_in_different_files(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    draft = Draft("k3-mxfp4")
    for name in draft.shards:
        draft.shards[name] = draft.files[name.endswith("_scale")]
    draft.write(tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", "bf16")
    assert worst(tmp_path / "out", oracle("k3-mxfp4")) <= TOLERANCE


def test_jobs_and_progress_change_nothing(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    source, seen = oracle("k3-mxfp4").folder, list[tuple[int, int]]()
    convert(source, tmp_path / "one", "w4a8")
    convert(source, tmp_path / "two", "w4a8", jobs=3, progress=lambda done, total: seen.append((done, total)))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert seen[-1][0] == seen[-1][1] == Checkpoint.open(source).total_bytes


def test_the_report_says_what_was_lost(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    report = convert(oracle("k3").folder, tmp_path / "out", "mxfp4")
    before, after = (load_model(folder, expert_weights="bf16") for folder in (oracle("k3").folder, tmp_path / "out"))
    block = "model.layers.2.mlp.experts.w2.weight"
    a, b = (model.layers["2"].mlp.experts.w2.double() for model in (before, after))
    assert report.blocks[block].relative == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-6)
    assert report.blocks[block].cosine == pytest.approx((a * b).sum().item() / (a.norm() * b.norm()).item(), rel=1e-6)
    each = ((a - b).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1)).tolist()
    assert report.blocks[block].worst[0] == pytest.approx(max(each), rel=1e-5)
    assert report.blocks[block].worst[1] == f"model.layers.2.mlp.experts.{each.index(max(each))}.w2.weight"
    stored = json.loads((tmp_path / "out" / REPORT).read_text())
    assert ErrorReport.from_json(stored["blocks"]) == report
    assert (stored["source"], stored["to"]) == ("k3", "mxfp4")


# --- refusals ---


@pytest.mark.parametrize(("name", "to"), [("k3", "bf16"), ("k3-mxfp4", "mxfp4"), ("k3-w4a8", "w4a8")])
def test_nothing_to_convert(oracle: Callable[[str], Oracle], tmp_path: Path, name: str, to: str) -> None:
    with pytest.raises(CheckpointError, match=r"its experts are .* already"):
        convert(oracle(name).folder, tmp_path / "out", to)  # type: ignore[arg-type]


def test_a_folder_with_something_else(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    source = oracle("k3-mxfp4").folder
    (tmp_path / "mine.txt").touch()
    with pytest.raises(CheckpointError, match="not empty, and no unfinished conversion"):
        convert(source, tmp_path, "bf16")
    convert(source, tmp_path / "done", "bf16")
    with pytest.raises(CheckpointError, match="not empty, and no unfinished conversion"):
        convert(source, tmp_path / "done", "bf16")
    (tmp_path / "half" / WORK).mkdir(parents=True)
    (tmp_path / "half" / WORK / "job.json").write_text("another")
    with pytest.raises(CheckpointError, match="an unfinished conversion of another checkpoint, or to another form"):
        convert(source, tmp_path / "half", "bf16")


def test_sizes_that_a_form_cannot_have(tmp_path: Path) -> None:
    draft = Draft("k3")
    draft.text["moe_intermediate_size"] = 40
    draft.text["num_shared_experts"] = 1
    for name, tensor in draft.tensors.items():
        if ".experts." in name or ".shared_experts." in name:
            shape = tuple({32: 40, 64: 40 if ".shared" in name else 64}.get(n, n) for n in tensor.shape)
            inner = 1 if name.endswith(("w2.weight", "down_proj.weight")) else 0
            shape = tuple(shape[i] if i == inner else n for i, n in enumerate(tensor.shape))
            draft.tensors[name] = torch.zeros(shape)
    draft.write(tmp_path / "in")
    assert not verify(tmp_path / "in").faults
    with pytest.raises(CheckpointError, match=r"w2\.weight: a weight \[32, 40\] cannot be stored as MXFP4"):
        convert(tmp_path / "in", tmp_path / "out", "mxfp4")
    convert(tmp_path / "in", tmp_path / "out", "w4a8")


def test_a_faulty_source(tmp_path: Path) -> None:
    """What is wrong with names is said at once, what is wrong inside when it is met; then nothing looks finished."""
    draft = Draft("k3-mxfp4")
    draft.remove(f"{EXPERT}w2.weight_scale")
    draft.write(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"missing tensor(.|\n)*w2\.weight_scale"):
        convert(tmp_path / "missing", tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()
    for number, (form, change) in enumerate(
        (
            ("k3", lambda draft: draft.tensors[f"{EXPERT}w2.weight"].view(-1)[:1].fill_(torch.nan)),
            ("k3-mxfp4", lambda draft: draft.tensors[f"{EXPERT}w2.weight_scale"].fill_(255)),
            ("k3-w4a8", swapped(f"{EXPERT}w2.weight", f"{EXPERT}w1.weight")),
        )
    ):
        draft, out = Draft(form), tmp_path / f"out{number}"
        change(draft)
        draft.write(tmp_path / f"in{number}")
        with pytest.raises(CheckpointError, match=r"not finite|wrong content"):
            convert(tmp_path / f"in{number}", out, "int4x2", jobs=2)
        assert {file.name for file in out.glob("*.json")} == set()


# --- kills ---


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4x2"])
def test_killed_conversions_are_gone_on_with(oracle: Callable[[str], Oracle], tmp_path: Path, form: str) -> None:
    """kill -9 before calls of the file system and at random times; the result never differs in a byte."""
    script, source = Path(__file__).with_name("kill_convert.py"), oracle("k3-mxfp4").folder
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "GOMP_SPINCOUNT": "0"}
    run = [sys.executable, script, source, tmp_path, form, "0"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["different"] == []
    assert found["killed"] >= 20

"""Verifying finds every fault at once; a manifest finds what cannot be seen; the commands say it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kimi_k3_npu import KimiK3Config
from kimi_k3_npu.checkpoint.checksums import Checksums
from kimi_k3_npu.checkpoint.inspect import inspect
from kimi_k3_npu.checkpoint.manifest import Extent, TensorSpec, expand, load_manifest
from kimi_k3_npu.checkpoint.stream import non_finite
from kimi_k3_npu.checkpoint.verify import verify
from kimi_k3_npu.checkpoint.writer import ShardWriter
from kimi_k3_npu.cli import main
from kimi_k3_npu.errors import CheckpointError, ConfigError
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.resources import resource_path
from tests.checkpoint.corpus import DESCRIPTION, EXPERT, KDA, MOE, Draft

if TYPE_CHECKING:
    from tests.conftest import Oracle

ORACLES = ("k3", "k3-deep", "k3-mxfp4", "k3-w4a8", "k3-router", "k3-vision", "kimi-linear", "kimi-linear-flat")


def kinds(folder: Path, **options: object) -> list[tuple[str, str]]:
    return [(fault.kind, fault.name) for fault in verify(folder, **options).faults]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ORACLES)
def test_the_oracles_have_no_fault(oracle: Callable[[str], Oracle], name: str) -> None:
    seen: list[tuple[int, int]] = []
    found = verify(oracle(name).folder, progress=lambda done, total: seen.append((done, total)))
    assert (found.faults, found.notes) == ([], [])
    assert found.checkpoint
    assert seen[-1] == (found.checkpoint.total_bytes, found.checkpoint.total_bytes)


def test_all_faults_at_once(tmp_path: Path) -> None:
    """Of the description, of names, shapes and dtypes, and inside tensors: each of its kind, in one list."""
    draft = Draft("k3-w4a8")
    assert draft.description is not None
    draft.description["language_model.ghost.weight"] = "FLOAT"
    draft.remove(f"{KDA}input_layernorm.weight")
    draft.add("language_model.model.surplus", torch.zeros(1))
    draft.tensors[f"{KDA}self_attn.q_proj.weight"] = torch.zeros(3, 3)
    draft.tensors[f"{KDA}self_attn.k_proj.weight"] = torch.zeros(64, 64, dtype=torch.int16)
    draft.tensors[f"{KDA}self_attn.dt_bias"][3] = torch.inf
    draft.tensors[f"{KDA}self_attn.A_log"][-1] = 1.0
    draft.tensors[f"{EXPERT}w2.weight_scale"] *= 2
    draft.write(tmp_path)
    assert set(kinds(tmp_path)) == {
        ("wrong shape", f"{KDA}self_attn.q_proj.weight"),
        ("wrong dtype", f"{KDA}self_attn.k_proj.weight"),
        ("unknown tensor", "language_model.model.surplus"),
        ("missing tensor", f"{KDA}input_layernorm.weight"),
        ("described but missing", "language_model.ghost.weight"),
        ("wrong content", f"{KDA}self_attn.A_log"),
        ("not finite", f"{KDA}self_attn.dt_bias"),
        ("wrong content", f"{EXPERT}w2.weight"),
    }
    assert len(kinds(tmp_path)) == 8
    assert len(kinds(tmp_path, data=False)) == 5


def test_a_folder_without_a_config_has_its_files_checked(tmp_path: Path) -> None:
    draft = Draft("k3")
    draft.after.append(lambda folder: (folder / "config.json").unlink())
    draft.after.append(lambda folder: (folder / "model-00002-of-00002.safetensors").write_bytes(b"short"))
    draft.write(tmp_path)
    assert kinds(tmp_path) == [
        ("config", "config.json"),
        ("truncated or not safetensors", "model-00002-of-00002.safetensors"),
    ]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=2,ep=2", None),
        ("tp=4,dp=2,ep=4", None),
        ("tp=3", "4 attention heads do not split over attn_tp = 3"),
        ("tp=4,ep=2", "experts of width 32 over tp / ep = 2 ranks is 16 a rank"),
    ],
)
def test_layouts(oracle: Callable[[str], Oracle], layout: str, message: str | None) -> None:
    faults = verify(oracle("k3-mxfp4").folder, layout=ParallelLayout.parse(layout), data=False).faults
    assert [fault.kind for fault in faults] == ([] if message is None else ["layout"])
    assert message is None or message in faults[0].detail


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_non_finite(dtype: torch.dtype) -> None:
    """Also where values are so large that their sum is not finite, and where infinities cancel."""
    x = torch.full((3, 70), torch.finfo(dtype).max, dtype=dtype)
    assert non_finite(x) == 0
    x[1, 5], x[2, 6], x[0, 0] = torch.inf, -torch.inf, torch.nan
    assert non_finite(x) == 3
    assert non_finite(torch.zeros(0, dtype=dtype)) == 0
    assert non_finite(torch.full((4,), 255, dtype=torch.uint8)) == 0


# --- manifests ---


@pytest.mark.parametrize("name", ["kimi-k3-mxfp4", "kimi-k3-w4a8-sgl-npu", "kimi-k3-w4a8-eco-tech"])
def test_published_manifests_are_of_the_published_model(name: str) -> None:
    raw = json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text())
    manifest = load_manifest(name)
    specs = list(expand(manifest, Extent.of(KimiK3Config.from_hf(raw))))
    assert len({spec.name for spec in specs}) == len(specs) == manifest.total_tensors
    assert sum(spec.nbytes for spec in specs) == manifest.total_bytes


def test_the_w4a8_manifests_have_the_published_sizes_and_counts() -> None:
    for name, gigabytes, w8a8, floats in (("sgl-npu", 1486.26, 460, 2168), ("eco-tech", 1466.39, 742, 1887)):
        manifest = load_manifest(f"kimi-k3-w4a8-{name}")
        assert manifest.total_bytes / 1e9 == pytest.approx(gigabytes, abs=0.005)
        experts = sum(pattern.count for pattern in manifest.patterns if ".experts.{E}" in pattern.name)
        assert experts == 247_296 * 4
        codes = [p.count for p in manifest.patterns if p.dtype == torch.int8 and ".experts.{E}" not in p.name]
        assert sum(codes) == w8a8
        assert manifest.total_tensors == experts + 3 * w8a8 + floats


def test_against_a_published_manifest(oracle: Callable[[str], Oracle]) -> None:
    """Whose model is another; see test_names.py for its own."""
    (fault,) = verify(oracle("k3").folder, against="kimi-k3-mxfp4", data=False).faults
    assert (fault.kind, fault.name) == ("another model than the manifest's", "config.json")
    with pytest.raises(ConfigError, match="no manifest 'nothing'; there are: kimi-k3-mxfp4, kimi-k3-w4a8"):
        verify(oracle("k3").folder, against="nothing")


@pytest.mark.slow
def test_the_published_checkpoint_by_its_headers(tmp_path: Path) -> None:
    """All 497,220 headers in 96 files of holes, of which one tensor is called otherwise."""
    raw = resource_path("weights", "manifests", "kimi-k3-config.json").read_text()
    (tmp_path / "config.json").write_text(raw)
    wanted, found = f"{MOE}experts.895.w2.weight_scale", f"{MOE}experts.895.w2.weight_scales"
    shards: dict[str, list[TensorSpec]] = {}
    for spec in expand(load_manifest("kimi-k3-mxfp4"), Extent.of(KimiK3Config.from_hf(json.loads(raw)))):
        layer = spec.name.partition(".layers.")[2].partition(".")[0]
        place = int(layer) + 1 if layer else {"l": 94, "m": 95, "v": 96}[spec.name[0]]
        shard = f"model-{place:05}-of-000096.safetensors"
        shards.setdefault(shard, []).append(spec._replace(name=found) if spec.name == wanted else spec)
    for shard, specs in shards.items():
        ShardWriter(tmp_path / shard, specs).close()
        size = (tmp_path / shard).stat().st_size + sum(spec.nbytes for spec in specs)
        os.truncate(tmp_path / shard, size)
    weight_map = {spec.name: shard for shard, specs in shards.items() for spec in specs}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len(shards) == 96
    assert set(kinds(tmp_path, against="kimi-k3-mxfp4", data=False)) == {
        ("unknown tensor", found),
        ("missing tensor", wanted),
        ("missing, by the manifest", wanted),
        ("not in the manifest", found),
    }


def test_against_checksums(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    Checksums.of(oracle("k3").folder).write(tmp_path / "sums.json")
    assert verify(oracle("k3").folder, against=tmp_path / "sums.json").faults == []
    draft = Draft("k3")
    draft.rename(f"{MOE}gate.weight", f"{KDA}mlp.gate.weight")  # an alias: right, but not the same
    draft.tensors[f"{KDA}input_layernorm.weight"] = draft.tensors[f"{KDA}input_layernorm.weight"].bfloat16()
    draft.tensors[f"{EXPERT}w2.weight"][0, 0] += 1
    draft.config["text_config"]["rms_norm_eps"] = 1e-6
    draft.write(tmp_path / "changed")
    assert set(kinds(tmp_path / "changed", against=tmp_path / "sums.json")) == {
        ("config differs from the manifest", "text_config.rms_norm_eps"),
        ("differs from the manifest", f"{KDA}input_layernorm.weight"),
        ("missing, by the manifest", f"{MOE}gate.weight"),
        ("not in the manifest", f"{KDA}mlp.gate.weight"),
        ("differs from the manifest", f"{EXPERT}w2.weight"),
    }
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json: no file of checksums .* \(format is None, expected"):
        verify(tmp_path / "changed", against=tmp_path / "other.json")


def test_how_tensors_are_spread_over_files_does_not_matter(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    Checksums.of(oracle("k3-mxfp4").folder).write(tmp_path / "sums.json")
    draft = Draft("k3-mxfp4")
    draft.shards = dict.fromkeys(draft.tensors, draft.files[0])
    draft.write(tmp_path / "one")
    assert kinds(tmp_path / "one", against=tmp_path / "sums.json") == []


# --- inspecting ---


def test_inspect(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    for name, storage, experts in (
        ("k3", "plain", "plain"),
        ("k3-mxfp4", "mxfp4", "MXFP4"),
        ("k3-w4a8", "modelslim", "W4A8_DYNAMIC"),
    ):
        found = inspect(oracle(name).folder)
        assert (found.storage, found.experts, found.faults, found.notes) == (storage, experts, [], [])
        assert sum(pattern.tensors for pattern in found.patterns) == found.tensors
        assert sum(pattern.bytes for pattern in found.patterns) == sum(found.dtypes.values()) == found.bytes
    names = {pattern.name: pattern for pattern in found.patterns}
    codes = names["language_model.model.layers.{L}.block_sparse_moe.experts.{E}.w2.weight"]
    assert (codes.tensors, codes.kinds) == (64, {"int8 [16, 32]": 64})

    draft = Draft("k3-w4a8")
    draft.tensors[f"{KDA}self_attn.dt_bias"] = draft.tensors[f"{KDA}self_attn.dt_bias"].bfloat16()
    draft.description = None
    draft.write(tmp_path)
    found = inspect(tmp_path)
    assert found.storage is None
    assert [(fault.kind, fault.name) for fault in found.faults] == [("missing quantization", DESCRIPTION)]
    with pytest.raises(CheckpointError, match="no such folder"):
        inspect(tmp_path / "nowhere")


# --- commands ---


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["weights", *map(str, args)])
        return int(end.value.code or 0), *capfd.readouterr()

    return run


def test_commands(oracle: Callable[[str], Oracle], run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    """Inspect, convert, checksum and verify, one after the other."""
    source, out, sums = oracle("k3-mxfp4").folder, tmp_path / "out", tmp_path / "sums.json"
    code, text, errors = run("inspect", source)
    assert (code, errors) == (0, "")
    assert "format   mxfp4, routed experts MXFP4" in text
    assert "model.layers.{L}.block_sparse_moe.experts.{E}.w2.weight_scale  uint8 [32, 1]" in text
    assert json.loads(run("inspect", source, "--json")[1])["tensors"] == 1002

    code, text, errors = run("convert", source, out, "--to", "int4x2", "--jobs", 2)
    assert (code, errors) == (0, "")
    assert f"{out}: 384 weights as int4x2" in text
    assert "model.layers.1.mlp.experts.w1.weight       16       0.000e+00   1.000000000" in text
    assert run("convert", source, out, "--to", "int4x2")[0] == 1
    assert json.loads(run("convert", source, tmp_path / "bf16", "--to", "bf16", "--json")[1])

    assert run("checksum", out, "--out", sums)[:2] == (0, f"{sums}: 1,386 tensors\n")
    code, text, errors = run("verify", out, "--layout", "tp=2,ep=2", "--against", sums)
    assert (code, errors) == (0, "")
    assert "no fault in 1,386 tensors" in text
    assert f"stored as int4x2, all values read, every rank of tp=2,ep=2, the same as {sums}" in text
    assert "headers only" in run("verify", out, "--no-data")[1]


def test_verify_ends_with_1_and_all_faults(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    draft = Draft("k3")
    draft.remove(f"{EXPERT}w2.weight")
    draft.tensors[f"{KDA}self_attn.dt_bias"] = draft.tensors[f"{KDA}self_attn.dt_bias"].bfloat16()
    draft.tensors["language_model.model.norm.weight"][0] = torch.nan
    draft.write(tmp_path)
    code, text, errors = run("verify", tmp_path)
    assert (code, text) == (1, "")
    assert f"missing tensor (1):\n    {EXPERT}w2.weight" in errors
    assert "not finite (1):\n    language_model.model.norm.weight: 1 of 64 values are NaN or infinite" in errors
    assert f"note: less precise than published: {KDA}self_attn.dt_bias: is bfloat16, published as float32" in errors
    code, text, errors = run("verify", tmp_path, "--json")
    assert (code, errors) == (1, "")
    assert {fault["kind"] for fault in json.loads(text)["faults"]} == {"missing tensor", "not finite"}

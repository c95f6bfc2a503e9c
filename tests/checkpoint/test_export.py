"""Export is loading backwards: what is exported loads as the same model, with published names, shapes and dtypes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_k3_npu import KimiK3Config, KimiK3ForCausalLM, load_model
from kimi_k3_npu.checkpoint.checksums import Checksums
from kimi_k3_npu.checkpoint.convert import convert
from kimi_k3_npu.checkpoint.export import INDEX, export_tensors, write_checkpoint
from kimi_k3_npu.checkpoint.manifest import load_manifest
from kimi_k3_npu.checkpoint.names import normalise, published_name
from kimi_k3_npu.checkpoint.reader import Checkpoint
from kimi_k3_npu.formats import FORMATS
from kimi_k3_npu.parallel.layout import ParallelLayout
from kimi_k3_npu.parallel.mesh import Mesh
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tiny import write_tiny

FOLDERS = ["k3", "k3-deep", "k3-mxfp4", "k3-router", "k3-vision", "kimi-linear", "kimi-linear-flat"]


def save(model: KimiK3ForCausalLM, like: Path, folder: Path, **options: Any) -> Path:
    """Export `model` to `folder` with the config.json of `like`."""
    folder.mkdir(exist_ok=True)
    write_checkpoint(export_tensors(model, **options), folder)
    (folder / "config.json").write_bytes((like / "config.json").read_bytes())
    return folder


def published(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint."""
    checkpoint = Checkpoint.open(folder)
    return {name: checkpoint.read(name) for name in checkpoint.entries}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype, name
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("name", FOLDERS)
def test_round_trip(oracle: Callable, name: str, tmp_path: Path) -> None:
    source = oracle(name)
    again = load_model(save(source.model, source.folder, tmp_path))
    assert_same(source.model.state_dict(), again.state_dict())


@pytest.mark.parametrize("name", FOLDERS)
def test_exports_what_was_published(oracle: Callable, name: str, tmp_path: Path) -> None:
    source = oracle(name)
    original = published(source.folder)
    exported = published(save(source.model, source.folder, tmp_path))
    assert original.keys() == exported.keys()
    for key, tensor in exported.items():
        wanted = original[key]
        assert tensor.dtype == wanted.dtype
        if "_res_norm." in key or "_res_proj." in key:  # known by their product only
            norm, proj = key.replace("_res_proj.", "_res_norm."), key.replace("_res_norm.", "_res_proj.")
            tensor, wanted = exported[norm] * exported[proj], original[norm] * original[proj]
        elif key.endswith("A_log") and name.startswith("kimi-linear"):  # these have it without padding, or 4-D
            tensor, wanted = tensor[: wanted.numel()], wanted.flatten()
        assert torch.equal(tensor, wanted), key


def test_packs_experts(oracle: Callable, tmp_path: Path) -> None:
    """Experts that were MXFP4 and were expanded are packed to the same values."""
    source = oracle("k3-mxfp4")
    expanded = source.load(source.folder, expert_weights="bf16")
    folder = save(expanded, source.folder, tmp_path, experts=FORMATS["mxfp4"])
    assert Checkpoint.open(folder).entries.keys() == Checkpoint.open(source.folder).entries.keys()
    assert_same(load_model(folder, expert_weights="bf16").state_dict(), expanded.state_dict())


def test_rounds_experts_to_mxfp4(oracle: Callable, tmp_path: Path) -> None:
    source, like = oracle("k3"), oracle("k3-mxfp4")
    rounded = load_model(save(source.model, like.folder, tmp_path, experts=FORMATS["mxfp4"]), expert_weights="bf16")
    for (name, weight), exact in zip(rounded.named_parameters(), source.model.parameters(), strict=True):
        if ".experts." in name:
            assert not torch.equal(weight, exact)
            # A group's scale puts its largest value between 4 and 8: above 6 is clipped, and steps below are 2 wide.
            assert (weight - exact).abs().max() <= exact.abs().max() / 3
        else:
            assert torch.equal(weight, exact)


def test_fp32_in_memory_stays_exact(oracle: Callable, tmp_path: Path) -> None:
    """A product of two bf16 values is no bf16 value: the mixer is then published as fp32, and the router as bf16."""
    source = oracle("k3")
    folder = save(source.load(source.folder, dtype=torch.bfloat16), source.folder, tmp_path)
    tensors = published(folder)
    layer = "language_model.model.layers.1."
    assert tensors[f"{layer}mlp_res_norm.weight"].dtype == torch.bfloat16
    assert tensors[f"{layer}mlp_res_proj.weight"].dtype == torch.float32
    assert tensors[f"{layer}block_sparse_moe.gate.weight"].dtype == torch.float32
    assert tensors[f"{layer}self_attn.A_log"].dtype == torch.float32
    assert tensors[f"{layer}self_attn.q_proj.weight"].dtype == torch.bfloat16

    model = load_model(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    dtypes = {name: tensor.dtype for name, tensor in export_tensors(model)}
    assert dtypes[f"{layer}mlp_res_proj.weight"] == torch.bfloat16
    assert dtypes[f"{layer}block_sparse_moe.gate.weight"] == torch.bfloat16
    assert dtypes[f"{layer}self_attn.A_log"] == torch.float32


def test_refuses_one_rank_of_several(oracle: Callable) -> None:
    config = oracle("k3").model.config
    with torch.device("meta"):
        model = KimiK3ForCausalLM(config, Mesh.inspect(ParallelLayout(tp=2), 0))
    with pytest.raises(ValueError, match="one rank's shards"):
        next(export_tensors(model))


def test_published_names_of_the_full_model() -> None:
    config = KimiK3Config.from_hf(json.loads(resource_path("weights", "manifests", "kimi-k3-config.json").read_text()))
    for pattern in load_manifest("kimi-k3-mxfp4").patterns:
        for layer in (0, 1, 92):
            if pattern.layers in ("dense", "moe") and config.text.is_moe(layer) != (pattern.layers == "moe"):
                continue
            name = pattern.name.format(L=layer, E=895, B=26)
            assert published_name(normalise(name), config) == name


def test_shards(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(5)}  # 16 bytes each
    write_checkpoint(tensors.items(), tmp_path, shard_bytes=32)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == [f"model-0000{i}-of-000003.safetensors" for i in (1, 2, 3)] + [INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == {"total_size": 80}
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], tensors[name])
    assert Checkpoint.open(tmp_path).entries.keys() == tensors.keys()


def test_a_failed_export_is_no_checkpoint(tmp_path: Path) -> None:
    def tensors() -> Any:
        yield "a", torch.zeros(4)
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        write_checkpoint(tensors(), tmp_path, shard_bytes=1)
    assert not list(tmp_path.glob("*.safetensors*"))


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_files_have_the_mode_of_the_umask(tmp_path: Path, umask: int) -> None:
    """Colleagues can read what one of them has written: libraries write temporary files of mode 0600."""
    before = os.umask(umask)
    try:
        write_tiny(tmp_path / "tiny")
        convert(tmp_path / "tiny", tmp_path / "out", "bf16")
        Checksums.of(tmp_path / "out").write(tmp_path / "out" / "checksums.json")
    finally:
        os.umask(before)
    modes = {str(file): oct(file.stat().st_mode & 0o777) for file in tmp_path.rglob("*") if file.is_file()}
    assert len(modes) == 18
    assert modes == dict.fromkeys(modes, oct(0o666 & ~umask))

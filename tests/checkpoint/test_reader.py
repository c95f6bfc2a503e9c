"""Opening a checkpoint finds every fault of its files; reading gives exact slices and reads little else."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from kimi_k3_npu.checkpoint import byte_ranges, reader
from kimi_k3_npu.checkpoint.reader import Checkpoint, ReadRequest
from kimi_k3_npu.checkpoint.safetensors_header import DTYPES
from kimi_k3_npu.errors import CheckpointError, Fault

INDEX = "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def f32(offsets: list[int], shape: list[int]) -> dict:
    return {"dtype": "F32", "shape": shape, "data_offsets": offsets}


def write_shard(file: Path, header: dict | str | bytes, data: bytes) -> None:
    raw = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def write_index(folder: Path, weight_map: dict[str, str], name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def faults(folder: Path) -> tuple[Fault, ...]:
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(folder)
    for fault in error.value.faults:
        assert fault.kind in str(error.value)
        assert f"{fault.name}: {fault.detail}" in str(error.value)
    return error.value.faults


def summary(folder: Path) -> list[tuple[str, str]]:
    return [(fault.kind, fault.name) for fault in faults(folder)]


@pytest.fixture
def two_shards(tmp_path: Path) -> Path:
    """a and b in the first shard, c in the second, with an index."""
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4.0)}, tmp_path / A)
    save_file({"c": torch.arange(5.0)}, tmp_path / B)
    write_index(tmp_path, {"a": A, "b": A, "c": B})
    return tmp_path


# --- opening


def test_opens_what_the_index_names(two_shards: Path) -> None:
    save_file({"logits": torch.zeros(2)}, two_shards / "expected.safetensors")
    checkpoint = Checkpoint.open(str(two_shards))
    assert sorted(checkpoint.entries) == ["a", "b", "c"]
    assert checkpoint.total_bytes == 60
    assert checkpoint.metadata == {INDEX: {"total_size": 1}, A: {}, B: {}}
    assert checkpoint.unindexed_files == ("expected.safetensors",)
    entry = checkpoint.entries["a"]
    assert (entry.file, entry.dtype, entry.shape, entry.nbytes) == (two_shards / A, torch.float32, (2, 3), 24)


@pytest.mark.parametrize("name", ["quant_model_weights.safetensors.index.json", "other.safetensors.index.json"])
def test_any_single_index_is_taken(two_shards: Path, name: str) -> None:
    (two_shards / INDEX).rename(two_shards / name)
    assert len(Checkpoint.open(two_shards).entries) == 3


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["model.safetensors", "adapter.safetensors"], 1),
        ([A, B, "expected.safetensors"], 2),
        (["quant_model_weights-00001-of-00002.safetensors", "quant_model_weights-00002-of-00002.safetensors"], 2),
        (["quant_model_weights.safetensors"], 1),
    ],
)
def test_without_an_index_the_usual_names_are_taken(tmp_path: Path, names: list[str], taken: int) -> None:
    for name in names:
        save_file({name: torch.zeros(1)}, tmp_path / name, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.entries) == names[:taken]
    assert checkpoint.unindexed_files == tuple(names[taken:])
    assert checkpoint.metadata == {name: {"format": "pt"} for name in names[:taken]}


LITTER = [f"._{A}", f"._{INDEX}", ".DS_Store", "._.DS_Store", ".nfs000012.safetensors", "Thumbs.db"]


@pytest.mark.parametrize("indexed", [True, False])
def test_what_systems_leave_beside_weights_is_no_weight(two_shards: Path, indexed: bool) -> None:
    for name in LITTER:
        (two_shards / name).write_bytes(b"\0\5\26\7 of another system")
    if not indexed:
        (two_shards / INDEX).unlink()
    checkpoint = Checkpoint.open(two_shards)
    assert sorted(checkpoint.entries) == ["a", "b", "c"]
    assert checkpoint.unindexed_files == ()


def test_one_file_written_in_several_ways(two_shards: Path) -> None:
    (two_shards / "more").mkdir()
    (two_shards / B).rename(two_shards / "more" / B)
    write_index(two_shards, {"a": A, "b": f"./{A}", "c": f".//more/./{B}"})
    checkpoint = Checkpoint.open(two_shards)
    assert {name: entry.file for name, entry in checkpoint.entries.items()} == {
        "a": two_shards / A,
        "b": two_shards / A,
        "c": two_shards / "more" / B,
    }
    assert checkpoint.metadata == {INDEX: {"total_size": 1}, A: {}, f"more/{B}": {}}
    assert checkpoint.unindexed_files == ()
    write_index(two_shards, {"a": f"./{A}", "b": A, "c": f"./{A}"})
    assert faults(two_shards) == (Fault("tensor not in its shard", "c", f"the index says {A}, no shard has it"),)


def test_a_numbered_series_must_be_complete(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model-00002-of-00004.safetensors")
    assert faults(tmp_path) == tuple(
        Fault(
            "missing shard",
            f"model-0000{number}-of-00004.safetensors",
            "one of 4 by the names of the others, it is not in the folder",
        )
        for number in (1, 3, 4)
    )


def test_nothing_to_open(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no safetensors checkpoint: .* found no safetensors file"):
        Checkpoint.open(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    with pytest.raises(CheckpointError, match=r"no safetensors checkpoint: .* found only adapter\.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        Checkpoint.open(tmp_path / "adapter.safetensors")


# --- faults of the index


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("{", "not valid JSON (Expecting property name"),
        ("[1]", "holds a JSON list, expected an object"),
        ("[" * 100_000, "not valid JSON (nested too deeply)"),
        ("{}", "weight_map must be an object"),
        ('{"weight_map": {"a": 1}}', "weight_map must be an object"),
        ('{"metadata": 1, "weight_map": {}}', "metadata is 1, expected an object"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "names files outside the folder: ../a.safetensors"),
        ('{"weight_map": {"a": "/a.safetensors"}}', "names files outside the folder: /a.safetensors"),
    ],
)
def test_broken_index(two_shards: Path, text: str, detail: str) -> None:
    (two_shards / INDEX).write_text(text)
    (fault,) = faults(two_shards)
    assert (fault.kind, fault.name) == ("broken index", INDEX)
    assert detail in fault.detail


def test_index_that_cannot_be_read(two_shards: Path) -> None:
    (two_shards / INDEX).unlink()
    (two_shards / INDEX).mkdir()
    assert summary(two_shards) == [("broken index", INDEX)]


def test_two_indexes(two_shards: Path) -> None:
    write_index(two_shards, {}, "z.safetensors.index.json")
    (fault,) = faults(two_shards)
    assert fault.kind == "ambiguous index"
    assert f"2 index files, {INDEX}, z.safetensors.index.json" in fault.detail


def test_index_names_a_tensor_twice(two_shards: Path) -> None:
    (two_shards / INDEX).write_text(f'{{"weight_map": {{"a": "{A}", "b": "{A}", "c": "{A}", "c": "{B}"}}}}')
    assert faults(two_shards) == (Fault("duplicate key", "c", f"twice in {INDEX}"),)


def test_index_and_shards_disagree(two_shards: Path) -> None:
    write_index(two_shards, {"a": A, "c": A, "d": B})
    assert faults(two_shards) == (
        Fault("tensor in another shard", "c", f"the index says {A}, it is in {B}"),
        Fault("tensor not in its shard", "d", f"the index says {B}, no shard has it"),
        Fault("tensor not in the index", "b", f"in {A}"),
    )


def test_missing_shard_is_one_fault(two_shards: Path) -> None:
    (two_shards / A).unlink()
    assert faults(two_shards) == (Fault("missing shard", A, f"{INDEX} puts 2 tensors there, it is not in the folder"),)


# --- faults of a shard

GOOD = {"a": f32([0, 8], [2]), "b": f32([8, 16], [2])}


@pytest.mark.parametrize(
    ("header", "size", "kind", "name", "detail"),
    [
        ("{", 0, "broken shard header", B, "not valid JSON (Expecting property name"),
        (b'{"\xff": 1}', 0, "broken shard header", B, "not valid JSON ('utf-8' codec"),
        ("[]", 0, "broken shard header", B, "holds a JSON list, expected an object"),
        ('{"__metadata__": [1]}', 0, "broken shard header", B, "__metadata__ is [1], expected an object"),
        (GOOD, 12, "truncated or not safetensors", B, "bytes on disk"),
        (GOOD, 20, "unclaimed bytes", B, "at the end, belong to no tensor"),
        ({"a": f32([0, 8], [2]), "b": f32([12, 20], [2])}, 20, "unclaimed bytes", B, "before b, belong to no tensor"),
        ({"a": f32([0, 8], [2]), "b": f32([4, 12], [2])}, 12, "overlapping tensors", "b", f"of {B}, inside the tensor"),
        ({"a": f32([0, 8], [3])}, 8, "broken tensor entry", "a", "[0, 8] hold 8 bytes, F32 [3] takes 12"),
        ({"a": f32([8, 0], [2])}, 8, "broken tensor entry", "a", "[8, 0] hold -8 bytes, F32 [2] takes 8"),
        ({"a": f32([0, 8, 9], [2])}, 8, "broken tensor entry", "a", "data_offsets [0, 8, 9] are not [begin, end]"),
        ({"a": f32([0, 8], [-2])}, 8, "broken tensor entry", "a", "shape [-2] is not a list of sizes"),
        ({"a": f32([0, 8], [True])}, 8, "broken tensor entry", "a", "shape [True] is not a list of sizes"),
        (
            {"a": f32([0, 8], [2]) | {"dtype": "F4"}},
            8,
            "broken tensor entry",
            "a",
            "unknown dtype 'F4'; known: BOOL, U8",
        ),
        ({"a": f32([0, 8], [2]) | {"dtype": []}}, 8, "broken tensor entry", "a", "unknown dtype []"),
        ({"a": {"dtype": "F32"}}, 8, "broken tensor entry", "a", "expected dtype, shape and data_offsets, found {"),
        ({"a": 7}, 8, "broken tensor entry", "a", "expected dtype, shape and data_offsets, found 7"),
    ],
)
def test_faulty_shard(tmp_path: Path, header: dict | str | bytes, size: int, kind: str, name: str, detail: str) -> None:
    save_file({"z": torch.zeros(1)}, tmp_path / A)
    write_shard(tmp_path / B, header, bytes(size))
    (fault,) = faults(tmp_path)
    assert (fault.kind, fault.name) == (kind, name)
    assert detail in fault.detail


@pytest.mark.parametrize(
    ("raw", "detail"),
    [
        (b"", "0 bytes on disk, the header length alone takes 8"),
        (b"1234567", "7 bytes on disk, the header length alone takes 8"),
        (bytes(8), "header length 0, expected 1 to"),
        (b"\xff" * 100, "header length 18446744073709551615, expected 1 to 100000000"),
        (b"\x7fELF\0\0\0\0" + bytes(100), "header length 1179403647, expected 1 to 100000000"),
        ((50).to_bytes(8, "little") + b"{}", "the header ends at byte 58, 10 bytes on disk"),
    ],
)
def test_file_without_a_header(tmp_path: Path, raw: bytes, detail: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    (fault,) = faults(tmp_path)
    assert (fault.kind, fault.name) == ("truncated or not safetensors", "model.safetensors")
    assert detail in fault.detail


def test_a_tensor_may_overlap_several(tmp_path: Path) -> None:
    header = {"a": f32([0, 16], [4]), "b": f32([4, 8], [1]), "c": f32([8, 16], [2])}
    write_shard(tmp_path / "model.safetensors", header, bytes(16))
    assert summary(tmp_path) == [("overlapping tensors", "b"), ("overlapping tensors", "c")]


def test_tensor_twice_in_one_header(tmp_path: Path) -> None:
    spec = json.dumps(f32([0, 4], [1]))
    write_shard(tmp_path / "model.safetensors", f'{{"a": {spec}, "a": {spec}}}', bytes(4))
    assert faults(tmp_path) == (Fault("duplicate key", "a", "twice in model.safetensors"),)


@pytest.mark.parametrize("index", [True, False])
def test_tensor_in_two_shards(two_shards: Path, index: bool) -> None:
    save_file({"c": torch.zeros(5), "a": torch.zeros(1)}, two_shards / B)
    if not index:
        (two_shards / INDEX).unlink()
    assert faults(two_shards) == (Fault("duplicate tensor", "a", f"in {A} and {B}"),)


def test_shard_that_cannot_be_read(two_shards: Path) -> None:
    (two_shards / B).unlink()
    (two_shards / B).mkdir()
    assert faults(two_shards) == (Fault("unreadable shard", B, "Is a directory"),)


def test_all_faults_are_reported_together(two_shards: Path) -> None:
    write_shard(two_shards / A, "{", b"")
    with open(two_shards / B, "ab") as file:
        file.write(b"more")
    write_index(two_shards, {"a": A, "b": A, "c": B, "d": "gone.safetensors"})
    assert summary(two_shards) == [
        ("missing shard", "gone.safetensors"),
        ("broken shard header", A),
        ("unclaimed bytes", B),
    ]


def test_a_long_list_is_cut_in_the_message_only() -> None:
    listed = [Fault("missing tensor", f"t{number}", "gone") for number in range(25)] + [Fault("bad", "x", "y")]
    error = CheckpointError.from_faults("folder", listed)
    lines = str(error).splitlines()
    assert error.faults == tuple(listed)
    assert lines[:3] == ["folder: 26 faults in this checkpoint", "  missing tensor (25):", "    t0: gone"]
    assert lines[21:] == ["    t19: gone", "    ... and 5 more", "  bad (1):", "    x: y"]


# --- reading


def tensors() -> dict[str, Tensor]:
    """Every dtype and rank, also without elements and without dimensions."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (7 * 5 * 3 * dtype.itemsize,), generator=generator)
        made[name] = raw.to(torch.uint8).view(dtype).view(7, 5, 3)
    made["scalar"] = torch.tensor(3.5)
    made["empty"] = torch.empty(0, 4, dtype=torch.bfloat16)
    made["no columns"] = torch.empty(4, 0)
    return made


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal in every bit: NaN patterns too."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.is_contiguous()
    return torch.equal(found.reshape(-1).view(torch.uint8), wanted.reshape(-1).contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("all-dtypes")
    save_file(tensors(), path / "model.safetensors")
    return path


def test_whole_tensors(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    wanted = tensors()
    assert checkpoint.entries.keys() == wanted.keys()
    for name, tensor in wanted.items():
        found = checkpoint.read(name)
        assert same(found, tensor)
        assert found.data_ptr() % 16 == 0


def test_the_safetensors_library_agrees_on_slices(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name in ("BF16", "F32", "U8", "F64"):
            part = file.get_slice(name)
            assert same(checkpoint.read(name, (slice(2, 4),)), part[2:4])
            assert same(checkpoint.read(name, (slice(None), slice(1, 4))), part[:, 1:4])
            assert same(checkpoint.read(name, (slice(1, 7), slice(None), slice(0, 2))), part[1:7, :, 0:2])


BOUNDS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=3)


@given(name=st.sampled_from(sorted(DTYPES)), bounds=BOUNDS, gap=st.sampled_from([0, 3, 4096]))
def test_any_slice(folder: Path, name: str, bounds: list[tuple[int, int]], gap: int) -> None:
    limits = [(min(pair), max(pair)) for pair in bounds]
    source = tuple(slice(min(a, n), min(b, n)) for (a, b), n in zip(limits, (7, 5, 3), strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_ranges, "MAX_GAP", gap)
        assert same(Checkpoint.open(folder).read(name, source), tensors()[name][source])


@pytest.mark.parametrize(
    "source",
    [(slice(0, 8),), (slice(-1, 3),), (slice(4, 2),), (slice(0, 4, 2),), (slice(None),) * 4],
)
def test_a_slice_that_does_not_fit_is_refused(folder: Path, source: tuple[slice, ...]) -> None:
    with pytest.raises(ValueError, match=r"F32: .*shape \[7, 5, 3\]"):
        Checkpoint.open(folder).read("F32", source)


def test_unknown_names_are_all_reported(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(CheckpointError) as error:
        checkpoint.stream([ReadRequest("nope"), ReadRequest("F32"), ReadRequest("neither")])
    assert [fault.name for fault in error.value.faults] == ["nope", "neither"]


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("max_read", [1, 64, 32 << 20])
@pytest.mark.parametrize("in_flight", [0, 1000, 256 << 20])
def test_stream_gives_each_request_its_slice(
    folder: Path, monkeypatch: pytest.MonkeyPatch, threads: int, max_read: int, in_flight: int
) -> None:
    monkeypatch.setattr(byte_ranges, "MAX_READ", max_read)
    monkeypatch.setattr(reader, "MAX_READ", max_read)
    wanted = tensors()
    requests = [ReadRequest(name, key=name) for name in wanted]
    requests += [ReadRequest(name, (slice(1, 5), slice(2, 3)), key=number) for number, name in enumerate(DTYPES)]
    requests += [ReadRequest("F32", (slice(None), slice(0, 1)), key=key) for key in ("once", "twice")]
    for seed in range(3):
        random.Random(seed).shuffle(requests)
        stream = Checkpoint.open(folder).stream(requests, threads=threads, max_bytes_in_flight=in_flight)
        keys = []
        for request, tensor in stream:
            assert same(tensor, wanted[request.name][request.source])
            keys.append(request.key)
        assert sorted(map(str, keys)) == sorted(str(request.key) for request in requests)


def test_stream_over_shards_and_nothing(two_shards: Path) -> None:
    checkpoint = Checkpoint.open(two_shards)
    assert [request.name for request, _ in checkpoint.stream(map(ReadRequest, "cba"))] == ["a", "b", "c"]
    assert list(checkpoint.stream([])) == []


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every read from now on."""
    sizes: list[int] = []
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        count = real(fd, buffers, offset)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return sizes


@pytest.fixture
def experts(tmp_path: Path) -> Checkpoint:
    """Six tensors for each of 8 experts, and one small tensor between every two experts; 9 MB."""
    made = {}
    for expert in range(8):
        for name in ("w1", "w2", "w3"):
            made[f"experts.{expert}.{name}.weight_packed"] = torch.full((512, 768), expert, dtype=torch.uint8)
            made[f"experts.{expert}.{name}.weight_scale"] = torch.full((512, 48), expert, dtype=torch.uint8)
        made[f"experts.{expert}.x"] = torch.zeros(16, dtype=torch.uint8)
    save_file(made, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


def test_one_experts_bytes_are_read_in_one_go_and_no_others(experts: Checkpoint, preads: list[int]) -> None:
    requests = [ReadRequest(name) for name in experts.entries if name.startswith("experts.3.w")]
    reported: list[int] = []
    needed = sum(tensor.nbytes for _, tensor in experts.stream(requests, on_bytes=reported.append))
    assert needed == 3 * 512 * (768 + 48)
    assert sum(preads) == sum(reported) == needed
    assert len(preads) == 1


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_row_slices_read_little_else(experts: Checkpoint, preads: list[int], parts: int) -> None:
    rows = slice(512 // parts, 2 * 512 // parts)
    requests = [ReadRequest(name, (rows,)) for name in experts.entries if "weight_packed" in name]
    needed = sum(tensor.nbytes for _, tensor in experts.stream(requests))
    assert needed == 8 * 3 * 512 * 768 // parts
    assert needed <= sum(preads) <= 1.05 * needed


def test_column_slices_skip_gaps_of_a_page_or_more(tmp_path: Path, preads: list[int]) -> None:
    save_file({"near": torch.zeros(64, 4096 + 100), "far": torch.zeros(64, 4096)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.read("far", (slice(None), slice(0, 1024))).shape == (64, 1024)
    assert preads == [4096] * 64
    preads.clear()
    assert checkpoint.read("near", (slice(None), slice(0, 3596))).shape == (64, 3596)
    assert preads == [63 * 4 * 4196 + 4 * 3596]


def test_many_short_rows_are_read_together(tmp_path: Path, preads: list[int]) -> None:
    matrix = torch.arange(2000 * 8).view(2000, 8)
    save_file({"w": matrix}, tmp_path / "model.safetensors")
    found = Checkpoint.open(tmp_path).read("w", (slice(None), slice(2, 5)))
    assert same(found, matrix[:, 2:5])
    assert len(preads) == 4  # of at most 1,024 buffers, a row and a gap taking one each


def test_parts_of_one_matrix_are_read_together(tmp_path: Path, preads: list[int]) -> None:
    matrix = torch.arange(100 * 8).view(100, 8)
    save_file({"w": matrix}, tmp_path / "model.safetensors")
    requests = [ReadRequest("w", (slice(None), slice(start, start + 4))) for start in (4, 0)]
    parts = [tensor for _, tensor in Checkpoint.open(tmp_path).stream(requests)]
    assert torch.equal(torch.cat(parts, dim=1), matrix)
    assert preads == [matrix.nbytes]


def test_long_tensors_are_read_in_parts(
    experts: Checkpoint, preads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_ranges, "MAX_READ", 100_000)
    assert torch.equal(experts.read("experts.5.w1.weight_packed"), torch.full((512, 768), 5, dtype=torch.uint8))
    assert preads == [100_000, 100_000, 100_000, 512 * 768 - 300_000]


def test_reads_that_stop_early_are_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:7]], offset))
    wanted = tensors()
    for request, tensor in Checkpoint.open(folder).stream(ReadRequest(name, (slice(1, 4),)) for name in DTYPES):
        assert same(tensor, wanted[request.name][1:4])


def test_works_without_posix_fadvise(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    monkeypatch.setattr(byte_ranges, "MAX_GAP", 0)
    found = Checkpoint.open(folder).read("F32", (slice(None), slice(0, 1)))
    assert same(found, tensors()["F32"][:, :1])


def test_what_is_read_ahead_is_bounded(experts: Checkpoint, preads: list[int]) -> None:
    requests = [ReadRequest(name) for name in experts.entries if "packed" in name]
    stream = experts.stream(requests, threads=2, max_bytes_in_flight=3 * 512 * 768)
    threads = reading_threads()
    next(stream)
    wait_until(lambda: len(preads) >= 3)
    assert sum(preads) <= 4 * 512 * 768
    next(stream)
    wait_until(lambda: len(preads) == 4)  # the next one is read while the second is being used
    assert reading_threads() - threads
    stream.close()  # type: ignore[attr-defined]


def reading_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("checkpoint-read")}


def wait_until(condition: Callable[[], bool]) -> None:
    done = threading.Event()
    for _ in range(500):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("waited 5 s in vain")


@pytest.fixture
def open_files(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """File descriptors that the reader holds open."""
    held: set[int] = set()
    opening, closing = os.open, os.close

    def open_file(*args: object) -> int:
        fd = opening(*args)  # type: ignore[arg-type]
        held.add(fd)
        return fd

    def close_file(fd: int) -> None:
        held.discard(fd)
        closing(fd)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "close", close_file)
    return held


def test_leaving_early_stops_threads_and_closes_files(experts: Checkpoint, open_files: set[int]) -> None:
    stream = experts.stream([ReadRequest(name) for name in experts.entries], max_bytes_in_flight=1 << 20)
    next(stream)
    assert open_files
    assert reading_threads()
    del stream
    assert not open_files
    assert not reading_threads()


def test_a_file_cut_after_opening_is_named(experts: Checkpoint, open_files: set[int]) -> None:
    file = experts.folder / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size // 2)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: ends at byte {size // 2}, a tensor reaches to"):
        list(experts.stream([ReadRequest(name) for name in experts.entries]))
    last = max(experts.entries.values(), key=lambda entry: entry.offset)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends at byte"):
        experts.read(last.name)
    assert not open_files
    assert not reading_threads()


def test_a_file_gone_after_opening_is_named(experts: Checkpoint) -> None:
    (experts.folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        list(experts.stream([ReadRequest("experts.0.x")]))

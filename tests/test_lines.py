"""Lines of files as users have them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from kimi_k3_npu.lines import BadLine, Line, LineError, is_json_lines, json_line, read_file, read_lines, read_object


def read(data: bytes) -> list[Line | BadLine]:
    return list(read_lines(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\r\nb", ["a", "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"a\rb\nc", ["a\rb", "c"]),
        ("a\u2028b\x0bc\x85d\n".encode(), ["a\u2028b\x0bc\x85d"]),
        (b"\n\na\n", ["", "", "a"]),
        (b"", []),
    ],
)
def test_lines_end_with_a_line_feed(data: bytes, texts: list[str]) -> None:
    assert read(data) == [Line(i, text) for i, text in enumerate(texts, 1)]


def test_bad_bytes_cost_their_line_alone() -> None:
    assert read(b"a\nx\xe9y\nb\n") == [Line(1, "a"), BadLine(2, "not UTF-8: byte E9 in place 2"), Line(3, "b")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "p.txt").write_bytes("\ufeffab\ncd\n".encode(encoding))
    with pytest.raises(LineError, match=r"p\.txt: is UTF-16, expected UTF-8; save it as UTF-8"):
        read_file(tmp_path / "p.txt")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LineError, match="nowhere: No such file or directory"):
        read_file(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 100_000, "nested too deeply"),
        ("{", "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        ("null", "a JSON NoneType, expected an object"),
    ],
)
def test_no_object(text: str, reason: str) -> None:
    with pytest.raises(LineError, match=reason):
        read_object(text)


def test_half_a_surrogate_pair_survives() -> None:
    record = {"id": "\ud83d", "text": "Größe \U0001f600"}
    line = json_line(record)
    assert line == '{"id": "\\ud83d", "text": "Größe \U0001f600"}\n'.encode()
    assert json.loads(line) == record


def test_names() -> None:
    assert [is_json_lines(Path(name)) for name in ("x.jsonl", "x.JSONL", "x.Json", "x.ndjson", "x.txt", "jsonl")] == [
        True,
        True,
        True,
        True,
        False,
        False,
    ]

"""Files of lines as users have them: every command reads prompts, problems and conversations through this module.

A line ends with a line feed, or a carriage return and one: JSON and text may hold any other line end. A byte-order mark
is dropped. A line that cannot be read is handed on as a `BadLine`, with its number, and the lines after it are read.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_k3_npu.errors import KimiK3Error

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")


class LineError(KimiK3Error):
    """A file, or one of its lines, that is not what was wanted."""


@dataclass(frozen=True)
class Line:
    """Text of a line without its end; `line` is its number, from 1."""

    line: int
    text: str


@dataclass(frozen=True)
class BadLine:
    """A line that cannot be used, and why."""

    line: int
    reason: str


def read_lines(stream: Iterable[bytes]) -> Iterator[Line | BadLine]:
    """The lines of a binary stream, which yields them as Python's do, each as soon as it is there.

    Raises:
        LineError: The stream is UTF-16, whose lines begin and end elsewhere.
    """
    for number, raw in enumerate(stream, 1):
        if number == 1:
            if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise LineError("is UTF-16, expected UTF-8; save it as UTF-8")
            raw = raw.removeprefix(codecs.BOM_UTF8)
        try:
            yield Line(number, raw.removesuffix(b"\n").removesuffix(b"\r").decode())
        except UnicodeDecodeError as error:
            yield BadLine(number, f"not UTF-8: byte {raw[error.start]:02X} in place {error.start + 1}")


def read_file(path: Path) -> list[Line | BadLine]:
    """The lines of a file. Raises LineError when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return list(read_lines(stream))
    except OSError as error:
        raise LineError(f"{path}: {error.strerror or error}") from None
    except LineError as error:
        raise LineError(f"{path}: {error}") from None


def is_json_lines(path: Path) -> bool:
    """Whether the file's name says that each of its lines is JSON."""
    return path.suffix.lower() in JSON_SUFFIXES


def read_object(text: str) -> dict[str, Any]:
    """The JSON object that a line, or a small file, is. Raises LineError for anything else."""
    try:
        raw = json.loads(text)
    except RecursionError:
        raise LineError("not usable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise LineError(f"not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise LineError(f"a JSON {type(raw).__name__}, expected an object")
    return raw


def json_line(record: Any) -> bytes:
    """A record as a line of JSON. Half of a surrogate pair, which is no character, stays as JSON escapes it."""
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"

"""Answers to a file of prompts, one line of JSON each, written as they come: a run that is killed goes on where it was.

The results file is the only record. A line that was cut while it was written is dropped and its prompt asked again; an
answer that is there is never asked for again. The settings of the first run stay beside the results, so that a later
run cannot mix answers of two models into one file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Protocol

from kimi_k3_npu.lines import LineError, json_line, read_object
from kimi_k3_npu.locks import writing_to
from kimi_k3_npu.recipes.requests import BatchError, BatchSettings, Request, read_requests
from kimi_k3_npu.tokenizer import Tokenizer

__all__ = [
    "BatchError",
    "BatchSettings",
    "Generated",
    "OfflineEngine",
    "Request",
    "Results",
    "read_requests",
    "run_batch",
]


@dataclass(frozen=True)
class Generated:
    """New token ids, the one that ended the answer included; `finish_reason` is "stop" or "length"."""

    token_ids: tuple[int, ...]
    finish_reason: str


class OfflineEngine(Protocol):
    """Something that generates for many prompts."""

    def generate(self, requests: Sequence[Request], settings: BatchSettings) -> Iterator[tuple[Request, Generated]]:
        """Each request once, in any order, as soon as it is finished."""
        ...

    def close(self) -> None:
        """Give back what the engine holds."""
        ...


class Results:
    """The results file, open for this run alone; a context manager.

    Raises:
        BatchError: Another run has it open, it holds what is no result, or its settings are others.
    """

    def __init__(self, path: Path, settings: BatchSettings) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open = ExitStack()
        try:
            self._open.enter_context(writing_to(path, "batch", BatchError))
            self._file: BinaryIO = self._open.enter_context(path.open("a+b"))
            self._check_settings(settings)
            self.done = self._read()
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def missing(self, requests: Iterable[Request]) -> list[Request]:
        """The requests that have no answer yet. Raises BatchError if an answer there is to another prompt."""
        left = []
        for request in requests:
            digest = self.done.get(request.line)
            if digest is None:
                left.append(request)
            elif digest != request.digest:
                raise BatchError(
                    f"{self.path} answers another prompt for line {request.line}: the input has changed; use a new file"
                )
        return left

    def add(self, request: Request, answer: dict[str, Any]) -> None:
        """Write one line, whole, to the end."""
        record = {request.id_key: request.id, "line": request.line, "prompt": request.digest, **answer}
        self._file.write(json_line(record))
        self._file.flush()
        self.done[request.line] = request.digest

    def sync(self) -> None:
        """Let what is written outlive the machine."""
        os.fsync(self._file.fileno())

    def _check_settings(self, settings: BatchSettings) -> None:
        file = self.path.with_name(self.path.name + ".settings.json")
        empty = not self._file.seek(0, os.SEEK_END)
        if empty or not file.is_file():
            if not empty:
                raise BatchError(f"{self.path}: has results, but {file.name} is gone; use a new file")
            part = file.with_name(file.name + ".part")
            part.write_text(json.dumps(_plain(settings), indent=2) + "\n", encoding="utf-8")
            part.replace(file)
            return
        before, now = _named(_read_settings(file)), _named(_plain(settings))
        if other := [name for name in {**now, **before} if before.get(name) != now.get(name)]:
            was = ", ".join(f"{name} {_said(before, name)} (now {_said(now, name)})" for name in other)
            raise BatchError(f"{self.path}: its answers were made with {was}; use a new file, or the same settings")

    def _read(self) -> dict[int, str]:
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # the run was killed while it wrote
            self._file.truncate(whole)
        done: dict[int, str] = {}
        for number, line in enumerate(content[:whole].split(b"\n")[:-1], 1):
            try:
                record = read_object(line.decode())
                done[record["line"]] = record["prompt"]
            except (ValueError, KeyError, TypeError):
                raise BatchError(f"{self.path}: line {number} is no result of a batch; use a new file") from None
        return done


def _plain(settings: BatchSettings) -> dict[str, Any]:
    """The settings as they are read back: arguments of engines are YAML, which has values that JSON has not."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(settings), default=str))
    return plain


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        return read_object(file.read_text(encoding="utf-8"))
    except (LineError, UnicodeDecodeError) as error:
        raise BatchError(
            f"{file}: does not hold the settings of a batch: {error}; use a new file for results"
        ) from None


def _named(settings: dict[str, Any]) -> dict[str, Any]:
    """Each setting by its name, arguments of the engine one by one."""
    own = settings.get("engine_args")
    given = own if isinstance(own, dict) else {}
    plain = {name: value for name, value in settings.items() if name != "engine_args"}
    return plain | {f"engine argument {name}": value for name, value in given.items()}


def _said(settings: dict[str, Any], name: str) -> Any:
    return settings.get(name, "not given")


def run_batch(
    engine: OfflineEngine,
    requests: Sequence[Request],
    results: Results,
    settings: BatchSettings,
    tokenizer: Tokenizer | None,
    *,
    window: int,
    advance: Callable[[], None] = lambda: None,
) -> int:
    """Answer what is missing, `window` prompts at a time; returns how many were. `advance` is called after each."""
    left = results.missing(requests)
    for start in range(0, len(left), window):
        for request, generated in engine.generate(left[start : start + window], settings):
            results.add(request, _as_record(request, generated, settings, tokenizer))
            advance()
        results.sync()
    return len(left)


def _as_record(
    request: Request, generated: Generated, settings: BatchSettings, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    record: dict[str, Any] = {}
    if request.chat and tokenizer is not None:
        from kimi_k3_npu.chat.parse import parse_answer

        thinking = request.settings(settings).thinking
        record["message"] = parse_answer(tokenizer.pieces(generated.token_ids), thinking=thinking).as_message()
    elif tokenizer is not None:
        record["text"] = tokenizer.decode(generated.token_ids, skip_special=True)
    return record | {
        "token_ids": list(generated.token_ids),
        "finish_reason": generated.finish_reason,
        "prompt_tokens": len(request.token_ids),
    }

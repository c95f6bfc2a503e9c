"""Answers to conversations: from an engine in this process, or from any server that speaks OpenAI's protocol."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from kimi_k3_npu import envs
from kimi_k3_npu.chat.calls import Message
from kimi_k3_npu.chat.parse import parse_answer, pieces_of_text
from kimi_k3_npu.chat.prompt import chat_prompt
from kimi_k3_npu.chat.render import CLOSE
from kimi_k3_npu.errors import LaunchError
from kimi_k3_npu.recipes.offline import BatchSettings, OfflineEngine, Request
from kimi_k3_npu.tokenizer import Tokenizer

Effort = Literal["low", "high", "max"]

#: A request that fails for a reason that may pass is sent again after each of these seconds.
PAUSES = (1.0, 5.0, 20.0)
#: How long one answer may take.
PATIENCE = 3600.0
_MAY_PASS = (429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Reply:
    """An answer and the reasoning before it. `tokens` were generated for both; `finished`: not cut off."""

    content: str
    reasoning: str
    tokens: int
    finished: bool


class Answers(Protocol):
    """Something that answers conversations; `model` is what it calls its model."""

    model: str

    def ask(self, conversations: Sequence[list[Message]]) -> Iterator[tuple[int, Reply]]:
        """Each conversation's place in the list and its answer, once, in any order, as soon as it is there."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


class EngineAnswers:
    """Answers of an engine in this process, asked for `window` at a time. The prompts are made here."""

    def __init__(
        self,
        engine: OfflineEngine,
        tokenizer: Tokenizer,
        settings: BatchSettings,
        *,
        window: int,
        effort: Effort | None = None,
    ) -> None:
        self.model = settings.model
        self._engine, self._tokenizer, self._settings = engine, tokenizer, settings
        self._window, self._effort = window, effort

    def ask(self, conversations: Sequence[list[Message]]) -> Iterator[tuple[int, Reply]]:
        thinking = self._settings.thinking
        options: dict[str, Any] = {"thinking": thinking, "effort": self._effort}
        requests = [
            Request(i + 1, i, tuple(chat_prompt(self._tokenizer, messages, **options).token_ids), chat=True)
            for i, messages in enumerate(conversations)
        ]
        for start in range(0, len(requests), self._window):
            for request, generated in self._engine.generate(requests[start : start + self._window], self._settings):
                answer = parse_answer(self._tokenizer.pieces(generated.token_ids), thinking=thinking)
                finished = generated.finish_reason == "stop"
                reply = Reply(answer.content, answer.reasoning, len(generated.token_ids), finished)
                yield request.line - 1, reply

    def close(self) -> None:
        self._engine.close()


class ServerAnswers:
    """Answers of a server at `url`, `window` requests at a time.

    What is not asked for is left to the server: it then thinks, and as long as it does by default. `model` None is the
    first that the server names.

    Raises:
        LaunchError: No server answers there, or not as OpenAI's protocol says.
    """

    def __init__(
        self, url: str, model: str | None, settings: BatchSettings, *, window: int, effort: Effort | None = None
    ) -> None:
        base = url.rstrip("/")
        self._url = base if base.endswith("/v1") else f"{base}/v1"
        self._window, self._thinking = window, settings.thinking
        self.model = model or self._first_model()
        self._body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
        }
        if settings.top_p is not None:
            self._body["top_p"] = settings.top_p
        if settings.seed is not None:
            self._body["seed"] = settings.seed
        if effort is not None:
            self._body["reasoning_effort"] = effort
        if not settings.thinking:
            self._body["chat_template_kwargs"] = {"thinking": False}

    def ask(self, conversations: Sequence[list[Message]]) -> Iterator[tuple[int, Reply]]:
        with ThreadPoolExecutor(self._window) as pool:
            asked = {pool.submit(self._one, messages): i for i, messages in enumerate(conversations)}
            try:
                for done in as_completed(asked):
                    yield asked[done], done.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Nothing is held."""

    def _one(self, messages: list[Message]) -> Reply:
        answer = self._fetch("/chat/completions", {**self._body, "messages": messages})
        try:
            choice, usage = answer["choices"][0], answer.get("usage") or {}
            message, reason = choice["message"], choice["finish_reason"]
            content, reasoning = (
                message.get("content") or "",
                message.get("reasoning_content") or message.get("reasoning"),
            )
            tokens = int(usage.get("completion_tokens", 0))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise LaunchError(f"{self._url}/chat/completions: no answer of a chat: {str(answer)[:200]}") from None
        if not reasoning and CLOSE in content:  # a server without K3's reasoning parser hands on its markup
            read = parse_answer(pieces_of_text(content), thinking=self._thinking)
            content, reasoning = read.content, read.reasoning
        return Reply(content, reasoning or "", tokens, reason != "length")

    def _first_model(self) -> str:
        answer = self._fetch("/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise LaunchError(
                f"{self._url}/models: names no model: {str(answer)[:200]}; give its name as --model"
            ) from None

    def _fetch(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers; without a body, of a GET."""
        headers = {"Content-Type": "application/json"}
        if key := envs.server_key():
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        for pause in (*PAUSES, None):
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}: {error.read(500).decode(errors='replace').strip() or error.reason}"
                passes = error.code in _MAY_PASS
            except urllib.error.URLError as error:
                problem, passes = str(error.reason), False
            except (OSError, http.client.HTTPException) as error:
                problem, passes = f"{type(error).__name__}: {error}", True
            except ValueError:
                problem, passes = "the answer is not JSON", False
            if pause is None or not passes:
                break
            time.sleep(pause)
        raise LaunchError(f"{self._url}{path}: {problem}")

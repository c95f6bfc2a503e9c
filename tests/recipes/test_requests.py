"""Prompts as users have them: odd files, OpenAI's batches, and fields that change an answer."""

from __future__ import annotations

import json
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.chat.render import encode, render
from kimi_k3_npu.cli import main
from kimi_k3_npu.engines.offline import Sglang, Transformers, seed_of
from kimi_k3_npu.recipes.offline import BatchError, BatchSettings, Request, Results, read_requests, run_batch
from kimi_k3_npu.tiny import write_tiny
from kimi_k3_npu.tokenizer import Tokenizer, load_tokenizer

SETTINGS = BatchSettings(
    model="m", engine="transformers", max_new_tokens=3, temperature=0.0, top_p=None, seed=None, thinking=True
)
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder, storage="fp32")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return load_tokenizer(tiny)


@pytest.fixture
def read(tokenizer: Tokenizer, tmp_path: Path) -> Callable[..., tuple[list[Request], list[Any]]]:
    def read(*lines: Any, thinking: bool = True) -> tuple[list[Request], list[Any]]:
        file = tmp_path / "p.jsonl"
        file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return read_requests(file, tokenizer, 272, as_json=True, thinking=thinking)

    return read


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(file: Path, *args: str) -> tuple[int, str]:
        out = str(tmp_path / "out.jsonl")
        with pytest.raises(SystemExit) as end:
            main(["batch", "--model", str(tiny), "--prompts", str(file), "--out", out, "--max-new-tokens", "3", *args])
        text = capfd.readouterr()
        assert "Traceback" not in text.err
        return int(end.value.code or 0), text.err

    return run


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


class TestFiles:
    def test_a_byte_order_mark(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
        found, bad = read_requests(tmp_path / "p.jsonl", tokenizer, 272, as_json=True, thinking=True)
        assert ([one.token_ids for one in found], bad) == ([(97,), (98,)], [])
        (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfHi\rno\n")
        (only,), bad = read_requests(tmp_path / "p.txt", tokenizer, 272, as_json=False, thinking=True)
        assert (bytes(only.token_ids), bad) == (b"Hi\rno", [])

    def test_what_is_bad_costs_its_line(self, read: Callable, tokenizer: Tokenizer, tmp_path: Path) -> None:
        found, bad = read({"prompt": "a"}, "[" * 3000, '{"prompt":\r"b"}')
        assert [bytes(one.token_ids) for one in found] == [b"a", b"b"]
        assert [(one.line, one.reason) for one in bad] == [(2, "not usable JSON: it is nested too deeply")]
        (tmp_path / "p.txt").write_bytes(b"a\nb\xe9\nc\n")
        found, bad = read_requests(tmp_path / "p.txt", tokenizer, 272, as_json=False, thinking=True)
        assert [one.line for one in found] == [1, 3]
        assert [(one.line, one.reason) for one in bad] == [(2, "not UTF-8: byte E9 in place 2")]

    def test_ids_do_not_meet_the_numbers_of_lines(self, read: Callable) -> None:
        found, bad = read({"id": 2, "prompt": "a"}, {"prompt": "b"}, {"id": 2, "prompt": "c"})
        assert [(one.line, one.id) for one in found] == [(1, 2), (2, 2)]
        assert [one.reason for one in bad] == ["id 2 is already that of line 1"]

    def test_half_a_character_as_id(self, run: Callable, tmp_path: Path) -> None:
        (tmp_path / "X.JSONL").write_text('{"id": "\\ud83d", "prompt": "a"}\n{"prompt": "b"}\n')
        code, err = run(tmp_path / "X.JSONL")
        assert (code, err.splitlines()[-1]) == (0, f"{tmp_path}/out.jsonl: 2 answers written, 0 were there")
        assert [one["id"] for one in answers(tmp_path)] == ["\ud83d", 2]
        assert [one["prompt_tokens"] for one in answers(tmp_path)] == [1, 1]
        code, err = run(tmp_path / "X.JSONL")
        assert (code, err.splitlines()[-1]) == (0, f"{tmp_path}/out.jsonl: 0 answers written, 2 were there")

    @pytest.mark.parametrize(
        ("text", "message"), [("nonsense\n[]\n", "all 2 lines were skipped"), ("\n", "holds no prompts")]
    )
    def test_nothing_to_answer(self, run: Callable, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "p.jsonl").write_text(text)
        code, err = run(tmp_path / "p.jsonl")
        assert code != 0
        assert err.splitlines()[-1] == f"error: {tmp_path}/p.jsonl: {message}"
        assert not (tmp_path / "out.jsonl").exists()


class TestFields:
    def test_openai_batch(self, run: Callable, tmp_path: Path) -> None:
        request = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions"}
        body = {"model": "gpt", "messages": HI, "max_completion_tokens": 1, "stop": None, "n": 1}
        text = {"custom_id": "r-2", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
        (tmp_path / "p.jsonl").write_text(json.dumps({**request, "body": body}) + "\n" + json.dumps(text) + "\n")
        assert run(tmp_path / "p.jsonl")[0] == 0
        first, second = sorted(answers(tmp_path), key=lambda one: one["line"])
        assert (first["custom_id"], second["custom_id"]) == ("r-1", "r-2")
        assert "id" not in first
        assert first["message"]["role"] == "assistant"
        assert (len(first["token_ids"]), len(second["token_ids"])) == (1, 3)

    def test_what_changes_the_prompt_is_used(self, read: Callable, tokenizer: Tokenizer) -> None:
        chat: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}
        (one, other), bad = read(
            {"messages": HI, **chat, "reasoning_effort": "low"},
            {"messages": HI, "chat_template_kwargs": {"thinking": False}},
        )
        assert bad == []
        assert list(one.token_ids) == encode(tokenizer, render(HI, effort="low", **chat))
        assert list(other.token_ids) == encode(tokenizer, render(HI, thinking=False))
        assert (one.changes, other.changes) == ((), (("thinking", False),))
        assert other.settings(SETTINGS).thinking is False

    def test_what_changes_sampling_is_used(self, read: Callable) -> None:
        fields = {"max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "seed": 7}
        (one, plain), bad = read({"prompt": "a", **fields}, {"prompt": "a"})
        assert bad == []
        changed = replace(SETTINGS, max_new_tokens=9, temperature=0.5, top_p=0.9, seed=7)
        assert one.settings(SETTINGS) == changed
        assert plain.settings(SETTINGS) == SETTINGS
        assert (seed_of(one, SETTINGS), seed_of(plain, SETTINGS)) == (7, None)
        assert one.digest != replace(one, changes=()).digest
        served = object.__new__(Sglang)._sampling(one, SETTINGS)
        assert served == {"max_new_tokens": 9, "temperature": 0.5, "top_p": 0.9, "sampling_seed": 7}

    def test_transformers_takes_each_line_s_own(self, tiny: Path) -> None:
        engine = Transformers(tiny, {})
        short, long = (("max_new_tokens", 1),), (("max_new_tokens", 4),)
        asked = [Request(i, i, (97 + i,), False, "id", changes) for i, changes in enumerate([short, (), long, short])]
        found = {one.line: answer.token_ids for one, answer in engine.generate(asked, SETTINGS)}
        assert [len(found[i]) for i in range(4)] == [1, 3, 4, 1]
        sampled = [replace(one, changes=(("seed", 3), ("temperature", 1.0))) for one in (asked[1], asked[1])]
        one, other = (answer.token_ids for _, answer in engine.generate(sampled, SETTINGS))
        assert one == other != found[1]

    @pytest.mark.parametrize(
        ("fields", "reason"),
        [
            ({"stop": ["\n"]}, "stop is ['\\n'], which is not supported here"),
            ({"n": 2}, "n is 2, which is not supported here"),
            ({"stream": True}, "stream is True, which is not supported here"),
            ({"logit_bias": {"1": 2}}, "logit_bias is {'1': 2}, which is not supported here"),
            ({"max_tokens": 0}, "max_tokens is 0, expected a whole number of at least 1"),
            ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens is 1 and max_completion_tokens is 2"),
            ({"temperature": "hot"}, "temperature is 'hot', expected a number of at least 0"),
            ({"temperature": float("nan")}, "temperature is nan, expected a number of at least 0"),
            ({"top_p": 0}, "top_p is 0, expected a number above 0, at most 1"),
            ({"seed": -1}, "seed is -1, expected a whole number from 0 to 2147483647"),
            ({"tools": "f"}, "tools is not a list of declarations"),
            ({"tool_choice": {"type": "function"}}, "choices: auto, none, required"),
            ({"response_format": {"type": "xml"}}, "types: text, json_object, json_schema"),
            ({"reasoning_effort": "medium"}, "thinking effort is 'medium'; choices: low, high, max"),
            ({"chat_template_kwargs": {"x": 1}}, "it may have thinking and thinking_effort"),
            ({"chat_template_kwargs": {"thinking": "no"}}, "thinking is not one of true and false"),
        ],
    )
    def test_what_cannot_be_followed_is_refused(self, read: Callable, fields: dict[str, Any], reason: str) -> None:
        for line in ({"messages": HI, **fields}, {"custom_id": "a", "body": {"messages": HI, **fields}}):
            found, bad = read(line, {"prompt": "good"})
            assert [one.line for one in found] == [2]
            assert reason in bad[0].reason

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ({"body": {"messages": HI, "max_token": 1}}, "max_token is not a field that is known here"),
            ({"body": {"messages": HI}, "x": 1}, "has x beside a body"),
            ({"body": []}, "body is a JSON list, expected an object"),
            ({"body": {"messages": HI}, "method": "GET"}, "method is 'GET', expected POST"),
            ({"body": {"input": "a"}, "url": "/v1/embeddings"}, "choices: /v1/chat/completions, /v1/completions"),
            ({"body": {"prompt": "a"}, "url": "/v1/chat/completions"}, "has no messages, which /v1/chat"),
            ({"body": {"messages": HI}, "custom_id": 1.5}, "custom_id is 1.5, expected text or a whole number"),
            ({"prompt": "a", "tools": TOOLS}, "tools has no effect without messages"),
        ],
    )
    def test_envelopes(self, read: Callable, line: dict[str, Any], reason: str) -> None:
        found, bad = read(line)
        assert not found
        assert reason in bad[0].reason

    def test_keys_of_the_user(self, read: Callable) -> None:
        (one,), bad = read({"prompt": "a", "answer": 3, "stop": None, "n": 1, "model": "x"})
        assert (one.changes, bad) == ((), [])


class TestSettings:
    @pytest.mark.parametrize(("dtype", "found"), [("bfloat16", "bfloat16"), (None, "not given")])
    def test_arguments_of_the_engine(self, tmp_path: Path, dtype: str | None, found: str) -> None:
        before = replace(SETTINGS, engine_args={} if dtype is None else {"dtype": dtype})
        engine: Any = types.SimpleNamespace(generate=lambda requests, _: iter(()))
        with Results(tmp_path / "out", before) as results:
            run_batch(engine, [], results, before, None, window=1)
            results.done[1] = ""
            (tmp_path / "out").write_text('{"line": 1, "prompt": "x"}\n')
        now = replace(SETTINGS, engine_args={"dtype": "float32"})
        with pytest.raises(BatchError, match=rf"made with engine argument dtype {found} \(now float32\)"):
            Results(tmp_path / "out", now)
        with Results(tmp_path / "out", before) as results:
            assert results.done == {1: "x"}

    def test_on_the_command_line(self, run: Callable, tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
        assert run(tmp_path / "p.jsonl", "--engine-arg", "dtype=float32")[0] == 0
        code, err = run(tmp_path / "p.jsonl", "--engine-arg", "dtype=bfloat16")
        assert code != 0
        assert "engine argument dtype float32 (now bfloat16); use a new file, or the same settings" in err

    @pytest.mark.parametrize("content", [b"", b"[]", b"null", b'{"model": ', b"\xff", b"[" * 5000])
    def test_a_settings_file_that_is_none(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "out").write_text('{"line": 1, "prompt": "x"}\n')
        (tmp_path / "out.settings.json").write_bytes(content)
        with pytest.raises(BatchError, match=r"out\.settings\.json: does not hold the settings of a batch: "):
            Results(tmp_path / "out", SETTINGS)

"""`eval gsm` and `eval compare`, with this package's engine and with a server that answers by a table."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.evaluation import answers
from kimi_k3_npu.tiny import write_tiny

PROBLEMS = [
    {"question": "What is 1 plus 1?", "answer": "1+1=2.\n#### 2"},
    {"question": "What is 6 times 7?", "answer": "6*7=42.\n#### 42"},
    {"question": "What is 9 minus 4?", "answer": "9-4=5.\n#### 5"},
]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*args: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["eval", *map(str, args)])
        text = capfd.readouterr()
        assert "Traceback" not in text.out + text.err
        return int(end.value.code or 0), text.out, text.err

    return run


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(problem) + "\n" for problem in PROBLEMS))
    return file


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder, storage="fp32")
    return folder


class Server(ThreadingHTTPServer):
    """OpenAI's protocol. `answer` makes the message of a request's body; `failures` are sent first."""

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.failures: list[int] = []
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "kimi-k3"}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.failures:
            self._send(self.server.failures.pop(), {"error": "the pool is empty"})
            return
        assert self.path == "/v1/chat/completions"
        self.server.asked.append(body)
        self.server.keys.append(self.headers["Authorization"])
        self._send(200, self.server.answer(body))

    def _send(self, status: int, answer: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def by_table(body: dict[str, Any]) -> Any:
    """The second answer is wrong, the third cut off while it thinks."""
    message, reason = {
        PROBLEMS[0]["question"]: ({"reasoning_content": "1+1=2.", "content": "It is 2."}, "stop"),
        PROBLEMS[1]["question"]: ({"content": "41"}, "stop"),
        PROBLEMS[2]["question"]: ({"reasoning": "9-4, well", "content": None}, "length"),
    }[body["messages"][-1]["content"]]
    return {"choices": [{"message": message, "finish_reason": reason}], "usage": {"completion_tokens": 20}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(answers, "PAUSES", (0.01, 0.01))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with Server(by_table) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_server_scored(run: Callable, data: Path, server: Server, tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    code, text, _ = run("gsm", "--engine", server.url, "--data", data, "--show", "2", "--out", out)
    assert code == 0
    shown, table = text[: text.index("accuracy")], text[text.index("accuracy") :].splitlines()
    assert shown == ("What is 1 plus 1?\n  1+1=2.\n  It is 2.  right\n\nWhat is 6 times 7?\n  41  wrong, it is 42\n\n")
    assert table[0] == "accuracy  33.3%, 95 % interval 6.1% to 79.2%"
    assert table[1:4] == ["right     1 of 3", "invalid   33.3%: 1 without a number", "cut off   1"]
    assert table[5].startswith("output    60 tokens, ")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["question"] for record in records] == [problem["question"] for problem in PROBLEMS]
    assert [record["number"] for record in records] == ["2", "41", None]
    assert [record["finished"] for record in records] == [True, True, False]
    (body,) = [body for body in server.asked if body["messages"][-1]["content"] == PROBLEMS[0]["question"]]
    assert body == {
        "model": "kimi-k3",
        "max_tokens": 1024,
        "temperature": 0.0,
        "messages": [{"role": "user", "content": PROBLEMS[0]["question"]}],
    }


def test_the_score_as_json(run: Callable, data: Path, server: Server) -> None:
    code, text, _ = run("gsm", "--engine", f"{server.url}/v1/", "--data", data, "--limit", "2", "--json")
    result = json.loads(text)
    assert code == 0
    assert (result["engine"], result["model"]) == (f"{server.url}/v1/", "kimi-k3")
    assert result["accuracy"] == 0.5
    assert (result["problems"], result["right"], result["invalid"], result["tokens"]) == (2, 1, 0, 40)
    assert result["interval"] == pytest.approx([0.0945, 0.9055], abs=1e-4)  # Wilson's (1 + 1.92 -+ 1.66) / (2 + 3.84)
    assert result["seconds"] > 0


def test_options_reach_the_server(run: Callable, data: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    options = ("--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--max-new-tokens", "99", "--model", "m")
    run("gsm", "--engine", server.url, "--data", data, *options, "--effort", "low", "--system", "Be brief.")
    body = server.asked[0]
    assert {name: body[name] for name in body if name != "messages"} == {
        "model": "m", "max_tokens": 99, "temperature": 0.5, "top_p": 0.9, "seed": 7, "reasoning_effort": "low",
    }  # fmt: skip
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert set(server.keys) == {"Bearer secret"}
    run("gsm", "--engine", server.url, "--data", data, "--no-thinking", "--limit", "1")
    assert server.asked[-1]["chat_template_kwargs"] == {"thinking": False}


def test_shown_problems_are_not_asked(run: Callable, data: Path, server: Server, tmp_path: Path) -> None:
    code, text, _ = run("gsm", "--engine", server.url, "--data", data, "--shots", "1", "--json")
    assert code == 0
    assert json.loads(text)["problems"] == 2
    messages = server.asked[0]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[1] == {"role": "assistant", "reasoning_content": "1+1=2.", "content": "2"}
    other = tmp_path / "train.jsonl"
    other.write_text(json.dumps({"question": "What is 2 plus 2?", "answer": "#### 4"}))
    _, text, _ = run("gsm", "--engine", server.url, "--data", data, "--shots", "1", "--shots-from", other, "--json")
    assert json.loads(text)["problems"] == 3


def test_markup_that_a_server_hands_on_is_read(run: Callable, data: Path, server: Server) -> None:
    markup = "1+1=2.<|close|>think<|sep|><|open|>response<|sep|>2<|close|>response<|sep|><|close|>message<|sep|>"
    server.answer = lambda _: {"choices": [{"message": {"content": markup}, "finish_reason": "stop"}]}
    _, text, _ = run("gsm", "--engine", server.url, "--data", data, "--limit", "1", "--show", "1")
    assert text.startswith("What is 1 plus 1?\n  1+1=2.\n  2  right\n")


def test_a_failure_that_passes_is_tried_again(run: Callable, data: Path, server: Server) -> None:
    server.failures = [503, 429]
    code, _, _ = run("gsm", "--engine", server.url, "--data", data, "--limit", "1")
    assert code == 0


@pytest.mark.parametrize("failures", [[400], [503, 503, 503]])
def test_a_server_that_fails(run: Callable, data: Path, server: Server, failures: list[int]) -> None:
    server.failures = list(failures)
    code, text, error = run("gsm", "--engine", server.url, "--data", data, "--limit", "1")
    assert (code, text) == (1, "")
    assert f"{server.url}/v1/chat/completions: HTTP {failures[0]}: " in error
    assert "the pool is empty" in error
    assert server.failures == []


def test_answers_that_are_none(run: Callable, data: Path, server: Server) -> None:
    server.answer = lambda _: {"choices": []}
    code, _, error = run("gsm", "--engine", server.url, "--data", data)
    assert code == 1
    assert "no answer of a chat: {'choices': []}" in error


def test_no_server(run: Callable, data: Path) -> None:
    code, _, error = run("gsm", "--engine", "http://127.0.0.1:9", "--data", data)
    assert code == 1
    assert "http://127.0.0.1:9/v1/models: " in error
    assert "refused" in error


def test_this_packages_engine(run: Callable, data: Path, tiny: Path, tmp_path: Path) -> None:
    """Random weights: cut off, and always the same, however many are asked at a time."""
    common = ("gsm", "--model", tiny, "--data", data, "--max-new-tokens", "6")
    code, text, _ = run(*common, "--json", "--out", tmp_path / "a.jsonl")
    result = json.loads(text)
    assert code == 0
    assert (result["problems"], result["right"], result["cut_off"], result["tokens"]) == (3, 0, 3, 18)
    run(*common, "--batch-size", "2", "--engine-arg", "dtype=float32", "--out", tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()


def test_compare(run: Callable, data: Path, server: Server, tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    run("gsm", "--engine", server.url, "--data", data, "--out", a)
    code, text, _ = run("compare", a, a, "--at-most", "0")
    assert (code, text) == (0, "0 of 3 answers differ (0 %)\n")
    b.write_text(
        a.read_text().replace('"answer": "41"', '"answer": "42"').replace('"right": false', '"right": true', 1)
    )
    code, text, _ = run("compare", a, b)
    assert code == 0
    assert text.splitlines() == [
        "What is 6 times 7?",
        f"  {a}: 41  wrong, it is 42",
        f"  {b}: 42  right",
        "1 of 3 answers differ (33 %)",
    ]
    assert run("compare", a, b, "--at-most", "1")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--engine", "sglan"), 2, "'sglan' is neither transformers"),
        ((), 2, "--model"),
        (("--engine", "http://127.0.0.1:9", "--engine-arg", "tp_size=2"), 2, "a running server takes none"),
        (("--model", "{tiny}", "--engine-arg", "tp_size"), 2, "'tp_size' is not KEY=VALUE"),
        (("--model", "{tiny}", "--shots", "3"), 1, "none is left to ask"),
        (("--model", "{tiny}", "--shots", "4"), 1, "has 3 problems, and --shots wants 4"),
        (("--model", "{tiny}", "--shots-from", "x"), 2, "has no effect without --shots"),
        (("--model", "{tiny}", "--effort", "low", "--no-thinking"), 2, "has no effect with --no-thinking"),
        (("--model", "{tiny}", "--show", "1", "--json"), 2, "is no JSON"),
        (("--model", "{tiny}", "--top-p", "0.5"), 2, "--temperature"),
        (("--model", "{tiny}", "--data", "{tiny}/none"), 1, "No such file"),
        (("--model", "{tiny}", "--data", "{tiny}/config.json"), 1, "no problem in GSM8K's format"),
        (("--model", "{tiny}/none"), 1, "no such folder"),
        (("--model", "{tiny}", "--out", "{tiny}"), 2, "is a folder; give a file to write"),
    ],
)
def test_mistakes(run: Callable, data: Path, tiny: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    given = [argument.format(tiny=tiny) for argument in arguments]
    found, text, error = run("gsm", *(() if "--data" in given else ("--data", data)), *given)
    assert (found, text) == (code, "")
    assert message in " ".join(error.replace("│", " ").split())

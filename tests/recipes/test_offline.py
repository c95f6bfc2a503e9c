"""`batch`: every prompt one answer, whatever happens in between."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kimi_k3_npu.cli import main
from kimi_k3_npu.engines.offline import Sglang, Transformers, Vllm, open_engine
from kimi_k3_npu.recipes.offline import (
    BatchError,
    BatchSettings,
    Generated,
    Request,
    Results,
    read_requests,
    run_batch,
)
from kimi_k3_npu.resources import resource_path
from kimi_k3_npu.tiny import write_tiny
from kimi_k3_npu.tokenizer import Tokenizer, load_tokenizer

SETTINGS = BatchSettings(
    model="m", engine="transformers", max_new_tokens=6, temperature=0.0, top_p=None, seed=None, thinking=True
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    write_tiny(folder, storage="fp32")
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> Tokenizer:
    return load_tokenizer(tiny)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    def run(*args: str, prompts: str = "p.jsonl", out: str = "out.jsonl") -> tuple[int, str]:
        files = ("--prompts", str(tmp_path / prompts), "--out", str(tmp_path / out))
        with pytest.raises(SystemExit) as end:
            main(["batch", "--model", str(tiny), *files, "--max-new-tokens", "6", *args])
        text = capfd.readouterr()
        assert "Traceback" not in text.out + text.err
        assert not text.out
        return int(end.value.code or 0), text.err

    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write(file: Path, *objects: Any) -> None:
    file.write_text("".join(json.dumps(one) + "\n" for one in objects))


class Counter:
    """An engine that answers with the prompt turned round, and counts."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.asked: list[int] = []
        self.fail_after = fail_after

    def generate(self, requests: Sequence[Request], settings: BatchSettings) -> Iterator[tuple[Request, Generated]]:
        for request in requests:
            if self.fail_after is not None and len(self.asked) == self.fail_after:
                raise KeyboardInterrupt
            self.asked.append(request.line)
            yield request, Generated(request.token_ids[::-1], "stop")

    def close(self) -> None:
        """Nothing is held."""


def requests(count: int) -> list[Request]:
    return [Request(line, line, (line % 7 + 1, line), chat=False) for line in range(1, count + 1)]


class TestReading:
    def test_text(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        (tmp_path / "p.txt").write_text("hello\r\n\nworld\n")
        found, bad = read_requests(tmp_path / "p.txt", tokenizer, 272, as_json=False, thinking=True)
        assert [(one.line, bytes(one.token_ids).decode()) for one in found] == [(1, "hello"), (3, "world")]
        assert not bad

    def test_json(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "hi"}]
        write(
            tmp_path / "p.jsonl",
            {"prompt": "a\u2028b", "answer": 3},
            {"id": "x", "token_ids": [1, 2]},
            {"messages": chat},
        )
        found, bad = read_requests(tmp_path / "p.jsonl", tokenizer, 272, as_json=True, thinking=False)
        assert [one.id for one in found] == [1, "x", 3]
        assert bytes(found[0].token_ids).decode() == "a\u2028b"
        assert [one.chat for one in found] == [False, False, True]
        assert not bad

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            ("{", "not valid JSON"),
            ("[1]", "a JSON list, expected an object"),
            ("{}", "has no prompt, expected one of prompt, token_ids, messages"),
            ('{"prompt": "a", "token_ids": [1]}', "has prompt and token_ids"),
            ('{"prompt": 1}', "prompt is 1, expected text"),
            ('{"prompt": ""}', "is empty"),
            ('{"token_ids": [272]}', "holds token id 272, outside the vocabulary 0..271"),
            ('{"token_ids": [true]}', "token_ids is not a list of whole numbers"),
            ('{"id": 1.5, "prompt": "a"}', "id is 1.5, expected text or a whole number"),
            ('{"messages": []}', "messages is not a list of messages"),
            ('{"messages": [{"role": "user"}]}', "content"),
        ],
    )
    def test_bad_lines(self, tokenizer: Tokenizer, tmp_path: Path, line: str, reason: str) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "good"}\n' + line + '\n{"prompt": "good too"}\n')
        found, bad = read_requests(tmp_path / "p.jsonl", tokenizer, 272, as_json=True, thinking=True)
        assert [one.line for one in found] == [1, 3]
        assert [one.line for one in bad] == [2]
        assert reason in bad[0].reason

    def test_ids_are_told_apart(self, tokenizer: Tokenizer, tmp_path: Path) -> None:
        write(tmp_path / "p.jsonl", {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
        _, bad = read_requests(tmp_path / "p.jsonl", tokenizer, 272, as_json=True, thinking=True)
        assert bad[0].reason == "id 'a' is already that of line 1"

    def test_without_a_tokenizer(self, tmp_path: Path) -> None:
        write(tmp_path / "p.jsonl", {"prompt": "x"}, {"token_ids": [1]})
        found, bad = read_requests(tmp_path / "p.jsonl", None, 272, as_json=True, thinking=True)
        assert len(found) == 1
        assert bad[0].reason == "is text, and the folder has no tokenizer; give token_ids"


class TestResults:
    def test_goes_on(self, tmp_path: Path) -> None:
        asked = requests(20)
        with pytest.raises(KeyboardInterrupt), Results(tmp_path / "out", SETTINGS) as results:
            run_batch(Counter(fail_after=7), asked, results, SETTINGS, None, window=4)
        engine = Counter()
        with Results(tmp_path / "out", SETTINGS) as results:
            assert run_batch(engine, asked, results, SETTINGS, None, window=4) == 13
        assert engine.asked == list(range(8, 21))
        assert [one["line"] for one in lines(tmp_path / "out")] == list(range(1, 21))

    @pytest.mark.parametrize("cut", [1, 5, 40])
    def test_a_cut_line_is_asked_again(self, tmp_path: Path, cut: int) -> None:
        with Results(tmp_path / "out", SETTINGS) as results:
            run_batch(Counter(), requests(3), results, SETTINGS, None, window=4)
        whole = (tmp_path / "out").read_bytes()
        (tmp_path / "out").write_bytes(whole[:-cut])
        engine = Counter()
        with Results(tmp_path / "out", SETTINGS) as results:
            run_batch(engine, requests(3), results, SETTINGS, None, window=4)
        assert engine.asked == [3]
        assert (tmp_path / "out").read_bytes() == whole

    def test_other_settings(self, tmp_path: Path) -> None:
        from dataclasses import replace

        other = replace(SETTINGS, max_new_tokens=9)
        with Results(tmp_path / "out", other):
            """Nothing is written: the settings are not binding yet."""
        with Results(tmp_path / "out", SETTINGS) as results:
            run_batch(Counter(), requests(1), results, SETTINGS, None, window=4)
        with pytest.raises(BatchError, match=r"made with max_new_tokens 6 \(now 9\); use a new file"):
            Results(tmp_path / "out", other)
        (tmp_path / "out.settings.json").unlink()
        with pytest.raises(BatchError, match=r"has results, but out\.settings\.json is gone"):
            Results(tmp_path / "out", SETTINGS)

    def test_other_input(self, tmp_path: Path) -> None:
        with Results(tmp_path / "out", SETTINGS) as results:
            run_batch(Counter(), requests(2), results, SETTINGS, None, window=4)
        changed = [requests(2)[0], Request(2, 2, (9, 9), chat=False)]
        with (
            Results(tmp_path / "out", SETTINGS) as results,
            pytest.raises(BatchError, match="another prompt for line 2"),
        ):
            results.missing(changed)

    def test_one_writer(self, tmp_path: Path) -> None:
        with (
            Results(tmp_path / "out", SETTINGS),
            pytest.raises(BatchError, match="another batch is writing to it"),
        ):
            Results(tmp_path / "out", SETTINGS)

    def test_no_results_of_ours(self, tmp_path: Path) -> None:
        with Results(tmp_path / "out", SETTINGS) as results:
            run_batch(Counter(), requests(1), results, SETTINGS, None, window=4)
        with (tmp_path / "out").open("a") as file:
            file.write("something else\n")
        with pytest.raises(BatchError, match="line 2 is no result of a batch"):
            Results(tmp_path / "out", SETTINGS)


class TestCommand:
    def test_answers(self, run: Callable[..., tuple[int, str]], tiny: Path, tmp_path: Path) -> None:
        chat = [{"role": "user", "content": "hi"}]
        write(tmp_path / "p.jsonl", {"prompt": "hello"}, {"token_ids": [1, 2, 3]}, {"id": "c", "messages": chat})
        code, err = run()
        assert code == 0
        assert err == f"{tmp_path}/out.jsonl: 3 answers written, 0 were there\n"
        first, second, third = lines(tmp_path / "out.jsonl")
        assert list(first) == ["id", "line", "prompt", "text", "token_ids", "finish_reason", "prompt_tokens"]
        assert bytes(first["token_ids"]).decode() == first["text"]
        assert third["message"]["role"] == "assistant"
        assert third["id"] == "c"
        assert second["prompt_tokens"] == 3

    def test_bad_lines_are_reported_and_skipped(self, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
        (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\nnonsense\n')
        code, err = run()
        assert code == 0
        assert f"{tmp_path}/p.jsonl:2: skipped: not valid JSON" in err
        assert err.endswith("1 answers written, 0 were there, 1 lines skipped\n")

    def test_sampling_does_not_depend_on_the_batch(self, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
        write(tmp_path / "p.jsonl", *({"prompt": f"{i} and"} for i in range(6)))
        sampled = ("--temperature", "1", "--seed", "3")
        run(*sampled, out="whole")
        write(tmp_path / "half.jsonl", *({"prompt": f"{i} and"} for i in range(3)))
        run(*sampled, prompts="half.jsonl", out="parts")
        run(*sampled, "--batch-size", "2", out="parts")
        answers = {name: [one["token_ids"] for one in lines(tmp_path / name)] for name in ("whole", "parts")}
        assert answers["whole"] == answers["parts"]
        assert len(set(map(tuple, answers["whole"]))) == 6

    def test_script(self, tiny: Path, tmp_path: Path) -> None:
        write(tmp_path / "p.jsonl", {"prompt": "a"})
        script = resource_path("recipes", "offline_generate.py")
        files = ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(tmp_path / "out")]
        subprocess.run([sys.executable, str(script), "--model", str(tiny), *files], check=True)
        assert len(lines(tmp_path / "out")) == 1

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (("--engine", "vllm"), "vllm is not installed here; install it, or use --engine transformers"),
            (("--prompts", "nowhere"), "nowhere: "),
        ],
    )
    def test_mistakes(
        self, run: Callable[..., tuple[int, str]], tmp_path: Path, args: tuple[str, ...], message: str
    ) -> None:
        write(tmp_path / "p.jsonl", {"prompt": "a"})
        code, err = run(*args)
        assert code == 1
        assert message in err


@pytest.mark.slow
def test_killed_twice(tiny: Path, tmp_path: Path) -> None:
    """200 prompts, two kills in the middle, and 200 answers that are those of each prompt alone."""
    prompts = [f"prompt {i}: " + "x" * (i % 23) for i in range(200)]
    write(tmp_path / "p.jsonl", *({"id": f"q{i}", "prompt": prompt} for i, prompt in enumerate(prompts)))
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "kimi_k3_npu", "batch", "--model", str(tiny), "--max-new-tokens", "6"]
    command += ["--prompts", str(tmp_path / "p.jsonl"), "--out", str(out), "--batch-size", "4"]
    for wanted in (40, 110):
        process = subprocess.Popen(command)
        while not out.exists() or out.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None, "it finished before it could be killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wanted <= out.read_bytes().count(b"\n") < 200
    subprocess.run(command, check=True)

    found = lines(out)
    assert len(found) == 200
    assert {one["id"] for one in found} == {f"q{i}" for i in range(200)}
    engine = Transformers(tiny, {})
    by_id = {one["id"]: one["token_ids"] for one in found}
    for i, prompt in enumerate(prompts):
        ((_, alone),) = engine.generate([Request(i + 1, i, tuple(prompt.encode()), chat=False)], SETTINGS)
        assert by_id[f"q{i}"] == list(alone.token_ids)


class TestTransformers:
    def test_stops(self, tiny: Path) -> None:
        """A row that ends early is cut at its end token; what fills up the batch is no answer."""
        engine = Transformers(tiny, {"dtype": "float32"})
        asked = [Request(1, 1, tuple(b"hello"), chat=False), Request(2, 2, tuple(b"what"), chat=False)]
        whole = dict((one.line, answer) for one, answer in engine.generate(asked, SETTINGS))
        assert all(answer.finish_reason == "length" for answer in whole.values())
        stop = whole[1].token_ids[2]
        engine._network.generation_config.eos_token_id = [stop]
        cut = dict((one.line, answer) for one, answer in engine.generate(asked, SETTINGS))
        first = whole[1].token_ids.index(stop)
        assert cut[1] == Generated(whole[1].token_ids[: first + 1], "stop")
        engine.close()

    def test_uneven_prompts(self, tiny: Path) -> None:
        engine = open_engine("transformers", tiny, {})
        asked = [Request(i, i, tuple(range(1, 2 + 5 * i)), chat=False) for i in range(4)]
        together = [answer for _, answer in engine.generate(asked, SETTINGS)]
        alone = [next(engine.generate([one], SETTINGS))[1] for one in asked]
        assert together == alone


class TestServingEngines:
    """What is asked of SGLang and vLLM, against stand-ins with their interfaces."""

    def test_sglang(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}

        class Engine:
            def __init__(self, **options: Any) -> None:
                asked["options"] = options

            def generate(self, *, input_ids: list[list[int]], sampling_params: list[dict]) -> list[dict[str, Any]]:
                asked["params"] = sampling_params
                return [
                    {"output_ids": ids[::-1], "meta_info": {"finish_reason": {"type": "length", "length": 2}}}
                    for ids in input_ids
                ]

            def shutdown(self) -> None:
                asked["closed"] = True

        monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=Engine))
        from dataclasses import replace

        engine = Sglang(Path("/m"), {"tp_size": 4})
        sampled = replace(SETTINGS, temperature=0.5, top_p=0.9, seed=1)
        found = list(engine.generate(requests(2), sampled))
        assert asked["options"] == {"model_path": "/m", "model_impl": "kimi_k3_npu", "tp_size": 4}
        assert [answer.token_ids for _, answer in found] == [(1, 2), (2, 3)]
        seeds = [params.pop("sampling_seed") for params in asked["params"]]
        assert len(set(seeds)) == 2
        assert asked["params"] == [{"max_new_tokens": 6, "temperature": 0.5, "top_p": 0.9}] * 2
        engine.close()
        assert asked["closed"]

    def test_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: dict[str, Any] = {}

        class Params:
            def __init__(self, **params: Any) -> None:
                self.params = params

        class LLM:
            def __init__(self, **options: Any) -> None:
                asked["options"] = options

            def generate(self, prompts: list[dict], params: list[Params], *, use_tqdm: bool) -> list[Any]:
                asked["params"] = [one.params for one in params]
                return [
                    types.SimpleNamespace(
                        outputs=[types.SimpleNamespace(token_ids=one["prompt_token_ids"][::-1], finish_reason="stop")]
                    )
                    for one in prompts
                ]

        monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=Params))
        engine = Vllm(Path("/m"), {"tensor_parallel_size": 8})
        found = list(engine.generate(requests(2), SETTINGS))
        assert asked["options"] == {"model": "/m", "tensor_parallel_size": 8}
        assert [answer for _, answer in found] == [Generated((1, 2), "stop"), Generated((2, 3), "stop")]
        assert asked["params"] == [{"max_tokens": 6, "temperature": 0.0, "seed": None}] * 2

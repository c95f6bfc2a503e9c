"""The HTTP server: the oracle's tokens, load, other weights, and a clean end."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from tests.engines.sglang.harness import ARGUMENTS, GREEDY, ORACLES, Server, as_options, greedy, servable
from tests.patience import PATIENCE

ARGUMENTS_HERE = {
    **ARGUMENTS,
    "skip_tokenizer_init": False,
    "max_total_tokens": 16384,
    "enable_metrics": True,
    "skip_server_warmup": True,
}

#: Two logits closer than this may come out in either order: batches are summed in another order than single requests.
TIE = 1e-3


@pytest.fixture(scope="module", params=[{}, {"chunked_prefill_size": 32}], ids=["whole", "chunked"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    model = servable(ORACLES / "k3", folder / "k3")
    server = Server(folder, *as_options({"model_path": model, **ARGUMENTS_HERE, **request.param}))
    try:
        server.wait()
        yield server
    finally:
        server.close()


def test_the_log_names_our_class(server: Server) -> None:
    assert "type=KimiK3ForSGLang" in server.log


def test_each_prompt_alone(server: Server, prompts: Callable) -> None:
    for prompt, expected in zip(*prompts("k3"), strict=True):
        reply = server.post("/v1/completions", model="k3", prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)
        words = reply["choices"][0]["text"].split()
        assert [int(word[1:]) for word in words] == expected
        assert reply["usage"]["prompt_tokens"] == len(prompt)


def test_prompts_at_the_same_time(server: Server, prompts: Callable) -> None:
    asked, expected = prompts("k3")
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(server.greedy, 4 * asked))
    assert [reply["output_ids"] for reply in replies] == 4 * expected


def test_a_continued_prompt_comes_from_the_cache_of_states(server: Server, prompts: Callable) -> None:
    for prompt, expected in zip(*prompts("k3"), strict=True):
        server.greedy(prompt)
        reply = server.greedy(prompt + expected[:4], max_new_tokens=4)
        assert reply["output_ids"] == expected[4:]
        assert reply["meta_info"]["cached_tokens"] >= len(prompt)


def test_a_crowd_gets_what_each_gets_alone(server: Server) -> None:
    """200 requests, 16 at a time, every eighth abandoned by its client: nothing leaks from one to another."""
    wanted = crowd(200)
    alone = [server.greedy(*request, return_logprob=True, top_logprobs_num=2) for request in wanted]
    free = free_states(server)

    def one(i: int) -> list[int] | None:
        prompt, count = wanted[i]
        if i % 8 == 3:
            abandon(server, prompt)
            return None
        return server.greedy(prompt, count)["output_ids"]

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(one, range(len(wanted))))
    finished = [(tokens, alone[i]) for i, tokens in enumerate(together) if tokens is not None]
    differing = [pair for pair in finished if pair[0] != pair[1]["output_ids"]]
    assert [pair for pair in differing if not first_difference_is_a_tie(*pair)] == []
    assert len(differing) <= 3
    assert free_states(server) == free
    assert server.healthy()


def crowd(count: int) -> list[tuple[list[int], int]]:
    """Prompts of 1 to 180 tokens, a third of them continuing an earlier one, and how many tokens each wants."""
    draw = random.Random(0)
    prompts: list[list[int]] = []
    for _ in range(count):
        start = draw.choice(prompts)[: draw.randrange(1, 120)] if prompts and draw.random() < 0.3 else []
        prompts.append(start + [draw.randrange(128) for _ in range(draw.choice((1, 3, 20, 60)))])
    return [(prompt, draw.choice((1, 4, 8, 16))) for prompt in prompts]


def abandon(server: Server, prompt: list[int]) -> None:
    """Ask for a long answer, and hang up after its first tokens."""
    body = {"input_ids": prompt, "stream": True, "sampling_params": {**GREEDY, "max_new_tokens": 300}}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=PATIENCE) as reply:
        for _, line in zip(range(3), reply.iter_lines(), strict=False):
            assert line is not None


def first_difference_is_a_tie(tokens: list[int], alone: dict[str, Any]) -> bool:
    """Whether the two best logits were as good as equal where the answers part."""
    i = next(i for i, pair in enumerate(zip(tokens, alone["output_ids"], strict=True)) if pair[0] != pair[1])
    (first, *_), (second, *_) = alone["meta_info"]["output_top_logprobs"][i]
    return first - second < TIE


def free_states(server: Server) -> float:
    """State slots that are free once nothing runs and the cache of prefixes is dropped."""
    end, readings = time.monotonic() + PATIENCE, [-1.0]
    while len(readings) < 3 or readings[-1] != readings[-2]:  # the gauges follow the scheduler's steps
        assert time.monotonic() < end, readings
        while "flushed" not in str(server.post("/flush_cache")).lower():
            assert time.monotonic() < end, "something still runs"
            time.sleep(0.1)
        server.greedy([1], 1)
        server.post("/flush_cache")
        readings.append(server.gauge("sglang:mamba_available_tokens"))
    return readings[-1]


def test_other_weights_are_served_after_a_reload(server: Server, prompts: Callable, tmp_path: Path) -> None:
    from kimi_k3_npu import load_model

    (prompt, *_), (expected, *_) = prompts("k3")
    other = changed(ORACLES / "k3", tmp_path / "other")
    new = greedy(load_model(other), prompt)
    assert new != expected
    assert server.post("/update_weights_from_disk", model_path=str(other))["success"]
    assert server.greedy(prompt)["output_ids"] == new

    broken = changed(ORACLES / "k3", tmp_path / "broken")
    largest = max(broken.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1000])
    reply = server.post("/update_weights_from_disk", model_path=str(broken))
    assert not reply["success"]
    assert largest.name in reply["message"]
    assert server.greedy(prompt)["output_ids"] == new, "what was served before is still served"

    reply = server.post("/update_weights_from_disk", model_path=str(ORACLES / "k3-deep"))
    assert not reply["success"]
    assert "is another network" in reply["message"]

    assert server.post("/update_weights_from_disk", model_path=str(ORACLES / "k3"))["success"]
    assert server.greedy(prompt)["output_ids"] == expected


def changed(oracle: Path, folder: Path) -> Path:
    """The same network with the rows of its head turned by one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(oracle, folder)
    for shard in folder.glob("model*.safetensors"):
        tensors = load_file(shard)
        heads = [name for name in tensors if name.endswith("lm_head.weight")]
        for name in heads:
            tensors[name] = tensors[name].roll(1, dims=0).contiguous()
        if heads:
            save_file(tensors, shard, metadata={"format": "pt"})
    return folder


def test_it_ends_when_told_to(server: Server) -> None:
    """The last test of a server: all its processes end, without an error."""
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family
    said = len(server.log)
    os.kill(server.process.pid, signal.SIGTERM)
    server.process.wait(timeout=PATIENCE)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    assert not alive
    assert server.process.returncode == 0
    assert "Traceback" not in server.log[said:]
    assert "Scheduler hit an exception" not in server.log

"""SGLang in processes of its own, running the installed package."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import requests

from tests.patience import PATIENCE

HERE = Path(__file__).parent
ORACLES = HERE.parents[1] / "oracle"

#: What every launch here says.
ARGUMENTS: dict[str, Any] = {
    "model_impl": "kimi_k3_npu",
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "context_length": 512,
    "max_total_tokens": 8192,
    "max_running_requests": 16,
    "max_mamba_cache_size": 64,
    "mamba_radix_cache_strategy": "no_buffer",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "log_level": "info",
}

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def environment(**changes: str) -> dict[str, str]:
    """Of a launch: as in a shell without settings of ours, the installed package and not this checkout."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLANG_", "KIMI_K3_NPU_")) and name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    settings = {
        "OMP_NUM_THREADS": "1",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",  # windows in bf16 move the tiny fp32 model to other tokens
        # A launch that fails ends at once, without looking for a debugger and for core dumps of a GPU.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    }
    return {**kept, **settings, **changes}


class Driver:
    """A process in which engines are started one after the other."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self._log, self._begin = folder / "log", 0
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "driver.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=folder,
                env=env,
                text=True,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        """All that the processes of the engine have printed since its start."""
        return self._log.read_bytes()[self._begin :].decode(errors="replace")

    def start(self, **arguments: Any) -> None:
        self._begin = self._log.stat().st_size
        self("start", **arguments)

    def __call__(self, command: str, **arguments: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
        self._process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(PATIENCE):
                self.close()
                raise TimeoutError(f"{command}: no answer in {PATIENCE} s\n{self.log[-4000:]}")
        answer = self._process.stdout.readline()
        if not answer:
            self._process.wait()
            raise EngineFailed(self.log)
        return json.loads(answer)

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return self("generate", requests=requests)

    def greedy(self, prompts: list[list[int]]) -> list[list[int]]:
        """The 8 tokens that follow each prompt, all prompts at once."""
        results = self.generate([{"input_ids": prompt, "sampling_params": GREEDY} for prompt in prompts])
        return [result["output_ids"] for result in results]

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class EngineFailed(Exception):
    """The engine ended its process; the message is the log."""


#: Below the ports that systems give to connections, and those of each pytest process apart: an engine that starts
#: beside another finds its ports free, also those that SGLang counts on from its first.
_PORTS = count(10_000 + 10_000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")), 10)


def free_port() -> int:
    """One that this process has not given out before."""
    for port in _PORTS:
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("unreachable")


class Server:
    """`python -m sglang.launch_server` on a free port of this machine, or what `script` starts on `port` instead.
    `log` is all that its processes print."""

    def __init__(
        self, folder: Path, *arguments: str, script: Path | None = None, port: int | None = None, **env: str
    ) -> None:
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        command = [sys.executable, "-m", "sglang.launch_server", "--host", "127.0.0.1", "--port", str(port), *arguments]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                ["bash", script] if script else command,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment(**env),
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> None:
        """Until it serves. Raises EngineFailed with the log if it ends instead."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError(self.log[-4000:])
            if self.healthy():
                return
            time.sleep(0.5)
        raise EngineFailed(self.log)

    def healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=60).status_code == 200
        except requests.RequestException:
            return False

    def post(self, path: str, **body: Any) -> Any:
        """The parsed answer, or the text if it is no JSON."""
        reply = requests.post(self.url + path, json=body, timeout=PATIENCE)
        try:
            return reply.json()
        except ValueError:
            return reply.text

    def greedy(self, prompt: list[int], max_new_tokens: int = 8, **more: Any) -> dict[str, Any]:
        return self.post(
            "/generate", input_ids=prompt, sampling_params={**GREEDY, "max_new_tokens": max_new_tokens}, **more
        )

    def gauge(self, name: str) -> float:
        """A number that the server reports on /metrics."""
        text = requests.get(f"{self.url}/metrics", timeout=PATIENCE).text
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.split()[-1])

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def as_options(arguments: dict[str, Any]) -> list[str]:
    """Arguments of an engine as they are written on a command line."""
    options: list[str] = []
    for name, value in arguments.items():
        if value is not False:
            options.append("--" + name.replace("_", "-"))
            options += [] if value is True else [str(value)]
    return options


def servable(oracle: Path, folder: Path) -> Path:
    """A copy of an oracle with a tokenizer, whose every token is a word, as a server needs one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    for file in oracle.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((oracle / "config.json").read_text())
    words = {f"t{i}": i for i in range(config["text_config"]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def greedy(model: Any, prompt: list[int], count: int = 8) -> list[int]:
    """The tokens that follow, by our model without an engine."""
    import torch

    from kimi_k3_npu.model.attention import CachedAttention

    cache = model.new_cache(1, len(prompt) + count)
    slot, new, ids = cache.join(), [], torch.tensor(prompt)
    with torch.inference_mode():
        for _ in range(count):
            attention = CachedAttention(cache, [slot], [len(ids)])
            hidden = model(ids, attention)
            attention.commit()
            ids = model.logits(hidden[-1:]).argmax(dim=-1)
            new.append(int(ids))
    return new

"""Runs SGLang engines in a process of its own, told what to do by JSON lines; see `Driver` in conftest.py.

The engine kills its own process when a part of it fails, and its processes start by importing the main module again, so
neither can be the tests'.
"""

import asyncio
import json
import sys
from typing import Any


class Commands:
    def __init__(self) -> None:
        self.engine: Any = None

    def start(self, **arguments: Any) -> str:
        import sglang

        import kimi_k3_npu

        assert "site-packages" in kimi_k3_npu.__file__, kimi_k3_npu.__file__
        self.engine = sglang.Engine(**arguments)
        return sglang.__version__

    def stop(self) -> None:
        self.engine.shutdown()

    def generate(self, requests: list[dict[str, Any]]) -> list[Any]:
        """The requests, all at once."""

        async def run() -> list[Any]:
            return await asyncio.gather(*(self.engine.async_generate(**request) for request in requests))

        return self.engine.loop.run_until_complete(run())

    def call(self, name: str, **arguments: Any) -> Any:
        """Any other method of the engine."""
        return getattr(self.engine, name)(**arguments)


def main() -> None:
    commands = Commands()
    # What the engine prints goes to the log.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        result = getattr(commands, request.pop("command"))(**request)
        print(json.dumps(result, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()

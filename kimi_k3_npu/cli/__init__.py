"""The command line, `kimi-k3-npu`: one module a command or group of commands, listed in `app`.

Commands import torch and transformers when they run, so that `--help` is quick. What a user can get wrong is raised as
`KimiK3Error` and printed as one message; any other exception is a bug and keeps its traceback.
"""

from kimi_k3_npu.cli.app import main

__all__ = ["main"]

"""Write the options of an installed engine's real argument parser, for the lists beside this script.

Run in the engine's own environment:

    python recipes/flags/dump.py sglang > recipes/flags/sglang-0.5.23.txt
    python recipes/flags/dump.py vllm > recipes/flags/vllm-0.32.0.txt

A line is an option, what follows it (switch, value, or values for several; with `:int`, `:float`, `:size` or `:json`
where the parser converts it), and the choices where they are fixed. Another name of an option has a line `NAME alias
OPTION`. Lines that start with `env` are the environment variables that occur in the engine's sources: one of its own
that does not is read by nobody.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Set
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    engine = sys.argv[1]
    sys.argv = [sys.argv[0]]  # both engines look at the command line while they build their parsers
    parser = {"sglang": sglang_parser, "vllm": vllm_parser}[engine]()
    package, release = installed(engine)
    print(f"# Options of {engine} {release}, from the parser of {package}; made by recipes/flags/dump.py.")
    print("\n".join(sorted(set(options(parser)))))
    print("\n".join(f"env {name}" for name in variables(engine)))


def options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        names = [flag for flag in action.option_strings if flag.startswith("--")]
        opposites = isinstance(action, argparse.BooleanOptionalAction)
        for flag in names:
            if flag == names[0] or opposites:
                choices = action.choices or ()
                words = map(str, sorted(choices, key=str) if isinstance(choices, Set) else choices)
                yield f"{flag} {_takes(action)}{_type(action)} {','.join(words)}".rstrip()
            else:
                yield f"{flag} alias {names[0]}"


def variables(engine: str) -> list[str]:
    spec = find_spec(engine)
    assert spec is not None
    assert spec.submodule_search_locations
    prefixes = {"sglang": "SGLANG|SGL|DEEPEP|DEEP|MOONCAKE", "vllm": "VLLM"}[engine]
    pattern = re.compile(rf"\b(?:{prefixes})_[A-Z0-9_]*[A-Z0-9]\b")
    files = Path(spec.submodule_search_locations[0]).rglob("*.py")
    return sorted({name for file in files for name in pattern.findall(file.read_text(errors="replace"))})


def installed(engine: str) -> tuple[str, str]:
    for package in (engine, f"{engine}-cpu"):
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    raise SystemExit(f"{engine} is not installed here")


def _takes(action: argparse.Action) -> str:
    if action.nargs == 0:
        return "switch"
    return "values" if action.nargs in ("+", "*") else "value"


#: What this package calls the functions by which the engines' parsers convert a value; any other takes text.
TYPES = {
    "int": "int",
    "float": "float",
    "human_readable_int": "size",
    "loads": "json",
    "json_list_type": "json",
    "parse_cuda_graph_config_arg": "json",
}


def _type(action: argparse.Action) -> str:
    name = TYPES.get(getattr(action.type, "__name__", ""))
    return f":{name}" if name and action.nargs != 0 else ""


def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def vllm_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


if __name__ == "__main__":
    main()

"""`chat`: talk with a model on the terminal, or by lines piped in."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_k3_npu.cli import generation
from kimi_k3_npu.errors import KimiK3Error
from kimi_k3_npu.lines import BadLine, Line, LineError, read_lines

if TYPE_CHECKING:
    from PIL import Image

    from kimi_k3_npu.chat.parse import Delta
    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.engines.transformers import KimiK3ForGeneration
    from kimi_k3_npu.images import ImageSettings
    from kimi_k3_npu.tokenizer import Tokenizer

_COMMANDS = {
    "/image FILE": "show the model an image with your next message",
    "/reset": "start a new conversation",
    "/help": "this list",
    "/quit": "leave, as the end of the input does",
}


def chat(
    model: generation.ModelFolder,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.", show_default=False)] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Let the model think first.")] = True,
    effort: Annotated[
        Literal["low", "high", "max"] | None, typer.Option(help="How much to think.", show_default="not said")
    ] = None,
    max_new_tokens: generation.MaxNewTokens = 1024,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = None,
    seed: generation.Seed = None,
    text_only: generation.TextOnly = False,
    expert_weights: generation.ExpertWeights = "auto",
    scan: generation.Scan = True,
    dtype: generation.Dtype = "auto",
    compiled: generation.Compile = False,
) -> None:
    """Chat with a model, line by line: /image FILE shows it an image, /reset starts anew, /help lists all commands.

    Lines can be piped in too; the exit code then says whether every one of them was answered.
    """
    if effort and not thinking:
        raise typer.BadParameter("has no effect with --no-thinking", param_hint="--effort")
    temperature = generation.check_sampling(temperature, top_p)

    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.tokenizer import load_tokenizer

    config = KimiK3Config.from_pretrained(model)
    tokenizer = load_tokenizer(model)
    for control in ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"):
        tokenizer.control(control)
    network = generation.load_network(
        model, dtype, expert_weights, vision=False if text_only else None, scan=scan, compiled=compiled
    )
    settings = generation.sampling(network, max_new_tokens, temperature, top_p, seed)
    session = _Session(network, tokenizer, config, model, settings, thinking=thinking, effort=effort, system=system)
    failed = False
    for line in _lines():
        try:
            if isinstance(line, BadLine):
                raise LineError(f"line {line.line}: {line.reason}")
            if not session.read(line.text):
                break
        except KimiK3Error as error:
            failed = True
            typer.echo(f"error: {error}", err=True)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def _lines() -> Iterator[Line | BadLine]:
    """Lines of the standard input, with a prompt and line editing on a terminal."""
    if not sys.stdin.isatty():
        raw = getattr(sys.stdin, "buffer", None)  # a program around this one may have put text alone there
        yield from read_lines((line.encode() for line in sys.stdin) if raw is None else raw)
        return
    import readline  # noqa: F401  gives input() its editing and history

    for number in count(1):
        try:
            yield Line(number, input("> "))
        except UnicodeDecodeError as error:
            yield BadLine(number, f"not {error.encoding}: {error.reason}")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return


class _Session:
    """One conversation after another with one model."""

    def __init__(
        self,
        network: KimiK3ForGeneration,
        tokenizer: Tokenizer,
        config: KimiK3Config,
        folder: Path,
        settings: dict[str, Any],
        *,
        thinking: bool,
        effort: str | None,
        system: str | None,
    ) -> None:
        self._network, self._tokenizer, self._config, self._folder = network, tokenizer, config, folder
        self._settings, self._thinking, self._effort = settings, thinking, effort
        self._longest = _longest(folder)
        self._beginning: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._beginning)
        self._images: list[Image.Image] = []

    def read(self, line: str) -> bool:
        """Do what a line says; False for the end. Raises KimiK3Error and is then as before."""
        if line.startswith("/"):
            return self._command(*line.strip().partition(" ")[::2])
        if line.strip():
            self._answer(line)
        return True

    def _command(self, name: str, argument: str) -> bool:
        if name == "/image" and argument.strip():
            self._show(Path(os.path.expanduser(argument.strip())))  # as it is, where there is no such user
        elif name == "/reset":
            self._messages, self._images = list(self._beginning), []
        elif name in ("/quit", "/exit"):
            return False
        elif name == "/help":
            typer.echo("\n".join(f"{command:12} {what}" for command, what in _COMMANDS.items()))
        else:
            raise KimiK3Error(
                f"{name}{' ' * bool(argument)}{argument}: no such command; there are {', '.join(_COMMANDS)}. "
                "A message that begins with / needs a space in front."
            )
        return True

    def _show(self, file: Path) -> None:
        from kimi_k3_npu.images import open_image

        settings = self._image_settings()
        image = open_image(file)
        features = settings.preprocess([image]).features[0]
        self._images.append(image)
        typer.echo(f"{file.name}: {image.width}x{image.height}, {features} positions, goes with your next message")

    def _image_settings(self) -> ImageSettings:
        if self._network.model.vision_tower is None:
            raise KimiK3Error("this model has no vision weights, or was started with --text-only; it takes no images")
        return generation.image_settings(self._folder, self._config)

    def _answer(self, text: str) -> None:
        from kimi_k3_npu.chat.prompt import chat_prompt

        images = [{"type": "image", "image": image} for image in self._images]
        content: Any = [*images, {"type": "text", "text": text}] if images else text
        messages = [*self._messages, {"role": "user", "content": content}]
        has_images = any(isinstance(message["content"], list) for message in messages)
        shown = self._image_settings() if has_images else None
        prompt = chat_prompt(self._tokenizer, messages, shown, thinking=self._thinking, effort=self._effort)
        generation.check_ids(prompt.token_ids, self._config.text.vocab_size)
        room = self._longest - len(prompt.token_ids)
        if room < 1:
            raise KimiK3Error(
                f"the conversation has {len(prompt.token_ids)} tokens, and the model takes {self._longest}; /reset "
                "starts a new one"
            )
        settings = self._settings | {"max_new_tokens": min(room, self._settings["max_new_tokens"])}
        printer = _Printer(self._tokenizer, self._thinking)
        with suppress(KeyboardInterrupt):  # what came so far is then the answer
            generation.run(self._network, prompt, settings, printer.token)
        self._messages = [*messages, printer.end()]
        self._images = []


def _longest(folder: Path) -> int:
    """The most tokens that the model was made for."""
    from kimi_k3_npu.config import read_config_file

    raw = read_config_file(folder)
    return int(raw.get("text_config", raw).get("max_position_embeddings") or sys.maxsize)


class _Printer:
    """Prints an answer while it is generated: thinking, dimmed on a terminal, then the answer, then tool calls."""

    def __init__(self, tokenizer: Tokenizer, thinking: bool) -> None:
        from kimi_k3_npu.chat.parse import AnswerParser
        from kimi_k3_npu.tokenizer import PieceStream

        self._pieces, self._parser = PieceStream(tokenizer), AnswerParser(thinking)
        self._kind: str | None = None

    def token(self, token: int) -> None:
        """Print what the next token adds."""
        for piece in self._pieces.feed(token):
            for delta in self._parser.feed(piece):
                self._show(delta)

    def end(self) -> dict[str, Any]:
        """Print the rest; the answer as a message."""
        for piece in self._pieces.end():
            for delta in self._parser.feed(piece):
                self._show(delta)
        answer = self._parser.end()
        if self._kind:
            typer.echo()
        if not answer.finished:
            typer.secho("(cut off)", dim=True)
        return answer.as_message()

    def _show(self, delta: Delta) -> None:
        if delta.kind == "reasoning_was_content":
            typer.secho("\n(that was the answer)", dim=True, nl=False)
            return
        dim = delta.kind == "reasoning"
        if delta.kind != self._kind:
            typer.echo("\n" * bool(self._kind), nl=False)
            typer.secho({"reasoning": "(thinking) ", "content": "", "tool_call": ""}[delta.kind], dim=dim, nl=False)
            self._kind = delta.kind
        if delta.call:
            typer.echo(f"(call) {delta.call.name} {delta.call.arguments}")
            self._kind = None
        else:
            typer.secho(delta.text, dim=dim, nl=False)
        sys.stdout.flush()

"""`eval`: how well a model answers, whatever runs it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from kimi_k3_npu.cli import generation, outputs
from kimi_k3_npu.cli.numbers import MOST
from kimi_k3_npu.cli.progress import steps_bar

if TYPE_CHECKING:
    from kimi_k3_npu.chat.calls import Message
    from kimi_k3_npu.engines.offline import EngineChoice
    from kimi_k3_npu.evaluation.answers import Answers, Effort
    from kimi_k3_npu.evaluation.gsm import Marked, Problem, Score
    from kimi_k3_npu.recipes.offline import BatchSettings

app = typer.Typer(no_args_is_help=True, help="Measure how well a model answers.")

#: Requests at a time.
WINDOWS = {"transformers": 8, "sglang": 256, "vllm": 256}
SERVER_WINDOW = 16


@app.callback()
def evaluate() -> None:
    """Measure how well a model answers."""


@app.command()
def gsm(
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Checkpoint folder; of a URL the model's name there.", show_default=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Problems in GSM8K's format.", show_default="500 easy ones, weights/tiny"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Ask only the first so many.", show_default="all")
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="ENGINE", help="transformers, sglang, vllm, or the URL of a running server.")
    ] = "transformers",
    engine_arg: generation.EngineArgs = None,
    shots: Annotated[
        int, typer.Option(min=0, max=MOST, help="Show so many solved problems before each; they are not asked.")
    ] = 0,
    shots_from: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where those come from.", show_default="the first of --data")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.", show_default=False)] = None,
    thinking: Annotated[bool, typer.Option("--thinking/--no-thinking", help="Let the model think first.")] = True,
    effort: Annotated[
        Literal["low", "high", "max"] | None,
        typer.Option(help="How much to think.", show_default="not said; a server may then say max"),
    ] = None,
    max_new_tokens: generation.MaxNewTokens = 1024,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = None,
    seed: generation.Seed = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Problems at a time.", show_default="8; sglang, vllm: 256; a server: 16"),
    ] = None,
    show: Annotated[int, typer.Option(min=0, max=MOST, help="Print the first so many problems and answers.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write every answer, a line of JSON each.",
            callback=outputs.file_with_folders,
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the score as one JSON object.")] = False,
) -> None:
    """Ask word problems, and count the answers whose final number is right."""
    if effort and not thinking:
        raise typer.BadParameter("has no effect with --no-thinking", param_hint="--effort")
    if show and as_json:
        raise typer.BadParameter("prints text, which is no JSON", param_hint="--show")
    if shots_from and not shots:
        raise typer.BadParameter("has no effect without --shots", param_hint="--shots-from")
    if engine not in WINDOWS and not engine.startswith(("http://", "https://")):
        raise typer.BadParameter(
            f"{engine!r} is neither transformers, sglang, vllm nor an http:// or https:// URL", param_hint="--engine"
        )
    temperature = generation.check_sampling(temperature, top_p)
    options = generation.engine_options(engine_arg or [])

    from kimi_k3_npu.evaluation import gsm as scoring
    from kimi_k3_npu.recipes.offline import BatchSettings
    from kimi_k3_npu.resources import resource_path

    examples, problems = _chosen(data or resource_path("weights", "tiny", "test.jsonl"), limit, shots, shots_from)
    beginning: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for example in examples:
        beginning += example.as_shot(thinking)
    conversations = [[*beginning, {"role": "user", "content": problem.question}] for problem in problems]
    settings = BatchSettings(
        model=model or "",
        engine=engine,
        engine_args=options,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        thinking=thinking,
    )
    with _alone_at(out):
        answers = _open(settings, options, batch_size, effort)
        try:
            marked, seconds = _ask(answers, conversations, problems)
        finally:
            answers.close()
        if out is not None:
            scoring.write_marked(marked, out)
    result = scoring.score(marked, seconds)
    if as_json:
        asked = {**asdict(settings), "model": answers.model, "shots": shots, "effort": effort}
        typer.echo(json.dumps(asked | asdict(result)))
        return
    for one in marked[:show]:
        typer.echo(_shown(one))
    typer.echo(_table(result))


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="Answers that `gsm --out` wrote.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="B", help="Others, to the same problems.", show_default=False)],
    at_most: Annotated[
        float | None, typer.Option(min=0.0, max=100.0, metavar="PERCENT", help="Fail if more answers differ.")
    ] = None,
) -> None:
    """List the problems that two evaluations answered differently: two engines, formats or layouts of one model."""
    from kimi_k3_npu.evaluation.gsm import differing, read_marked

    answers = read_marked(first)
    pairs = differing(answers, read_marked(second))
    for one, other in pairs:
        typer.echo(f"{one.question}\n  {first}: {_verdict(one)}\n  {second}: {_verdict(other)}")
    percent = 100 * len(pairs) / max(1, len(answers))
    typer.echo(f"{len(pairs)} of {len(answers)} answers differ ({percent:.2g} %)")
    if at_most is not None and percent > at_most:
        raise typer.Exit(1)


def _chosen(data: Path, limit: int | None, shots: int, shots_from: Path | None) -> tuple[list[Problem], list[Problem]]:
    """The problems to show and those to ask."""
    from kimi_k3_npu.evaluation.gsm import EvaluationError, read_problems

    problems = read_problems(data)
    source = problems if shots_from is None else read_problems(shots_from)
    if len(source) < shots:
        raise EvaluationError(f"{shots_from or data}: has {len(source)} problems, and --shots wants {shots}")
    examples = source[:shots]
    asked = [problem for problem in problems if problem not in examples][:limit]
    if not asked:
        raise EvaluationError(f"{data}: all of its {len(problems)} problems are shown by --shots, none is left to ask")
    return examples, asked


@contextmanager
def _alone_at(out: Path | None) -> Iterator[None]:
    """Nothing else writes to `out`, if it is given; its folder is made."""
    if out is None:
        yield
        return
    from kimi_k3_npu.locks import writing_to

    out.parent.mkdir(parents=True, exist_ok=True)
    with writing_to(out, "evaluation"):
        yield


def _open(settings: BatchSettings, options: dict[str, Any], batch_size: int | None, effort: Effort | None) -> Answers:
    from kimi_k3_npu.evaluation.answers import EngineAnswers, ServerAnswers

    engine = settings.engine
    if engine.startswith(("http://", "https://")):
        if options:
            raise typer.BadParameter("a running server takes none", param_hint="--engine-arg")
        window = batch_size or SERVER_WINDOW
        return ServerAnswers(engine, settings.model or None, settings, window=window, effort=effort)
    if not settings.model:
        raise typer.BadParameter("is needed unless --engine is a URL", param_hint="--model")

    from kimi_k3_npu.config import KimiK3Config
    from kimi_k3_npu.engines.offline import open_engine
    from kimi_k3_npu.tokenizer import load_tokenizer

    folder = Path(settings.model)
    KimiK3Config.from_pretrained(folder)  # what is wrong with the folder is said before an engine starts
    tokenizer = load_tokenizer(folder)
    running = open_engine(cast("EngineChoice", engine), folder, options)
    return EngineAnswers(running, tokenizer, settings, window=batch_size or WINDOWS[engine], effort=effort)


def _ask(answers: Answers, conversations: list[list[Message]], problems: list[Problem]) -> tuple[list[Marked], float]:
    """Every answer with its mark, in the order of the problems, and the seconds that it took."""
    from kimi_k3_npu.evaluation.gsm import mark

    marked: dict[int, Marked] = {}
    started = time.perf_counter()
    with steps_bar("answering", len(problems)) as advance:
        for i, reply in answers.ask(conversations):
            marked[i] = mark(problems[i], reply)
            advance()
    return [marked[i] for i in range(len(problems))], time.perf_counter() - started


def _shown(one: Marked) -> str:
    thinking = f"  {one.thinking}\n" if one.thinking else ""
    return f"{one.question}\n{thinking}  {_verdict(one)}\n"


def _verdict(one: Marked) -> str:
    answer = one.answer.strip() or "(no answer)"
    return f"{answer}  {'right' if one.right else f'wrong, it is {one.expected}'}"


def _table(result: Score) -> str:
    low, high = result.interval
    cells = {
        "accuracy": f"{result.accuracy:.1%}, 95 % interval {low:.1%} to {high:.1%}",
        "right": f"{result.right} of {result.problems}",
        "invalid": f"{result.invalid / result.problems:.1%}: {result.invalid} without a number",
        "cut off": f"{result.cut_off}",
        "time": f"{result.seconds:.1f} s",
        "output": f"{result.tokens} tokens, {result.tokens_per_second:.1f} a second",
    }
    return "\n".join(f"{name:10}{value}" for name, value in cells.items())

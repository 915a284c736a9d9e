"""`instep generate`: decode prompts with instep's engine, and print the speed of a checked run.

Leaves out: decoding and checking (`instep.generate`).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from instep_reference.contract.errors import BadInput

from ..bundled import model
from ..options import PROPOSED
from ..verdict import Verdict
from . import controller_options
from .finish_with_result import Files, writes
from .subject_options import Given, takes_setting

if TYPE_CHECKING:
    from instep_reference.contract.sampling import Sampling

    from ..generate.decode import Ask, Decoded
    from ..generate.tokenizer import Words

MOST_TOKENS = 2**20  # no model has more positions
FIRST_STEPS = 3  # drafts a round by default


@writes("json")
@takes_setting(ops="Op set by name, or module:attribute.", drafter=PROPOSED)
def generate(
    given: Given,
    files: Files,
    checkpoint: Annotated[Path | None, typer.Argument(help="A Hugging Face checkpoint directory; default: instep's "
                                                           "model.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Text, or token numbers without a tokenizer; may be "
                                                         "repeated. Default: the model's prompts.json.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON list of {name, text | tokens}.")] = None,
    num_steps: Annotated[int | None, typer.Option(help="Drafts a round, default 3; with --adaptive the initial number.",
                                                  min=0, max=MOST_TOKENS)] = None,
    adaptive: controller_options.Adaptive = None, dialect: controller_options.DialectOption = None,
    captured: controller_options.Captured = None,
    tokens: Annotated[int, typer.Option(help="Maximum tokens of each request.", min=1,
                                           max=MOST_TOKENS)] = 64,
    batch: Annotated[int, typer.Option(help="Requests at a time; others follow as these finish.", min=1)] = 8,
    chunk: Annotated[int, typer.Option(help="Prompt tokens of a request in one step.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="Above 0: sample, and accept drafts by rejection sampling.",
                                               min=0.0)] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from this many of the likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens up to this total.")] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same tokens.", min=0)] = 0,
    check: Annotated[int, typer.Option(help="Number of requests that the reference checks.", min=1)] = 4,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Check none, and show no speed.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Keep the run as a trace, for `instep replay`.")] = None,
) -> None:
    """Decode prompts; exit 0: right, or not checked; 1: the reference says otherwise."""
    from instep_reference.contract.checkpoint import Checkpoint
    from instep_reference.contract.drafters import in_use

    from ..generate.decode import decode
    from ..generate.tokenizer import words_of
    from ..run.build_compared_engines import candidates
    from ..run.replay import must_hold
    from ..trace.file import beside, replaceable

    if prompt and prompts is not None:
        raise BadInput("--prompts", found="--prompt too", expected="one of them")
    if trace is not None:
        replaceable(trace)
    files.must_be_free(*[] if trace is None else [trace, beside(trace)])
    directory = checkpoint or model()
    setting = given.setting()
    opened = Checkpoint.open(directory, setting.mode)
    words = words_of(directory, opened.config.vocab)
    must_hold(opened, setting.dtype)
    asked = _prompts(directory, prompt, prompts, words, opened.config.vocab)
    kept = frozenset() if unchecked else _sample(list(asked), check)
    config = in_use(opened.config, setting.mode)
    drafts = bool(config.mtp_layers or config.block or setting.proposer())
    steps = _steps(num_steps, controller_options.chosen(num_steps, adaptive, dialect, captured), drafts)
    ask = replace(
        _ask(directory, opened, setting, asked, steps, tokens, batch, chunk, kept, trace),
        sampling=_sampling(temperature, top_k, top_p), seed=seed)
    for message in candidates(**ask.header.steps("adaptive"))[1]:
        print(message)
    decoded = decode(ask)
    verdict = None if unchecked else _reread(decoded)
    _finish(decoded, words, verdict, trace, files)


def _finish(decoded: Decoded, words: Words, verdict: Verdict | None, trace: Path | None, files: Files) -> None:
    """Write the run and the result, print texts and figures; return the exit code."""
    from ..generate import render
    from ..subject.memory_per_request import need

    ask = decoded.ask
    widest, tokens = max((*ask.header.candidates, ask.num_steps)) + 1, ask.header.room().request_positions
    memory = need(ask.checkpoint.config, ask.setting.options(), widest, tokens, ask.setting.op_set())
    if trace is not None:
        _keep(decoded, trace)
    shown = decoded, memory, verdict, words
    files.finish(render.of(*shown), render.document(*shown))


def _prompts(
    directory: Path, given: list[str] | None, file: Path | None, words: Words, vocab: int
) -> dict[str, tuple[int, ...]]:
    """The prompts by name, as tokens of this vocabulary."""
    from ..generate.tokenizer import prompts_from

    if given:
        found = {f"prompt {number}": words.encode(text) for number, text in enumerate(given, start=1)}
    else:
        path = file or directory / "prompts.json"
        if file is None and not path.is_file():
            raise BadInput(str(path), found="no such file", expected="prompts.json in the model's folder",
                           hint="give --prompt TEXT or --prompts FILE")
        found = prompts_from(path, words)
    for name, tokens in found.items():
        wrong = [token for token in tokens if not 0 <= token < vocab]
        if wrong or not tokens:
            raise BadInput(f'prompt "{name}"', found=f"token {wrong[0]}" if wrong else "no token",
                           expected=f"tokens of the model's vocabulary, 0 to {vocab - 1}")
    return found


def _sample(names: list[str], count: int) -> frozenset[str]:
    """This many of them, evenly spread, the first and the last included."""
    count = min(count, len(names))
    return frozenset(names[number * (len(names) - 1) // max(count - 1, 1)] for number in range(count))


def _sampling(temperature: float, top_k: int | None, top_p: float | None) -> Sampling | None:
    from instep_reference.contract.sampling import Sampling

    said = Sampling(temperature, top_k, top_p)
    for field, found, expected in said.wrong():
        raise BadInput(f"--{field.replace('_', '-')}", found=found, expected=expected)
    if not said.draws and (top_k, top_p) != (None, None):
        raise BadInput("--temperature", found=temperature, expected="one above 0 with --top-k or --top-p",
                       hint="at 0 the likeliest token is taken")
    return said if said.draws else None


def _steps(num_steps: int | None, chosen: controller_options.Steps | None, drafts: bool) -> controller_options.Steps:
    """The first step count, and the controller. drafts: whether drafts are possible."""
    if not drafts and (num_steps or chosen):
        raise BadInput("--num-steps", found="drafts", expected="0 and no --adaptive",
                       hint="there is no draft head and no proposer (--drafter ngram)")
    return chosen or controller_options.Steps((FIRST_STEPS if drafts else 0) if num_steps is None else num_steps)


def _ask(
    directory: Path, opened: Any, setting: Any, prompts: dict[str, tuple[int, ...]],
    steps: controller_options.Steps, tokens: int, batch: int, chunk: int, kept: frozenset[str],
    trace: Path | None,
) -> Ask:
    import os

    from ..generate.decode import Ask
    from ..generate.tokenizer import stop_of
    from ..trace.header import Model

    folder = Path.cwd() if trace is None else trace.parent
    model = Model.of(opened, directory, os.path.relpath(directory.resolve(), folder.resolve()))
    stop = stop_of(directory)
    return Ask(
        opened, setting, prompts, steps.num_steps, steps.adaptive, tokens, min(batch, len(prompts)), chunk,
        stop if stop is not None and 0 <= stop < opened.config.vocab else None, model, kept,
        controller=steps.controller,
    )


def _reread(decoded: Decoded) -> Verdict:
    from ..generate.text_check import Reader

    return Reader(decoded).verdict()


def _keep(decoded: Decoded, out: Path) -> None:
    """Write the run as a trace: with its prompts, but without answers of the fp64 reference, which did not run."""
    import torch

    from instep_reference.contract.engine import Admit

    from ..trace.file import write

    prompts = {
        f"prompt.{index}": torch.tensor(event.prompt)
        for index, event in enumerate(decoded.events) if isinstance(event, Admit)
    }
    write(out, decoded.ask.header, decoded.events, prompts)

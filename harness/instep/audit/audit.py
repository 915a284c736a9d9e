"""Judge one recording: find its format, read it, and run every level for which it has data.

Leaves out: the levels themselves (`tokens.py`), and words (`result.py`).
"""

import os
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from msgspec import structs

from instep_reference.contract.checkpoint import OnDisk
from instep_reference.contract.config import ModelConfig, states_mtp_layers
from instep_reference.contract.errors import BadInput

from ..run.replay import Outcome
from ..setting import wide
from ..subject.memory_per_request import spelled, weights_bytes
from ..trace.event_rules import EventRules
from ..trace.file import Trace
from ..trace.header import Model, config_digest
from ..verdict import INTERRUPTED, Comparison, Exit, Tier, Verdict
from . import recording, sglang_dumps, step_counts
from .layerwise_reference import Advance, Precision, final_norm, silent
from .rank_recordings import is_of_ranks, read_ranks
from .recorded_engine import TimeIsUp, complete, first_served, replayed, without_copies
from .recording import META, Recorded, as_usual, width
from .token_origins import Text, Told, told
from .tokens import Judged, judged
from .write import digest as weights_digest

OF_MEMORY = 0.75  # part of memory that a model and its reference may take; the rest is for states and activations
TOKENS, ROWS, STATES = 1, 2, 3  # levels: tokens and counts; logits and final rows; states


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    assumed  whether neither the recording nor the user named the dtype in which the engine computes
    peak     memory of this process, MiB
    rounds   number of rounds whose step count was judged; None: the recording names no controller
    texts    as far as they were judged;  trace: the recording's events;  kinds: of the model's layers
    events   the judged events;  one_step: whether each state was judged from the recorded one before it
    stopped  why the audit ended early; empty: it did not
    """

    recorded: Recorded
    told: Told
    precision: Precision
    tokens: Judged
    replay: Outcome | None
    verdict: Verdict
    assumed: bool
    digest: str | None
    seconds: float
    peak: float
    texts: Sequence[Text]
    trace: Trace
    kinds: Sequence[str]
    rounds: int | None = None
    events: range = range(0)
    one_step: bool = False
    stopped: str = ""

    @property
    def only_given(self) -> bool:
        """Whether there are tokens, and none that could be judged."""
        return bool(self.texts) and all(text.given for text in self.texts)

    @property
    def exit(self) -> Exit:
        replay = Exit.AGREED if self.replay is None else self.replay.verdict.exit
        stopped = Exit.INCONCLUSIVE if self.stopped else replay
        tokens = self.tokens.exit
        if self.only_given and self.replay is not None and any(map(_of_numbers, self.replay.verdict.compared)):
            tokens = Exit.AGREED  # rows or states decide
        return Exit.worst([Exit.DIVERGED if self.verdict.findings else tokens, replay, stopped])


def _of_numbers(one: Comparison) -> bool:
    """Whether it compares rows or states, and not only how many or which ones there are."""
    return one.elements > 0 and one.tier in (Tier.DERIVED, Tier.DIRECTED, Tier.PROPAGATED)


def opened(path: Path, config: ModelConfig | None = None) -> Recorded:
    """Read a recording: a directory in instep's format or of SGLang's dumper, or a file of JSON lines.

    config: of the model, by which the parts of ranks are merged; None: it has one rank
    """
    if not path.exists():
        raise BadInput(str(path), found="no such file or directory", expected="a recording")
    if path.is_file():
        return recording.read_plain(path)
    if (path / META).is_file():
        if (ranks := recording.stated_of(path).ranks) is not None:
            raise BadInput(str(path), found=f"one of {ranks} ranks", expected=f"the directory above it, {path.parent}")
        return recording.read(path)
    if config is not None and is_of_ranks(path):
        return read_ranks(path, config)
    if sglang_dumps.is_dump(path):
        return sglang_dumps.read(path)
    below = [file.parent for file in sorted(path.glob(f"*/{META}"))]
    hint = f"it has {' and '.join(map(str, below))}" if below else "a file of JSON lines is given by its own name"
    raise BadInput(str(path), found=f"no {META}, and no file of SGLang's dumper", expected="a recording", hint=hint)


def text_of(path: Path) -> Path:
    """The file of a recording that has a line for each event or request; for dumps of SGLang any file."""
    files = [path / recording.EVENTS, *sorted(path.glob("*.pt"))] if path.is_dir() else [path]
    return next((file for file in files if file.is_file()), path)


def audit(
    path: Path, model: Path, *, dtype: str | None = None, tokens: int | None = None,
    level: int = STATES, progress: Advance = silent, events: str | None = None, from_start: bool = False,
    first: bool = False, minutes: float | None = None,
) -> Audit:
    """Judge a recording.

    level       the highest level that is judged
    dtype       the dtype in which the engine computes, if the recording does not name it
    tokens      the maximum per request that is judged
    events      the judged events as "A:B", both included; either may be left out
    from_start  judge states from position 0, not from the recorded states before them
    first       stop at the first event whose rows or states are wrong
    minutes     time limit; the result then covers the events up to there, as after an interrupt
    """
    begun, disk = time.perf_counter(), OnDisk.open(model)
    found = opened(path, disk.config)
    shows = [key for key in found.shows if level > ROWS or (key != "states" and level > TOKENS)]
    if shows:
        _must_fit(disk)
    digest = _same_model(found, disk, model)
    precision, assumed = _precision(found, disk, dtype)
    header = found.header(Model("", digest or "", config_digest(model), disk.config.vocab, disk.config.mtp_layers))
    span = judged_events(events, len(found.events), found.path.name)
    words = found.told or told(EventRules(header), found.events, recording.EVENTS, span)
    trace, replay, stopped = Trace(path / recording.EVENTS, header, found.events, {}, ""), None, ""
    complete(found, disk.config, found.shows, range(first_served(trace, span.start), span.stop))
    if shows:
        without_copies(found)
    found, words = recording.with_short_names(found, words)
    trace = replace(trace, events=found.events)
    texts = [text.up_to(tokens) for text in words.texts]
    if events is not None:
        texts = [part for text in texts if len((part := text.within(span)).said) > part.known]
    limited = until(progress, begun, minutes)
    try:
        what = judged(disk, precision, texts, limited)
    except (KeyboardInterrupt, TimeIsUp) as end:
        what, shows, stopped = Judged(), [], f"{str(end) or INTERRUPTED}, before the tokens were judged"
    verdict = Verdict(events=len(span))
    # Tokens first: a wrong count of accepted drafts follows from a wrong token of the same commit, not the reverse.
    steps = _step_counts(found, span)
    verdict.add([*(one for one in found.differences if one.event in span or not one.agrees),
                 *what.verdict.compared, *words.counts, *(steps or ())])  # fmt: skip
    one_step = "states" in shows and not from_start
    if shows:
        header = structs.replace(header, checkpoint=structs.replace(header.checkpoint, digest=disk.digest()))
        replay = replayed(found, replace(trace, header=header), model, disk.config, precision, shows, limited,
                          events=span, one_step=one_step, first=first)
        stopped = replay.verdict.stopped and f"{replay.verdict.stopped}, after {replay.verdict.events} events"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    return Audit(found, words, precision, what, replay, verdict, assumed, digest, time.perf_counter() - begun, peak,
                 texts, trace, disk.config.mixers, None if steps is None else len(steps), span, one_step,
                 stopped)  # fmt: skip


def _step_counts(found: Recorded, span: range) -> list[Comparison] | None:
    """Judge the step counts; None: the recording names no controller."""
    if found.controller is None:
        return None
    field, how = f"{META}: controller", (found.controller, found.num_steps)
    attached = found.layers is not None  # then events may lack requests, and the recorder states the rounds of all
    every = step_counts.judged_rounds(*how, found.batches, field) if attached else \
        step_counts.judged(*how, found.lag, found.events, field)  # fmt: skip
    return [one for one in every if one.event in span]


def judged_events(given: str | None, count: int, name: str) -> range:
    """The range of an option "A:B", whose ends are included and may be left out; one number is one event."""
    if given is None:
        return range(count)
    first, colon, last = given.partition(":")
    ends = [first or "0", last or str(count - 1)] if colon else [first, first]
    if count == 0:
        raise BadInput("--events", found=given, expected="nothing: this recording has texts and no events")
    if not all(end.isdecimal() for end in ends) or not int(ends[0]) <= int(ends[1]) < count:
        raise BadInput("--events", found=given, expected=f"events of {name} as A:B, 0:{count - 1} for all of them")
    return range(int(ends[0]), int(ends[1]) + 1)


def until(progress: Advance, begun: float, minutes: float | None) -> Advance:
    """The same progress function, which raises `TimeIsUp` once the time limit is over."""

    def advance(what: str, done: int, of: int | None) -> None:
        progress(what, done, of)
        if minutes is not None and time.perf_counter() - begun > 60 * minutes:
            raise TimeIsUp(f"the limit of {minutes:g} minutes is over")

    return advance


def _same_model(found: Recorded, disk: OnDisk, model: Path) -> str | None:
    """Compare the recorded model with the checkpoint -> its digest; None: the recording does not name its model.

    The weights must be the same, and so must the fields of the configuration that the reference reads, however they are
    wrapped.
    """
    digest = None
    for stated, of in ((found.digest, disk.digest), (found.weights, lambda: weights_digest(model))):
        if stated is None:
            continue
        digest = of()
        if digest != stated:
            raise BadInput("--model", found=f"{digest[:12]}.. in {model}", expected=f"{stated[:12]}.., as {META} says",
                           hint="the recording was made with another checkpoint")
    if found.config is not None:
        try:
            loaded = ModelConfig.from_dict(dict(found.config))
        except BadInput as error:
            raise BadInput(f"{META}: {error.field}", found=error.found, expected=error.expected) from None
        for field in fields(loaded):
            engine, ours = getattr(loaded, field.name), getattr(disk.config, field.name)
            if engine != ours and (field.name != "mtp_layers" or states_mtp_layers(dict(found.config))):
                raise BadInput(f"{META}: config: {field.name}", found=engine, expected=f"{ours}, as in {model}",
                               hint="the engine loaded the same weights as another model")
    return digest


def _precision(found: Recorded, disk: OnDisk, dtype: str | None) -> tuple[Precision, bool]:
    """How the engine computes: from the recording, or from the user, or else in the checkpoint's dtype."""
    if dtype is not None and found.dtype is not None and dtype != found.dtype:
        raise BadInput("--dtype", found=dtype, expected=f"{found.dtype}, as {META} says")
    stored = str(next(iter(disk.read(final_norm(disk)[:1]).values())).dtype).removeprefix("torch.")
    word = found.dtype or dtype or stored
    activation = width(word, "--dtype")
    declared = found.declared or as_usual(activation, wide(activation), {}, {})
    return Precision(activation, wide(activation), declared), found.dtype is None and dtype is None


def _must_fit(disk: OnDisk) -> None:
    """Refuse a model that is too large: rows and states need the checkpoint and the whole reference in two widths."""
    stored = sum(file.stat().st_size for file in disk.files)
    whole = stored + weights_bytes(disk.config, torch.float64) + weights_bytes(disk.config, torch.float32)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if whole > memory * OF_MEMORY:
        raise BadInput("--level", found=f"a model of {spelled(stored)}, with its reference {spelled(whole)}",
                       expected=f"at most {OF_MEMORY} of the {spelled(memory)} of memory for levels 2 and 3",
                       hint="--level 1 judges tokens, windows and counts layer by layer, however large the model is")

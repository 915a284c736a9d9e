"""A campaign: many random runs of one op set, until a count or a time; the smallest failing run becomes a trace.

Hypothesis draws, and shrinks setting, room and events; `shrink` then removes every event that the finding does not
need. The same seed draws the same runs. Leaves out: the terminal (`instep.cli.fuzz`).
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
from hypothesis.stateful import run_state_machine_as_test

from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract import shards
from instep_reference.contract.adaptive_controller_file import Dialect
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.errors import BadInput, InstepError
from instep_reference.contract.event_facts import kind_of

from ...adapters import takes
from ...diagnose import diagnose
from ...report.finding_tensors import for_a_file
from ...report.machine import installed
from ...run.build_compared_engines import Plan
from ...run.engine_without_comparison import header_of
from ...run.replay import Outcome, Replay
from ...setting import Setting, moves_labels
from ...subject.engines.verbs import ByVerbs
from ...trace.file import read, replaceable
from ...trace.header import Header, Model, Part, Recording
from ...trace.policy import Policy
from ...verdict import Exit
from ..runner import Over, TrialRunner
from ..shrink import Shrunk, shrink
from . import coverage as conditions
from . import draw_events
from .coverage import Coverage, untested
from .drawn_run import Diverged, Example
from .hypothesis_machine import Machine, TransferMachine, by_seed_alone
from .request_histories import Pair

EVENTS = 16  # rules per run; a rule is up to three events
SEEDS_APART = 10**6  # between the batches of neighbouring seeds
BATCH = 100  # examples with one seed; the clock is read between two batches
SHRINK_S = 60.0  # the time for shrinking; the smallest example by then is kept


@dataclass(frozen=True)
class Settings:
    """The settings of a campaign: op set, model, number of runs, and place for a finding.

    examples None: until the time is over
    setting  how the subject is set up; sampled: fields of it that every run draws again (`draw.SAMPLED`)
    trees    windows are trees of at most this many nodes, with a constant step count; 0: chains
    number   number of a finding whose trace must not replace earlier ones; 0: a campaign has one finding
    """

    setting: Setting
    checkpoint: Path
    examples: int | None
    seed: int
    out: Path
    shrink_s: float = SHRINK_S
    sampled: Collection[str] = draw_events.SAMPLED
    trees: int = 0
    transfers: bool = False
    command: str = "fuzz"  # the one that draws: names the trace of a finding
    number: int = 0


@dataclass
class Result:
    """The result of a campaign. found: the trace of the smallest failing run, and its outcome.

    examples drawn runs; of a soak: stretches after which every request left
    rounds   of a soak on engines that stay (`campaign/soak/soak.py`); None: every run has new engines
    refused  kind of event -> how often the rules refused a drawn event (mostly because no page was free)
    again    whether the sides differed again when that trace was replayed from its file
    cut      why shrinking ended early; "" if it did not
    interrupted  whether the user ended it with Ctrl-C: what ran until then counts
    """

    settings: Settings
    coverage: Coverage = field(default_factory=Coverage)
    examples: int = 0
    rounds: int | None = None
    events: int = 0
    elements: int = 0
    seconds: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    found: Outcome | None = None
    again: bool = True
    cut: str = ""
    interrupted: bool = False

    @property
    def untested(self) -> list[str]:
        """Sentences about options that no run tested."""
        options = {**self.settings.setting.data(), "transfers": self.settings.transfers}
        return untested(options, self.coverage.met)

    @property
    def exit(self) -> Exit:
        """The exit code. A campaign that compared nothing, or did not test an option, has not passed."""
        if self.found is not None:
            return Exit.DIVERGED
        return Exit.AGREED if self.elements and not self.untested else Exit.INCONCLUSIVE


def campaign(settings: Settings, run: TrialRunner | None = None) -> Result:
    """Draw runs until one fails, or all were drawn, or the time is over."""
    must_be_free(settings)
    host = _Host(settings, run or TrialRunner())
    for number in count():
        left = BATCH if settings.examples is None else min(BATCH, settings.examples - number * BATCH)
        if left <= 0 or host.smallest is not None or host.run.over:
            break
        host.known = dict(host.result.coverage.histories.met)
        _batch(host, left, settings.seed * SEEDS_APART + number)
    if host.smallest is not None:
        host.result.found, host.result.again, cut = again(host.smallest, settings, host.run)
        host.result.cut = host.result.cut or cut
    host.result.seconds, host.result.interrupted = host.run.seconds, host.run.interrupted
    return host.result


def _batch(host: "_Host", examples: int, seed: int) -> None:
    how = hypothesis.settings(
        max_examples=examples, stateful_step_count=EVENTS, database=None, deadline=None, print_blob=False,
        report_multiple_bugs=False, verbosity=hypothesis.Verbosity.quiet,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
    )

    @hypothesis.seed(seed)
    def machine() -> Machine:
        return TransferMachine(host) if host.settings.transfers else Machine(host)

    factory: Any = machine  # Hypothesis takes anything that makes a machine, but its types allow only classes
    try:
        with by_seed_alone():
            run_state_machine_as_test(factory, settings=how)
    except (Over, KeyboardInterrupt, Exception) as error:  # after `Over`, Hypothesis may say that a run was shorter
        host.ended(error)


class _Host:
    """Builds and serves examples, and keeps count; implements `machine.Host`."""

    def __init__(self, settings: Settings, run: TrialRunner) -> None:
        self.settings, self.run = settings, run
        self.opened = Checkpoint.open(settings.checkpoint, settings.setting.mode)
        self.model = Model.of(self.opened, settings.checkpoint, ".")
        self.edges = edges_of(self.opened)
        self.result = Result(settings)
        self.result.coverage.without = impossible(settings, self.opened)
        self.smallest: Example | None = None
        self.known: Mapping[Pair, int] = {}  # pairs of facts that the batches before this one met
        self.broken: Exception | None = None  # the harness, a side or a check failed: no divergence, and the end
        self.late = False  # something was to be served when the time was over
        self.name = f"runs of fuzz [{settings.setting.name}], seed {settings.seed}"

    def begin(self, choose: draw_events.Draw) -> Example:
        """Build both sides, with a drawn capacity."""
        self._go_on()
        plan, header = drawn_plan(choose, self.settings, self.opened, self.model)
        if self.smallest is None:
            self.result.examples += 1
            self.run.advance(self.name, self.result.examples, self.settings.examples)
            self.result.coverage.begin(
                overlap=plan.setting.overlap, heads=header.heads, buckets=plan.setting.prompt_buckets or (),
                block=header.drafter is not None, transfers=header.receiver is not None,
                stages=plan.setting.stages, micro_batches=plan.setting.micro_batches, dp=plan.setting.dp)
        try:
            example = Example(plan, header)
        except Exception as error:
            self.failed(error)
        self.result.coverage.offers(example.refuses)
        return example

    def serve(self, example: Example, event: Any) -> None:
        """Serve the event. If it fails and the example is the smallest so far, keep it and write its trace."""
        self._go_on()
        table = example.rules.serving(event).table
        before = table.as_it_stands()
        elements = example.elements
        try:
            example.serve(event)
        except Diverged:
            if self.smallest is None:
                self.run.until = time.monotonic() + self.settings.shrink_s
            if self.smallest is None or example.size < self.smallest.size:
                self.smallest = example
                self._keep(example)
            raise
        except Exception as error:
            self.failed(error)
        finally:
            if self.smallest is None:
                self.result.events += 1
                self.result.elements += example.elements - elements
        if self.smallest is None:
            self.result.coverage.note(before, event, table, example.served)

    def refused(self, event: Any) -> None:
        self.result.refused[kind_of(event)] += 1

    def _keep(self, example: Example) -> None:
        try:
            write(example, self.settings)
        except Exception as error:
            self.failed(error)

    def ended(self, error: BaseException) -> None:
        """Hypothesis ended with this error. A finding stays a finding, whatever ended its shrinking."""
        finding = self.smallest is not None
        self.run.stop(error)
        if self.run.interrupted:
            self.result.cut = "it was interrupted" if finding else ""
            return
        if self.broken is not None and (not finding or isinstance(self.broken, InstepError)):
            raise self.broken from None
        if not finding:
            if not self.run.over:
                raise error
        elif self.broken is not None:
            self.result.cut = f"the harness itself failed: {type(self.broken).__name__}: {self.broken}"
        elif self.late:
            self.result.cut = "its time was over"
        elif not isinstance(error, Diverged):
            self.result.cut = "the same events did not part the sides every time"

    def failed(self, error: Exception) -> NoReturn:
        """The harness, a side or a check failed: no finding, and the end."""
        self.broken = error
        raise Over from error

    def _go_on(self) -> None:
        if self.run.over:
            self.late = True
            raise Over


def edges_of(checkpoint: Checkpoint) -> tuple[int, ...]:
    """Chunk sizes at which conv windows go wrong."""
    width = checkpoint.config.conv_width
    return tuple(sorted({1, 2, width - 1, width} - {0}))


def drawn_plan(
    choose: draw_events.Draw, settings: Settings, opened: Checkpoint, model: Model, long: int = 0
) -> tuple[Plan, Header]:
    """The setting of a run with a drawn capacity, step counts and strategies; and the header of its trace.

    long: tokens of long requests, for which there is further room
    """
    setting = settings.setting
    setting.must_draft(opened.config)
    layers, found, nodes = _most_drafts(setting, opened), setting.subject(), settings.trees
    room, steps = draw_events.room(choose, long), draw_events.candidates(choose, layers)
    if nodes:
        room, steps = draw_events.with_trees(choose, room, steps, nodes, grow=_grows(setting, opened))
    if _tracks(setting, found):
        room = draw_events.with_prefixes(choose, room, always=bool(setting.kept))
    setting = draw_events.strategies(choose, setting, settings.sampled, trees=bool(nodes))
    controller = {} if nodes else draw_events.controller(choose, steps, dialects=_dialects(found))
    narrows = room.track_interval is not None and not settings.transfers  # narrow prefixes do not move
    if narrows and not moves_labels(found if isinstance(found, Ops) else None):
        setting = draw_events.narrow_prefixes(choose, setting, settings.sampled)
    if setting.mode == BLOCK and not nodes:
        room = draw_events.with_device_widths(choose, room)
    if isinstance(found, Ops) and found.split:
        setting = draw_events.split_rings(setting, room, settings.sampled)
    second = None
    if settings.transfers:
        ranks = [size for size in (1, 2) if _fits(opened, size)] if isinstance(found, Ops) else [1]
        second = draw_events.receiver(choose, setting, room, layers, ranks)
    policy = Policy(
        _name(settings),
        f"`instep {settings.command} {' '.join(setting.words()[:2])} --seed {settings.seed}`: no sequence of legal "
        "events makes the sides part.",
        room, (), steps[0], **controller, seed=settings.seed, receiver=second,
        replay=(Part(setting.ops, strategy=setting.strategy, conv=setting.conv),),
    )
    header, _ = header_of(
        policy, opened, model=model, recording=Recording(setting.mode), field=settings.command,
        directory=settings.checkpoint,
        created={name: installed(name) or "from source" for name in ("instep", "torch", "hypothesis")},
    )
    return Plan.of(header, opened, setting, settings.command, settings.checkpoint), header


def _most_drafts(setting: Setting, opened: Checkpoint) -> int | None:
    return opened.config.mtp_layers if setting.mode == "vanilla" else None


def _whole(setting: Setting) -> bool:
    """Whether an engine is in one piece: stages and replicas have neither grown trees nor tracked prefixes."""
    return setting.stages == setting.dp == 1


def _grows(setting: Setting, opened: Checkpoint) -> bool:
    return opened.config.mtp_layers == 1 and setting.mode == "eagle" and _whole(setting)


def _tracks(setting: Setting, found: object) -> bool:
    return isinstance(found, Ops) and not found.keepers and _whole(setting)


def _dialects(found: Any) -> Sequence[Dialect]:
    every = isinstance(found, Ops | ByVerbs) or takes(found, "controlled")
    return draw_events.DIALECTS if every else draw_events.DIALECTS[:1]


def impossible(settings: Settings, opened: Checkpoint, *, short: str = "in short runs") -> dict[str, str]:
    """Conditions that nothing drawn with these settings can meet -> the setting. short: why no request is long"""
    setting = settings.setting
    found, most, buckets = setting.subject(), _most_drafts(setting, opened), setting.prompt_buckets or ()
    refuses = f"with --{'overlap' if setting.overlap else 'transfers'}"
    without = (
        (conditions.OVERLAPS, not setting.overlap, "without --overlap"),
        (conditions.REFUSALS, setting.overlap or settings.transfers, refuses),
        (conditions.SWITCHES, settings.trees, "with --trees"),
        (conditions.UP_AND_DOWN, most == 1, "with one draft at most"),
        (conditions.TO_ZERO, len(_dialects(found)) == 1, "without the argument `controlled` of `make`"),
        (conditions.LONG_REQUESTS, short, short),
        (conditions.GROWN, not _grows(setting, opened), "without a drafter that grows trees"),
        (conditions.HITS, not _tracks(setting, found), "without tracked prefixes"),
        (conditions.WIDTHS, settings.trees or setting.kept, "with --trees, --kept-dtype or --chunk-dtype"),
        (conditions.WIDER_GRAPHS, len({*buckets}) == 1, "with one width in --prompt-graphs"),
        (conditions.BEYOND_GRAPHS, short and max(buckets, default=0) >= draw_events.TOKENS, "with so wide a graph"),
    )
    return {name: why for names, never, why in without if never for name in names}


def _fits(opened: Checkpoint, size: int) -> bool:
    """Return whether this number of ranks can share the model."""
    try:
        shards.config_of(opened.config, size)
    except BadInput:
        return False
    return opened.config.block is None


def place(settings: Settings) -> Path:
    """The path of the trace that a campaign writes for a finding."""
    return settings.out / f"{_name(settings)}.jsonl"


def must_be_free(settings: Settings) -> None:
    """Refuse a folder in which nothing could be kept, before anything runs. It is made when something is found."""
    there = next(folder for folder in (settings.out, *settings.out.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise BadInput("--out", found=f"{there}, no folder that can be written", expected="one that can be")
    if there == settings.out:
        replaceable(place(settings))


def _name(settings: Settings) -> str:
    """The name of a finding's trace. Its file may be copied to a system that allows no colon, as in mine:OPS."""
    name = for_a_file(f"{settings.command}-{settings.setting.name}-{settings.seed}")
    return f"{name}-{settings.number}" if settings.number else name


def write(example: Example, settings: Settings, begin: int = 0) -> None:
    """Write the example as a trace, from event `begin` on. It replaces a larger one that was found before."""
    settings.out.mkdir(parents=True, exist_ok=True)
    example.write(place(settings), example.header.near(settings.checkpoint, settings.out), begin)


def again(example: Example, settings: Settings, run: TrialRunner) -> tuple[Outcome, bool, str]:
    """Replay the trace from its file, and shrink it -> the outcome, whether the sides differ again, why it ended early.

    If they agree this time, they still differed once: then the outcome is the one that was found first.
    """
    trace = read(place(settings))
    replay = Replay(trace, example.setting, checkpoint=settings.checkpoint)

    def keep(smaller: Shrunk) -> None:
        if smaller.runs:
            smaller.write(place(settings), settings.checkpoint, trace.header.claim)

    found = shrink(replay, run, keep=keep)
    if found is None:
        return replace(diagnose(replay), verdict=example.verdict, last=None), False, ""
    cut = "it was interrupted" if found.interrupted else "its time was over"
    return found.outcome, True, "" if found.minimal else cut

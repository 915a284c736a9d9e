"""Whole rounds of a model in the 9B shape with random weights: draft, verify and commit, in graphs, overlapped.

A time is from one round's counts on the host to the next one's, so the host is included. The counts are copied after
their round, and read while the next one runs. Before the timing the same events are replayed with the checks that need
no whole reference, for `CHECKED` rounds; there the timed engine must hold the bits of the checked one. The floor is
every weight once (the head once per draft and once for the verify), every state read and written once, and all keys and
values of the middle round read once per layer and per run of the draft head. A block drafter drafts in one run. Its
proposals are also timed alone, in further rounds at the end (`proposals_us`).

Over ranks each has a process, and a card if there are cards. All ranks replay the checks; the calls of the timed rounds
are not compared, since the same ones were. The floor is that of a rank's weights, states, keys and values, and of the
round's collectives: a call takes at least as long as a sum of two numbers, and as its bytes at the rate of a large sum;
both are measured in the same processes. Leaves out: prompts, and any acceptance but the forced one.
"""

import dataclasses
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from instep.bundled import model
from instep.campaign.shapes import shape
from instep.campaign.shapes.random_weights import random_checkpoint
from instep.diagnose import explain_outcome
from instep.player import Player
from instep.report.divergence_message import where
from instep.run.engine_without_comparison import engine, header_of
from instep.run.large_model import outcome
from instep.run.rank_processes import over_processes
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import Part, Recording, Room
from instep.trace.policy import Arrival, Policy
from instep.verdict import Exit
from instep_optimized.ranks import Call
from instep_optimized.ranks.processes import Processes
from instep_optimized.transfer.to_host import HostCopy
from instep_reference.contract import shards
from instep_reference.contract.block_drafter import PREFIX, BlockDrafter
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.checkpoint_tensor_shapes import FUSED, block_shapes, expected_shapes
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.engine import Admit, AnyEvent, Commit, Committed, Draft, Forward, Row
from instep_reference.contract.engine import Path as Path_

from ..bench_types import Arm, At, Cell, Ground, Kind, Size
from ..interleaved_timing import Rates
from ..profile import Collectives, Span, by_work, of_ranks
from ..replayed_acceptance import Witness

SHAPE, NUM_STEPS, PROMPT, PAGE = "qwen3.5-9b", 3, 32, 16
ACCEPTED = (2, 3, 1, 2)  # accepted drafts, in turn over rounds and requests: two of three, as with a good draft head
BLOCK_LAYERS, READ = 5, 5  # layers of the block drafter, and layers of the target that it reads, as DFlash's for 8B
CHECKED, TIMED, PROFILED = 2, {"tiny": 4, "card": 200}, 4
ALONE = {"tiny": 4, "card": 40}  # further rounds with a block drafter, in which the proposals alone are timed
CASES: dict[Size, tuple[tuple[int, int], ...]] = {  # batch, layers
    "tiny": ((1, 0), (2, 0)), "default": ((1, 8), (1, 32), (8, 32), (32, 32)),
    "full": tuple((batch, layers) for layers in (8, 32) for batch in (1, 2, 4, 8, 16, 32, 64)),
}  # fmt: skip
OF_BLOCKS: dict[Size, tuple[tuple[int, int], ...]] = {  # the same with a block drafter
    "tiny": ((2, 0),), "default": ((8, 32),), "full": ((1, 32), (8, 32), (32, 32)),
}  # fmt: skip
OF_RANKS: dict[Size, tuple[tuple[int, int], ...]] = {  # on one rank, and on several
    "tiny": ((2, 0),), "default": ((1, 32), (8, 32), (32, 32)),
    "full": tuple((batch, layers) for layers in (8, 32) for batch in (1, 8, 32)),
}  # fmt: skip
# Of a collective, the number of tensors of the given size that each of `size` ranks sends at least.
SENDS: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size, "all_gather": lambda size: size - 1,
    "broadcast": lambda size: 1 / size,  # rank 0 alone sends all of it, or each one a part
}  # fmt: skip
ROWS, COLUMNS = 4, 4096  # of the tensors with which each kind of collective is checked
FEW, LARGE = 2, {"tiny": 1 << 16, "card": 1 << 26}  # numbers in fp32 whose sum over ranks is timed
SUMS, TURNS = 10, 5  # sums after each other, and how often these are timed
UNKNOWN = Rates(math.nan, math.nan, math.nan)  # of a process that measures no floor


def cells(ground: Ground, size: Size) -> Iterator[At]:
    if ground.ranks > 1:
        config = Checkpoint.open(model()).config if ground.tiny else shape(SHAPE)
        shards.config_of(config, ground.ranks)  # refuses ranks that cannot share the model
        for batch, layers in OF_RANKS[size]:
            for ranks in (1, ground.ranks):
                yield {"batch": batch, **({"layers": layers} if layers else {}), "ranks": ranks}
        return
    for cases, drafter in ((CASES, {}), (OF_BLOCKS, {"drafter": BLOCK})):
        for batch, layers in cases[size]:
            yield {"batch": batch, **({"layers": layers} if layers else {}), **drafter}


def checkpoint_of(ground: Ground, layers: int | None, drafter: str = "") -> Checkpoint:
    """The first layers of the shape; in tiny runs the trained model that instep ships."""
    if ground.tiny:
        return Checkpoint.open(model(), drafter)
    config = shape(SHAPE, layers=layers)
    if drafter == BLOCK:
        config = dataclasses.replace(config, block=block_of(config))
    return random_checkpoint(config, device=ground.device, dtype=ground.dtype)


def block_of(config: ModelConfig) -> BlockDrafter:
    """A block drafter of this shape: attention layers as wide as the target's, over rows of layers spread evenly."""
    count = len(config.layers)
    read = tuple(sorted({(number * (count - 1)) // READ + 1 for number in range(min(READ, count - 1))}))
    return BlockDrafter(
        "block_drafter", config.vocab, config.hidden, BLOCK_LAYERS, config.heads, config.kv_heads, config.head_dim,
        config.intermediate, config.eps, config.rope_theta, config.rotary_dim / config.head_dim, read, config.vocab - 1)


def laid(checkpoint: Checkpoint, batch: int, rounds: int) -> Trace:
    """Events of prompts and rounds with every choice drawn and forced, so that no engine has to choose."""
    reach = PROMPT + (rounds + 2) * (NUM_STEPS + 1)
    pages, names = batch * -(-reach // PAGE), tuple(f"r{number}" for number in range(batch))
    room = Room(tuple(range(1, batch + 1)), tuple(range(1, pages + 1)), PAGE, batch * PROMPT, reach)
    policy = Policy("rounds", "Whole rounds are timed of an engine that was checked.", room,
                    tuple(Arrival(name, name, max_new=reach) for name in names), NUM_STEPS, overlap=True)  # fmt: skip
    drafter = Recording().drafter if checkpoint.config.block is None else BLOCK
    header, _ = header_of(policy, checkpoint, replay=(Part("plain"),), recording=Recording(drafter))
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(1, checkpoint.config.vocab, (count,), generator=generator).tolist())

    roots, verify = tokens(batch), Forward(tuple(Row(name, "verify") for name in names))
    events: list[AnyEvent] = [Admit(name, tokens(PROMPT)) for name in names]
    events.append(Forward(tuple(Row(name, "prefill", PROMPT, root) for name, root in zip(names, roots, strict=True))))
    for number in range(rounds):
        picks = tuple(tokens(NUM_STEPS) for _ in names)
        counts = [ACCEPTED[(number * batch + row) % len(ACCEPTED)] for row in range(batch)]
        paths = tuple(Path_(tuple(range(1, count + 1)), bonus)
                      for count, bonus in zip(counts, tokens(batch), strict=True))  # fmt: skip
        events += [Draft(names, picks), verify, Commit(names, paths)]
    return Trace(Path("rounds.jsonl"), header, tuple(events), {}, "")


@dataclass(frozen=True)
class Link:
    """The measured speed of a sum over ranks: the seconds of one of two numbers, and the bytes that a rank sends."""

    seconds: float
    bytes_per_s: float

    def floor(self, calls: Sequence[Call], size: int) -> tuple[float, float]:
        """The minimum bytes that a rank sends for these calls, and the minimum seconds."""
        each = [SENDS[call.kind](size) * math.prod(call.shape) * max(
            call.dtype.itemsize, 4 if call.kind == "all_reduce" else 0) for call in calls]  # sums are in fp32
        return sum(each), sum(max(self.seconds, moved / self.bytes_per_s) for moved in each)


@dataclass
class Run:
    """One op set on the forced trace: checked, then timed."""

    trace: Trace
    checkpoint: Checkpoint
    setting: Setting
    alone: int = 0  # last rounds of the trace in which the proposals alone are timed
    seconds: list[float] = field(default_factory=list)
    work: dict[str, Any] = field(default_factory=dict)
    group: Processes | None = None  # of the ranks, while they run
    link: Link | None = None
    calls: list[Call] = field(default_factory=list)  # collectives of the profiled rounds
    kernels: list[Span] = field(default_factory=list)  # of these, on this rank

    def check(self) -> str:
        """Describe what is wrong. This also runs the timing, because the states of both runs are compared."""
        setting = self.setting
        if setting.ranks == 1:
            return self.checked()
        return over_processes(setting.ranks, setting.comm, self._of_rank, partial(
            other_rank, setting, len(self.names), len(self.checkpoint.config.layers)))  # fmt: skip

    def _of_rank(self, group: Processes) -> str:
        """Check and time this rank, and join the figures of all ranks."""
        self.group = group
        self.link = link_of(group, self.setting.device)
        found = wrong_collective(group, self.setting) or self.checked()
        if not any(group.gather([found])):
            self._join(group, self.link)
        self.group = None
        return found

    def _join(self, group: Processes, link: Link) -> None:
        spans = of_ranks(group.gather([self.kernels]), PROFILED)
        times, moving = ([], None) if spans is None else spans
        medians = [1e6 * statistics.median(seconds) for seconds in group.gather([self.seconds])]
        sends, floor = link.floor(self.calls, group.size)
        calls, sends, floor_us = (one / PROFILED for one in (len(self.calls), sends, 1e6 * floor))
        self.work["collectives"] = Collectives(calls, sends, floor_us, medians, times, moving).data()

    def checked(self) -> str:
        """Check and time this engine, or a rank of it."""
        commits = [number for number, event in enumerate(self.trace.events) if isinstance(event, Commit)]
        until = commits[CHECKED - 1]
        witness, judged = Witness(until), [self.checkpoint.config.recurrent[0]]
        found = explain_outcome(outcome(
            self.trace, self.checkpoint, self.setting, until=until, layers=judged, also=[witness], admissions=False,
            batches=self.batches, group=self.group,
        ))  # fmt: skip
        if found.verdict.exit is not Exit.AGREED:
            first = found.verdict.findings[:1]
            return f"{where(first[0])}: {first[0].diagnosis}" if first else "nothing was compared"
        del found  # its engine holds a copy of the weights
        gc.collect()
        if self.setting.device.startswith("cuda"):
            torch.cuda.empty_cache()
        held = self._timed(until)
        same = bool(held) and held == {name: witness.found.get(name) for name in held}  # it has finished requests, too
        return "" if same else "the timed engine holds other bits than the checked one"

    def _timed(self, until: int) -> dict[str, str]:
        """Serve all events and return digests of the requests' states at event `until`."""
        header, last = self.trace.header, len(self.trace.events) - 3 * self.alone
        events, rest = self.trace.events[:last], self.trace.events[last:]
        served = engine(self.checkpoint, self.setting, header.room(), num_steps=header.num_steps,
                        batches=self.batches, group=self.group)  # fmt: skip
        player, witness = Player("timed", served), Witness(until)
        drafts = [number for number, event in enumerate(events) if isinstance(event, Draft)]
        profiled, marks, counts = drafts[-PROFILED], list[float](), list[HostCopy]()
        for event in events[: until + 1]:
            player.serve(event)
        witness.living({name: served.state(name) for name in self.names})
        group = self.group
        with nullcontext() if group is None else group.uncompared():
            _wait(self.setting.device)
            begun = time.perf_counter()
            for event in events[until + 1 : profiled]:
                answer = player.serve(event).answer
                if isinstance(answer, Committed):
                    # Reading the answer here would wait for the round that was launched after it.
                    counts.append(HostCopy(answer.accept_lens, immutable=True))
                    if len(counts) > 1:
                        counts[-2].list()
                        marks.append(time.perf_counter())
            self.seconds = [after - before for before, after in zip([begun, *marks], marks, strict=False)][2:]
            _wait(self.setting.device)
            ends = [number for number, event in enumerate(events) if isinstance(event, Commit)][-PROFILED:]
            of_rounds = [events[first : last + 1] for first, last in zip(drafts[-PROFILED:], ends, strict=True)]
            meet = None if group is None else partial(group.add_in_place, torch.ones(FEW, device=self.setting.device))
            if group is not None:
                group.take_calls()
            self.work = by_work([partial(_play, player, one) for one in of_rounds], self.setting.device, meet,
                                self.kernels)  # fmt: skip
        if group is not None:
            (self.calls,) = group.take_calls()
        if rest:
            self.work |= self._alone(player, rest)
        return witness.found

    def _alone(self, player: Player, events: Sequence[AnyEvent]) -> dict[str, float]:
        """Time the proposals of further rounds by themselves: the host waits before and after each draft event."""
        spent = list[float]()
        for event in events:
            if isinstance(event, Draft):
                _wait(self.setting.device)
            begun = time.perf_counter()
            player.serve(event)
            if isinstance(event, Draft):
                _wait(self.setting.device)
                spent.append(time.perf_counter() - begun)
        return {"proposals_us": 1e6 * statistics.median(spent)}

    @property
    def batches(self) -> tuple[int, ...]:
        """Batch sizes for graphs: every round has all requests, so kernels of smaller batches need not be compiled."""
        return (len(self.trace.header.capacity.slots),)

    @property
    def names(self) -> list[str]:
        return [f"r{number}" for number in range(len(self.trace.header.capacity.slots))]


def wrong_collective(group: Processes, setting: Setting) -> str:
    """Compare each kind of collective with what it must make of the ranks' own tensors.

    Checked states do not show a wrong sum, since they are recomputed from the rows that enter a layer. n numbers that
    are added in fp32, in any order, err by at most d = (n - 1) 2^-24 of the sum of their sizes; the cast of a sum s + d
    errs by half a unit in the last place, h (s + d). Squares of 2^-24 are below 2^-20 of that.
    """
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn(ROWS, COLUMNS, generator=generator).to(setting.device, setting.activation)
    parts = [part.double() for part in group.gather([x])]
    due, sizes = sum(parts, torch.zeros_like(parts[0])), sum(map(torch.abs, parts), torch.zeros_like(parts[0]))
    half = torch.finfo(setting.activation).eps / 2
    allowed = (1 + 2**-20) * ((1 + half) * (group.size - 1) * 2**-24 * sizes + half * due.abs())
    if not bool(((group.all_reduce(x).double() - due).abs() <= allowed).all()):
        return "all_reduce over the ranks is not the sum of their tensors"
    if not torch.equal(group.all_gather(x, 1).double(), torch.cat(parts, 1)):
        return "all_gather over the ranks has other tensors than theirs"
    return "" if torch.equal(group.broadcast(x).double(), parts[0]) else "broadcast is not the tensor of rank 0"


def link_of(group: Processes, device: str) -> Link:
    """Measure sums over the ranks of a group. Every rank measures, and all use the figures of rank 0."""
    large = LARGE["card" if device.startswith("cuda") else "tiny"]
    few, many = (seconds_of_a_sum(group, count, device) for count in (FEW, large))
    return Link(*group.gather([(few, SENDS["all_reduce"](group.size) * 4 * large / many)])[0])


def seconds_of_a_sum(group: Processes, count: int, device: str) -> float:
    """The seconds of a sum of so many numbers, the median; on a card in a graph, one right after the other."""
    x = torch.randn(count, device=device)

    def turn() -> None:
        for _ in range(SUMS):
            group.add_in_place(x)

    turn()  # makes the connections
    _wait(device)
    if not device.startswith("cuda"):
        marks = list[float]()
        for _ in range(TURNS + 1):
            turn()
            marks.append(time.perf_counter())
        return statistics.median(after - before for before, after in itertools.pairwise(marks)) / SUMS
    graph = torch.cuda.CUDAGraph()
    group.ends_before(graph)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread that queries events
        turn()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(TURNS + 1)]  # type: ignore[no-untyped-call]
    for event in events:  # the first turn, in which the ranks meet, is not timed
        graph.replay()
        event.record()
    _wait(device)
    times = [float(one.elapsed_time(other)) for one, other in itertools.pairwise(events)]
    return 1e-3 * statistics.median(times) / SUMS


def other_rank(setting: Setting, batch: int, layers: int, group: Processes) -> None:
    """Run another rank in a new process, which makes the same model and trace again."""
    device = torch.device(setting.device)
    ground = Ground(device, setting.activation, {}, UNKNOWN, 0)
    checkpoint = checkpoint_of(ground, layers)
    Run(laid(checkpoint, batch, count_of(ground)), checkpoint, setting)._of_rank(group)


def _play(player: Player, events: tuple[AnyEvent, ...]) -> None:
    for event in events:
        player.serve(event)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def make(ground: Ground, at: At) -> Cell:
    drafter = at.get("drafter", "")
    checkpoint = checkpoint_of(ground, at.get("layers"), drafter)
    count, alone = count_of(ground), ALONE["tiny" if ground.tiny else "card"] if drafter == BLOCK else 0
    trace = laid(checkpoint, at["batch"], count + alone)
    ranks = at.get("ranks", 1)
    read, written = least(checkpoint, at["batch"], ground, middle(count), ranks)
    cell, runs = Cell([], read, written), list[Run]()
    over = {} if ranks == 1 else {"ranks": ranks, "comm": "nccl" if ground.card else "gloo"}
    for name in ground.sets:
        setting = Setting.of(ops=name, device=str(ground.device), dtype=str(ground.dtype).removeprefix("torch."),
                             graphs=ground.card, overlap=True, drafter=drafter or None, **over)  # fmt: skip
        runs.append(Run(trace, checkpoint, setting, alone))
        cell.arms.append(arm_of(name, runs[-1]))
    cell.waits = lambda: 1e-6 * min((run.work["collectives"]["floor_us"] for run in runs if "collectives" in run.work),
                                    default=0.0)  # fmt: skip
    return cell


def count_of(ground: Ground) -> int:
    """The number of rounds of a trace."""
    return CHECKED + PROFILED + 3 + TIMED["tiny" if ground.tiny else "card"]


def middle(rounds: int) -> float:
    """The tokens of a request in the middle round."""
    return PROMPT + rounds * (1 + sum(ACCEPTED) / len(ACCEPTED)) / 2


def arm_of(name: str, run: Run) -> Arm:
    """An arm that times itself, by a run that was checked."""
    samples: Callable[[int], list[float]] = lambda count: run.seconds  # noqa: E731
    return Arm(name, None, run.check, samples=samples, more=lambda: run.work)


def least(
    checkpoint: Checkpoint, batch: int, ground: Ground, length: float, ranks: int = 1
) -> tuple[float, float]:
    """Minimum bytes that a rank reads and writes in a round of requests with `length` tokens."""
    each, config = weights_of(checkpoint, ranks), shards.config_of(checkpoint.config, ranks)
    runs = NUM_STEPS if config.block is None else 1  # of the draft side and its head
    weights = ground.dtype.itemsize * (each["trunk"] + runs * each["draft"] + (runs + 1) * each["head"])
    state = 4.0 * batch * config.value_heads * config.key_dim * config.value_dim * len(config.recurrent)
    drafting = NUM_STEPS if config.block is None else config.block.num_hidden_layers
    attending = len(config.attending) + drafting
    kept = 2 * config.kv_heads * config.head_dim * ground.dtype.itemsize * batch * length * attending
    return weights + state + kept, state


def weights_of(checkpoint: Checkpoint, ranks: int = 1) -> dict[str, int]:
    """The number of weights that a row of the trunk, of the draft head and of the head is multiplied by, on a rank."""
    config, each = checkpoint.config, {"trunk": 0, "draft": 0, "head": 0}
    shapes = expected_shapes(config, FUSED)
    if config.block is not None:  # it drafts, and no MTP layer runs
        shapes = {name: size for name, size in shapes.items() if not name.startswith("mtp.")} | block_shapes(config)
    for name, size in shapes.items():
        head = name == ("model.embed_tokens.weight" if config.tied else "lm_head.weight")
        part = "head" if head else "draft" if name.startswith(("mtp.", PREFIX)) else "trunk"
        if head or "embed_tokens" not in name:
            shard = shards.weight(config, name)
            whole = math.prod(size)
            each[part] += whole if shard is None else whole * shard.part(ranks) // shard.length
    return each


KIND = Kind("a round", cells, make)

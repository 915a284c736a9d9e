"""Rounds with a prompt in each, eagerly and in graphs: a request comes, is prefilled next to windows, and leaves.

The windows and the prompt are one forward. Drafts and commits run in graphs in both arms of an op set on a card; only
that forward differs. Rounds are checked and timed as in `rounds.py`; the checked run counts how many forwards were
replayed, so an arm whose graphs never ran has a finding. The floor has, in addition, the products of all rows of the
forward. Leaves out: rounds without a prompt, and prompts alone (`prefill.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from instep.run.engine_without_comparison import header_of
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.header import Part, Room
from instep.trace.policy import Arrival, Policy
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, AnyEvent, Finish, Forward, Row

from ..bench_types import At, Cell, Ground, Kind, Size
from . import rounds
from .rounds import NUM_STEPS, PAGE, PROMPT, Run, arm_of, checkpoint_of, laid, least, weights_of

ROWS = 64  # the bucket is the next multiple: 250 tokens and 8 windows of 4 are 282 rows, in a graph for 320
CASES: dict[Size, tuple[tuple[int, int, int], ...]] = {  # batch, layers, tokens of the prompt
    "tiny": ((1, 0, 12),), "default": ((8, 32, 250), (32, 32, 250)),
    "full": tuple((batch, layers, tokens) for layers in (8, 32) for batch in (8, 32) for tokens in (60, 250, 1000)),
}  # fmt: skip


def cells(ground: Ground, size: Size) -> Iterator[At]:
    for batch, layers, tokens in CASES[size]:
        yield {"batch": batch, "prompt": tokens, **({"layers": layers} if layers else {})}


def with_prompts(trace: Trace, checkpoint: Checkpoint, batch: int, tokens: int) -> Trace:
    """The rounds of a trace with a request more in each: admitted, prefilled in its forward, and finished."""
    room = trace.header.capacity
    reach, rows = room.max_positions or 0, tokens + batch * (NUM_STEPS + 1)
    pages = len(room.pages) + -(-(tokens + NUM_STEPS + 1) // PAGE)
    wide = Room(tuple(range(1, batch + 2)), tuple(range(1, pages + 1)), PAGE, max(batch * PROMPT, rows), max(
        reach, tokens + NUM_STEPS + 1))  # fmt: skip
    names = [event.request for event in trace.events if isinstance(event, Admit)]
    policy = Policy("prompts", "Rounds with a prompt are timed of an engine that was checked.", wide,
                    tuple(Arrival(name, name, max_new=reach) for name in names), NUM_STEPS, overlap=True)  # fmt: skip
    header, _ = header_of(policy, checkpoint, replay=(Part("plain"),))
    generator, events = torch.Generator().manual_seed(1), list[AnyEvent]()
    for event in trace.events:
        new = f"p{len(events)}"
        if not isinstance(event, Forward) or any(row.kind == "prefill" for row in event.rows):
            events.append(event)
            continue
        *prompt, root = torch.randint(1, checkpoint.config.vocab, (tokens + 1,), generator=generator).tolist()
        # Within draft and commit, so that a slice of rounds is complete.
        events += [Admit(new, tuple(prompt)), Forward((*event.rows, Row(new, "prefill", tokens, root))), Finish(new)]
    return replace(trace, header=header, events=tuple(events))


@dataclass
class PromptRun(Run):
    """One op set on rounds with prompts, which have a slot more than there are requests with windows."""

    @property
    def batches(self) -> tuple[int, ...]:
        slots = len(self.trace.header.capacity.slots)
        return slots - 1, slots

    @property
    def names(self) -> list[str]:
        return [f"r{number}" for number in range(len(self.trace.header.capacity.slots) - 1)]


def make(ground: Ground, at: At) -> Cell:
    checkpoint, batch, tokens = checkpoint_of(ground, at.get("layers")), at["batch"], at["prompt"]
    count = rounds.count_of(ground)
    trace = with_prompts(laid(checkpoint, batch, count), checkpoint, batch, tokens)
    rows = tokens + batch * (NUM_STEPS + 1)
    read, written = least(checkpoint, batch, ground, rounds.middle(count))
    products = 2.0 * rows * weights_of(checkpoint)["trunk"]
    cell = Cell([], read, written, products)
    for name in ground.sets:
        for prompts in (None, str(-(-rows // ROWS) * ROWS)):
            setting = Setting.of(
                ops=name, device=str(ground.device), dtype=str(ground.dtype).removeprefix("torch."), overlap=True,
                graphs=ground.card or prompts is not None, prompt_graphs=prompts,
            )
            label = "prompts run eagerly" if prompts is None else f"in graphs of {prompts} rows"
            cell.arms.append(arm_of(f"{name}, {label}", PromptRun(trace, checkpoint, setting)))
    return cell


KIND = Kind("a round with a prompt", cells, make)

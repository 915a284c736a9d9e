"""The events that a gate checks and times: one short trace, recorded with the reference for some model.

All choices are given, so both arms do the same work: an arm that accepts more does not look faster. Drafts are the
reference's own. The number of accepted drafts is forced: all, none, one, two and so on in turn. Otherwise, with a model
that accepts nothing, a wrong commit would pass and be timed. Leaves out: running them (`cases.py`).
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from instep.run.build_compared_engines import Plan, reference
from instep.run.engine_without_comparison import header_of
from instep.setting import DEFAULTS, Setting
from instep.trace.event_scheduler import drive, recorded
from instep.trace.file import Trace, write
from instep.trace.header import Model, Recording, Room
from instep.trace.policy import Arrival, Policy, read_prompts
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.drafters import BLOCK
from instep_reference.contract.engine import Admit, AnyEvent, Commit, Draft, Finish, Forward
from instep_reference.contract.errors import BadInput

PROMPT_TOKENS = 32  # of every request: two pages and a state that is no longer fresh
PAGE_SIZE = 16
ROUND = (Draft, Forward, Commit)


@dataclass(frozen=True)
class Course:
    """A trace in two parts: `opening` (admissions and prompts), then `rounds` of draft, verify and commit."""

    trace: Trace
    opening: tuple[AnyEvent, ...]
    rounds: tuple[tuple[AnyEvent, ...], ...]

    @classmethod
    def of(cls, trace: Trace) -> "Course":
        events = [event for event in trace.events if not isinstance(event, Finish)]
        begin = next((number for number, event in enumerate(events) if isinstance(event, Draft)), len(events))
        rounds = tuple(tuple(events[at : at + 3]) for at in range(begin, len(events), 3))
        if not rounds or any(tuple(map(type, played)) != ROUND for played in rounds):
            found = "other events" if rounds else "no round"
            raise BadInput(trace.path.name, found=found, expected="prompts, then rounds of draft, forward and commit")
        return cls(trace, tuple(events[:begin]), rounds)

    @property
    def prompts(self) -> dict[str, tuple[int, ...]]:
        """Request -> prompt, in batch order."""
        return {event.request: event.prompt for event in self.opening if isinstance(event, Admit)}


def lay(
    directory: Path, out: Path, *, batch: int, rounds: int, num_steps: int, drafter: str = DEFAULTS.drafter
) -> Course:
    """Record a course for the model in `directory` and write its trace to `out`.

    Prompts are those in the model's folder (`prompts.json`), or random tokens if there are none.
    drafter: its proposals are recorded if it is a block drafter; other drafters are given those of `eagle`
    """
    drafter = BLOCK if drafter == BLOCK else DEFAULTS.drafter
    opened = Checkpoint.open(directory, drafter)
    width, reach = num_steps + 1, PROMPT_TOKENS + (rounds + 1) * (num_steps + 1)
    pages = batch * -(-reach // PAGE_SIZE)
    room = Room(tuple(range(batch, 0, -1)), tuple(range(pages, 0, -1)), PAGE_SIZE, batch * max(PROMPT_TOKENS, width),
                reach)
    prompts = _prompts(directory, opened.config.vocab, batch)
    policy = Policy(
        "gate", "A window is verified and committed at full speed, and rightly.", room,
        tuple(Arrival(name, name, max_new=reach) for name in prompts), num_steps, rotate=False, rounds=rounds + 1,
        accept=(num_steps, 0, *range(1, num_steps)),
    )
    header, _ = header_of(policy, opened, model=Model.of(opened, directory, str(directory.resolve())), field="gate",
                          recording=Recording(drafter), directory=directory)
    plan = Plan(opened, header.room(), num_steps, Setting("reference", dtype="float64", drafter=drafter))
    steps = list(drive(policy, prompts, header, reference(plan, plan.setting.activation)))
    trace = write(out, header, [step.event for step in steps], recorded(steps))
    return Course.of(trace)


def _prompts(directory: Path, vocab: int, batch: int) -> dict[str, tuple[int, ...]]:
    """One prompt per request, all equally long: pieces of the model's own prompts, each from another place."""
    file = directory / "prompts.json"
    stored = read_prompts(file).values() if file.is_file() else ()
    long = [prompt for prompt in stored if len(prompt) >= PROMPT_TOKENS]
    sampled = torch.randint(vocab, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()
    found = {}
    for number in range(batch):
        tokens = tuple(sampled[number])
        if long:
            lap, which = divmod(number, len(long))
            begin = min(lap * PROMPT_TOKENS, len(long[which]) - PROMPT_TOKENS)
            tokens = long[which][begin : begin + PROMPT_TOKENS]
        found[f"r{number}"] = tokens
    return found

"""The input of the driver: arrivals of requests, chunk sizes, step counts over time, acceptance, special actions.

A policy and its prompts are JSON files with a strict schema. In the default policy of `instep record` each prompt is a
request, and everything happens in which engines go wrong: two or three requests share the slots, the others wait. Slots
and pages are used again in a shuffled order. Prompts come in chunks, step counts rise, fall and vanish, accepted counts
are ragged because they are forced, and one request is saved and preempted. Leaves out: the events that follow from it
(`event_scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import AnyEvent
from instep_reference.contract.errors import BadInput, bytes_of
from instep_reference.contract.event_facts import FACTS, kind_of
from instep_reference.contract.sampling import Sampling

from .file import decode
from .header import Part, Receiver, Room
from .seeded_coins import SEEDS

if TYPE_CHECKING:
    Action = str
else:
    Action = Literal[tuple(kind_of(event) for event, said in FACTS.items() if said.when)]
import json
from collections.abc import Mapping


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request: its prompt's name, the round of its arrival, its chunk sizes in turn (none: the whole prompt).

    sampling  how its tokens are drawn, with uniforms that follow from the policy's seed; none: argmax
    seed      with `sampling`: its uniforms are SGLang's coins of this seed, its length and the column
              (`seeded_coins.py`), so they depend on no other request. None: they follow from the policy's seed
    behind    an earlier request: its prompt and all tokens that it has chosen by then come before this prompt
    receiver  it arrives at the second engine
    """

    request: str
    prompt: str
    arrive: int = 0
    chunks: tuple[int, ...] = ()
    max_new: int = 32
    sampling: Sampling | None = None
    behind: str = ""
    seed: int | None = None
    receiver: bool = False


class ScheduledAction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A special action, done in the first round from `round` on in which it is legal.

    when  only for an abort and what is refused: between rounds, after the draft, or after the verify
    of    an event that must be refused; the engine gets it in the first round from `round` on in which it is illegal.
          `request` is then the request that is after its draft or verify
    name  the name under which a save keeps the state and a load finds it; the copy that moves or is evicted
    """

    round: int
    do: Action
    request: str = ""
    name: str = ""
    when: Literal["between", "drafted", "verified"] = "between"
    of: AnyEvent | None = None


class Transfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request that moves to the other engine, in the first round from `round` on in which it can.

    It is saved under `name` and offloaded. Then it ends here, enters the other engine, and continues there from the
    fetched copy, which is then evicted. So the name is free, and may be that of a later transfer.
    prefix  its longest tracked prefix moves instead, for other requests: it stays, and the name is that of the prefix
    """

    round: int
    request: str
    name: str = "moved"
    prefix: bool = False


class Steps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From this round on the step count is `num_steps`."""

    round: int
    num_steps: int


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """claim       the sentence that the trace is to prove
    capacity    with a track_interval, chunks end at its multiples, every multiple that a chunk or an accepted path
                reaches is tracked, and an admitted request loads the longest prefix that its prompt begins with. With
                `tracked`, the least recently used prefix leaves the device to make room for another one
    inner       with a track_interval, chunks do not end at its multiples: prefixes are tracked inside them
    lazy        with `tracked`, as SGLang's extra_buffer_lazy: a window that may reach a multiple takes a second slot if
                one is free, and then the older prefix of its request is evicted; if none is, its newest prefix is
                replaced in place. No other prefix makes room for it
    host        the number of prefixes that the host keeps after they left the device, until a request loads them. The
                least recently used one is evicted to make room. 0: a prefix that leaves the device is evicted
    steps       the schedule of step counts;  follow: the engine's own wishes instead, with `lag`
    controller  the controller, if it is not that of SGLang 0.5.12 with `adaptive`. true is the old name of `follow`
    overlap     rounds overlap: a request ends one round after its last token was chosen, and wishes are 1 round late
    accept      forced numbers of accepted drafts, in turn over rounds and requests; none: greedy acceptance. In a tree
                the path turns to each child of a node in turn
    trees       shapes of windows: an entry per round, in turn; in it the parents of every draft, in turn over the
                requests. An empty entry: the draft head's own chains, or trees where the capacity has topk. None: so
                in every round
    widths      of chains: numbers of drafts, in turn over rounds and requests, at most the step count; none: as many
    caps        the most drafts that a request accepts, in turn over rounds and requests, at most as many as its window
                has; none: no caps. A longer path of `accept` is recorded as it is, and every engine cuts it
    own         the drafts that the head proposes are recorded as such: a replay lets each engine propose its own window
    plain       rounds that decode without drafts although the step count is above 0
    rotate      the batch order is rotated by one every round, so that row numbers differ from slots
    rounds      the most rounds; requests that are left then are finished
    receiver    a second engine;  transfers: the requests that move between the two. Requests arrive at the first one,
                if the arrival does not say `receiver`. The fields for step counts are those of the first engine
    """

    name: str
    claim: str
    capacity: Room
    arrivals: tuple[Arrival, ...]
    num_steps: int
    adaptive: dict[str, Any] | None = None
    steps: tuple[Steps, ...] = ()
    controller: Controlled | bool | None = None
    follow: bool = False
    lag: int = 0
    overlap: bool = False
    accept: tuple[int, ...] = ()
    trees: tuple[tuple[tuple[int, ...], ...], ...] = ()
    widths: tuple[int, ...] = ()
    caps: tuple[int, ...] = ()
    deeds: tuple[ScheduledAction, ...] = ()
    plain: tuple[int, ...] = ()
    rotate: bool = True
    stop: int | None = None
    host: int = 0
    own: bool = False
    inner: bool = False
    lazy: bool = False
    seed: int = 0
    rounds: int = 1000
    receiver: Receiver | None = None
    transfers: tuple[Transfer, ...] = ()
    replay: tuple[Part, ...] = (Part("ledger"), Part("plain"))

    def __post_init__(self) -> None:
        if isinstance(self.controller, bool):  # the old name of `follow`
            msgspec.structs.force_setattr(self, "follow", self.follow or self.controller)
            msgspec.structs.force_setattr(self, "controller", None)


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"origin": "from"}):
    """A prompt by name: `text`, of which each character is one byte (latin-1), or `tokens`."""

    name: str
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    origin: str = ""


def read_policy(path: Path) -> Policy:
    policy: Policy = _read(path, Policy)
    rules: list[tuple[str, object, int, int]] = [
        ("arrivals", "none", len(policy.arrivals), 1), ("rounds", policy.rounds, policy.rounds, 1),
        ("accept", policy.accept, min(policy.accept, default=0), 0),
        ("caps", policy.caps, min(policy.caps, default=0), 0),
    ]
    for index, arrival in enumerate(policy.arrivals):
        at = f"arrivals[{index}]"
        rules += [
            (f"{at}.chunks", arrival.chunks, min(arrival.chunks, default=1), 1),
            (f"{at}.max_new", arrival.max_new, arrival.max_new, 1), (f"{at}.arrive", arrival.arrive, arrival.arrive, 0),
        ]
        if arrival.seed is not None and (arrival.sampling is None or not 0 <= arrival.seed < SEEDS):
            raise BadInput(f"{path.name}: {at}.seed", found=arrival.seed,
                           expected="a number from 0 to below 2**63, with `sampling`")
    rules += [(f"{name}[{index}].round", one.round, one.round, 0) for name in ("deeds", "steps", "transfers")
              for index, one in enumerate(getattr(policy, name))]  # fmt: skip
    for field, found, smallest, least in rules:
        if smallest < least:
            raise BadInput(f"{path.name}: {field}", found=found, expected=f"at least {least}")
    for index, deed in enumerate(policy.deeds):
        if (deed.of is None) is (deed.do == "refused"):
            raise BadInput(
                f"{path.name}: deeds[{index}].of",
                found="no event" if deed.of is None else f"an event beside {deed.do}",
                expected='the event that is refused where `do` is "refused", and only there')
    if policy.receiver is None and (policy.transfers or any(arrival.receiver for arrival in policy.arrivals)):
        raise BadInput(f"{path.name}: receiver", found="none", expected="one, as requests move there or arrive there")
    if policy.follow and policy.steps:
        raise BadInput(f"{path.name}: steps", found="a schedule, and wishes to follow", expected="one of them")
    return policy


def one_per_byte(text: str) -> tuple[int, ...]:
    """A text as tokens, for a model whose tokens are bytes."""
    return tuple(text.encode("latin-1"))


def read_prompts(path: Path, encode: Callable[[str], tuple[int, ...]] = one_per_byte) -> dict[str, tuple[int, ...]]:
    """Prompts by name, as tokens; `encode`: how a text becomes tokens."""
    prompts: dict[str, tuple[int, ...]] = {}
    for index, prompt in enumerate(_read(path, tuple[Prompt, ...])):
        if prompt.name in prompts:
            raise BadInput(f"{path.name}: [{index}].name", found=f'"{prompt.name}" again', expected="a different name")
        if (prompt.text is None) == (prompt.tokens is None):
            raise BadInput(f"{path.name}: [{index}]", found="text and tokens" if prompt.text else "neither",
                           expected="either text or tokens")
        try:
            prompts[prompt.name] = prompt.tokens or encode(prompt.text or "")
        except UnicodeEncodeError as error:
            raise BadInput(f"{path.name}: [{index}].text", found=f"character {error.start} is above 255",
                           expected="one character per byte") from None
    return prompts


def _read(path: Path, kind: Any) -> Any:
    return decode(bytes_of(path), kind, path.name, "the fields of a policy or of prompts")


SLOTS = (3, 1, 2)  # at most; slot 0 is reserved, and a row number is no slot
PAGE, CHUNKS, NEW, WIDEST = 16, (64, 3), 24, 3  # positions of a page, tokens of chunks, tokens to say, most drafts
ROUNDS = Steps(4, 3), Steps(8, 0), Steps(10, 3)  # the later changes of the step count
ACCEPT = (1, 0, 3, 2)
EXAMPLE = {"a": (0,) * 100, "b": (0,)}  # prompts by length, for a policy to look at


def usual(prompts: Mapping[str, tuple[int, ...]], drafts: bool = True, rounds: int | None = None) -> Policy:
    """The policy for these prompts.

    drafts: whether there is a drafter; without one, every round decodes
    rounds: the maximum; None: until all requests are complete. With a maximum no request is preempted, because it
            might not resume in time
    """
    names = [*prompts]
    slots = SLOTS[-min(len(names), len(SLOTS)):]
    longest = sorted((len(tokens) for tokens in prompts.values()), reverse=True)[: len(slots)]
    pages = sum(-(-(tokens + NEW + WIDEST + 1) // PAGE) for tokens in longest) + 2 * len(slots)
    deeds = [] if rounds is not None and rounds < 8 else [
        ScheduledAction(2, "save", names[0], name="start"), ScheduledAction(7, "idle")]
    if len(names) > 1 and rounds is None:
        deeds += [ScheduledAction(5, "preempt", names[1]), ScheduledAction(9, "resume", names[1])]
    steps: dict[str, Any] = {"num_steps": 0}
    if drafts:
        steps = {"num_steps": 1, "adaptive": {"candidate_steps": [1, 3]}, "steps": ROUNDS, "accept": ACCEPT}
    if rounds is not None:
        steps["rounds"] = rounds
    return Policy(
        name="usual",
        claim="Requests that arrive, wait and end, in chunks and windows of changing width, get the model's tokens.",
        capacity=Room(slots, (*range(2, pages + 1, 2), *range(1, pages + 1, 2)), PAGE, 2 * CHUNKS[0]),
        arrivals=tuple(Arrival(name, name, arrive=at, chunks=CHUNKS, max_new=NEW) for at, name in enumerate(names)),
        deeds=tuple(deeds), **steps,
    )  # fmt: skip


def example() -> str:
    """The usual policy of two prompts, `a` and `b`, as the text of a file. Missing fields have their defaults."""
    lines = []
    for name, value in msgspec.json.decode(msgspec.json.encode(usual(EXAMPLE))).items():
        several = isinstance(value, list) and isinstance(next(iter(value), None), dict)
        told = ",\n  ".join(map(_said, value)) if several else _said(value)
        if value not in (None, [], "", 0):
            lines.append(f' "{name}": ' + (f"[\n  {told}\n ]" if several else told))
    return "{\n" + ",\n".join(lines) + "\n}"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items()
                 if inner not in (None, [], "") and inner is not False and name != "when"}
    return json.dumps(value)

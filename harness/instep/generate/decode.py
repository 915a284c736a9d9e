"""Prompts through an optimized engine that chooses everything by itself; every event timed, last states kept.

Leaves out: the schedule (`trace/event_scheduler.py`, the only one), and what is made of the times (`rates.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from instep_reference.contract.adaptive_controller_file import AdaptiveFile
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.controllers import Controlled
from instep_reference.contract.engine import AnyEvent, Finish, RequestState
from instep_reference.contract.errors import BadInput
from instep_reference.contract.sampling import Sampling

from ..run.build_compared_engines import candidates
from ..run.engine_without_comparison import engine, header_of
from ..setting import Setting
from ..trace.event_rules import EventRules
from ..trace.event_scheduler import Step, drive
from ..trace.header import Header, Model, Part, Recording, Room
from ..trace.policy import Arrival, Policy
from ..trace.request_table import Standing
from ..watch.batched_host_copies import on_host
from ..watch.observers import LastStates

PAGE_SIZE = 16
CHUNK = 64  # tokens of a prompt that run in one step, next to the windows of others


@dataclass(frozen=True)
class Ask:
    """The request: what to decode, and how.

    prompts   by name, as tokens; `batch` of them at a time, the others as slots become free
    tokens    maximum tokens of a request; stop: the token that ends it earlier
    num_steps drafts per round, the initial number if `adaptive` (a file of SGLang 0.5.12) or `controller` changes it
    kept      requests whose last state is kept for the check
    sampling  how every request chooses; None: argmax.  seed: of the uniforms
    """

    checkpoint: Checkpoint
    setting: Setting
    prompts: Mapping[str, tuple[int, ...]]
    num_steps: int
    adaptive: dict[str, Any] | None = None
    tokens: int = 64
    batch: int = 8
    chunk: int = CHUNK
    stop: int | None = None
    model: Model | None = None
    kept: frozenset[str] = frozenset()
    sampling: Sampling | None = None
    seed: int = 0
    controller: Controlled | None = None

    @cached_property
    def policy(self) -> Policy:
        """Everybody comes at once; room for `batch` of them at their longest."""
        longest = max(map(len, self.prompts.values()), default=0)
        if not longest or self.tokens < 1 or self.batch < 1 or self.chunk < 1:
            found = f"{len(self.prompts)} prompts, {self.tokens} tokens, batches of {self.batch}"
            raise BadInput("generate", found=found, expected="at least one of each")
        widest = max(self._candidates()) + 1
        most = longest + self.tokens + 2 * widest
        pages = self.batch * -(-most // PAGE_SIZE)
        room = Room(
            tuple(range(1, self.batch + 1)), tuple(range(1, pages + 1)), PAGE_SIZE,
            self.batch * max(widest, self.chunk), most,
        )
        arrivals = tuple(
            Arrival(name, name, chunks=(self.chunk,), max_new=self.tokens, sampling=self.sampling)
            for name in self.prompts)
        return Policy(
            "generate", "A free-running engine generates the tokens of the model.", room, arrivals, self.num_steps,
            adaptive=self.adaptive, controller=self.controller,
            follow=self.adaptive is not None or self.controller is not None, rotate=False, stop=self.stop,
            seed=self.seed, rounds=len(self.prompts) * (longest + self.tokens + 1),
        )

    @cached_property
    def header(self) -> Header:
        return header_of(
            self.policy, self.checkpoint, model=self.model, replay=(Part(self.setting.ops),),
            recording=Recording(self.setting.mode, self.setting.dtype), field="generate",
        )[0]

    def _candidates(self) -> tuple[int, ...]:
        file = None if self.adaptive is None else AdaptiveFile.of(self.adaptive)
        return candidates(self.num_steps, file, self.controller)[0]


@dataclass(frozen=True)
class Decoded:
    """The result: complete events, the seconds of each, and the kept states, each from before its finish."""

    ask: Ask
    events: tuple[AnyEvent, ...]
    seconds: tuple[float, ...]
    states: Mapping[str, RequestState]

    @cached_property
    def ended(self) -> Mapping[str, Standing]:
        """Request -> how the trace leaves it, in order of the prompts."""
        rules = EventRules(self.ask.header)
        for event in self.events:
            rules.apply(event)
        ended = {standing.request: standing for standing in rules.table.ended}
        return {name: ended[name] for name in self.ask.prompts}

    def said(self, request: str) -> tuple[int, ...]:
        """Its tokens, without what a last window brought beyond the limit."""
        return self.ended[request].said[: self.ask.tokens]


def decode(ask: Ask) -> Decoded:
    """Run every prompt to its end. On a GPU a first run on a separate engine compiles the kernels."""
    if ask.setting.device.startswith("cuda"):
        _decode(ask)
    return _decode(ask)


def _decode(ask: Ask) -> Decoded:
    header = ask.header
    served = engine(ask.checkpoint, ask.setting, header.room(), **header.steps("adaptive"))
    last = LastStates(served, on_host, ask.kept)
    steps = drive(ask.policy, ask.prompts, header, served, [last], ask.setting.proposer())
    timed = list(_timed(steps, ask.setting.device))
    return Decoded(ask, tuple(step.event for step, _ in timed), tuple(seconds for _, seconds in timed), last.found)


def _timed(steps: Iterator[Step], device: str) -> Iterator[tuple[Step, float]]:
    """Each event with the seconds until its answer was there; a finish, in which states are kept, has none."""
    begun = time.perf_counter()
    for step in steps:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        spent = time.perf_counter() - begun
        yield step, 0.0 if isinstance(step.event, Finish) else spent
        begun = time.perf_counter()

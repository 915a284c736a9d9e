"""The dialect sglang-0.5.12: one average per bracket of batch sizes, and a probe that is judged at once.

Mirrors: `srt/speculative/adaptive_spec_params.py` of SGLang 0.5.12. Differs: there it is one flat file, without 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..contract.adaptive_controller_file import AdaptiveFile, Bracket
from ..contract.controllers import Controlled
from .base import Controller

DEFAULT_STEPS = (1, 3, 7)
SMALLEST_KEY = 1  # a flat file is one bracket, for every batch size


@dataclass(frozen=True)
class Candidates:
    """Step counts that may come into force.

    by_bracket  batch-size key -> sorted, without duplicates, the initial count among them
    maximum     the largest over all brackets; pools are sized for it
    messages    what was inserted, one sentence each
    rules       batch-size key -> the numbers of its controller; empty without a file
    """

    initial: int
    by_bracket: dict[int, tuple[int, ...]]
    maximum: int
    messages: tuple[str, ...] = ()
    rules: dict[int, Bracket] = field(default_factory=dict)

    def bracket(self, batch: int) -> int:
        """Return the key for a batch: the largest not above it; below all keys, the smallest."""
        return max((key for key in self.by_bracket if key <= batch), default=min(self.by_bracket))


def resolve(file: AdaptiveFile | None, initial: int) -> Candidates:
    """Fill in what the file leaves open. Without a file the initial count is the only candidate."""
    if file is None:
        return Candidates(initial, {SMALLEST_KEY: (initial,)}, initial)
    rules = file.by_batch if file.flat is None else {SMALLEST_KEY: file.flat}
    written = {key: set(DEFAULT_STEPS if rule.candidate_steps is None else rule.candidate_steps)
               for key, rule in rules.items()}
    messages = tuple(
        f"adaptive: the initial step count {initial} is not among the candidates {sorted(steps)} "
        f"of bracket {key}; inserted"
        for key, steps in written.items() if initial not in steps
    )
    by_bracket = {key: tuple(sorted(steps | {initial})) for key, steps in written.items()}
    return Candidates(initial, by_bracket, max(map(max, by_bracket.values())), messages, dict(rules))


@dataclass
class Opinion:
    """The state of one bracket's controller: its average, its wish, its counted batches."""

    ema: float
    wish: int
    batches: int = 0


class Brackets(Controller):
    """Wishes for a step count, from the drafts that were accepted. The driver may follow the wish or not."""

    def __init__(self, resolved: Candidates) -> None:
        initial, brackets = resolved.initial, resolved.by_bracket
        super().__init__(initial, [count for counts in brackets.values() for count in counts], resolved.messages)
        self.resolved = resolved
        self.batch = 0
        self.probing = False
        self.opinions = {key: Opinion(float(max(initial - 1, 0)), initial) for key in brackets}

    def wish(self, batch: int | None = None) -> int:
        """Return the wish at a batch size; by default at the size of the last counted batch."""
        return self.opinions[self.resolved.bracket(self.batch if batch is None else batch)].wish

    def set_num_steps(self, num_steps: int) -> None:
        """Put `num_steps` in force. Rising from 0 makes the next commit a probe round."""
        self.probing = num_steps > 0 and (self.probing or self.in_force == 0)
        super().set_num_steps(num_steps)
        self.opinions[self.resolved.bracket(self.batch)].wish = num_steps

    @property
    def slots(self) -> dict[int, tuple[int, float]]:
        return {key: (opinion.wish, opinion.ema) for key, opinion in self.opinions.items()}

    def forwarded(self, decode_rows: int) -> None:
        if self.in_force == 0:
            self.update(decode_rows)

    def committed(self, num_correct_drafts: Sequence[int]) -> None:
        self.update(len(num_correct_drafts), num_correct_drafts)

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        return self.wish()

    def update(self, batch: int, num_correct_drafts: Sequence[int] = ()) -> None:
        """Count one batch: a commit of `batch` requests, or, without counts, a forward of `batch` decode rows."""
        key = self.resolved.bracket(batch)
        rule = self.resolved.rules.get(key)
        if batch == 0 or rule is None:
            return
        opinion, steps, commit = self.opinions[key], self.in_force, len(num_correct_drafts) > 0
        self.batch = batch
        opinion.batches += 1
        if commit and steps > 0:
            mean = sum(num_correct_drafts) / batch
            opinion.ema = (1 - rule.ema_alpha) * opinion.ema + rule.ema_alpha * mean
        late = opinion.batches - rule.warmup_batches
        due = late > 0 and late % rule.update_interval == 0
        probe = late > 0 and commit and self.probing
        self.probing = self.probing and not commit
        if steps == 0 and due:
            opinion.wish = min((step for step in self.resolved.by_bracket[key] if step > 0), default=opinion.wish)
        elif steps > 0 and (due or probe):
            opinion.wish = decide(steps, opinion.ema, self.resolved.by_bracket[key], rule)


def decide(steps: int, ema: float, candidates: tuple[int, ...], rule: Bracket) -> int:
    """Step down while the accepted drafts would fit into fewer steps; else step up while they fill the steps.

    An average that is equal to a threshold steps down (<=) and never up (>).
    """
    stepped_down = False
    while (lower := max((step for step in candidates if step < steps), default=None)) is not None:
        threshold = (lower - 0.5 if lower > 0 else 0.5) + rule.down_hysteresis
        if ema > threshold:
            break
        steps, stepped_down = lower, True
    while not stepped_down and (upper := min((step for step in candidates if step > steps), default=None)) is not None:
        if ema <= steps - 0.5 + rule.up_hysteresis:
            break
        steps = upper
    return steps


def controller(controlled: Controlled, num_steps: int | None, lag: int) -> Brackets:
    assert num_steps is not None, "the contract refuses it"
    return Brackets(resolve(controlled.adaptive_file(), num_steps))

"""Adaptive step counts: the file as written, and the specification, which each side implements separately.

Leaves out every computation. Defaults for candidates, insertion, the choice of a bracket and the controller are written
twice, in `instep_reference.adaptive` and `instep_optimized.adaptive`, from the text below.

The file
  A JSON object with the fields of `Bracket`, or an object of such objects under batch-size keys
  (decimal integers, at least 1). A flat object is one bracket for every batch size.

Candidates, per bracket
  1. `candidate_steps`, or {1, 3, 7} without it; the initial step count is inserted if it is missing,
     and a message reports it (each engine keeps its own in `messages`; the wording is not compared); then sorted,
     without duplicates. 0 may be among them: no speculation.
  2. The bracket of a batch of b requests is the one with the largest key not above b; below all keys,
     the one with the smallest key.
  3. Pools, and the budget that sizes them, take the maximum over all brackets, plus one.
  4. Without a file there is no controller: the initial count is the only candidate and the wish is always
     the count in force. `set_num_steps` may set 0 or any candidate of any bracket. Drafts that form a tree
     are refused (Unsupported) while there is a file.

State
  in_force    the step count in force: the initial one, then the argument of the last `set_num_steps`
  batch       the size of the last counted batch; 0 before the first
  probing     true from a `set_num_steps(n > 0)` while in_force was 0 until the next commit event that is
              counted, or until `set_num_steps(0)`
  per bracket ema (a float, from max(initial - 1, 0)), batches (an int, from 0), wish (from initial)

Counted batches
  A commit event of at least one request is one batch; its size is the number of its requests.
  A forward with at least one decode row, while in_force is 0, is one batch; its size is the number of its
  decode rows. Nothing else counts: not prefill, not verify, not draft, not a decode row while in_force > 0,
  not an event without requests. Empty events change nothing.

A counted batch of size b, in its bracket, in this order (n = in_force throughout)
  1. batch <- b;  batches <- batches + 1.
  2. If it is a commit and n > 0:  ema <- (1 - ema_alpha) * ema + ema_alpha * mean, mean being
     sum(num_correct_drafts) / b in 64-bit floats (this side's own answer, forced or not: what was committed).
     Otherwise the ema is frozen.
  3. due  <- batches > warmup_batches and (batches - warmup_batches) % update_interval == 0.
     probe <- it is a commit, probing is true, and batches > warmup_batches. A commit ends probing.
  4. If n = 0 and due:                wish <- the next candidate above 0 (a probe round), if there is one.
     If n > 0 and (due or probe):     wish <- decide(n, ema).
     Otherwise the wish stays.

decide(n, ema), candidates of this bracket, thresholds in 64-bit floats
  Down: while there is a candidate below n, call the nearest one m: if ema <= m - 0.5 + down_hysteresis
  (for m = 0: ema <= 0.5 + down_hysteresis), n <- m and repeat; otherwise stop.
  Up, only if nothing was stepped down: while there is a candidate above n, call the nearest one m:
  if ema > n - 0.5 + up_hysteresis, n <- m and repeat; otherwise stop. (Up starts from n > 0 always:
  0 is left by a probe round only, which is judged at once, by the same rule, and returns to 0 or stays.)

In the engine
  `set_num_steps(n)`: in_force <- n, probing as above, and the wish of the bracket of `batch` <- n.
  `next_num_steps()`: the wish of the bracket of `batch`. Calling it changes nothing. The driver reads it between
  rounds and applies it with the lag of the trace's header. Until then (it may never apply it) the engine continues
  with in_force. Nothing else touches the controller: not save, load, preempt, resume, finish, abort or idle.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec

from .errors import BadInput

LONGEST_KEY = 9  # digits of a batch size

class Bracket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fields of the file for one range of batch sizes. `candidate_steps` is None if the file does not have it."""

    candidate_steps: tuple[int, ...] | None = None
    ema_alpha: float = 0.2
    warmup_batches: int = 10
    update_interval: int = 5
    down_hysteresis: float = -0.25
    up_hysteresis: float = 0.0


class AdaptiveFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file as written: either `flat`, or `by_batch` under batch-size keys. No default candidates are filled in."""

    flat: Bracket | None = None
    by_batch: dict[int, Bracket] = {}

    @classmethod
    def open(cls, path: Path) -> AdaptiveFile:
        """Read a file. Errors name its path."""
        try:
            return cls.read(path.read_bytes(), str(path))
        except OSError as error:
            raise BadInput(str(path), found=error.strerror, expected="a readable file") from None

    @classmethod
    def read(cls, text: str | bytes, field: str = "adaptive") -> AdaptiveFile:
        """Read JSON text. Errors name `field` as the place of the text."""
        try:
            value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, field))
        except (ValueError, RecursionError) as error:
            raise BadInput(field, found=f"text that does not parse ({error})", expected="JSON") from None
        return cls.of(value, field)

    @classmethod
    def of(cls, value: Any, field: str = "adaptive") -> AdaptiveFile:
        """Read parsed JSON."""
        if not isinstance(value, dict):
            raise BadInput(field, found=type(value).__name__, expected="an object")
        if not value or not all(isinstance(inner, dict) for inner in value.values()):
            return cls(flat=_bracket(value, field))
        return cls(by_batch={_batch(key, field): _bracket(inner, f"{field}.{key}") for key, inner in value.items()})

    def written(self) -> dict[str, Any]:
        """Convert back to plain JSON values."""
        if self.flat is not None:
            return dict(msgspec.to_builtins(self.flat))
        return {str(batch): msgspec.to_builtins(bracket) for batch, bracket in self.by_batch.items()}


def _bracket(value: dict[str, Any], field: str) -> Bracket:
    try:
        bracket = msgspec.convert(value, Bracket)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$")
        expected, _, found = text.partition(", got ")
        place = f"{field}{where.rstrip('`')}"
        if not found:
            raise BadInput(place, found=text, expected=f"fields among {', '.join(Bracket.__struct_fields__)}") from None
        raise BadInput(place, found=found, expected=expected.removeprefix("Expected ")) from None
    _within(bracket, field)
    return bracket


def _within(bracket: Bracket, field: str) -> None:
    """Check the ranges of values. They are not in the schema, because its messages would be less clear."""
    steps = bracket.candidate_steps
    rules = (
        ("candidate_steps", steps, steps is None or (len(steps) > 0 and min(steps) >= 0), "step counts of at least 0"),
        ("ema_alpha", bracket.ema_alpha, 0 < bracket.ema_alpha <= 1, "a number above 0 and at most 1"),
        ("warmup_batches", bracket.warmup_batches, bracket.warmup_batches >= 0, "at least 0"),
        ("update_interval", bracket.update_interval, bracket.update_interval >= 1, "at least 1"),
        ("down_hysteresis", bracket.down_hysteresis, math.isfinite(bracket.down_hysteresis), "a finite number"),
        ("up_hysteresis", bracket.up_hysteresis, math.isfinite(bracket.up_hysteresis), "a finite number"),
    )
    for name, found, holds, expected in rules:
        if not holds:
            raise BadInput(f"{field}.{name}", found=found, expected=expected)


def _batch(key: str, field: str) -> int:
    if not (key.isascii() and key.isdigit() and not key.startswith("0") and len(key) <= LONGEST_KEY):
        raise BadInput(f"{field}.{key}", found=repr(key), expected="a batch size of at least 1 as key")
    return int(key)


def _unique(pairs: list[tuple[str, Any]], field: str) -> dict[str, Any]:
    """Refuse a key that occurs twice. JSON allows it, and the parser would silently take the last one."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(f"{field}.{key}", found=f"{keys.count(key)} times", expected="once")
    return dict(pairs)

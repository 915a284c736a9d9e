"""Controllers of the step count: the dialects, and the rules that each side implements separately.

Leaves out every computation. Start values, routing, averages and decisions are written twice, in
`instep_reference.controllers` and `instep_optimized.controllers`, from the text below. The files are read by
`contract/adaptive_controller_file.py`.

A controller
  Both sides make one with `controller(controlled, num_steps, file, lag)`. `controlled` is None for the dialect
  sglang-0.5.12 with `file`, or without any controller if `file` is None, too. `num_steps` is the initial count; None:
  the dialect's own, if it has one. `lag` is the number of rounds by which results are late (1 where rounds overlap).
  candidates  every count that may ever come into force, with 0 and the initial count, sorted, without duplicates.
              Pools, and the budget that sizes them, have room for the largest one plus one.
  initial     the count in force at the beginning
  messages    sentences about counts that were inserted; the wording is not compared
  slots       batch-size key -> (current count or wish, average), for tests; empty if the dialect has none
  set_num_steps(n)            n is in force from now on: a candidate, or 0
  forwarded(decode_rows)      a forward with at least one row was served; that many of its rows were decode rows
  committed(correct_drafts)   a commit was served; one number of accepted drafts per request, as committed
                              (forced or not), in batch order. Without requests nothing happens.
  next_num_steps(batch, scheduled)  the wish for the round that comes. Calling it changes nothing.
  Nothing else touches a controller: not save, load, preempt, resume, finish, abort or idle.

The wish
  `batch` is the number of requests that decode or verify in the round that comes, `scheduled` the number of requests
  that have rows in it, prompts included. The driver knows both when it plans the round. It asks once per round, and
  only if the number that the dialect uses is above 0 (sglang-0.5.12 and constant use none). It puts the wish in force
  `wish_delay` rounds later. Until then (it may never do so) the engine continues with the count in force.
  After an event the harness asks both sides with the same numbers, taken from the trace alone: `batch` is the number of
  requests whose root is known and that hold a slot (also between draft and commit), `scheduled` is that number plus
  the requests that are in their prompt, or waiting for it, and hold a slot. So the two wishes can be compared after
  every event. Both may be 0, and a controller must answer then, too.

Counted batches
  A commit event of at least one request is one batch; its values are the accepted drafts of its requests.
  A forward with at least one decode row, while 0 is in force, is one batch; its values are as many zeros.
  Nothing else counts: not prefill, not verify, not draft, not a decode row while more than 0 is in force.
  The dialects with slots process a batch late. Number the forwards with at least one row 1, 2, 3 .. The batch of a
  commit belongs to the last forward, the batch of decode rows to its own forward k. With lag 0 a batch is processed at
  once. With lag L > 0 it is processed at forward k + L, before anything of that forward is counted, and batches are
  processed in order. So the released overlapped loop: round r is launched, then the results of round r - 1 are
  processed, and a decision that they lead to acts from round r + 1 on. Whether a forward counts as a batch, and its
  values, are fixed when the forward is served; the average and the decision use the state of the slot when it is
  processed. (The first results after a rise from 0 are zeros of a round at 0, and they are averaged.)
  The other dialects process every batch at once, or none.

sglang-0.5.12: one flat file. The release is extended by brackets of batch sizes and by 0 steps, so the two agree for
flat files with at least two counts, all above 0, and `down_hysteresis` <= `up_hysteresis`. wish_delay: the lag.
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
    `next_num_steps(batch, scheduled)`: the wish of the bracket of the last counted batch; both numbers are ignored.

sglang-0.5.14: slots (`srt/speculative/adaptive_spec_params.py` of SGLang 0.5.14 to 0.5.23). wish_delay: 0.
  Start
    U is the sorted union of the counts of all slots. `num_steps` None: U[len(U) // 2]. Otherwise `num_steps` must be in
    U (`Controlled.check` refuses it).
    Each slot has its counts c, sorted, without duplicates. Nothing is inserted.
    current <- the initial count if it is in c, else c[len(c) // 2];  ema <- current - 1 as a float;  n <- 0.
  Routing of a batch of b requests (also b = 0)
    If `captured` is not empty: b <- the smallest captured size that is >= b; if there is none, b stays.
    Then the slot with the largest key <= b; if there is none, the slot with the smallest key.
  A processed batch of b values, in the slot to which b routes, in this order, in 64-bit floats
    1. If current > 0: ema <- (1 - ema_alpha) * ema + ema_alpha * mean, mean being sum(values) / b.
    2. n <- n + 1. Stop if n <= warmup_batches, or (n - warmup_batches) % update_interval != 0.
    3. Decide, with old = current and i = the index of old in c.
       old = 0: i <- min(i + 1, the last index). If c[i] > 0 and ema < 0: ema <- c[i] - 1 as a float. current <- c[i].
       No other rule: the probe lasts until the next decision of the slot, which judges it as any other count.
       old > 0: down: while i > 0 and ema <= t + down_hysteresis, t being 0.5 if c[i - 1] is 0, else c[i - 1] - 0.5:
       i <- i - 1. Up, only if nothing was stepped down: while there is an index i + 1 and
       ema > c[i] - 0.5 + up_hysteresis: i <- i + 1.
       Ceiling, only if ceiling_coeff > 0: C = max(1, ceil(ema * ceiling_coeff)); if c[i] > C and c[i] <= old:
       while i > 0 and c[i] > C: i <- i - 1. (So the ceiling may stop or lower, but never prevents a rise.)
       current <- c[i].
  Sums are taken from left to right: c[i - 1] - 0.5 + down_hysteresis is (c[i - 1] - 0.5) + down_hysteresis.
  `set_num_steps` changes no slot: a slot keeps its current count while others are in force, and when it is entered.
  The wish is the current count of the slot to which `batch` routes.

sglang-0.5.13: as sglang-0.5.14, with three differences (SGLang 0.5.13). wish_delay: 0.
  Counts are at least 1, so there is no probe. The up loop runs in any case, also after steps down. The default file is
  another one. (The engine's 0, which is always legal, is no count of a slot: its batches of zeros are averaged.)

vllm-table: the count by the number of scheduled requests (`v1/spec_decode/dynamic/utils.py` of vLLM 0.33). No batch
counts. wish_delay: 1, whatever the lag: the count is the number of drafts proposed in a step, and the windows of the
next step have them.
  `table` has entries (from, to, K), both ends included. The wish is K of the entry that includes `scheduled`; if there
  is none, K of the entry with the largest `from` <= `scheduled`; for 0 that of 1. It is at most
  `num_speculative_tokens`. `num_steps` None: `num_speculative_tokens`.

constant: the initial count, always. wish_delay: 0. `num_steps` must be given.

Trees: drafts that form a tree are refused (Unsupported) while there is a controller other than constant.
"""

from typing import Any

import msgspec

from .adaptive_controller_file import DEFAULT_FILES, FEWEST, FLAT, RELEASES, AdaptiveFile, Dialect
from .adaptive_controller_file import DIALECTS as DIALECTS
from .errors import BadInput

NEWEST = "0.5.23"


class Controlled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The controller of a trace, or of an engine. A dialect refuses the fields that it does not use.

    captured  batch sizes of captured decode graphs, in ascending order (slots); none: there are no decode graphs
    file      the adaptive file as written; None: the default file of the release
    defaults  the SGLang release whose default file is meant (sglang-0.5.14); None: 0.5.23
    table     (from, to, number of drafts), as in vLLM's `num_speculative_tokens_per_batch_size`
    num_speculative_tokens  the largest number of drafts (vllm-table)
    """

    dialect: Dialect
    captured: tuple[int, ...] = ()
    file: dict[str, Any] | None = None
    defaults: str | None = None
    table: tuple[tuple[int, int, int], ...] = ()
    num_speculative_tokens: int | None = None

    @property
    def varies(self) -> bool:
        """Whether the step count may change."""
        return self.dialect != "constant"

    def wish_delay(self, lag: int) -> int:
        """Return after how many rounds a wish comes into force."""
        return {FLAT: lag, "vllm-table": 1}.get(self.dialect, 0)

    def adaptive_file(self, field: str = "controller") -> AdaptiveFile | None:
        """Read the file, or the default file of the release. None: the dialect has no file."""
        if self.dialect != FLAT and self.dialect not in FEWEST:
            return None
        written = self.file
        if written is None:
            release = self.defaults or (NEWEST if self.dialect == "sglang-0.5.14" else self.dialect.rpartition("-")[2])
            written = DEFAULT_FILES[RELEASES[release][1]]
        return AdaptiveFile.of(written, self.dialect, f"{field}.file")

    def check(self, num_steps: int | None, field: str = "controller") -> None:
        """Refuse fields that contradict each other or the initial count."""
        slots, table = self.dialect in FEWEST, self.dialect == "vllm-table"
        known = [release for release, (dialect, _) in RELEASES.items() if dialect == self.dialect == "sglang-0.5.14"]
        most = self.num_speculative_tokens
        rules: tuple[tuple[str, object, bool, str], ...] = (
            ("captured", self.captured, slots or not self.captured, f"no sizes with {self.dialect}"),
            ("captured", self.captured, list(self.captured) == sorted({n for n in self.captured if n > 0}),
             "different sizes of at least 1, in ascending order"),
            ("file", "a file", self.file is None or slots or self.dialect == FLAT, f"none with {self.dialect}"),
            ("defaults", self.defaults, self.defaults is None or (self.defaults in known and self.file is None),
             f"one of {', '.join(known)}, without a file" if known else f"none with {self.dialect}"),
            ("table", self.table, table or not self.table, f"none with {self.dialect}"),
            ("table", self.table, not table or _table(self.table),
             "entries (from, to, drafts) without overlap, the first from 1, drafts of at least 0"),
            ("num_speculative_tokens", most, (most is not None and most > 0) if table else most is None,
             "at least 1" if table else f"none with {self.dialect}"),
        )
        for name, found, holds, expected in rules:
            if not holds:
                raise BadInput(f"{field}.{name}", found=found, expected=expected)
        file = self.adaptive_file(field)
        counts = sorted({n for slot in file.slots.values() for n in slot.candidate_steps}) if file else []
        if num_steps is None:
            if self.dialect in (FLAT, "constant"):
                raise BadInput("num_steps", found="none", expected=f"the initial step count of {self.dialect}")
        elif counts and num_steps not in counts:
            raise BadInput("num_steps", found=num_steps, expected=f"one of {counts}, the counts of the slots")
        elif table and not 0 <= num_steps <= (most or 0):
            raise BadInput("num_steps", found=num_steps, expected=f"0 to {most}, num_speculative_tokens")


def _table(entries: tuple[tuple[int, int, int], ...]) -> bool:
    """Whether the ranges are as vLLM requires them. Gaps are allowed, and the order is not important."""
    last = 0
    for first, final, drafts in sorted(entries):
        if first <= last or final < first or drafts < 0:
            return False
        last = final
    return bool(entries) and min(entries)[0] == 1

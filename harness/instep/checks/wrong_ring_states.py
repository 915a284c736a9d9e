"""Wrong states of engines that keep updates and replay them.

Such an engine keeps a token's key k, decay and update u, and replays it as S <- decay S + k u^T. Each of the three may
be that of another token, and the update may have been computed from another state.

An engine may decide with the last window whether a ring must be folded. If the next window is wider, its last tokens do
not fit: they are not stored, or older tokens are lost. Such states depend on many earlier tokens, so there are hundreds
of them. They are computed only to name a state that is known to be wrong.
Leaves out: mistakes that need no kept update, and the table of all wrong states (`wrong_state_bank.py`).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..finding_problem import Mistake, NamedMistake, WrongContent
from ..oracle.miscounted_states import joined, lacking_oldest
from ..oracle.reordered_arithmetic import in_two_parts
from ..oracle.storage_rounding import rounded
from .wrong_state_inputs import Scene, States, Wrong, add, fade, step, update

# A detail of the sentence, the number of tokens, and the wrong update [HV, V] of each.
Updates = Iterable[tuple[str, int, Callable[[int], torch.Tensor]]]
Change = Callable[[torch.Tensor], torch.Tensor]


class WrongUpdate(NamedTuple):
    """A mistake in kept updates.

    kept    its sentence for the updates; added: for a state to which the last one was added, or, if they are `many`,
            as many as there are
    wrong   the updates that it leaves for a window
    least   fewest committed tokens of a state that differs; rejected: only if a token was rejected
    """

    name: str
    kept: str
    added: str
    wrong: Callable[[Scene], Updates]
    many: bool = False
    least: int = 1
    rejected: bool = False

    def states(self, scene: Scene) -> Iterator[torch.Tensor | tuple[str, torch.Tensor] | Wrong]:
        if not scene.kept or scene.count < self.least or (self.rejected and scene.count == len(scene.updates)):
            return
        for detail, tokens, wrong in self.wrong(scene):
            updates, begin = scene.updates.clone(), 0 if self.many else scene.count - 1
            for t in range(begin, min(scene.count, tokens)):
                updates[t] = wrong(t)
            yield detail, scene.again(scene.after(begin), updates=updates, begin=begin)


def _made(scene: Scene, state_of: Callable[[int], torch.Tensor], decays: bool = True) -> Updates:
    """Each update is computed from another state."""
    gates = scene.log_decay if decays else torch.zeros_like(scene.log_decay)
    return [("", len(scene.k), lambda t: update(
        state_of(t), scene.k[t], scene.v[t], gates[t], scene.beta[t], scene.recalls))]


def _of_token(scene: Scene, by: int) -> Updates:
    return [("", len(scene.k), scene.updates.roll(-by, 0).__getitem__)]


def _without_beta(scene: Scene) -> Updates:
    """The window itself ran with the right ones."""
    lacking = scene.updates / scene.beta[..., None]
    return [("", len(lacking), lacking.__getitem__)] if bool(lacking.isfinite().all()) else []


def _older(scene: Scene) -> Updates:
    return [] if scene.older is None else [("", len(scene.older), scene.older.__getitem__)]


def _older_at_last(scene: Scene) -> Updates:
    return _older(scene) if scene.older is not None and scene.count <= len(scene.older) else []


def _of_another(scene: Scene) -> Updates:
    """Updates are kept or read by batch row instead of slot."""
    return [(whose, len(theirs), theirs.__getitem__) for whose, theirs in scene.theirs]


UPDATES = (
    WrongUpdate("update-of-the-token-after", "is that of the token after",
                "adds the update of the first rejected token, not that of the last accepted one",
                lambda scene: _of_token(scene, 1), rejected=True),
    WrongUpdate("update-of-the-token-before", "is that of the token before",
                "adds the update of the token before, not that of the last one",
                lambda scene: _of_token(scene, -1), least=2),
    WrongUpdate("updates-of-the-previous-step", "is that of the previous step",
                "adds the updates of the previous step along the keys of this one", _older, many=True),
    WrongUpdate("update-of-the-previous-step", "", "adds an update of the previous step, not that of the last token",
                _older_at_last, least=2),
    WrongUpdate("update-of-another-request", "is that {}", "adds the updates {}", _of_another, many=True),
    WrongUpdate("update-before-the-token-before", "was made from the state before the token before",
                "adds an update that was made from the state before the token before",
                lambda scene: _made(scene, lambda t: scene.after(max(t - 1, 0))), least=2),
    WrongUpdate("updates-before-the-step", "was made from the state before the window",
                "adds updates that were all made from the state before the step",
                lambda scene: _made(scene, lambda _: scene.base), many=True, least=2),
    WrongUpdate("updates-without-beta", "lacks its beta", "adds updates that lack their beta", _without_beta,
                many=True),
    WrongUpdate("update-before-the-decay", "was made before the state decayed",
                "adds an update that was made before the state decayed",
                lambda scene: _made(scene, scene.after, decays=False)),
)  # fmt: skip
VALUE = NamedMistake("value-for-the-update", "is the value, not the update")


def wrong_updates(scene: Scene) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """The updates [T, HV, V] that known mistakes keep for a window."""
    yield VALUE.known(), scene.v
    for one in UPDATES:
        for detail, tokens, wrong in one.wrong(scene) if one.kept and len(scene.k) >= one.least else ():
            if tokens == len(scene.k):
                yield NamedMistake(one.name, one.kept).known(detail), torch.stack([wrong(t) for t in range(tokens)])


def _again(least: int, **changed: Change) -> Callable[[Scene], Iterator[torch.Tensor]]:
    """The tokens of a window are run again with other keys, decays or updates."""

    def states(scene: Scene) -> Iterator[torch.Tensor]:
        if scene.kept and scene.count >= least:
            own = {"k": scene.k, "log_decay": scene.log_decay, "updates": scene.updates}
            given: dict[str, Any] = {name: change(own[name]) for name, change in changed.items()}
            yield scene.again(scene.base, **given)

    return states


def _shifted(least: int, name: str) -> States:
    """By one token, cyclically in the window."""

    def states(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("after", state) for state in _again(least, **{name: lambda x: x.roll(-1, 0)})(scene))
        yield from (("before", state) for state in _again(least, **{name: lambda x: x.roll(1, 0)})(scene))

    return states


def _from_the_second(scene: Scene) -> Iterator[torch.Tensor]:
    """The replay starts one entry too late: without the first accepted token, with the first rejected one."""
    if scene.count < len(scene.k):
        yield from _again(1, **dict.fromkeys(("k", "log_decay", "updates"), lambda x: x.roll(-1, 0)))(scene)


def _with_their_decays(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
    """Decays are kept or read by batch row instead of slot."""
    for whose, decays in scene.their_decays if scene.kept else ():
        if len(decays) >= scene.count and decays.shape[1:] == scene.log_decay.shape[1:]:
            yield whose, scene.again(scene.base, log_decay=decays)


def _written_first(scene: Scene) -> Iterator[torch.Tensor]:
    """Each token is added before the decay, not after it."""
    if scene.kept:
        state = scene.base
        for t in range(scene.count):
            added = add(state, scene.k[t], torch.zeros_like(scene.log_decay[t]), scene.updates[t])
            state = fade(added, scene.log_decay[t])
        yield state


def _parts(
    x: torch.Tensor, dtype: torch.dtype, shown: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The two parts of numbers in a ring. shown: the sums of the parts; they do not tell a high part that is a tie."""
    high, whole = rounded(x, dtype), in_two_parts(x, dtype) if shown is None else shown
    near = rounded(whole, dtype)
    high = torch.where((whole - high).abs() <= (whole - near).abs(), high, near)
    return high, whole - high


def _cut(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round towards zero."""
    _, exponent = torch.frexp(x.abs().clamp_min(torch.finfo(dtype).tiny))
    unit = torch.ldexp(torch.full_like(x, torch.finfo(dtype).eps / 2), exponent)
    return (x / unit).trunc() * unit


# High and low parts [T, HV, ..] of a window's tokens, and their dtype -> the sums that a mistake leaves, each with the
# detail that fills the second {} of its sentence, if it has one.
Sums = Callable[[torch.Tensor, torch.Tensor, torch.dtype], Iterable[tuple[str, torch.Tensor]]]
TWO_PARTS: tuple[Mistake[Sums], ...] = (
    Mistake("low-parts-left-out", "{} without low parts", lambda high, low, dtype: [("", high)]),
    Mistake("low-parts-subtracted", "{} with low parts subtracted", lambda high, low, dtype: [("", high - low)]),
    Mistake("low-parts-added-twice", "{} with low parts added twice", lambda high, low, dtype: [("", high + 2 * low)]),
    Mistake("low-parts-alone", "{} without high parts", lambda high, low, dtype: [("", low)]),
    Mistake("high-parts-twice", "{} with high parts in place of low parts", lambda high, low, dtype: [("", 2 * high)]),
    Mistake("low-parts-of-another-token", "{} with the low parts of the token {}", lambda high, low, dtype: [
        (which, high + low.roll(by, 0)) for which, by in (("before", 1), ("after", -1)) if len(low) > 1]),
    Mistake("low-parts-of-another-head", "{} with the low parts of another head",
            lambda high, low, dtype: [("", high + low.roll(by, 1)) for by in (1, -1)]),
    Mistake("high-parts-cut-off", "{} with high parts that are cut off towards zero",
            lambda high, low, dtype: [("", _cut(high + low, dtype) + low)]),
)  # fmt: skip
OF_ANOTHER_REQUEST = NamedMistake("low-parts-of-another-request", "is kept with the low parts {}")
NARROW_DECAYS = NamedMistake("run-again-with-narrow-decays", "was run again with decays in {}")


def wrong_parts(
    scene: Scene, dtype: torch.dtype, shown: torch.Tensor | None = None, *, updates: bool = False
) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """Yield what a mistake in one part of the keys and updates of a ring leaves: states, or updates [T, HV, V].

    shown: the updates [T, HV, V] that the subject has shown, as its ring has them; None: those of the scene
    """
    if not scene.kept:
        return
    if shown is not None and shown.shape != scene.updates.shape:
        shown = None
    keys, mine = _parts(scene.k, dtype), _parts(scene.updates, dtype, shown)
    for mistake in TWO_PARTS:
        for (detail, k), (_, changed) in zip(*(mistake.wrong(*parts, dtype) for parts in (keys, mine)), strict=True):
            if updates:
                yield mistake.known("is kept", detail), changed
                continue
            for which, along, added in (("keys", k, mine[0] + mine[1]), ("updates", keys[0] + keys[1], changed),
                                        ("keys and updates", k, changed)):  # fmt: skip
                state = scene.again(scene.base, k=along, updates=added)
                yield mistake.known(f"was run again from {which}", detail), state
    for whose, theirs in scene.theirs if updates else ():
        if len(theirs) == len(scene.updates):
            yield OF_ANOTHER_REQUEST.known(whose), mine[0] + _parts(theirs, dtype)[1]
    if not updates:
        decays = rounded(scene.log_decay.exp(), dtype)
        state = scene.again(scene.base, k=keys[0] + keys[1], updates=mine[0] + mine[1], log_decay=decays.log())
        yield NARROW_DECAYS.known(str(dtype).removeprefix("torch.")), state


SPLIT = (*TWO_PARTS, OF_ANOTHER_REQUEST, NARROW_DECAYS)
RUN_AGAIN: tuple[Mistake[States], ...] = (
    *(Mistake(one.name, one.added, one.states) for one in UPDATES),
    # for one token the same as without the decay of the last token
    Mistake("run-again-without-decay", "was run again without decay", _again(2, log_decay=torch.zeros_like)),
    Mistake("run-again-decayed-twice", "was run again with every decay twice", _again(2, log_decay=lambda x: 2 * x)),
    Mistake("run-again-with-other-decays", "was run again with the decays of the tokens {}", _shifted(1, "log_decay")),
    Mistake("run-again-along-other-keys", "was run again along the keys of the tokens {}", _shifted(2, "k")),
    Mistake("run-again-with-decays-of-another-request", "was run again with the decays {}", _with_their_decays),
    Mistake("run-again-in-reverse-decays", "was run again with the decays of the tokens in the opposite order",
            _again(3, log_decay=lambda x: x.flip(0))),
    # for one token the same as the update of a rejected token
    Mistake("run-again-with-other-updates", "was run again with the updates of the tokens {}", _shifted(2, "updates")),
    Mistake("run-again-written-first", "was run again so that each token is written before the state decays",
            _written_first),
    Mistake("run-again-from-the-second", "was run again from the second token on, up to the first rejected one",
            _from_the_second),
)  # fmt: skip


OLDEST_INSTEAD = NamedMistake(
    "oldest-of-a-ring-instead", "has the {} of a ring of {} entries in place of the window's last{}")


def overfull(scene: Scene) -> Iterator[Wrong]:
    """All wrong states of this file."""
    if scene.recent and scene.verb == "accepted":
        yield from _replaced_by_oldest(scene)
        for known, state in lacking_oldest(scene.base, scene.recent):
            yield from (Wrong(known, carried) for carried in scene.carried(state))
    yield from (Wrong(known, state) for known, state in scene.later())
    yield from (Wrong(known, carried) for known, state in scene.stale() for carried in scene.carried(state))


def _replaced_by_oldest(scene: Scene) -> Iterator[Wrong]:
    """The window's last tokens are not stored: their entries still hold the tokens that are one ring older."""
    recent, mine = joined(scene.recent), (scene.k, scene.v, scene.log_decay, scene.beta, scene.updates)
    k, v, log_decay, beta, updates = (torch.cat((x, y[: scene.count])) for x, y in zip(recent, mine, strict=True))
    end = len(k)
    for size in range(max(2, len(scene.k)), end):
        for many in range(1, min(scene.count, end - size) + 1):
            computed = replayed = scene.after(scene.count - many)
            for t in range(end - many - size, end - size):
                computed = step(computed, k[t], v[t], log_decay[t], beta[t], scene.recalls)
                replayed = add(replayed, k[t], log_decay[t], updates[t])
            known = OLDEST_INSTEAD.known(_tokens(many), size, " one" if many == 1 else f" {many}")
            yield from (Wrong(known, state) for state in (computed, replayed))


def unstored_updates(scene: Scene) -> Iterator[tuple[WrongContent, torch.Tensor]]:
    """Mistakes, and the updates [T, HV, V] that a ring without room for the window's last tokens holds for it."""
    if not scene.recent:
        return
    recent, width = joined(scene.recent)[-1], len(scene.updates)
    both = torch.cat((recent, scene.updates))
    for size in range(max(2, width), len(both)):
        for many in range(1, min(width, len(both) - size) + 1):
            end = len(both) - size
            kept = torch.cat((scene.updates[: width - many], both[end - many : end]))
            yield OLDEST_INSTEAD.known(_tokens(many), size, ""), kept


def _tokens(many: int) -> str:
    return "oldest token" if many == 1 else f"{many} oldest tokens"

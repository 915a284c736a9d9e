"""Wrong states of engines that keep updates and replay them.

Such an engine keeps a token's key k, decay and update u, and replays it as S <- decay S + k u^T. Each of the three may
be that of another token, and the update may have been computed from another state. Leaves out: mistakes that need no
kept update, and the table of all wrong states (`wrong_state_bank.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from ..finding_problem import Mistake, NamedMistake, WrongContent
from .wrong_state_inputs import Scene, States, Wrong, add, update

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
    return [("", len(scene.k), lambda t: update(state_of(t), scene.k[t], scene.v[t], gates[t], scene.beta[t]))]


def _of_token(scene: Scene, by: int) -> Updates:
    return [("", len(scene.k), scene.updates.roll(-by, 0).__getitem__)]


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


def _written_first(scene: Scene) -> Iterator[torch.Tensor]:
    """Each token is added before the decay, not after it."""
    if scene.kept:
        state = scene.base
        for t in range(scene.count):
            decay = scene.log_decay[t].exp()[:, None, None]
            state = decay * add(state, scene.k[t], torch.zeros_like(scene.log_decay[t]), scene.updates[t])
        yield state


RUN_AGAIN: tuple[Mistake[States], ...] = (
    *(Mistake(one.name, one.added, one.states) for one in UPDATES),
    # for one token the same as without the decay of the last token
    Mistake("run-again-without-decay", "was run again without decay", _again(2, log_decay=torch.zeros_like)),
    Mistake("run-again-decayed-twice", "was run again with every decay twice", _again(2, log_decay=lambda x: 2 * x)),
    Mistake("run-again-with-other-decays", "was run again with the decays of the tokens {}", _shifted(1, "log_decay")),
    Mistake("run-again-along-other-keys", "was run again along the keys of the tokens {}", _shifted(2, "k")),
    # for one token the same as the update of a rejected token
    Mistake("run-again-with-other-updates", "was run again with the updates of the tokens {}", _shifted(2, "updates")),
    Mistake("run-again-written-first", "was run again so that each token is written before the state decays",
            _written_first),
    Mistake("run-again-from-the-second", "was run again from the second token on, up to the first rejected one",
            _from_the_second),
)  # fmt: skip

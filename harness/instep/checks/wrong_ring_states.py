"""Wrong states of engines that keep updates and replay them.

Such an engine keeps a token's key k, decay and update u, and replays it as S <- decay S + k u^T. Each of the three may
be that of another token, and the update may have been computed from another state. Leaves out: mistakes that need no
kept update, and the table of all wrong states (`wrong_state_bank.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .wrong_state_inputs import Scene, Wrong, add, update


def update_of_a_rejected_token(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count == len(scene.updates):
        return []
    return [_last(scene, "adds the update of the first rejected token, not that of the last accepted one",
                  scene.updates[scene.count])]  # fmt: skip


def update_of_the_token_before(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []
    before = scene.updates[scene.count - 2]
    return [_last(scene, "adds the update of the token before, not that of the last one", before)]


def update_of_the_previous_step(scene: Scene) -> list[Wrong]:
    """Entries have the content of the previous round: all of them, or only the last one."""
    if not scene.kept or scene.older is None:
        return []
    wrong = [_as_many(scene, "adds the updates of the previous step along the keys of this one", scene.older)]
    if 1 < scene.count <= len(scene.older):
        wrong.append(_last(scene, "adds an update of the previous step, not that of the last token",
                           scene.older[scene.count - 1]))  # fmt: skip
    return wrong


def update_of_another_request(scene: Scene) -> list[Wrong]:
    """Updates are kept or read by batch row instead of slot."""
    if not scene.kept:
        return []
    return [_as_many(scene, f"adds the updates {whose}", theirs) for whose, theirs in scene.theirs]


def update_without_the_token_before(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []
    t = scene.count - 1
    return [_last(scene, "adds an update that was made from the state before the token before",
                  _made(scene, t, scene.after(t - 1)))]  # fmt: skip


def updates_before_the_step(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []
    made = torch.stack([_made(scene, t, scene.base) for t in range(scene.count)])
    return [_as_many(scene, "adds updates that were all made from the state before the step", made)]


def update_before_the_decay(scene: Scene) -> list[Wrong]:
    if not scene.kept:
        return []
    t = scene.count - 1
    none = torch.zeros_like(scene.log_decay[t])
    made = update(scene.after(t), scene.k[t], scene.v[t], none, scene.beta[t])
    return [_last(scene, "adds an update that was made before the state decayed", made)]


def run_again_without_decay(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []  # for one token the same as `last_decay_dropped`
    return [Wrong("was run again without decay", scene.again(scene.base, log_decay=torch.zeros_like(scene.log_decay)))]


def run_again_decayed_twice(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []
    return [Wrong("was run again with every decay twice", scene.again(scene.base, log_decay=2 * scene.log_decay))]


def run_again_with_other_decays(scene: Scene) -> list[Wrong]:
    """Decays are shifted by one token, cyclically in the window."""
    if not scene.kept:
        return []
    return [
        Wrong(f"was run again with the decays of the tokens {where}",
              scene.again(scene.base, log_decay=scene.log_decay.roll(by, 0)))
        for where, by in (("after", -1), ("before", 1))
    ]  # fmt: skip


def run_again_along_other_keys(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []
    return [
        Wrong(f"was run again along the keys of the tokens {where}", scene.again(scene.base, k=scene.k.roll(by, 0)))
        for where, by in (("after", -1), ("before", 1))
    ]


def run_again_with_other_updates(scene: Scene) -> list[Wrong]:
    if not scene.kept or scene.count < 2:
        return []  # for one token the same as the update of a rejected token
    return [
        Wrong(f"was run again with the updates of the tokens {where}",
              scene.again(scene.base, updates=scene.updates.roll(by, 0)))
        for where, by in (("after", -1), ("before", 1))
    ]  # fmt: skip


def run_again_written_first(scene: Scene) -> list[Wrong]:
    """Each token is added before the decay, not after it."""
    if not scene.kept:
        return []
    state = scene.base
    for t in range(scene.count):
        decay = scene.log_decay[t].exp()[:, None, None]
        state = decay * add(state, scene.k[t], torch.zeros_like(scene.log_decay[t]), scene.updates[t])
    return [Wrong("was run again so that each token is written before the state decays", state)]


def run_again_from_the_second(scene: Scene) -> list[Wrong]:
    """The replay starts one entry too late: without the first accepted token, with the first rejected one."""
    if not scene.kept or scene.count == len(scene.updates):
        return []
    k, log_decay, updates = (x.roll(-1, 0) for x in (scene.k, scene.log_decay, scene.updates))
    return [Wrong("was run again from the second token on, up to the first rejected one",
                  scene.again(scene.base, k=k, log_decay=log_decay, updates=updates))]  # fmt: skip


def wrong_updates(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
    """Sentences of known mistakes, and the updates [T, HV, V] of a window that each keeps."""
    tokens = range(len(scene.updates))
    none = torch.zeros_like(scene.log_decay[0])
    yield "was made before the state decayed", torch.stack(
        [update(scene.after(t), scene.k[t], scene.v[t], none, scene.beta[t]) for t in tokens])
    yield "is the value, not the update", scene.v
    if len(tokens) > 1:
        yield "was made from the state before the window", torch.stack([_made(scene, t, scene.base) for t in tokens])
        behind = [_made(scene, t, scene.after(max(t - 1, 0))) for t in tokens]
        yield "was made from the state before the token before", torch.stack(behind)
        yield "is that of the token after", scene.updates.roll(-1, 0)
        yield "is that of the token before", scene.updates.roll(1, 0)
    for whose, theirs in scene.theirs:
        if theirs.shape == scene.updates.shape:
            yield f"is that {whose}", theirs
    if scene.older is not None and scene.older.shape == scene.updates.shape:
        yield "is that of the previous step", scene.older


def _made(scene: Scene, t: int, state: torch.Tensor) -> torch.Tensor:
    """The update of token t, computed from another state."""
    return update(state, scene.k[t], scene.v[t], scene.log_decay[t], scene.beta[t])


def _last(scene: Scene, sentence: str, last: torch.Tensor) -> Wrong:
    """The state with another update of the last accepted token."""
    updates, t = scene.updates.clone(), scene.count - 1
    updates[t] = last
    return Wrong(sentence, scene.again(scene.after(t), updates=updates, begin=t))


def _as_many(scene: Scene, sentence: str, others: torch.Tensor) -> Wrong:
    """The state with other updates of the first tokens, for as many as there are."""
    updates, many = scene.updates.clone(), min(scene.count, len(others))
    updates[:many] = others[:many]
    return Wrong(sentence, scene.again(scene.base, updates=updates))


RUN_AGAIN = (
    update_of_a_rejected_token, update_of_the_token_before, update_of_the_previous_step, update_of_another_request,
    update_without_the_token_before, updates_before_the_step, update_before_the_decay, run_again_without_decay,
    run_again_decayed_twice, run_again_with_other_decays, run_again_along_other_keys, run_again_with_other_updates,
    run_again_written_first, run_again_from_the_second,
)  # fmt: skip

"""The bank of wrong states: a table of known mistakes, each with a small function that returns what it leaves.

Leaves out: the comparison with these states (`known_wrong_states.py`), and mistakes in the replay of kept updates
(`wrong_ring_states.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch.nn import functional as F

from instep_reference import gdn

from ..finding_problem import Mistake, NamedMistake, WrongContent
from ..oracle.miscounted_states import FROM_ZERO, IN_PART, LOST, TWICE
from ..oracle.recomputation import fold, rule_inputs
from ..oracle.states_with_folded_tokens import Folding
from ..trace.tree_shape import lines
from .check_interface import COUNT, at_end, held
from .wrong_ring_states import RUN_AGAIN
from .wrong_state_inputs import BLOCKS, Scene, States, Wrong, block, fade, step, turned, update_of, write, wrong_of

NODE = NamedMistake("another-node", "holds the {} after node {}, {}; node {} is the last accepted one")
CHAIN = NamedMistake("tree-as-chain", "takes the tree for a chain: holds rows 0 to {} in their order, {}")


def branches(folding: Folding, path: Sequence[int]) -> list[Wrong]:
    """The states after every node off the path, and after rows in order. path: accepted nodes, root first.

    The state after an earlier node of the path is the state of a smaller count of tokens, another row of the bank.
    """
    assert folding.parents is not None, "asked of trees alone"
    found = [Wrong(known, fold(folding.tokens, folding.base, nodes)[0]) for known, nodes in
             beside("state", folding.parents, path)]  # fmt: skip
    # An engine that keeps updates replays rows with updates that were computed from the states of their parents.
    _, k, _, log_decay, _, _ = rule_inputs(folding.tokens)
    updates, base = folding.tokens.of("update")[None], folding.base.to(k)[None]
    for known, nodes in _as_chains(path, len(folding.parents)):
        rows = list(nodes)
        found.append(Wrong(known, gdn.absorb(k[:, rows], log_decay[:, rows], updates[:, rows], base)[0]))
    return found


def beside(what: str, parents: Sequence[int], path: Sequence[int]) -> Iterator[tuple[WrongContent, Sequence[int]]]:
    """Mistakes that take another path, and its nodes. what: the name of the memory."""
    last = path[-1]
    for node, line in enumerate(lines(parents)):
        if node not in path:
            yield NODE.known(what, node, kin(parents, path, node), last), line
    yield from _as_chains(path, len(parents))


def kin(parents: Sequence[int], path: Sequence[int], node: int) -> str:
    """The relation of a node to the path; the closest one if there are several."""
    last = path[-1]
    if parents[node] == last:
        return f"a child of node {last}"
    if parents[node] == parents[last]:
        return f"a sibling of node {last}"
    if node == len(path) - 1:
        return "whose number is the depth of the path"
    return "the last node of the window" if node == len(parents) - 1 else "a node off the path"


def _as_chains(path: Sequence[int], width: int) -> Iterator[tuple[WrongContent, Sequence[int]]]:
    """The rows that a commit takes if it ignores parents."""
    means = {width: "all of them", path[-1] + 1: "up to the last accepted node", len(path): "as many as are accepted"}
    for rows, said in means.items():
        if list(path) != list(range(rows)):
            yield CHAIN.known(rows - 1, said), range(rows)


TINY = 2.0**-40  # of 1: gates closer to their bound, or to 0, are taken to be there
ZERO = NamedMistake("all-zero", "is all zero")


def _another_count(scene: Scene) -> Iterator[Wrong]:
    for count in scene.counts():
        yield Wrong(held("state", count, scene.count, scene.verb), scene.after(count))


def _last_token_twice(scene: Scene) -> Iterator[torch.Tensor]:
    """The last token is counted twice. If not all tokens were taken, one more is a draft too many: another mistake."""
    if scene.count == scene.k.shape[0]:
        t = scene.count - 1
        yield step(scene.right, scene.k[t], scene.v[t], scene.log_decay[t], scene.beta[t], scene.recalls)
        if scene.kept:
            yield scene.again(scene.right, begin=t)


def _of_branches(mistake: NamedMistake) -> Mistake[States]:
    return Mistake(mistake.name, mistake.sentence,
                   lambda scene: [wrong for wrong in scene.branches if wrong.known.name == mistake.name])


def _handed(mistake: NamedMistake) -> Mistake[States]:
    """The tokens of the previous step were replayed twice, or some of them not at all."""
    return Mistake(mistake.name, mistake.sentence, lambda scene: [
        Wrong(known, state) for known, left in scene.handed if known.name == mistake.name
        for state in scene.carried(left)])


def _previous(scene: Scene) -> list[torch.Tensor]:
    return [] if scene.previous is None else [scene.previous]


def _previous_lost(scene: Scene) -> list[torch.Tensor]:
    """The tokens of the previous step were not replayed, or not from the right state."""
    return [] if scene.previous is None else scene.carried(scene.previous)


def _last_decays_dropped(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
    """The last block of a chunk, possibly incomplete, is read with its decay but stored without it."""
    yield at_end(1), scene.last(log_decay=torch.zeros_like(scene.log_decay[0]))
    for begin in sorted({scene.count - 1, *(block(scene.count, size) for size in BLOCKS)}, reverse=True):
        yield at_end(scene.count - begin), scene.undecayed(begin)


def _last_decay_doubled(scene: Scene) -> Iterator[torch.Tensor]:
    t = scene.count - 1
    yield scene.last(log_decay=2 * scene.log_decay[t])
    if scene.kept:
        yield scene.again(scene.after(t), log_decay=2 * scene.log_decay, begin=t)


def _stale_gate(scene: Scene) -> Iterator[torch.Tensor]:
    if (t := scene.count - 2) >= 0:
        yield scene.last(log_decay=scene.log_decay[t], beta=scene.beta[t])


def _stale_k(scene: Scene) -> Iterator[torch.Tensor]:
    if (t := scene.count - 1) > 0:
        yield scene.last(k=scene.k[t - 1])
        if scene.kept:
            yield scene.again(scene.after(t), k=scene.k.roll(1, 0), begin=t)


def _has_channels(scene: Scene) -> bool:
    """Whether a state forgets at a rate per channel. The mistakes below are of such states alone."""
    return scene.log_decay.dim() > scene.beta.dim()


def _other_decays(change: Callable[[torch.Tensor], Iterable[tuple[str, torch.Tensor]]]) -> States:
    """All tokens are taken with other decays [T, HV, K], in the window or only where a ring runs them again."""

    def states(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
        for detail, decays in change(scene.log_decay) if _has_channels(scene) else ():
            for state in replace(scene, log_decay=decays).carried(scene.base):
                yield detail, state
            if scene.kept:
                yield detail, scene.again(scene.base, log_decay=decays)

    return states


def _bound_left_out(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
    """All tokens are taken with gates that lack their bound: log_decay = bound sigmoid(exp(A_log) (a + dt_bias))."""
    if scene.safe is None:
        return
    bound, rate = scene.safe
    opened = torch.logit((scene.log_decay / bound).clamp(TINY, 1 - TINY))  # exp(A_log) (a + dt_bias)
    per_head = rate.reshape(-1, *(1,) * (scene.log_decay.dim() - 2)).to(opened)
    for detail, decays in (
        ("was made without the bound of the safe gate, with a softplus", -per_head * F.softplus(opened / per_head)),
        ("lacks the bound of the safe gate as a factor", scene.log_decay / -bound),
    ):
        for state in replace(scene, log_decay=decays).carried(scene.base):
            yield detail, state


def _without_recall(scene: Scene) -> Iterator[torch.Tensor]:
    """Each token writes its whole value, also the part that the state already recalls for its key."""
    if _has_channels(scene):
        yield scene.again(scene.base, updates=scene.beta[..., None] * scene.v)


def _with_recall(scene: Scene) -> Iterator[torch.Tensor]:
    """Each token writes only what the state does not recall for its key, where the recurrence writes all of it."""
    if not scene.recalls:
        yield replace(scene, recalls=True).fold(scene.base)


def _of_other_heads(name: Literal["k", "log_decay"]) -> States:
    """All tokens are taken with the keys of another group of heads, or the decays of another head: of outer products.

    The catalogue of mistakes in the delta rule has them for the others.
    """

    def states(scene: Scene) -> Iterator[tuple[str, torch.Tensor]]:
        x, by = getattr(scene, name), scene.shared if name == "k" else 1
        for detail, heads in (("before", by), ("after", -by)) if x.shape[1] > by and not scene.recalls else ():
            for state in replace(scene, **{name: x.roll(heads, 1)}).carried(scene.base):
                yield detail, state

    return states


def _with_skip(scene: Scene) -> Iterator[torch.Tensor]:
    """Each token also writes D v, which belongs to its read-out."""
    if scene.skip is not None:
        yield from replace(scene, beta=scene.beta + scene.skip).carried(scene.base)


def _decays_values(scene: Scene) -> Iterator[torch.Tensor]:
    """The decay of key channel i is applied to value column i."""
    if _has_channels(scene) and scene.k.shape[-1] == scene.v.shape[-1]:
        state = scene.base
        for t in range(scene.count):
            faded = fade(state.mT, scene.log_decay[t]).mT
            state = write(faded, scene.k[t], update_of(faded, scene.k[t], scene.v[t], scene.beta[t], scene.recalls))
        yield state


BANK: tuple[Mistake[States], ...] = (
    Mistake(COUNT.name, COUNT.sentence, _another_count),
    Mistake("last-token-twice", "counts the last token twice", _last_token_twice),
    _of_branches(NODE), _of_branches(CHAIN),
    Mistake("state-of-another-request", "holds the state {}", lambda scene: scene.others),
    Mistake("previous-step", "holds the state from before the previous step", _previous),
    Mistake(LOST.name, LOST.sentence, _previous_lost),
    _handed(TWICE), _handed(IN_PART),
    Mistake(ZERO.name, ZERO.sentence, lambda scene: [torch.zeros_like(scene.base)]),
    Mistake(FROM_ZERO.name, FROM_ZERO.sentence, lambda scene: scene.carried(torch.zeros_like(scene.base))),
    Mistake("transposed", "is transposed", lambda scene: turned(scene.right)),
    Mistake("from-transposed", "was continued from a transposed state",
            lambda scene: [state for base in turned(scene.base) for state in scene.carried(base)]),
    Mistake("last-decays-dropped", "lacks the decay of the {}", _last_decays_dropped),
    Mistake("last-decay-doubled", "has the decay of the last token twice", _last_decay_doubled),
    Mistake("last-token-stale-gates", "takes the last token with the gates of the token before", _stale_gate),
    Mistake("last-token-stale-key", "takes the last token with the key of the token before", _stale_k),
    Mistake("decays-of-the-next-channel", "decays each channel as the one {}", _other_decays(
        lambda decays: (("before", decays.roll(1, -1)), ("after", decays.roll(-1, -1))))),
    Mistake("decays-of-channels-reversed", "decays the channels of each head in the opposite order{}", _other_decays(
        lambda decays: (("", decays.flip(-1)),))),
    Mistake("decays-of-heads-reversed", "decays the heads in the opposite order{}", _other_decays(
        lambda decays: (("", decays.flip(1)),) if decays.shape[1] > 2 else ())),
    Mistake("one-decay-of-all-channels", "decays all channels of a head {}", _other_decays(lambda decays: (
        ("as its first one", decays[..., :1].expand_as(decays)),
        ("alike, by their mean", decays.mean(-1, keepdim=True).expand_as(decays)),
        ("alike, by the mean of their factors", decays.exp().mean(-1, keepdim=True).log().expand_as(decays))))),
    Mistake("channel-decays-of-another-head", "decays the channels of each head as those of the head {}", _other_decays(
        lambda decays: (("before", decays.roll(1, 1)), ("after", decays.roll(-1, 1))) if decays.shape[1] > 1 else ())),
    Mistake("bound-left-out", "{}", _bound_left_out),
    Mistake("decays-of-values", "decays value columns, not key channels", _decays_values),
    Mistake("nothing-recalled", "was made without the delta rule: tokens write what the state already recalls",
            _without_recall),
    Mistake("recalled", "was made by the delta rule, which this recurrence does not have", _with_recall),
    Mistake("skip-in-a-state", "has D v of each token added to it", _with_skip),
    Mistake("keys-of-another-group", "has the keys of the group of heads {} in each", _of_other_heads("k")),
    Mistake("decays-of-another-head", "has the decays of the head {} in each", _of_other_heads("log_decay")),
    *RUN_AGAIN,
)  # fmt: skip


def wrong_states(scene: Scene) -> list[Wrong]:
    """All wrong states of the bank."""
    return list(wrong_of(scene, BANK))

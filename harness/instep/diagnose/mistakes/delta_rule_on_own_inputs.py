"""The mistakes of the catalogue on the subject's own inputs of the delta rule: its read-outs, updates and states.

Leaves out: the mistakes (`delta_rule.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from instep_reference.trunk import WithState
from instep_reference.weights import GdnWeights

from ...oracle.declared_product_rounding import FOLDED, FOLDED_WHOLE
from ...oracle.single_layer_run import LayerWork
from .delta_rule import Candidate, candidates, listed
from .delta_rule_with_hooks import ROWS, Call, Walked
from .explanation_fit import agrees
from .finding_case import Case, Explanation, case_of
from .wrong_states import own_scene
from .wrong_weights import layer_of

LARGEST = 2**26  # numbers of the states after all rows of a call; a larger call is not run again
NEIGHBOURS = 4  # other requests whose rows may be in memory next to these
# A mistake that rounds to 16 bits is a mistake of many ties: a sum in another order falls to the other side of some of
# them, and is then off by a unit of 16 bits. So a mistake is drawn on inputs that are moved by some units of fp32.
DRAWS, NUDGE = 8, 2.0**-20


def recurrence(case: Case) -> Iterator[Explanation]:
    """Mistakes that account for the whole call, where its read-outs and the state that it leaves are both known."""
    yield from (one for one, whole in _judged(case) if whole)


def half_of_recurrence(case: Case) -> Iterator[Explanation]:
    """Mistakes that account for this tensor, and not for the other one. Kernels may compute the two apart."""
    alone = "in the state alone" if case.component == "state" else "in the read-outs alone"
    yield from (one._replace(sentence=f"{one.sentence}, {alone}") for one, whole in _judged(case) if not whole)


def _judged(case: Case) -> Iterator[tuple[Explanation, bool]]:
    found = _of_commit(case) if _commits(case) else _of_layer(case)
    if found is None:
        return
    call, count = found
    other = None if _commits(case) or case.granted is None else _other(case)
    for candidate in candidates(call, listed(call)):
        one = explanation(candidate, partial(part, case.component, count))
        yield one, other is None or not agrees(case, one) or agrees(
            other, explanation(candidate, partial(part, other.component, count)))


def explanation(candidate: Candidate, take: Callable[[Walked], torch.Tensor]) -> Explanation:
    """A mistake of the catalogue for the part of its results that was compared."""

    variant = candidate.variant

    def draws() -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.stack([take(variant.nudged(NUDGE, generator)) for _ in range(DRAWS)])

    # A copy: the other results of the recurrence need not stay in memory.
    wrong = take(candidate.walked).clone()
    return Explanation(candidate.sentence, wrong, draws=draws, name=candidate.mistake.name)


def part(component: str, count: int, walked: Walked) -> torch.Tensor:
    """The tensor of a component; count: rows after which the state is taken."""
    return {"core": walked.core, "update": walked.update}.get(component, walked.states[count])


def _commits(case: Case) -> bool:
    return case.piece is not None and case.piece.span.kind == "commit"


def _of_commit(case: Case) -> tuple[Call, int] | None:
    """A window's rows on the state before it. No query is kept, and none matters to a state."""
    scene = own_scene(case)
    if scene is None or len(scene.k) * scene.base.numel() > LARGEST:
        return None
    return Call(scene.k, scene.k, scene.v, scene.log_decay, scene.beta, scene.base, recalls=scene.recalls), scene.count


def _of_layer(case: Case) -> tuple[Call, int] | None:
    work = None if case.piece is None else case.piece.work
    if case.component not in ("core", "update", "state") or not isinstance(work, LayerWork):
        return None
    recalls = case.own("write") is None
    shown = dict(zip(ROWS, FOLDED if recalls else FOLDED_WHOLE, strict=True))
    own: dict[str, Any] = {name: rows for name in ROWS if (rows := case.own(shown[name])) is not None}
    if len(own) < len(ROWS):
        return None
    k, v = own["k"], own["v"]
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=torch.float64)
    if len(v) * state.numel() > LARGEST:
        return None
    if isinstance(work.memory, WithState):
        state = work.memory.state.to(state)
    others = [(whose, {name: rows for name in ROWS for said, rows in case.others(shown[name]) if said == whose})
              for whose, _ in case.others("v")]  # fmt: skip
    others = [(whose, rows) for whose, rows in others if len(rows) == len(ROWS)]
    near = [rows for _, rows in others[:NEIGHBOURS]]
    return Call(
        **own, state=state, parents=work.parents or (), raw=_raw(case, k), others=others, recalls=recalls,
        skip=_skip(case),
        before=[{name: x[-1] for name, x in rows.items()} for rows in near],
        after=[{name: x[0] for name, x in rows.items()} for rows in near],
    ), len(v)  # fmt: skip


def _skip(case: Case) -> torch.Tensor | None:
    """The weight with which values are added to read-outs, if there is one."""
    layer = layer_of(case)
    return layer.mixer.skip if layer is not None and isinstance(layer.mixer, GdnWeights) else None


def _raw(case: Case, k: torch.Tensor) -> dict[str, torch.Tensor]:
    """q and k before their norm, where the op norms them itself."""
    mixed = case.own("mixed") if "q" in case.context.shown.inside else None
    if mixed is None:
        return {}
    width = k.shape[1] * k.shape[2]
    return {"q": mixed[:, :width].reshape(k.shape), "k": mixed[:, width : 2 * width].reshape(k.shape)}


def _other(case: Case) -> Case | None:
    """The state that the same call leaves, or its read-outs where the finding is about the state."""
    piece = case.piece
    if piece is None or not piece.writes_state:
        return None
    place = piece.place("core" if case.component == "state" else "state")
    other = case_of(replace(case.finding, place=place), case.context, case.oracle, case.history)
    return None if other is None or other.granted is None else other

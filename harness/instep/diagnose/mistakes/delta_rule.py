"""Catalogue of known mistakes in the gated delta rule: a name, a sentence, and the recurrence with that one mistake.

To add a mistake, add an entry to `MISTAKES`. The replay runs every entry on the subject's own inputs (`recurrence`),
and the kit on the inputs of a call that went wrong (`kit/named_mistakes.py`). `explanation_fit.py` decides whether the
result explains the read-outs, updates and states that were found.
Leaves out: mistakes in memory around the call (`wrong_memory.py`, `checks/wrong_state_bank.py`), and ops before it
(`wrong_inputs.py`).
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch

from instep_reference.contract.declared_rounding import Blocked
from instep_reference.trunk import WithState
from instep_reference.weights import GdnWeights

from ...checks.wrong_state_inputs import fade, turned
from ...finding_problem import Mistake as Entry
from ...oracle.declared_product_rounding import FOLDED, FOLDED_WHOLE
from ...oracle.single_layer_run import LayerWork
from . import delta_rule_variants as form
from .delta_rule_variants import Forms, Variant
from .delta_rule_with_hooks import ROWS, Call, Walked, spread, walk
from .explanation_fit import agrees
from .finding_case import NARROW, Case, Explanation, case_of, in_16_bits
from .wrong_states import own_scene
from .wrong_weights import layer_of

OVERFLOWS = -math.log(torch.finfo(torch.float32).max)
TOGETHER = 2**22  # numbers of states that are carried through the rows at once


@dataclass(frozen=True)
class Mistake(Entry[Forms]):
    """A known mistake: `wrong` are its forms for a call. rounds: whether the kernel is right but for its rounding."""

    rounds: bool = False


class Candidate(NamedTuple):
    """A form of a mistake, carried through the rows of a call."""

    mistake: Mistake
    variant: Variant
    walked: Walked

    @property
    def sentence(self) -> str:
        return self.mistake.sentence.format(self.variant.detail)


Listed = Sequence[tuple[Mistake, Variant]]


def listed(call: Call, names: Collection[str] | None = None) -> Listed:
    """The mistakes of the catalogue, or those of some names, in the forms that they have on this call."""
    chosen = [mistake for mistake in MISTAKES if names is None or mistake.name in names]
    return [(mistake, variant) for mistake in chosen for variant in mistake.wrong(call)]


def candidates(call: Call, forms: Listed) -> Iterator[Candidate]:
    """Carry each form through the rows, one after the other; some that only change inputs are carried at once."""
    changed = iter([variant.call for _, variant in forms if variant.walk is walk])
    size = max(TOGETHER // (call.state.numel() * (len(call.v) + 1)), 1)
    done = (walked for calls in iter(lambda: list(islice(changed, size)), []) for walked in _together(call, calls))
    for mistake, variant in forms:
        yield Candidate(mistake, variant, next(done) if variant.walk is walk else variant.walk(variant.call))


def _together(call: Call, changed: Sequence[Call]) -> Iterator[Walked]:
    """The right recurrence over a call with several changes of its inputs at once."""
    every = [spread(one) for one in changed]
    stacked: Any = {name: torch.stack([getattr(one, name) for one in every]) for name in (*ROWS, "state")}
    yield from (Walked(*parts) for parts in zip(*walk(replace(call, **stacked)), strict=True))


# -- the catalogue -------------------------------------------------------------------------------------

SPOKEN = {"q": "the query", "k": "the key", "v": "the value", "log_decay": "the gate", "beta": "beta"}
NAMED = {"q": "query", "k": "key", "v": "value", "log_decay": "gate", "beta": "beta"}

MISTAKES: tuple[Mistake, ...] = (
    # the order of the recurrence
    Mistake("decay-after-update", "the state decays after the update, not before it",
            form.by_row(partial(form.decay_last, decays_read=False), partial(form.decay_last, decays_read=True))),
    Mistake("recall-undecayed", "the recall S^T k is read from the state before its decay",
            form.by_row(form.recall_undecayed)),
    Mistake("recall-missing", "the recall S^T k is missing: each value is written in full",
            form.by_row(form.recall_missing)),
    Mistake("recall-added", "the recall S^T k is subtracted, which this recurrence does not have", form.recall_added()),
    Mistake("skip-in-the-state", "D v of each token is added to the state, not to its read-out", form.skip_in_state()),
    Mistake("read-before-update", "each row is read before its own token is added", form.by_row(form.read_first)),
    # rows
    Mistake("gate-of-row-before", "the gate of row t - 1 is used for row t", form.rows_off(1, "log_decay")),
    Mistake("gate-of-row-after", "the gate of row t + 1 is used for row t", form.rows_off(-1, "log_decay")),
    Mistake("beta-of-row-before", "beta of row t - 1 is used for row t", form.rows_off(1, "beta")),
    Mistake("beta-of-row-after", "beta of row t + 1 is used for row t", form.rows_off(-1, "beta")),
    Mistake("gates-of-row-before", "the gate and beta of row t - 1 are used for row t",
            form.rows_off(1, "log_decay", "beta")),
    Mistake("gates-of-row-after", "the gate and beta of row t + 1 are used for row t",
            form.rows_off(-1, "log_decay", "beta")),
    *(Mistake(f"{NAMED[name]}-of-row-before", f"{SPOKEN[name]} of row t - 1 is used for row t", form.rows_off(1, name))
      for name in ("q", "k", "v")),
    *(Mistake(f"{NAMED[name]}-of-row-after", f"{SPOKEN[name]} of row t + 1 is used for row t", form.rows_off(-1, name))
      for name in ("q", "k", "v")),
    *(Mistake(f"{NAMED[name]}-of-another-row", f"{SPOKEN[name]} of row t {{}} is used for row t",
              form.rows_far_off(name)) for name in ROWS),
    *(Mistake(f"{NAMED[name]}-of-another-request", f"{SPOKEN[name]} {{}} is used", form.of_others(name))
      for name in ROWS),
    Mistake("last-row-skipped", "the last row of a sequence is skipped", form.last_row_skipped),
    Mistake("nothing-done", "the call does nothing: it reads zeros and leaves the state as it was", form.nothing_done),
    # heads
    Mistake("gate-by-key-head", "value head h uses the gate of head h // r, r value heads per key head",
            form.by_key_head("log_decay", modulo=False)),
    Mistake("gate-by-key-head-modulo", "value head h uses the gate of head h % H, H key heads",
            form.by_key_head("log_decay", modulo=True)),
    Mistake("beta-by-key-head", "value head h uses beta of head h // r, r value heads per key head",
            form.by_key_head("beta", modulo=False)),
    Mistake("beta-by-key-head-modulo", "value head h uses beta of head h % H, H key heads",
            form.by_key_head("beta", modulo=True)),
    Mistake("keys-modulo", "value head h reads key head h % {}", form.keys_modulo("q", "k")),
    Mistake("key-alone-modulo", "value head h reads its key, but not its query, from key head h % {}",
            form.keys_modulo("k")),
    Mistake("query-alone-modulo", "value head h reads its query, but not its key, from key head h % {}",
            form.keys_modulo("q")),
    *(Mistake(f"{NAMED[name]}-of-another-head", f"{SPOKEN[name]} of head {{}} is used for head h", form.heads_off(name))
      for name in ROWS),
    # gates
    Mistake("decay-by-exp2", "the decay is 2 ** gate, not exp(gate)",
            form.replaced("log_decay", lambda gate: gate * math.log(2))),
    Mistake("decay-by-exp-of-log2", "the decay is exp(gate * log2(e)): exp is used where exp2 is due",
            form.replaced("log_decay", lambda gate: gate / math.log(2))),
    Mistake("no-decay", "the decay is missing: nothing is forgotten", form.replaced("log_decay", torch.zeros_like)),
    Mistake("decay-twice", "every decay is applied twice", form.replaced("log_decay", lambda gate: 2 * gate)),
    Mistake("decay-half", "every gate is halved", form.replaced("log_decay", lambda gate: gate / 2)),
    Mistake("decay-as-gate", "the decay itself is used as its logarithm", form.replaced("log_decay", torch.exp)),
    Mistake("no-beta", "beta is missing: every token is written in full", form.replaced("beta", torch.ones_like)),
    Mistake("erases-at-most-once", "beta is limited to 1 where a token erases, and not where it writes",
            form.beta_in_part(erases=True)),
    Mistake("writes-at-most-once", "beta is limited to 1 where a token writes, and not where it erases",
            form.beta_in_part(erases=False)),
    Mistake("beta-squared", "beta is applied twice", form.replaced("beta", torch.square)),
    Mistake("decay-of-values", "the decay of key channel i is applied to value channel i", form.decays_of_values()),
    # norm and scale
    Mistake("query-not-normalised", "q is not normalised", form.not_normalised("q")),
    Mistake("key-not-normalised", "k is not normalised", form.not_normalised("k")),
    Mistake("neither-normalised", "q and k are not normalised", form.not_normalised("q", "k")),
    Mistake("scale-missing", "the scale K ** -0.5 is missing", form.replaced("q", lambda q: q * q.shape[-1] ** 0.5)),
    Mistake("scale-twice", "the scale K ** -0.5 is applied twice",
            form.replaced("q", lambda q: q * q.shape[-1] ** -0.5)),
    *(Mistake(f"{NAMED[name]}-{word}", f"{SPOKEN[name]} {says}", form.replaced(name, change))
      for name in ("k", "v", "beta") for word, says, change in (
          ("zero", "is taken as zero", torch.zeros_like), ("double", "is twice as large", lambda x: 2 * x),
          ("half", "is half as large", lambda x: x / 2), ("negative", "has the opposite sign", torch.neg))),
    # rounding
    *(Mistake(f"state-stored-in-{said}", f"the state is rounded to {said} when it is stored",
              form.rounding_stored(dtype), rounds=True) for said, dtype in NARROW.items()),
    *(Mistake(f"state-in-{said}", f"the state is rounded to {said} after every token",
              form.rounding_states(dtype), rounds=True) for said, dtype in NARROW.items()),
    Mistake("stored-per-token", "the state is rounded to its tiles after every token, not when it is stored",
            form.storing_states(), rounds=True),
    *(Mistake(f"update-in-{said}", f"the update of every token is rounded to {said}",
              form.by_row(partial(form.rounding_update, dtype=dtype)), rounds=True) for said, dtype in NARROW.items()),
    *(Mistake(f"read-in-{said}", f"each row is read from the state rounded to {said}",
              form.by_row(partial(form.rounding_read, dtype=dtype)), rounds=True) for said, dtype in NARROW.items()),
    *(Mistake(f"{NAMED[name]}-rounded", f"{SPOKEN[name]} is rounded to {{}}", form.narrow_rows(name), rounds=True)
      for name in ROWS),
    Mistake("first-state-rounded", "the state before the first row is rounded to {}",
            form.other_state(in_16_bits), rounds=True),
    # the state before the first row
    Mistake("state-cleared", "the state before the first row is taken as zero",
            form.other_state(lambda state: [("", torch.zeros_like(state))])),
    Mistake("state-transposed", "the state before the first row is read transposed",
            form.other_state(lambda state: [("", one) for one in turned(state)])),
    Mistake("state-of-another-head", "the state before the first row is that of head {} for head h",
            form.other_state(form.of_another_head)),
    # blocks of tokens
    Mistake("cleared-by-block", "starts from zero at every block of {} tokens",
            form.at_edges(lambda _, after, __: torch.zeros_like(after))),
    Mistake("forgotten-by-block", "drops the state from before the block at the end of every block of {} tokens",
            form.at_edges(lambda before, after, decay: after - fade(before, decay))),
    Mistake("undecayed-by-block", "does not decay the state from before the block over a block of {} tokens",
            form.at_edges(lambda before, after, decay: after + before - fade(before, decay))),
    Mistake("last-decays-dropped", "lacks the decay of the {}", form.last_decays_dropped),
    Mistake("decay-of-running-sums", "its decays are exp(G_t) exp(-G_t-1) of running sums G{}, which are not finite "
            f"where a sum passes {-OVERFLOWS:.1f}", form.of_running_sums),
)  # fmt: skip


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
        skip=_skip(case), stored=_stored(case),
        before=[{name: x[-1] for name, x in rows.items()} for rows in near],
        after=[{name: x[0] for name, x in rows.items()} for rows in near],
    ), len(v)  # fmt: skip


def _stored(case: Case) -> Blocked | None:
    """How states are stored, if that is in tiles and to nearest: `NARROW` has plain dtypes."""
    stored = None if case.oracle is None else case.oracle.rounds.get("state")
    return stored if isinstance(stored, Blocked) and stored.seed is None else None


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

"""Name the mistake of a kernel that failed its cases: one known mistake that accounts for all its results.

For the delta rule it is an entry of the catalogue (`diagnose/mistakes/delta_rule.py`), which must give every read-out
and every state of every launch, including those that agree. Leaves out: the comparison (`compare_with_reference.py`),
and whether a tensor fits (`diagnose/mistakes/explanation_fit.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from instep_optimized.memory_addresses import Part
from instep_optimized.ops.op_protocols import GdnInputs

from ..diagnose.mistakes.delta_rule import LARGEST, MISTAKES, Candidate, candidates, explanation, listed, part
from ..diagnose.mistakes.delta_rule_with_hooks import Call, Rows
from ..diagnose.mistakes.explanation_fit import APART, FLOOR, agrees, best, fit
from ..diagnose.mistakes.finding_case import Compared, Explanation
from ..finding_problem import Explained, Unexplained
from ..verdict import Comparison
from .cases.case import Inputs
from .expected_results import gates_of, walk, widened

Tensor = torch.Tensor
LAUNCHES = 12  # that failed, of each form: the mistake must account for the first ones


@dataclass(frozen=True)
class Observed(Compared):
    """One comparison of a launch.

    sampled: the draws of the yardstick. row: after which row the state is taken; None: the read-outs. wrongs: other
    contents that the case knows
    """

    sampled: Tensor
    row: int | None = None
    wrongs: Callable[[], Iterable[tuple[str, Tensor]]] = tuple

    def of(self, candidate: Candidate) -> Explanation:
        """This tensor as the mistake would compute it."""
        return explanation(candidate, partial(part, self.component, 0 if self.row is None else self.row + 1))


@dataclass(frozen=True)
class Launched:
    """A launch that failed, and all that it computed; inputs: of a recurrence, None for another op.

    recalls: whether the recurrence obeys the delta rule
    """

    observed: Sequence[Observed]
    inputs: Inputs | None = None
    recalls: bool = True

    def form(self, request: str | None) -> str:
        """The form of the part that a request is in: the kernel that ran it."""
        if self.inputs is None or request is None:
            return ""
        first = 0
        for each in self.inputs["parts"]:
            if first <= int(request) < first + len(each.count):
                return str(each.form)
            first += len(each.count)
        return ""


def named(compared: Sequence[Comparison], launches: Sequence[Launched]) -> list[Comparison]:
    """The comparisons, those that disagree with the mistake that accounts for them."""
    by_form = {form: _by_catalogue(form, launches) for form in ("window", "chunk")}
    said = dict[int, Explained | Unexplained]()
    for form, fitting in by_form.items():
        others = [mine for name, mine in by_form.items() if name != form]
        said |= {result: _said(_shared(mine, others)) for result, mine in fitting.items()}
    for launch in launches:
        for one in launch.observed:
            if not one.finding.agrees and not isinstance(said.get(id(one.finding)), Explained):
                sentence, _ = best(one, (Explanation(says, wrong) for says, wrong in one.wrongs()))
                if sentence is not None:
                    said[id(one.finding)] = Explained("hypothesis", sentence)
    return [_with(one, said.get(id(one))) for one in compared]


def _with(result: Comparison, said: Explained | Unexplained | None) -> Comparison:
    problem = result.problem
    if said is None or problem is None:
        return result
    problem = replace(problem, mistake=said) if isinstance(said, Explained) else replace(problem, unexplained=said)
    return replace(result, problem=problem)


Fitting = dict[int, dict[str, str]]  # id of a finding -> name of a mistake that explains it -> its sentence there


def _by_catalogue(form: str, launches: Sequence[Launched]) -> Fitting:
    """The mistakes that account for every launch of a form, for each of its findings."""
    left = {mistake.name for mistake in MISTAKES}
    found = Fitting()
    for launch in [one for one in launches if one.inputs is not None and _failed(one, form)][:LAUNCHES]:
        for request, call in calls(launch.inputs or {}, form, launch.recalls):
            mine = [one for one in launch.observed if one.finding.request == str(request)]
            fitting = _fitting(call, mine, left)
            left &= fitting.keys()
            found |= {id(one.finding): fitting for one in mine if not one.finding.agrees}
    return {result: {name: says for name, says in fitting.items() if name in left} for result, fitting in found.items()}


def _shared(mine: dict[str, str], others: Sequence[Fitting]) -> dict[str, str]:
    """The mistakes that explain the other form as well; if there is none, all of them."""
    there = {name for other in others for fitting in other.values() for name in fitting}
    return {name: says for name, says in mine.items() if name in there} or mine


def _failed(launch: Launched, form: str) -> bool:
    return any(not one.finding.agrees and launch.form(one.finding.request) == form for one in launch.observed)


def _said(fitting: dict[str, str]) -> Explained | Unexplained:
    if len(fitting) != 1:
        return Unexplained(len(fitting), names=tuple(fitting.values()))
    ((name, says),) = fitting.items()
    return Explained("hypothesis", says, names=(name,))


def _fitting(call: Call, observed: Sequence[Observed], names: set[str]) -> dict[str, str]:
    """The mistakes of these names that give all that was observed, to within the allowance, and their sentences."""
    left = dict[str, tuple[float, str]]()
    if call.state.numel() * len(call.v) > LARGEST:
        return {}
    tried = listed(call, names)
    for candidate in candidates(call, tried):
        worst = 0.0
        for one in observed:
            explains = one.of(candidate)
            if one.finding.agrees:
                worst = worst if agrees(one, explains) else torch.inf
            else:
                found = fit(one, explains, len(tried))
                worst = torch.inf if found is None or found.part else max(worst, found.left)
            if worst == torch.inf:
                break
        else:
            name = candidate.mistake.name
            left[name] = min(left.get(name, (torch.inf, "")), (worst, candidate.sentence))
    least = max(min((worst for worst, _ in left.values()), default=0.0), FLOOR)
    return {name: sentence for name, (worst, sentence) in left.items() if worst <= APART * least}


# -- the calls of a launch -----------------------------------------------------------------------------


def calls(inputs: Inputs, form: str, recalls: bool = True) -> Iterator[tuple[int, Call]]:
    """The call of each request of a form, in fp64: its number in the launch, and its rows on its own state."""
    wide = widened(inputs, torch.float64)
    raw = dict[str, Tensor]()
    if "mixed" in wide:
        wide["inputs"] = GdnInputs(**gates_of(wide))
        heads, size = wide["key_heads"], wide["key_dim"]
        raw = {name: wide["mixed"][:, at * heads * size : (at + 1) * heads * size].unflatten(1, (heads, size))
               for at, name in enumerate(("q", "k"))}  # fmt: skip
    rows: dict[str, Any] = wide["inputs"]._asdict()
    for number, each, request, parents, state in walk(inputs["parts"], wide["inputs"].v):
        if each.form != form:
            continue
        begin, count = int(each.begin[request]), int(each.count[request])
        chain = parents == list(range(-1, count - 1))
        yield number, Call(
            **{name: x[begin : begin + count] for name, x in rows.items()}, state=state,
            parents=() if chain else tuple(parents), raw={name: x[begin : begin + count] for name, x in raw.items()},
            recalls=recalls, **_neighbours(rows, each, request),
        )


def _neighbours(rows: Rows, each: Part, request: int) -> dict[str, Any]:
    """Rows of other requests that a launch may have next to those of a request: the longest request comes first.

    A kernel over dense states is launched once per row where the state after every row is kept.
    """
    begin, count, total = each.begin.tolist(), each.count.tolist(), len(rows["v"])
    runs = (one for one in range(len(count)) if count[one] and each.read.units[one] >= 0)
    lanes = sorted(runs, key=lambda one: -count[one])
    at, own = lanes.index(request), begin[request]
    order = [begin[lane] + t for lane in lanes for t in range(count[lane])]
    spot = order.index(own)

    def taken(*numbers: int) -> Rows:
        return {name: x[list(numbers)] for name, x in rows.items()}

    def by_row(step: int) -> list[Rows]:
        """The neighbour of the last request is the first one, or itself."""
        alive = [[lane for lane in lanes if count[lane] > t] for t in range(count[request])]
        wraps = (begin[some[(at + step) % len(some)]] + t for t, some in enumerate(alive))
        stays = (begin[some[min(max(at + step, 0), len(some) - 1)]] + t for t, some in enumerate(alive))
        return [taken(*wraps), taken(*stays)]

    first = {name: x[0] for name, x in taken(order[spot - 1]).items()}
    near = {name: x[0] for name, x in taken(max(own - 1, 0)).items()}
    last = {name: x[0] for name, x in taken(order[(spot + count[request]) % len(order)]).items()}
    behind = {name: x[0] for name, x in taken(min(own + count[request], total - 1)).items()}
    return {"before": [first, near], "after": [last, behind], "launched_before": by_row(-1),
            "launched_after": by_row(1)}  # fmt: skip

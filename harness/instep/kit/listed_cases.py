"""Cases of one op as a list for pytest, and their comparison on an op set: `served(case, OPS).must_agree()`.

Leaves out: the comparison (`compare_with_reference.py`), and the cases (`cases/`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.watch_op_calls import tensors_of
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.recurrences import RECURRENCES

from ..adapters import in_a_shell
from ..options import CHOICES, either
from ..report.divergence_message import NAMES, message, numbers
from ..verdict import Comparison, Exit, Verdict
from .argument_checks import must_be, must_be_several
from .cases import CASES, Case
from .cases.case import Call
from .cases.random_shapes import DRAWERS, drawn
from .cases.real_sizes import REAL
from .compare_with_reference import is_tree, judged
from .replayed_trace import Divergence, setting_of

OPS = tuple(dict.fromkeys(case.op for case in CASES))  # that have cases


@dataclass(frozen=True)
class Served:
    """The verdict on an op set over cases. name: the op set's; command: whether `instep op` finds it by this name."""

    name: str
    cases: Sequence[Case]
    verdict: Verdict
    command: bool = True
    device: str = "cpu"

    @property
    def exit(self) -> Exit:
        return self.verdict.exit

    @property
    def message(self) -> str:
        """The message of a divergence, or the reason why nothing was compared; empty if all agree."""
        findings = self.verdict.findings
        if findings:
            first = self.cases[findings[0].event]
            there = "" if self.device == "cpu" else f" --device {self.device}"
            again = [f"instep op {in_a_shell(self.name)} {first.op} --case {first.name}{there}"] if self.command else []
            return message(f"op {first.op} of {self.name}", findings, numbers(findings[0]), again, self.where)
        if self.exit is Exit.INCONCLUSIVE:
            why = "; ".join(dict.fromkeys(skip.reason for skip in self.verdict.skipped)) or "there was no case"
            return f"INCONCLUSIVE  {self.name}: nothing was compared: {why}"
        return ""

    def where(self, found: Comparison) -> str:
        """gdn case verify-r2-KV-float32, request 1, recurrent state, unit 6, head 2"""
        case, component = self.cases[found.event], found.place.component
        parts = [f"{case.op} case {case.name}"]
        parts += [f"request {found.request}"] if found.request is not None else []
        parts += [NAMES.get(component, component)] if component != "hidden" else []  # of an op without a place
        parts += [f"{name} {at}" for name, at in (("unit", found.slot), ("head", found.head)) if at is not None]
        return ", ".join(parts)

    def must_agree(self) -> Self:
        """Raise `Divergence`, whose text is the message, unless everything agrees."""
        if self.exit is not Exit.AGREED:
            raise Divergence(self.message)
        return self


def served(
    cases: Case | Iterable[Case], subject: Ops | str, *, device: str = "cpu",
    progress: Callable[[int], None] = lambda number: None,
) -> Served:
    """Serve cases with an op set, by name or as a value, and compare them with the reference."""
    must_be("cases", cases, (Case, Iterable), "a case, or a list of cases")
    every = [cases] if isinstance(cases, Case) else list(cases)
    must_be_several("cases", every, Case, "cases, as op_cases gives them")
    setting, command = setting_of(subject, device=device)
    return Served(setting.name, every, judged(setting.op_set(), every, device, progress), command, device)


def op_cases(
    op: str | None = None, *, case: str | None = None, drawn: int = 0, seed: int = 0,
    dtype: str | torch.dtype | None = None, state_dtype: str | torch.dtype = "float32", trees: bool = False,
    real: bool = False,
) -> list[Case]:
    """The cases of one op, or of all: for `pytest.mark.parametrize("case", op_cases("gdn"), ids=str)`.

    case         only the case of this name;  drawn, seed: add this number of random shapes (`random_shapes.py`)
    dtype        only cases with activations of this dtype;  state_dtype: the same for states
    trees        also windows that are trees;  real: only cases at the sizes of a real model (`real_sizes.py`)

    Raises `Unsupported` with the reason if no case is left: pytest would skip a test with an empty list.
    """
    known = tuple(dict.fromkeys(one.op for one in REAL)) if real else OPS
    if op is not None and op not in known:
        raise BadInput("OP", found=op, expected=f"one of {', '.join(known)}")
    wanted = Widths(_width("dtype", dtype), _width("state_dtype", state_dtype))
    every = [one for one in (REAL if real else CASES) if op in (None, one.op)]
    every += [] if real else _drawn(op, range(seed, seed + drawn))
    if case is not None:
        every += [] if real else [one for one in REAL if op in (None, one.op)]
        number = case.removeprefix("drawn-")
        named = _drawn(op, [int(number)]) if number != case and number.isdecimal() else []
        found = [one for one in (*every, *named) if one.name == case][:1]
        if not found:
            raise BadInput("--case", found=case, expected=f"one of {', '.join(one.name for one in every)}")
        every, trees, wanted = found, True, wanted._replace(state_dtype=None)  # a named case has its own dtypes
    looked = [(one, is_tree(call), _widths(one, call)) for one in every for call in [one.build("cpu")]]
    there = {one: widths for one, tree, widths in looked if trees or not tree}
    if not there:
        raise Unsupported(f"{op}: its cases are windows that are trees; pass trees=True")
    _must_have(op or "every op", wanted, [*there.values()])
    return [one for one, widths in there.items() if widths.fit(wanted)]


def _drawn(op: str | None, numbers: Iterable[int]) -> list[Case]:
    return [drawn(name, number) for number in numbers for name in DRAWERS if op in (None, name)]


class Widths(NamedTuple):
    """Dtypes of activations and of states. None means that a case has none, or that any is accepted."""

    dtype: str | None
    state_dtype: str | None

    def fit(self, wanted: "Widths") -> bool:
        return all(None in pair or pair[0] == pair[1] for pair in zip(self, wanted, strict=True))


def _width(name: str, value: str | torch.dtype | None) -> str | None:
    spelled = None if value is None else str(value).removeprefix("torch.")
    if spelled is not None and spelled not in CHOICES[name]:
        raise BadInput(name, found=repr(value), expected=either(CHOICES[name]))
    return spelled


def _widths(case: Case, call: Call) -> Widths:
    """The dtype of the state's pool, and the narrowest dtype of the other inputs."""
    memory = call.pools.get("memory") if case.op in RECURRENCES else None
    given = [value for name, value in call.inputs.items() if name not in ("parts", "pages")]
    found = [x.dtype for value in given for x in tensors_of(value) if x.is_floating_point()]
    found += [value for value in given if isinstance(value, torch.dtype)]
    narrowest = min(found, key=lambda one: one.itemsize, default=None)
    return Widths(*(None if one is None else str(one).removeprefix("torch.")
                    for one in (narrowest, None if memory is None else memory.raw.dtype)))  # fmt: skip


def _must_have(op: str, wanted: Widths, there: Sequence[Widths]) -> None:
    lists = [list(dict.fromkeys(filter(None, of))) for of in zip(*there, strict=True)]
    for name, value, others in zip(Widths._fields, wanted, lists, strict=True):
        if value and others and value not in others:
            raise Unsupported(f"{op}: no case has {name} {value}: there are {', '.join(others)}")
    if not any(one.fit(wanted) for one in there):
        raise Unsupported(f"{op}: no case has both dtype {wanted.dtype} and state_dtype {wanted.state_dtype}")

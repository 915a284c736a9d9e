"""Cases of one op as a list for pytest, and what an op set makes of them: `served(case, OPS).must_agree()`.

Leaves out: the comparison (`judge.py`), and the cases (`cases/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from instep_optimized.ops.around import tensors_of
from instep_optimized.ops.base import Ops
from instep_reference.contract.errors import BadInput

from ..report.words import NAMES, message, numbers
from ..verdict import Comparison, Exit, Verdict
from .cases import CASES, Case
from .cases.drawn import DRAWERS, drawn
from .cases.real import REAL
from .judge import is_tree, judged
from .runs import Divergence, setting_of

OPS = tuple(dict.fromkeys(case.op for case in CASES))  # that have cases


@dataclass(frozen=True)
class Served:
    """What an op set made of cases. name: of the op set; command: whether `instep op` finds it under this name."""

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
        """The message of a divergence; where nothing was compared, why; empty: all agree."""
        findings = self.verdict.findings
        if findings:
            first = self.cases[findings[0].event]
            there = "" if self.device == "cpu" else f" --device {self.device}"
            again = [f"instep op {self.name} {first.op} --case {first.name}{there}"] if self.command else []
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


def served(cases: Case | Iterable[Case], subject: Ops | str, *, device: str = "cpu") -> Served:
    """Serve cases with an op set, by name or as a value, and compare them with the reference."""
    setting, command = setting_of(subject, device=device)
    every = [cases] if isinstance(cases, Case) else list(cases)
    return Served(setting.name, every, judged(setting.op_set(), every, device), command, device)


def op_cases(
    op: str | None = None, *, case: str | None = None, drawn: int = 0, seed: int = 0, dtype: str | None = None,
    state_dtype: str = "float32", trees: bool = False, real: bool = False,
) -> list[Case]:
    """The cases of one op, or of all: for `pytest.mark.parametrize("case", op_cases("gdn"), ids=str)`.

    case         the one of this name;  drawn, seed: so many of random shapes besides (gdn, conv, attend)
    dtype        of activations: only cases of this one;  state_dtype: the same of states
    trees        also windows that are trees;  real: cases of the sizes of a 9B model instead (gdn, conv, attend)
    """
    known = tuple(dict.fromkeys(one.op for one in REAL)) if real else OPS
    if op is not None and op not in known:
        raise BadInput("OP", found=op, expected=f"one of {', '.join(known)}")
    every = [one for one in (REAL if real else CASES) if op in (None, one.op)]
    every += [] if real else _drawn(op, range(seed, seed + drawn))
    if case is not None:
        every += [] if real else [one for one in REAL if op in (None, one.op)]
        number = case.removeprefix("drawn-")
        named = _drawn(op, [int(number)]) if number != case and number.isdecimal() else []
        found = [one for one in (*every, *named) if one.name == case][:1]
        if not found:
            raise BadInput("--case", found=case, expected=f"one of {', '.join(one.name for one in every)}")
        return found
    return [one for one in every if _has(one, dtype, state_dtype) and (trees or not is_tree(one.build("cpu")))]


def _drawn(op: str | None, numbers: Iterable[int]) -> list[Case]:
    return [drawn(name, number) for number in numbers for name in DRAWERS if op in (None, name)]


def _has(case: Case, dtype: str | None, state_dtype: str) -> bool:
    """Whether the case has these widths. A state's is that of its pool, an activation's the narrowest of the others."""
    inputs, pools = case.build("cpu")
    memory = pools.get("memory") if case.op == "gdn" else None
    if memory is not None and str(memory.raw.dtype) != f"torch.{state_dtype}":
        return False
    given = [value for name, value in inputs.items() if name not in ("parts", "pages")]
    found = [x.dtype for value in given for x in tensors_of(value) if x.is_floating_point()]
    found += [value for value in given if isinstance(value, torch.dtype)]
    narrowest = min(found, key=lambda one: one.itemsize, default=None)
    return dtype is None or narrowest is None or str(narrowest) == f"torch.{dtype}"

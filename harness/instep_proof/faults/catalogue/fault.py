"""The type of a fault: edits of the source, their origin, the trace that shows it, and the mistake that names it.

The expected finding is golden data (`fixtures/traces/faults/expected.json`), which `instep faults --update` writes.
Leaves out: planting it (`instep_proof/faults/plant.py`), and which there are (`catalogue/`, one file per family).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec

from instep.bundled import fixtures
from instep.setting import Setting
from instep_reference.contract.place_names import Place

# Sentences that give only the size or the place of an error. They do not name a mistake.
BARE = re.compile("relative error|bytes differ|(is|are) wrong|not finite|NaN|unknown|next_num_steps requests|"
                  "labels that do not belong")

CHANGE = re.compile("{(.*?) => (.*?)}", re.DOTALL)
TRACES = fixtures() / "traces" / "faults"
USUAL = Setting()
EXPECTED = TRACES / "expected.json"


class Expected(msgspec.Struct, frozen=True):
    """The first finding of a fault.

    event  the first event of the trace at which something is wrong, and the place of the first finding there
    says   part of a sentence from which a reader knows the mistake; never the size of an error, or what it led to.
           Empty: no sentence names it
    rank   the rank at fault; unset: the engine has one, or the finding is about all ranks
    """

    event: int
    stage: str
    layer: int
    component: str
    says: str = ""
    rank: int | msgspec.UnsetType = msgspec.UNSET

    def __post_init__(self) -> None:
        if BARE.search(self.says):
            raise ValueError(f"{self.says!r} describes the effect, not the mistake")

    @property
    def place(self) -> Place:
        return Place(self.stage, self.layer, self.component)


NOTHING = Expected(-1, "", 0, "")


@lru_cache
def recorded(path: Path = EXPECTED) -> dict[str, Expected]:
    """The expected finding of every fault."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Expected])


@dataclass(frozen=True)
class Edit:
    """One piece of syntax in the place of another (`instep_proof/faults/syntax_edit.py`).

    file  inside the copy, package first ("instep_optimized/commit/snapshot.py")
    old   whole statements, one expression, or arguments of a call; however they are formatted, once in that file
    new   what takes their place; statements may go without
    """

    file: str
    old: str
    new: str

    @classmethod
    def of(cls, file: str, text: str) -> "Edit":
        """An edit as one text, in which `{was => is}` marks what changes."""
        return cls(file, *(CHANGE.sub(side, text) for side in (r"\1", r"\2")))


@dataclass(frozen=True)
class ExactText(Edit):
    """An edit of a catalogue outside the tree: `old` is the exact text, with its layout and comments."""


@dataclass(frozen=True)
class Wrap:
    """A function that is called with other arguments, or whose result is changed (`faults/plant.py`).

    file       as of an edit
    seam       the function's name in that file, with its class where it is a method ("Columns.claim")
    arguments  statements that run first; they may change the parameters, which have their names
    result     statements that run afterwards; they may change `result`
    Both may call `right`, which is the function as it was.
    """

    file: str
    seam: str
    arguments: str = ""
    result: str = ""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    id       kebab case, unique over all families: the class, then the variant
    kind     its class, as the design names it ("commit-index")
    what     one sentence: what the planted source does
    trace    stem of a file under `fixtures/traces/faults`: the smallest trace that shows it
    seen_by  names of the checks that are meant to see it: at least one must
    blind    names of checks that compare there and cannot see it
    how      how the engine is set up, as `instep replay` is
    mistake  the entry of the catalogue of mistakes that names it (`instep/diagnose/mistakes/__init__.py`). Empty: a
             general sentence names it, which also describes unforeseen faults: a check reports what it compared
             ("length is 4; expected 6"), or the bank a change that any op may have ("is twice the right value")
    origin   the project and number of the bug that it copies; empty if the class is ours
    relation the relation that must find it (`instep relations`), where no single run can
    other    an expected finding that is not the recorded one
    outside  whether it is of a catalogue outside the tree: then it may expect no finding, and any finding counts
    """

    id: str
    kind: str
    what: str
    edits: tuple[Edit | Wrap, ...]
    trace: str
    how: Setting
    seen_by: tuple[str, ...]
    blind: tuple[str, ...] = ()
    relation: str | None = None
    mistake: str = ""
    origin: str = ""
    other: Expected | None = None
    outside: bool = False

    @property
    def expected(self) -> Expected:
        return self.other or recorded().get(self.id, NOTHING)

    @property
    def event(self) -> int:
        return self.expected.event

    @property
    def place(self) -> Place:
        return self.expected.place

    @property
    def says(self) -> str:
        return self.expected.says


def speaking(how: Setting) -> Setting:
    """Return the setting for generating text: labels have no text, so `plain` replaces them."""
    return replace(how, ops="plain") if how.ops == "ledger" else how


def of_family(
    trace: str, how: Setting = USUAL, seen: tuple[str, ...] = ("derived",), blind: tuple[str, ...] = ("identity",),
) -> Callable[..., Fault]:
    """Return a maker of the faults of a family: a fault names only what differs from most of them."""

    def fault(
        id: str, kind: str, what: str, *edits: Edit | Wrap, trace: str = trace, how: Setting = how,
        seen: tuple[str, ...] = seen, blind: tuple[str, ...] = blind, relation: str | None = None, mistake: str = "",
        origin: str = "",
    ) -> Fault:
        return Fault(id, kind, what, edits, trace, how, seen, blind, relation, mistake, origin)

    return fault

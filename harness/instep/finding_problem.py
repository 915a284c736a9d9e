"""The problem of a finding as a code with fields, and the one function that makes its sentence.

Programs decide by the code and the fields. The sentence is for readers; no program parses it (tests/test_house.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, TypeVar

T_co = TypeVar("T_co", covariant=True)

Code = Literal[
    "differs",  # another value than the expected one
    "missing",  # nothing is there, or a tensor of another shape or dtype
    "not_finite",  # NaN or infinite numbers
    "poison",  # the pattern of memory that nothing wrote
    "identified",  # the check recognises the content, and names it
    "unidentified",  # the check compared it with wrong contents that it knows, and recognises none
    "forbidden_write",  # memory changed that this event may not write
    "broken_contract",  # an op call breaks a clause of its contract
    "undecided",  # too many of the choices or blocks cannot be decided
    "failed",  # the subject raised an error, or accepted what it must refuse
]
UNEXPLAINED = "unexplained"
MOVED = {
    "back": "comes back different from what was saved",
    "to host": "goes to the host different from what was saved",
}
Moved = Literal["back", "to host"]


@dataclass(frozen=True)
class NamedMistake:
    """A known mistake: an entry of the catalogue (`diagnose/mistakes/__init__.py`), once for all checks that name it.

    name: kebab case, unique; a planted fault refers to it. sentence: without a subject; details fill its {}
    """

    name: str
    sentence: str

    def known(self, *details: object, state: Sequence[object] = ()) -> WrongContent:
        """The content that the mistake leaves. state: the details of its sentence for a state, if these differ."""
        return WrongContent(self.sentence.format(*details), self.sentence.format(*state) if state else "", self.name)


@dataclass(frozen=True)
class Mistake(NamedMistake, Generic[T_co]):
    """A known mistake with the change that makes a wrong result."""

    wrong: T_co


@dataclass(frozen=True)
class WrongContent:
    """A known wrong content of memory.

    in_a_state: its sentence for a state, if that is another one; name: its entry in the catalogue
    """

    says: str
    in_a_state: str = ""
    name: str = field(default="", compare=False)

    @property
    def key(self) -> str:
        """The same for the conv window and the state that one mistake leaves."""
        return self.in_a_state or self.says


@dataclass(frozen=True)
class Explained:
    """The mistake that accounts for a finding.

    by      "hypothesis": one known mistake with its own sentence; "bank": a mistake that any op may have
    `says`  the mistake, as a sentence without a subject
    where   the wrong part of the tensor, as the end of that sentence; empty: all of it
    equal   every known content with the same bits, this one included; empty: there was no search for others
    names   entries of the catalogue that account for it equally well, the best one first; empty: it is none
    by_all  whether every request must have the mistake, as in a formula, where one of them has it
    vague   whether it says no more than that nothing wrote the memory
    """

    by: Literal["hypothesis", "bank"]
    says: str
    where: str = ""
    equal: tuple[WrongContent, ...] = ()
    names: tuple[str, ...] = ()
    by_all: bool = False
    vague: bool = False

    @classmethod
    def one_of(cls, equal: Iterable[WrongContent], where: str = "") -> Explained:
        """The first of known contents with the same bits."""
        known = tuple(dict.fromkeys(equal))
        return cls("hypothesis", known[0].says, where, known, names_of(known))

    @classmethod
    def any_of(cls, fitting: Sequence[WrongContent], says: str) -> Explained:
        """Known mistakes that fit equally well, and the sentence that lists them."""
        return cls("hypothesis", says, names=names_of(fitting))

    @property
    def readings(self) -> tuple[WrongContent, ...]:
        """The mistake, and all others that leave the same bits."""
        return self.equal or tuple(WrongContent(self.says, name=name) for name in self.names or ("",))

    def only(self, common: Collection[WrongContent]) -> Explained:
        """Keep the readings that are in common."""
        equal = tuple(one for one in self.readings if one in common)
        return replace(self, says=equal[0].says, equal=equal if len(equal) > 1 else (), names=names_of(equal))

    @property
    def sentence(self) -> str:
        """The mistake for readers, with the others that leave the same bits."""
        others = "; ".join(known.says for known in self.equal if known.says != self.says)
        return f"{self.says}{self.where}" + (f" [equal bits: {others}]" if others else "")


@dataclass(frozen=True)
class Unexplained:
    """No mistake accounts for the finding.

    fitting  how many do equally well, and their sentences, where they are known; error: why the search broke off
    partly   whether some mistakes were not tried, as there are too many rows
    """

    fitting: int = 0
    error: str = ""
    names: tuple[str, ...] = ()
    partly: bool = False


@dataclass(frozen=True)
class Problem:
    """The result of a check, and the explanation that `explain/` adds.

    clause       the measurement or observation of the check, as a sentence without a subject; may be empty
    mistake      the mistake that accounts for it
    nearest      the nearest mistake that the check itself knows, where another one accounts for the finding
    like         another request, and the mistake at the same place of that request
    dtypes       the dtype that was found and the declared one, if it is too narrow
    prefix       name of the tracked prefix that owns the memory; empty: a request owns it
    moved        the move that changed the memory; draft: what the move did to the draft head's KV
    unexplained  set if the search for a mistake found none
    broken       broken contracts of op calls at the same place; written: a forbidden write to the same memory
    """

    code: Code
    clause: str = ""
    mistake: Explained | None = None
    nearest: Explained | None = None
    like: tuple[str, Explained] | None = None
    dtypes: tuple[str, str] | None = None
    prefix: str = ""
    moved: Moved | None = None
    draft: str = ""
    unexplained: Unexplained | None = None
    broken: tuple[Problem, ...] = ()
    written: Problem | None = None

    @classmethod
    def of(cls, clause: str, code: Code = "differs", known: Explained | None = None) -> Problem | None:
        """A problem with this clause, and with the known mistake that accounts for it. None for an empty clause."""
        if not clause:
            return None
        return cls(code, clause) if known is None else cls("identified", clause, known)


def names_of(known: Iterable[WrongContent]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in known if one.name))


def sentence(problem: Problem) -> str:
    """Render the problem for readers, without a subject."""
    found = "; ".join(filter(None, (_dtypes(problem), problem.clause)))
    if problem.moved is not None:
        found = f"{MOVED[problem.moved]}: {problem.draft}{found}"
    if problem.nearest is not None:
        found = "the nearest known wrong state: " + "; ".join(filter(None, (problem.nearest.sentence, found)))
    mistake = "" if problem.mistake is None else problem.mistake.sentence
    if problem.like is not None:
        request, like = problem.like
        mistake = f'{like.sentence} (seen in request "{request}")'
    broken = "; ".join(map(sentence, problem.broken))
    whole = "; ".join(filter(None, (
        mistake, found, _unexplained(problem.unexplained),
        broken and f"a contract is broken at the same place: {broken}",
        "" if problem.written is None else sentence(problem.written),
    )))  # fmt: skip
    return f'tracked prefix "{problem.prefix}": {whole}' if problem.prefix else whole


def _dtypes(problem: Problem) -> str:
    return "" if problem.dtypes is None else f"is {problem.dtypes[0]}, {problem.dtypes[1]} is declared"


def _unexplained(why: Unexplained | None) -> str:
    if why is None:
        return ""
    if why.error:
        return f"{UNEXPLAINED}: the search for an explanation raised {why.error}"
    if not why.fitting:
        return UNEXPLAINED
    return f"{UNEXPLAINED}: {why.fitting} explanations fit equally well" + "".join(f"; {name}" for name in why.names)

"""Guards every call to the subject: its exceptions, and answers of a wrong type, become its findings.

A failure of the harness is raised unchanged and is never the subject's. Leaves out: the finding itself
(`run/subject_errors.py`).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, get_args

import torch

from instep_optimized.ops.interpreter import VARIABLE, is_native_on_cpu
from instep_optimized.ranks.lockstep import RankKilled
from instep_reference.contract import engine as e
from instep_reference.contract.answers import MEMORY_FACTS
from instep_reference.contract.errors import BadInput, InstepError, Unsupported
from instep_reference.contract.event_facts import facts, kind_of, named, tracks
from instep_reference.contract.kept_copies import BY, Copy
from instep_reference.contract.place_names import COMPONENTS, Place, See
from instep_reference.contract.pool_meaning import WHATS, Meaning, Positions

from ..adapters import Maker, Subject
from ..player import Observer, Player, Side

SERVES, MAKES = "serves", "is made"  # two of the questions; all others are names of methods
METHODS = (
    *(kind_of(event) for event in get_args(e.AnyEvent) if event is not e.Refused),
    "next_num_steps", "state", "regions", "may_change", "slots", "pages", "watch",
)
COUNTED = ("slot", "row", "page", "request")  # meanings of the first axis of a region
WHOLE = (torch.int32, torch.int64)
NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LISTED = 4  # regions that one finding lists


class SubjectFailed(Exception):
    """The subject raised, or returned a wrong type, on a legal call. question: the call."""

    def __init__(self, question: str, error: BaseException) -> None:
        self.question, self.error = question, error
        super().__init__(said_by(error))


class WrongType(TypeError):
    """The answer does not have the type that the contract requires; the text is the whole finding."""


@contextmanager
def calling(question: str) -> Iterator[None]:
    """The context of one call to the subject, and of nothing else."""
    try:
        yield
    except (SubjectFailed, RankKilled):
        raise
    except InstepError as error:  # it does not support this combination, which is one line and no finding
        if question == MAKES or (question == SERVES and isinstance(error, Unsupported)):
            raise
        raise SubjectFailed(question, error) from error
    except KeyboardInterrupt:  # by the user
        raise
    except BaseException as error:  # also those that are no `Exception`: panics of Rust, outcomes of pytest
        if is_native_on_cpu(error):
            raise BadInput(VARIABLE, found="a native Triton kernel with tensors on the CPU",
                           expected="an interpreted kernel: Triton was imported before instep could switch its "
                                    f"interpreter on ({type(error).__name__}: {said_by(error)})",
                           hint=f"start Python with {VARIABLE}=1") from None
        raise SubjectFailed(question, error) from error


def says_refuses(engine: object) -> bool:
    """Whether the engine sets `refuses = True`, so that illegal events are played."""
    return bool(getattr(engine, "refuses", False))


class GuardedSubject:
    """A subject with guarded answers about its memory; a participant guards events and states."""

    def __init__(self, engine: Subject) -> None:
        self.engine = engine
        self.pools: frozenset[tuple[str, int]] = frozenset()  # name and layer of every region that it has shown

    @property
    def refuses(self) -> bool:
        return says_refuses(self.engine)

    def regions(self) -> list[e.Region]:
        with calling("regions"):
            found = self.engine.regions()
            right = isinstance(found, Sequence) and all(isinstance(region, e.Region) for region in found)
            must(right, "regions", found, "a list of `Region`")
            for region in found:
                what = f"regions: {region.name!r}"
                must(_is_memory(region), what, region.units, "units with a first axis to count")
                must(region.by in COUNTED, f"{what}: by", region.by, f"one of {', '.join(COUNTED)}")
                must(_is_declared(region), f"{what}: means", region.means, "a `Meaning` that fits the units, or None")
                must(_is_scratch(region), f"{what}: scratch", region.scratch, "a set of units of the region")
            pools = frozenset((region.name, region.layer) for region in found)
            hidden = [f"{name} (layer {layer})" for name, layer in sorted(self.pools - pools)]
            if hidden:  # it could write to a region whenever it hides it
                raise WrongType(f"`regions` omits regions that it showed before: {', '.join(hidden[:LISTED])}"
                                f"{' and more' if len(hidden) > LISTED else ''}")  # fmt: skip
            self.pools = pools
            return list(found)

    def may_change(self, event: e.Event) -> dict[str, set[int]]:
        with calling("may_change"):
            found = self.engine.may_change(event)
            right = isinstance(found, Mapping) and all(
                isinstance(units, Set | Sequence) and all(_whole(unit) for unit in units) for units in found.values()
            )
            must(right, "may_change", found, "region names with the units that the event may write")
            shown = {name for name, _ in self.pools}
            unknown = sorted(str(name) for name, units in found.items() if units and name not in shown)
            if unknown and shown:
                raise WrongType(f"may_change names units of {', '.join(unknown)}; `regions` shows no such region, only "
                                f"{', '.join(sorted(shown))}")  # fmt: skip
            return {str(name): set(units) for name, units in found.items()}

    def copies(self) -> Mapping[Copy, Mapping[str, torch.Tensor]] | None:
        """Its copies of requests; None if it does not show them, which is allowed."""
        asked = getattr(self.engine, "copies", None)
        if not callable(asked):
            return None
        with calling("copies"):
            found: Mapping[Copy, Mapping[str, torch.Tensor]] = asked()
            right = isinstance(found, Mapping) and all(
                isinstance(copy, tuple) and len(copy) == 2
                and copy[0] in BY and isinstance(copy[1], str) and isinstance(parts, Mapping)
                and all(isinstance(name, str) and _is_dense(part) for name, part in parts.items())
                for copy, parts in found.items()
            )  # fmt: skip
            must(right, "copies", found, f"({' or '.join(BY)}, a name) with tensors by name")
            return found

    def track_slots(self) -> Mapping[str, int] | None:
        """The track slot of each prefix on the device; None if it does not show them, which is allowed."""
        asked = getattr(self.engine, "track_slots", None)
        if not callable(asked):
            return None
        with calling("track_slots"):
            found: Mapping[str, int] = asked()
            right = isinstance(found, Mapping) and all(isinstance(name, str) and _whole(n) for name, n in found.items())
            must(right, "track_slots", found, "names with their track slots")
            return dict(found)

    def budget(self) -> Mapping[str, int] | None:
        """The bytes that its memory budget has for each region; None if it does not show a budget, which is allowed."""
        asked = getattr(self.engine, "budget", None)
        if not callable(asked):
            return None
        with calling("budget"):
            found: Mapping[str, int] = asked()
            right = isinstance(found, Mapping) and all(
                isinstance(name, str) and _whole(size) for name, size in found.items())
            must(right, "budget", found, "region names with their bytes")
            return dict(found)

    def slots(self) -> dict[str, int]:
        with calling("slots"):
            found = self.engine.slots()
            right = isinstance(found, Mapping) and all(_whole(slot) for slot in found.values())
            must(right, "slots", found, "requests with their slots")
            return dict(found)

    def pages(self) -> dict[str, list[int]]:
        with calling("pages"):
            found = self.engine.pages()
            right = isinstance(found, Mapping) and all(
                isinstance(pages, Sequence) and all(_whole(page) for page in pages) for pages in found.values()
            )
            must(right, "pages", found, "requests with the list of their pages")
            return {name: list(pages) for name, pages in found.items()}


class GuardedEngine:
    """A subject for a player, with guarded events, places, states and requested step counts.

    labels: whether it moves labels, which are integers.
    """

    def __init__(self, engine: Any, labels: bool = False) -> None:
        self._engine, self._labels = engine, labels
        self._rows: dict[Place, torch.Size] = {}  # the shape of one row of a place, the same in all calls

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> Any:
            with calling(SERVES):
                return getattr(self._engine, name)(*given)

        return call

    def state(self, request: str) -> e.RequestState:
        with calling("state"):
            return checked_state(self._engine, request, self._labels)

    def prefix(self, name: str) -> e.RequestState:
        with calling("prefix"):
            found = checked_state(self._engine, name, self._labels, "prefix")
            must(found.final is not None, "prefix: final", found.final, "a tensor")
            must_hold("prefix: final", found.final, self._labels)
            return found

    def next_num_steps(self, batch: int, scheduled: int) -> int:
        with calling("next_num_steps"):
            return checked_num_steps(self._engine, batch, scheduled)

    def offered(self, event: e.Event) -> None:
        """Serve an illegal event: an engine with `refuses` must raise an error of the contract."""
        if not says_refuses(self._engine):
            return
        with calling(SERVES):
            try:
                Player("offered", self._engine).serve(event)
            except InstepError:
                return
            raise WrongType(f"{kind_of(event)} was served, and must be refused with BadInput")

    def watch(self, see: See) -> None:
        with calling("watch"):
            self._engine.watch(lambda place, tensor: see(place, self._shown(place, tensor)))

    def _shown(self, place: Place, tensor: torch.Tensor) -> torch.Tensor:
        """The engine calls this, so that a wrong tensor raises while it serves."""
        must(isinstance(place, Place), "see: place", place, "a `Place`")
        what = f"see: {place}"
        labels = self._labels and place.component != "logits"  # logits are numbers in any case
        must_hold(what, tensor, labels or place.component == "pick")
        must(tensor.dim() > 0, what, tensor, "rows")
        before = self._rows.setdefault(place, tensor.shape[1:])
        must(tensor.shape[1:] == before, what, tensor, f"rows of {tuple(before)}, as it showed before")
        return tensor


class Checked(Observer):
    """Compares the type of every answer with the contract."""

    def after(self, event: e.Event, side: Side) -> Side:
        with calling(SERVES):
            return replace(side, answer=checked_answer(event, side.answer))


class Materialized(Observer):
    """Resolves lazy values of an answer."""

    def after(self, event: e.Event, side: Side) -> Side:
        with calling(SERVES):
            return replace(side, answer=materialized(side.answer))


def checked_state(engine: Any, request: str, labels: bool = False, asked: str = "state") -> e.RequestState:
    """The logical state of a request or a prefix, if its type is right. labels: whether it has integers."""
    found = getattr(engine, asked)(request)
    must(isinstance(found, e.RequestState), asked, found, "a `RequestState`")
    assert isinstance(found, e.RequestState)
    for name, component in MEMORY_FACTS.items():
        value, axes = getattr(found, name), component.dimensions
        must(isinstance(value, dict), f"state: {name}", value, "a dict of layers with tensors")
        for layer, held in value.items():
            must_hold(f"state: {name} of layer {layer}", held, labels or component.whole)
            must(held.dim() == axes, f"state: {name} of layer {layer}", held, f"{axes} axes")
    must(_whole(found.length), "state: length", found.length, "a whole number")
    for what, token in (("root", found.root), ("proposal", found.proposal)):
        must(token is None or _whole(token), f"state: {what}", token, "a whole number or None")
    hidden = found.proposal_hidden
    must(hidden is None or isinstance(hidden, torch.Tensor), "state: proposal_hidden", hidden, "a tensor or None")
    if hidden is not None:
        must_hold("state: proposal_hidden", hidden, labels)
        must(hidden.dim() == 1, "state: proposal_hidden", hidden, "one axis")
    return found


def checked_num_steps(engine: Any, batch: int, scheduled: int) -> int:
    """The step count that an engine requests next. An engine of the older form takes no numbers of requests."""
    try:
        takes = bool(inspect.signature(engine.next_num_steps).parameters)
    except (TypeError, ValueError):  # Python cannot read its signature
        takes = True
    found = engine.next_num_steps(*(batch, scheduled) if takes else ())
    must(_whole(found), "next_num_steps", found, "a whole number")
    return int(found)


def checked_answer(event: e.Event, found: object) -> e.Answer | None:
    """The answer to an event, if its type is right: its fields are tensors with a line for every request."""
    kind, what, names = facts(event).answer, kind_of(event), named(event)
    if kind is None:
        return None
    must(isinstance(found, kind), what, found, f"a `{kind.__name__}`")
    made = getattr(found, "tracked", {})
    right = isinstance(made, Mapping) and all(name in names and _whole(count) for name, count in made.items())
    must(right, f"{what}: tracked", made, "its requests with whole numbers")
    inner = getattr(found, "inner", {})
    right = isinstance(inner, Mapping) and all(under in tracks(event) and _whole(n) for under, n in inner.items())
    must(right, f"{what}: inner", inner, "its names with whole numbers")
    if isinstance(found, e.Forwarded):
        right = isinstance(found.own, Mapping) and all(isinstance(own, torch.Tensor) for own in found.own.values())
        must(right, f"{what}: own", found.own, "requests with tensors")
        must(isinstance(found.roots, Mapping), f"{what}: roots", found.roots, "requests with their roots")
        for name, own in found.own.items():
            must_hold(f"{what}: own of {name!r}", own, whole=True)
        return found
    for field in fields(found):  # type: ignore[arg-type]
        if field.name == "tracked":
            continue
        value = getattr(found, field.name)
        if value is None and field.default is None:
            continue
        right = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(names)
        must(right, f"{what}: {field.name}", value, f"a tensor with {len(names)} lines, one per request")
        must_hold(f"{what}: {field.name}", value, whole=True)
    return found  # type: ignore[return-value]


def materialized(answer: e.Answer | None) -> e.Answer | None:
    """The same answer with resolved lazy values."""
    if not isinstance(answer, e.Forwarded):
        return answer
    return replace(answer, roots=dict(answer.roots), own=dict(answer.own))


def make_subject(maker: Maker, *given: Any, **named: Any) -> Subject:
    """The engine of a maker, if it has the methods of the contract."""
    with calling(MAKES):
        engine = maker(*given, **named)
        missing = [name for name in METHODS if not callable(getattr(engine, name, None))]
        if missing:
            raise WrongType(f"`make` returned {_spelled(engine)}, which has no {', '.join(missing)}")
        return engine


def said_by(error: BaseException) -> str:
    """The message of an exception; empty if reading the message raises, too."""
    try:
        return str(error)
    except Exception:  # the exception is the user's code, like the subject
        return ""


def must(right: bool, what: str, found: object, expected: str) -> None:
    if not right:
        raise WrongType(f"{what} returned {_spelled(found)}; the contract expects {expected}")


def must_hold(what: str, tensor: object, whole: bool) -> None:
    """Require a dense tensor of the right kind of numbers."""
    kinds = WHOLE if whole else NUMBERS
    right = isinstance(tensor, torch.Tensor) and _is_dense(tensor) and tensor.dtype in kinds
    must(right, what, tensor, f"a dense tensor of {' or '.join(str(kind).removeprefix('torch.') for kind in kinds)}")


def _is_dense(found: object) -> bool:
    """Whether a value is a tensor with readable bytes."""
    dense = isinstance(found, torch.Tensor) and found.layout is torch.strided and not found.is_meta
    return dense and not found.is_complex()  # type: ignore[attr-defined]


def _is_memory(region: e.Region) -> bool:
    gaps = region.gaps
    return _is_dense(region.units) and region.units.dim() > 0 and (
        gaps is None or (_is_dense(gaps) and gaps.dim() > 0)
    )


def _is_declared(region: e.Region) -> bool:
    means = region.means
    if means is None or not isinstance(means, Meaning):
        return means is None
    along = means.positions
    if along is not None and not (isinstance(along, Positions) and along.what in WHATS and along.windows > 0):
        return False
    fits = along is None or 0 < along.axis < region.units.dim()
    return means.component in COMPONENTS and fits


def _is_scratch(region: e.Region) -> bool:
    found = region.scratch
    return isinstance(found, Set) and all(_whole(unit) and 0 <= unit < len(region.units) for unit in found)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _spelled(value: object, longest: int = 80) -> str:
    """A value in an error: None; a list (['slot 0']); a Tensor"""
    if value is None:
        return "None"
    kind = type(value).__name__
    if isinstance(value, torch.Tensor):
        where = "meta " if value.is_meta else "" if value.layout is torch.strided else "sparse "
        return f"a {where}{kind} {tuple(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    said = repr(value)
    return f"a {kind} ({said if len(said) <= longest else said[:longest] + '...'})"

"""A catalogue of faults outside the tree: a folder of JSON files, one per family, each a list of faults.

The files are data with a strict schema. Each edit replaces one exact text in a copy of the project's own source. An op
set or strategy of somebody else cannot be named, so no other code runs. Leaves out: planting and judging.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from instep.diagnose.mistakes import CATALOGUE
from instep.options import OPTIONS, known
from instep.setting import Setting
from instep.trace.file import decode
from instep.trace.file import read as read_trace
from instep_reference.contract.errors import BadInput, bytes_of
from instep_reference.contract.place_names import COMPONENTS, STAGES

from .campaign import CONTROL
from .catalogue import TRACES, by_id
from .catalogue.fault import NOTHING, ExactText, Expected, Fault
from .free_run import POLICY
from .plant import PACKAGES, edited, source

NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
COLON = ("state_rounding",)  # options whose values may have a colon: stochastic:7


class OutsideEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An exact text of a file, package first, which is there once, and its replacement."""

    file: str
    old: str
    new: str


class OutsideFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fault of a file.

    what      one sentence: what the edited source does
    trace     a file below the folder of the catalogue, or the stem of a trace in fixtures/traces/faults
    options   as of `instep replay`, without dashes: {"ops": "ledger", "state_dtype": "bfloat16"}
    expected  the first finding, as in the project's own catalogue; None: any finding counts, and no place is judged
    seen_by   the checks that are meant to see it; empty: any
    mistake   the entry of instep's catalogue of mistakes that names it; empty: none is known
    """

    id: str
    what: str
    edits: tuple[OutsideEdit, ...]
    trace: str
    options: dict[str, str | bool | int] = {}
    expected: Expected | None = None
    seen_by: tuple[str, ...] = ()
    mistake: str = ""
    origin: str = ""


def families(folder: Path) -> Mapping[str, tuple[Fault, ...]]:
    """Read the catalogue: name of a file -> its faults. Every edit is planted once, in memory."""
    files = sorted(file for file in folder.glob("*.json") if not file.name.endswith(POLICY))
    if not files:
        raise BadInput("--catalogue", found=f"{folder} without a JSON file", expected="a folder with lists of faults")
    found = {file.stem: tuple(_faults(file)) for file in files}
    taken = dict.fromkeys(by_id(), "the project's catalogue") | {CONTROL: "the run without a fault"}
    for family, faults in found.items():
        for fault in faults:
            if fault.id in taken:
                raise BadInput(f"{family}.json: id", found=f"{fault.id}, as in {taken[fault.id]}",
                               expected="a name that no other fault has")  # fmt: skip
            taken[fault.id] = f"{family}.json"
    return found


def _faults(file: Path) -> Iterator[Fault]:
    for number, one in enumerate(decode(bytes_of(file), tuple[OutsideFault, ...], file.name, "a list of faults")):
        where = f"{file.name}[{number}]"
        if not one.id or not one.edits:
            raise BadInput(where, found="no id" if not one.id else "no edit", expected="an id, and an edit at least")
        if not re.fullmatch(NAME, one.id):  # a folder is named so
            raise BadInput(f"{where}: id", found=repr(one.id), expected="letters, digits, - _ and .")
        yield Fault(
            one.id, file.stem, one.what, _edits(one, where), _trace(file.parent, one.trace, where),
            _setting(one.options, where), one.seen_by, mistake=_mistake(one.mistake, where), origin=one.origin,
            other=_expected(one.expected, where), outside=True,
        )  # fmt: skip


def _edits(one: OutsideFault, where: str) -> tuple[ExactText, ...]:
    """The edits, each of which applies to the text that the edits before it leave."""
    edits, texts = tuple(ExactText(edit.file, edit.old, edit.new) for edit in one.edits), dict[str, str]()
    for number, edit in enumerate(edits):
        field = f"{where}: edits[{number}]"
        package, _, rest = edit.file.partition("/")
        path = source(package) / rest if package in PACKAGES else Path()
        if (package not in PACKAGES or rest.startswith("/") or ".." in path.parts or path.suffix != ".py"
                or not path.is_file()):
            raise BadInput(f"{field}.file", found=repr(edit.file), expected=f"a Python file of {', '.join(PACKAGES)}, "
                           "as in instep_optimized/engine.py")  # fmt: skip
        before = texts.get(edit.file) or path.read_text()
        try:
            texts[edit.file] = after = edited(before, edit)
            same = ast.dump(ast.parse(after)) == ast.dump(ast.parse(before))
        except BadInput as error:
            raise BadInput(f"{field}.old", found=error.found, expected=error.expected, hint=error.hint) from None
        except SyntaxError as error:
            raise BadInput(f"{field}.new", found=f"no Python in line {error.lineno} of {edit.file}: {error.msg}",
                           expected="source that can be parsed") from None  # fmt: skip
        if same:
            raise BadInput(f"{field}.new", found="the same program", expected="another one: only a layout or a comment "
                           "changes")  # fmt: skip
    return edits


def _trace(folder: Path, name: str, where: str) -> str:
    """The path of a trace without its ending, or its stem in the folder of the project's faults."""
    own, ours = folder / name, TRACES / f"{name}.jsonl"
    below = not Path(name).is_absolute() and ".." not in Path(name).parts
    if below and own.suffix == ".jsonl" and own.is_file():
        read_trace(own)
        return str(own.absolute().with_suffix(""))
    if "/" in name or not ours.is_file():
        stems = ", ".join(sorted(file.stem for file in TRACES.glob("*.jsonl")))
        raise BadInput(f"{where}: trace", found=repr(name), expected=f"a .jsonl file in {folder}, or one of {stems}")
    return name


def _setting(options: Mapping[str, str | bool | int], where: str) -> Setting:
    for name, value in options.items():
        field = f"{where}: options.{name}"
        kind = OPTIONS.get(name, (None, ""))[0]
        if kind is None or name in ("engine", "comm"):
            raise BadInput(field, found="an option", expected="one of " + ", ".join(
                one for one in OPTIONS if one not in ("engine", "comm")))  # fmt: skip
        if type(value) is not kind:
            raise BadInput(field, found=repr(value), expected=f"a {kind.__name__}")
        if isinstance(value, str):
            with _at(field):
                known(name, value)
            if (":" in value or "/" in value or ".py" in value) and name not in COLON:
                raise BadInput(field, found=repr(value), expected="a name of instep: no other code runs")
    changed: Any = options
    with _at(f"{where}: options"):
        return Setting.of(**changed)


@contextmanager
def _at(field: str) -> Iterator[None]:
    """Name the field of the file in an error about an option."""
    try:
        yield
    except BadInput as error:
        where = f"{field}: {error.field}"
        raise BadInput(where, found=error.found, expected=error.expected, hint=error.hint) from None


def _mistake(name: str, where: str) -> str:
    if name and name not in CATALOGUE:
        raise BadInput(f"{where}: mistake", found=repr(name), expected="a name of `instep faults --list`")
    return name


def _expected(expected: Expected | None, where: str) -> Expected:
    if expected is None:
        return NOTHING
    stage = expected.stage.partition(".")[0]
    if stage not in STAGES or expected.component not in COMPONENTS or expected.event < 0:
        raise BadInput(f"{where}: expected", found=f"event {expected.event}, {expected.stage} {expected.component}",
                       expected="an event of the trace, and a stage and component of the data flow")
    return expected

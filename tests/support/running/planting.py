"""Plants edits in this process, for as long as a block lasts: the functions that they change get other code.

Every holder of such a function runs the other code: an op set, a subclass, a module that imported it.
Leaves out: kernels, tables and imports, which need a copy of the source (`instep_proof/faults/plant.py`).
"""

import ast
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import msgspec

from instep.diagnose import diagnose
from instep.lru_cache import forget
from instep.report.outcome_data import finding, listed_findings
from instep.run.replay import Replay
from instep.trace.file import Trace, read
from instep.verdict import Exit
from instep_proof.faults.catalogue import TRACES
from instep_proof.faults.catalogue.fault import Edit, Fault, Wrap
from instep_proof.faults.compare_with_control import Judged, judge
from instep_proof.faults.fault_runs import Arm
from instep_proof.faults.plant import edited
from instep_proof.faults.syntax_edit import parsed
from instep_reference.contract.engine import Commit, Forward
from instep_reference.contract.errors import BadInput

COPY = "plant it in a copy of the source: `plant.planted`"


@contextmanager
def planted_here(*edits: Edit | Wrap) -> Iterator[None]:
    """The edits hold within the block."""
    swaps = swaps_of(*edits)
    before = [function.__code__ for function, _ in swaps]
    shared = any(not edit.file.startswith("instep_optimized") for edit in edits)  # with runs of the reference
    try:
        for function, code in swaps:
            function.__code__ = code
        if shared:
            forget()
        yield
    finally:
        for (function, _), code in zip(swaps, before, strict=True):
            function.__code__ = code
        if shared:
            forget()


def swaps_of(*edits: Edit | Wrap) -> list[tuple[FunctionType, CodeType]]:
    """The functions that the edits change, and the code that each gets."""
    texts: dict[str, tuple[str, str]] = {}
    for edit in edits:
        module = _module(edit.file)
        original, text = texts.get(edit.file) or 2 * (Path(str(module.__file__)).read_text(),)
        texts[edit.file] = original, edited(text, edit)
    return [swap for file, both in texts.items() for swap in _swaps(file, *both)]


def plantable(fault: Fault) -> bool:
    """Whether a replay in this process can show the fault: it needs no relation, and no copy of the source."""
    try:
        return fault.relation is None and bool(swaps_of(*fault.edits))
    except BadInput:
        return False


def judged_here(fault: Fault) -> Judged:
    """The fault as `instep faults` judges it, of a run until the event of its expected finding.

    Only a whole campaign shows that the control agrees and that the edited source served; here both are assumed.
    """
    trace, right, planted = read(TRACES / f"{fault.trace}.jsonl"), {"instep": "right"}, {"instep": "planted"}
    control = Arm(Exit.AGREED, 0.0, served=right, events=1, of=1)
    with planted_here(*fault.edits):
        verdict = diagnose(Replay(trace, fault.how), until=fault.event).verdict
    findings = tuple(map(msgspec.to_builtins, map(finding, listed_findings(verdict.findings))))
    return judge(fault, control, Arm(verdict.exit, 0.0, findings, served=planted), right, planted)


def begun(trace: Trace, event: int) -> int:
    """Index of the event at which the round of an event begins. `instep faults` checks that no finding is earlier."""
    kinds = [type(one) for one in trace.events[: event + 1]]
    return max(at for at, kind in enumerate(kinds) if kind is Forward) if kinds[event] is Commit else event


def _module(file: str) -> ModuleType:
    return importlib.import_module(file.removesuffix(".py").removesuffix("/__init__").replace("/", "."))


def _swaps(file: str, original: str, text: str) -> Iterator[tuple[FunctionType, CodeType]]:
    """Every function of the module whose definition changed, and the code that it gets."""
    module, field = _module(file), f"planting in {file}"
    old, new = (dict(_functions(parsed(each, field))) for each in (original, text))
    if _rest(original) != _rest(text) or old.keys() != new.keys():
        raise BadInput(field, found="an edit that changes more than the code of functions", expected=COPY)
    codes = dict(_codes(compile(text, str(module.__file__), "exec", dont_inherit=True)))
    for name in old:
        if old[name] != new[name]:
            function = _found(module, name)
            if function is None or len(function.__code__.co_freevars) != len(codes[name].co_freevars):
                raise BadInput(field, found=f"{name}, which is no plain function", expected=COPY)
            yield function, codes[name]


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted name -> definition, of functions of the module and of its classes."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, ast.dump(node)
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


@lru_cache(maxsize=64)  # many plant in the same file
def _rest(text: str) -> str:
    """All of the file but the bodies of its functions."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body = []
    return ast.dump(tree)


def _codes(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each.co_qualname, each
            yield from _codes(each)


def _found(module: ModuleType, name: str) -> FunctionType | None:
    """The function itself, out of what decorators made of it."""
    holder: Any = module
    for part in name.split("."):
        holder = vars(holder)[part]
    for inner in ("__func__", "fget", "func"):
        if isinstance(holder, staticmethod | classmethod | property | cached_property):
            holder = getattr(holder, inner, holder)
    while hasattr(holder, "__wrapped__"):
        holder = holder.__wrapped__
    return holder if isinstance(holder, FunctionType) and holder.__code__.co_qualname == name else None

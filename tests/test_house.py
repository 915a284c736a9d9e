"""The house rules that a program can check: which module imports which, how long a file is, and how it begins.

Leaves out: taste.
"""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable
from contextlib import nullcontext
from fnmatch import fnmatch
from functools import cache
from graphlib import CycleError, TopologicalSorter
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from documentation.drawn_modules import COUNT, drawn
from instep_proof.faults.catalogue import FAMILIES, TRACES, by_id
from instep_proof.faults.catalogue.kinds import KINDS
from instep_reference.contract.recurrences import RECURRENCES
from support.wrong.harmless import HARMLESS

TOP = Path(__file__).resolve().parents[1]
ROOTS = {
    "instep_reference": TOP / "reference" / "instep_reference",
    "instep_optimized": TOP / "optimized" / "instep_optimized",
    "instep": TOP / "harness" / "instep",
    "instep_proof": TOP / "harness" / "instep_proof",
    "instep_speed": TOP / "harness" / "instep_speed",
}
TESTS = {"support", "campaigns", "documentation", "perf"}  # packages that only tests and studies may import
LONGEST_FILE = 600
LONGEST_PARAMETERS = 30  # of a kernel
SMALL_FILE = 80  # lines; a shorter file with one importer, in its own folder, belongs in that importer

# The packages of this project that each package may import (prefixes of absolute module names).
ALLOWED = {
    "instep_reference": ("instep_reference",),
    "instep_optimized": ("instep_optimized", "instep_reference.contract"),
    "instep": ("instep", "instep_optimized", "instep_reference"),
    "instep_proof": ("instep_proof", "instep", "instep_optimized", "instep_reference"),
    "instep_speed": ("instep_speed", "instep", "instep_optimized", "instep_reference"),
}
# Modules that may bring an engine into being; every other harness module is handed one.
BUILDS_ENGINES = {
    "instep.run.build_compared_engines", "instep.run.engine_without_comparison", "instep.run.large_model",
    "instep.run.reference_with_declared_storage",
}
ENGINE_MODULES = ("instep_optimized.engine", "instep_reference.engine", "instep_reference.label_ledger")
# Nothing in the contract computes: these are the only torch names it may use.
CONTRACT_TORCH_NAMES = {
    "Tensor", "dtype", "device", "float32", "int8", "float16", "bfloat16", "float64", "float8_e4m3fn", "isfinite",
}


def modules() -> list[tuple[str, Path]]:
    found = []
    for package, root in ROOTS.items():
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join((package, *(p for p in parts if p != "__init__")))
            found.append((name, path))
    return found


class Import(NamedTuple):
    """One import: the importing module, the imported one (or a member of it), and the line."""

    by: str
    of: str
    line: int


@cache
def imports(name: str, path: Path) -> tuple[Import, ...]:
    """The imports of a file, those inside functions included; relative names are resolved."""
    found = list[Import]()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [Import(name, alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found.append(Import(name, base, node.lineno))
            found += [Import(name, f"{base}.{alias.name}", node.lineno) for alias in node.names]
    return tuple(found)


def imported(name: str, path: Path) -> set[str]:
    """Absolute names of the modules that a file imports, and of their members that it names."""
    return {one.of for one in imports(name, path)}


MODULES = modules()


def foreign(name: str, others: Iterable[str]) -> set[str]:
    """The imports of a module that its layer may not have."""
    ours = {other for other in others if other.split(".")[0] in ROOTS.keys() | TESTS}
    # `from instep_reference import contract` names the package and the member: the member decides
    return {
        other for other in ours
        if not any(f"{other}.".startswith(f"{prefix}.") for prefix in ALLOWED[name.split(".")[0]])
        and not any(prefix.startswith(f"{other}.") for prefix in ALLOWED[name.split(".")[0]])
    }


def test_a_package_imports_only_what_its_layer_may() -> None:
    wrong = {name: sorted(found) for name, path in MODULES if (found := foreign(name, imported(name, path)))}
    assert len(MODULES) > 400 and not wrong, f"these modules import what their layer may not: {wrong}"


@pytest.mark.parametrize(("name", "other", "may"), [
    ("instep_reference.gdn", "instep_optimized.memory_addresses", False),
    ("instep_reference.gdn", "support.inputs.traces", False),
    ("instep_optimized.engine", "instep_reference.gdn", False), ("instep_optimized.engine", "torch", True),
    ("instep_optimized.engine", "instep_reference.contract.place_names", True), ("instep.player", "perf", False),
    ("instep_optimized.engine", "instep_reference", True), ("instep.player", "instep_reference.gdn", True),
    ("instep_optimized.engine", "instep.player", False),
])  # fmt: skip
def test_an_import_across_layers_is_seen(name: str, other: str, may: bool) -> None:
    assert bool(foreign(name, [other])) is not may


# The rooms of `instep` in their order: a room imports only from rooms before it, in functions too.
ROOMS = (
    "finding_problem", "options", "atomic_write", "lru_cache", "bundled", "threads", "verdict", "tier_allowances",
    "player", "trace", "watch", "oracle", "checks", "adapters", "subject", "setting", "run", "diagnose", "report",
    "generate", "campaign", "audit", "attach", "kit", "cli", "plugin", "__main__",
)
HARNESS = ("instep", "instep_proof", "instep_speed")
# Files under SMALL_FILE lines that keep their one importer next to them: members of a family, which its table lists.
TABLES = {"instep.checks", "instep.diagnose.explanation_bank", "instep.kit.cases"}


def edges(modules: Iterable[tuple[str, Path]]) -> list[Import]:
    """The imports between modules, each resolved to the module that is imported; a package is its `__init__`."""
    known = dict(modules)
    named = [one for name, path in known.items() for one in imports(name, path)]
    members = {(one.by, one.line, one.of.rpartition(".")[0]) for one in named if one.of in known}
    return [
        one for one in named
        if one.of in known and one.of != one.by and (one.by, one.line, one.of) not in members
    ]  # fmt: skip


def room(name: str) -> str:
    return name.split(".")[1]


def upward(found: Iterable[Import]) -> set[tuple[str, str]]:
    """The imports from a room of `instep` of a room that is later in the order."""
    inside = [one for one in found if one.by.startswith("instep.") and one.of.startswith("instep.")]
    return {(one.by, one.of) for one in inside if ROOMS.index(room(one.by)) < ROOMS.index(room(one.of))}


def cycles(found: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The groups of names that import each other, directly or through others."""
    graph: dict[str, set[str]] = {}
    for by, of in found:
        graph.setdefault(by, set()).add(of)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [error.args[1]]
    return []


def package(name: str) -> str:
    """The package that a module is in; a package is in itself."""
    return name if (dict(MODULES)[name]).name == "__init__.py" else name.rpartition(".")[0]


def test_a_room_imports_only_from_rooms_before_it() -> None:
    rooms = {room(name) for name, _ in MODULES if name.startswith("instep.")}
    assert rooms == set(ROOMS), "ROOMS lists every folder and file of the package `instep`"
    found = upward(edges(MODULES))
    assert not found, f"new: {sorted(found)}"


@pytest.mark.parametrize(("page", "heading"), [
    ("harness/README.md", "`instep`: is this engine right?"), ("docs/architecture.md", "Rooms"),
])  # fmt: skip
def test_a_page_lists_the_rooms_in_their_order(page: str, heading: str) -> None:
    section = (TOP / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [word.removesuffix(".py").rstrip("/") for cell in cells for word in re.findall(r"`([^`]+)`", cell)]
    assert (*named, "__main__") == ROOMS


def test_no_modules_import_each_other() -> None:
    found = [(one.by, one.of) for one in edges(MODULES)]
    assert len(found) > 2000 and not cycles(found)


def test_no_packages_import_each_other() -> None:
    found = {(package(one.by), package(one.of)) for one in edges(MODULES)
             if one.by.split(".")[0] in HARNESS}
    found = {(by, of) for by, of in found if by != of and {by, of}.isdisjoint(ROOTS)}
    assert len(found) > 100 and not cycles(found)


@pytest.mark.parametrize(("texts", "found"), [
    ({"trace.file": "from ..watch import rows", "watch.rows": ""}, {("instep.trace.file", "instep.watch.rows")}),
    ({"trace.file": "def f():\n    from ..watch.rows import x", "watch.rows": ""},
     {("instep.trace.file", "instep.watch.rows")}),
    ({"trace.file": "", "watch.rows": "from ..trace.file import read"}, set()),
])  # fmt: skip
def test_an_upward_import_is_seen(texts: dict[str, str], found: set[tuple[str, str]], tmp_path: Path) -> None:
    paths = {f"instep.{name}": tmp_path / f"{name}.py" for name in texts}
    for name, text in texts.items():
        paths[f"instep.{name}"].write_text(text)
    assert upward(edges(paths.items())) == found


def test_a_cycle_is_seen() -> None:
    assert cycles([("a", "b"), ("b", "c"), ("c", "a"), ("a", "d")])
    assert not cycles([("a", "b"), ("b", "c"), ("a", "c")])


def lonely() -> dict[str, str]:
    """Small files with one importer, which is in the same folder, and that importer."""
    importers: dict[str, set[str]] = {}
    for one in edges(MODULES):
        importers.setdefault(one.of, set()).add(one.by)
    return {
        name: by for name, path in MODULES
        if name.split(".")[0] in HARNESS and path.name != "__init__.py" and path.read_text().count("\n") < SMALL_FILE
        and len(importers.get(name, ())) == 1 and package(by := next(iter(importers[name]))) == package(name)
    }  # fmt: skip


def test_a_small_file_has_more_than_one_importer() -> None:
    found = lonely()
    wrong = {name: by for name, by in found.items() if by not in TABLES}
    assert not wrong, f"put each of these into its importer: {wrong}"
    assert len(found) <= 30, f"the families have {len(found)} small files"


def test_only_the_sides_build_engines() -> None:
    builders = {
        name for name, path in MODULES
        if name.split(".")[0] == "instep" and any(other in ENGINE_MODULES for other in imported(name, path))
    }
    assert builders <= BUILDS_ENGINES, f"engines are built in {sorted(builders - BUILDS_ENGINES)} too"


def test_events_reach_an_engine_through_the_player_alone() -> None:
    """`event.on(engine)` is in one place; `on` of a calibration's stage is a different method."""
    callers = {
        name for name, path in MODULES if name.split(".")[0] == "instep"
        if ".on(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "on"
    }
    assert callers == {"instep.player"}


def test_nothing_in_the_contract_computes() -> None:
    for name, path in MODULES:
        if not name.startswith("instep_reference.contract"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
                assert node.attr in CONTRACT_TORCH_NAMES, f"{name} line {node.lineno} uses torch.{node.attr}"


# Modules that serve one kind of recurrence alone, so that they may name its row by `GDN`: adapters and fused kernels of
# it, and the cases and yardsticks of such kernels. None writes its name as a text: the table has that.
OF_ONE_KIND = {
    "instep.adapters.dense", "instep.adapters.pooled", "instep.adapters.sglang_ring", "instep.kit.cases.conv_and_gdn",
    "instep.kit.compare_with_reference", "instep.kit.expected_results", "instep_optimized.ops.fused",
    "instep_proof.calibrate.graded_errors", "instep_speed.bench.drawn_rows",
}
TABLE = "instep_reference.contract.recurrences"


def named_kinds(source: str) -> set[str]:
    """The kinds of recurrences that a module names: as a text, or by the constant of a row."""
    tree = ast.parse(source)
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    rows = {one.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            and (node.module or "").endswith("recurrences") for one in node.names if one.name.lower() in RECURRENCES}
    return (texts & RECURRENCES.keys()) | rows


def test_only_modules_of_one_recurrence_name_a_kind() -> None:
    found = {name: kinds for name, path in MODULES if name != TABLE and not name.startswith("instep_proof.faults.")
             if (kinds := named_kinds(path.read_text()))}  # fmt: skip
    assert found.keys() == OF_ONE_KIND and set().union(*found.values()) == {"GDN"}, f"read the row instead: {found}"
    assert named_kinds("if kind == 'kda':\n    from .contract.recurrences import GDN") == {"kda", "GDN"}


# Attributes, JSON fields and variables that hold a sentence. Code decides by the code and fields of a `Problem`, so
# that a better sentence never switches an explanation off.
SENTENCES = {"diagnosis", "clause", "says", "sentence", "reason", "message"}
SENTENCE_VARIABLES = SENTENCES - {"says", "reason", "message"}
PARSES = {
    "startswith", "endswith", "removeprefix", "removesuffix", "split", "rsplit", "partition", "rpartition", "find",
    "rfind", "index", "rindex", "count",
}
SEARCHES = {"match", "fullmatch", "search", "findall", "finditer", "sub", "subn", "split"}
# Modules that may read a sentence, and why.
READ_SENTENCES = {
    "instep_proof.faults.compare_with_control":
        "it judges the report, so it compares what a reader sees with the catalogue",
    "instep_proof.commands.demo": "it shows a report and checks that the report names the planted fault",
    "instep_proof.faults.catalogue.fault": "it checks the sentences that people write into the catalogue",
}


def parsed_sentences(source: str) -> list[int]:
    """Lines that read a sentence which other code wrote: `in`, `==` with a text, methods of str, and `re`.

    A call that only cuts a text into lines, as `partition("\\n")`, is layout.
    """
    tree, lines = ast.parse(source), list[int]()
    every = [*ast.walk(tree)]
    named = any(isinstance(node, ast.Assign) and _is_sentence(node.value, set()) for node in every)
    functions = [node for node in every if named and isinstance(node, ast.FunctionDef)]
    for scope in [tree, *functions]:
        names = set(SENTENCE_VARIABLES)
        for node in ast.walk(scope) if scope is not tree else ():
            if isinstance(node, ast.Assign) and _is_sentence(node.value, set()):
                names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        lines += [node.lineno for node in ast.walk(scope) if _parses(node, names)]  # type: ignore[attr-defined]
    return sorted(set(lines))


def _is_sentence(node: ast.expr, names: set[str]) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name in SENTENCES
        case ast.Name(id=name):
            return name in names
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "upper" | "strip" | "splitlines" | "replace")):
            return _is_sentence(inner, names)
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)) or (
        isinstance(node, ast.Name) and node.id.isupper())


def _parses(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=right):
            sides = [left, *right]
            member = any(isinstance(op, ast.In | ast.NotIn) for op in ops)
            equal = any(isinstance(op, ast.Eq | ast.NotEq) for op in ops) and any(map(_is_text, sides))
            return (member or equal) and any(_is_sentence(side, names) for side in sides)
        case ast.Call(func=ast.Attribute(value=of, attr=called), args=given):
            layout = bool(given) and isinstance(given[0], ast.Constant) and given[0].value == "\n"
            return (called in PARSES and not layout and _is_sentence(of, names)) or (
                called in SEARCHES and any(_is_sentence(one, names) for one in given))
        case ast.Match(subject=subject):
            return _is_sentence(subject, names)
    return False


def test_no_code_parses_a_sentence_outside_of_the_report() -> None:
    found = {name: lines for name, path in MODULES if not name.startswith("instep.report")
             if (lines := parsed_sentences(path.read_text()))}  # fmt: skip
    assert found.keys() == READ_SENTENCES.keys(), f"these lines decide by a sentence: {found}"


@pytest.mark.parametrize(("line", "parses"), [
    ('"nobody" in found.diagnosis', True), ("one.says not in other.diagnosis", True),
    ('finding.diagnosis.startswith("unknown")', True), ("UNTOLD.search(finding.diagnosis)", True),
    ('re.match("nobody", finding["diagnosis"])', True), ('skip.reason == "no memory"', True),
    ("found.problem.clause == UNKNOWN", True), ('sentence.partition(" request ")[0]', True),
    ('located.says.lower().split(": ")', True), ("def f(x):\n    text = x.diagnosis\n    return 'a' in text", True),
    ("match found.diagnosis:\n    case 'unknown': pass", True),
    ('found.problem.code == "unidentified"', False), ("print(found.diagnosis)", False),
    ("skip.reason == other.reason", False), ('message.partition("\\n")', False), ("'x' in found.check", False),
    ("found.problem is None", False), ('f"{found.diagnosis}; {why}"', False),
])  # fmt: skip
def test_code_that_parses_a_sentence_is_seen(line: str, parses: bool) -> None:
    assert bool(parsed_sentences(line)) is parses


def unsound(path: Path) -> str:
    """The problem with a file's first sentence or its length; empty if there is none."""
    text = path.read_text()
    if text.count("\n") > LONGEST_FILE:
        return "longer than one idea; split it"
    tokens = tokenize.generate_tokens(StringIO(text).readline)
    opens = next(one for one in tokens if one.type not in (tokenize.COMMENT, tokenize.NL))
    said = opens.type == tokenize.STRING and ast.literal_eval(opens.string)
    told = bool(said) and isinstance(said, str)
    return "" if told or not text.strip() else "a file begins with one sentence that names its content"


def wide_kernels(text: str) -> list[str]:
    """The kernels and device functions with more than 30 parameters."""
    defined = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return [one.name for one in defined if len(one.args.args) > LONGEST_PARAMETERS
            and any("jit" in ast.unparse(decorator) for decorator in one.decorator_list)]  # fmt: skip


def test_a_kernel_has_few_parameters() -> None:
    files = [path for name, path in MODULES if name.startswith("instep_optimized.kernels.")]
    assert len(files) > 50 and not [name for path in files for name in wide_kernels(path.read_text())]
    many, few = (", ".join(f"x{i}" for i in range(count)) for count in (LONGEST_PARAMETERS + 1, LONGEST_PARAMETERS))
    kernels = f"@triton.jit(do_not_specialize=['x1'])\ndef wide({many}): pass\n@gluon.jit\ndef slim({few}): pass\n"
    assert wide_kernels(f"{kernels}def plain({many}): pass") == ["wide"]


def test_every_file_opens_with_a_sentence_and_is_short() -> None:
    paths = [*(path for _, path in MODULES), *(TOP / "tests").rglob("*.py"), *(TOP / "fixtures").rglob("*.py")]
    found = {str(path.relative_to(TOP)): says for path in paths if (says := unsound(path))}
    assert len(paths) > 700 and not found


@pytest.mark.parametrize(("text", "sound"), [
    ("", True), ('# a comment\n"""A word."""\n', True), ("import os\n", False), ('b"bytes"\n', False),
    ('"""A word."""\n' + "x = 1\n" * LONGEST_FILE, False), ('""""""\n', False),
])  # fmt: skip
def test_a_file_that_does_not_is_seen(tmp_path: Path, text: str, sound: bool) -> None:
    (tmp_path / "one.py").write_text(text)
    assert (unsound(tmp_path / "one.py") == "") is sound


def test_modules_are_drawn_alike_for_one_seed() -> None:
    names = {str(path.relative_to(TOP)) for _, path in MODULES if path.name not in ("__init__.py", "__main__.py")}
    assert drawn(1) == drawn(1) != drawn(2)
    assert len({*drawn(1)}) == COUNT == 12 and {*drawn(1)} <= names


def test_importing_the_harness_and_its_plugin_loads_neither_torch_nor_triton() -> None:
    program = "import sys, instep, instep.plugin; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    paths = ":".join(str(root.parent) for root in ROOTS.values())
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False, env={"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def repeated(sources: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The functions with the same body of three lines or more in several files."""
    bodies: dict[str, list[str]] = {}
    for name, text in sources:
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef):
                body = ast.unparse(ast.Module(node.body[ast.get_docstring(node) is not None :], []))
                bodies.setdefault(body, []).append(f"{name}: {node.name}")
    return [found for body, found in bodies.items() if len(found) > 1 and body.count("\n") >= 2]


def test_a_set_of_parameters_is_refused(request: pytest.FixtureRequest) -> None:
    plugin = request.config.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    assert plugin is not None
    for values, refused in ({"a", "b"}, True), (["a", "b"], False), ({"a": 1}.keys(), False):
        marks = [pytest.mark.parametrize("name", values).mark]
        with pytest.raises(AssertionError, match="here takes a set") if refused else nullcontext():
            plugin.pytest_generate_tests(SimpleNamespace(
                definition=SimpleNamespace(nodeid="here", iter_markers=lambda name, marks=marks: marks)))


def test_no_helper_of_tests_is_written_twice() -> None:
    sources = [(str(path.relative_to(TOP)), path.read_text()) for path in (TOP / "tests").rglob("*.py")]
    assert len(sources) > 300 and repeated(sources) == [], "use a fixture in conftest.py or a module of tests/support"


def test_a_repeated_helper_is_seen() -> None:
    body = "    y = x\n    z = y\n    return z\n"
    one, same = ("a", f"def f(x):\n{body}"), ("b", f'def g(x):\n    """Say it."""\n{body}')
    assert repeated([one, same]) == [["a: f", "b: g"]] and repeated([one, ("b", "def f(x):\n    return x\n")]) == []


def test_the_gpu_script_runs_every_file_with_gpu_tests() -> None:
    script = (TOP / "tests" / "on_gpu.sh").read_text()
    asked = [name for line in re.findall(r"^ *tests (.*)", script, re.M) for name in line.split()[1:]]
    marked = [str(path.relative_to(TOP)) for path in TOP.glob("tests/*/test_*.py") if "mark.gpu" in path.read_text()]
    assert marked and [one for one in marked if not any(fnmatch(one, name) for name in asked)] == []


def test_results_name_no_place_of_the_machine_that_they_were_made_on() -> None:
    texts = {path.name: path.read_text() for path in (TOP / "fixtures" / "results").iterdir()}
    place = re.compile(r"(?<![\w.~])/(tmp|root|home|work|mnt|opt|Users)/")
    assert place.search("--join /tmp/a.json") and len(texts) > 15
    assert [name for name, text in texts.items() if place.search(text)] == []


def test_triton_is_switched_to_its_interpreter_in_one_place() -> None:
    texts = {name: path.read_text() for name, path in MODULES}
    assert {name for name, text in texts.items() if "TRITON_INTERPRET" in text} == {"instep_optimized.ops.interpreter"}


def test_every_fault_has_a_unique_name_a_kind_and_a_trace() -> None:
    every = [(family, fault) for family, faults in FAMILIES.items() for fault in faults]
    assert len({fault.id for _, fault in every}) == len(every), "a name is given twice"
    for family, fault in every:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", fault.id), fault.id
        assert fault.kind in KINDS[family], f"{fault.id}: {fault.kind} is no kind of {family} (catalogue/kinds.py)"
        assert fault.what.endswith(".") and fault.seen_by, fault.id
        assert not set(fault.seen_by) & set(fault.blind), fault.id
        for ending in ("jsonl", "policy.json"):
            assert (TRACES / f"{fault.trace}.{ending}").is_file(), f"{fault.id}: {fault.trace}.{ending}"


def test_every_kind_of_fault_is_planted_and_every_trace_is_used() -> None:
    assert KINDS.keys() == FAMILIES.keys()
    for family, kinds in KINDS.items():
        assert {fault.kind for fault in FAMILIES[family]} >= kinds.keys(), family
    used = {one.trace for one in (*by_id().values(), *HARMLESS)}
    assert used == {path.stem for path in TRACES.glob("*.jsonl")}

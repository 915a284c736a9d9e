"""Record a running engine for `instep audit`, by hooks that the engine's own process loads.

    with instep.attach.recording("/tmp/recording"):
        engine = sglang.Engine(...)     # or vllm.LLM(...): every engine that starts here records itself

`instep attach sglang -- COMMAND` and `instep attach vllm -- COMMAND` do the same for a server. Without the environment
variable INSTEP_ATTACH the hooks do nothing. The engine's process imports this package and `audit/write.py`, and nothing
else of instep.
Leaves out: the hooks (`sglang.py`, `vllm.py`), and the judgement (`instep.audit`).
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

ENV = "INSTEP_ATTACH"  # the options as JSON; or only the directory
NAME = "instep"
PARTS = (
    "attach/__init__.py", "attach/device_states.py", "attach/recorder.py", "attach/releases.py", "attach/sglang.py",
    "attach/sglang_names.py", "attach/vllm.py", "attach/vllm_names.py", "audit/__init__.py",
    "audit/write.py",
)  # fmt: skip
SWITCH, PREFIX, RETRACTION = "switch", "prefix", "retraction"
TRIGGERS = (SWITCH, PREFIX, RETRACTION)


@dataclass(frozen=True)
class Plugin:
    """How an engine loads hooks.

    group      of entry points
    restricts  the variable with the names of allowed plugins;  empty_allows: whether it allows all if it is empty
    """

    group: str
    entry: str
    restricts: str
    empty_allows: bool


PLUGINS = {
    "sglang": Plugin("sglang.srt.plugins", "instep.attach.sglang:load", "SGLANG_PLUGINS", True),
    "vllm": Plugin("vllm.general_plugins", "instep.attach.vllm:load", "VLLM_PLUGINS", False),
}


@dataclass(frozen=True)
class Options:
    """The choice of what to record. Tokens, windows, counts, slots and rows are recorded of all chosen requests.

    folder    directory of the recording; the processes of an engine get directories in it
    layers    recurrent layers whose states are recorded; None: the first and the last, empty: all
    requests  prefixes of request names; empty: all
    triggers  causes for writing states: a change of the step count, a prefix hit, a retraction
    every     write states of every n-th event that has them, too; 0: only triggers do. With neither, none are copied
    before, after   the number of events with states before and after a triggering one that are written with it
    logits, final   whether logits and final rows are written, at every event: for small models
    digest    whether to read the checkpoint for its digest; None: up to 1 GiB
    run       a word that the ranks of one engine share; empty: the time
    """

    folder: str
    layers: tuple[int, ...] | None = None
    requests: tuple[str, ...] = ()
    triggers: tuple[str, ...] = TRIGGERS
    every: int = 32
    before: int = 2
    after: int = 1
    logits: bool = False
    final: bool = False
    digest: bool | None = None
    run: str = ""

    def __post_init__(self) -> None:
        wrong = [one for one in self.triggers if one not in TRIGGERS]
        if wrong:
            raise ValueError(f"triggers: {', '.join(map(repr, wrong))}; expected some of {', '.join(TRIGGERS)}")
        for name in ("every", "before", "after"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)}; expected 0 or more")

    @property
    def states(self) -> bool:
        """Whether states can be written at all."""
        return bool(self.triggers or self.every)

    def spelled(self) -> str:
        return json.dumps(asdict(self))


def options_in(environment: Mapping[str, str]) -> Options | None:
    """The options in an environment; None if no recording is requested."""
    given = environment.get(ENV, "")
    if not given:
        return None
    if not given.startswith("{"):
        return Options(given)
    found: dict[str, Any] = json.loads(given)
    unknown = found.keys() - {one.name for one in fields(Options)}
    if unknown:
        raise ValueError(f"{ENV}: unknown options {', '.join(sorted(unknown))}")
    return _options(found)


def _options(given: Mapping[str, Any]) -> Options:
    """Options of values as JSON has them, with lists for tuples."""
    fitting: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in given.items()}
    return Options(**fitting)


@contextmanager
def recording(folder: str | os.PathLike[str], **options: Any) -> Iterator[Options]:
    """Record every engine that starts within the block. options: fields of `Options`."""
    chosen = _options({"folder": os.path.abspath(folder), **options})
    with attached(chosen, os.environ) as changed:
        before = {name: os.environ.get(name) for name in changed}
        os.environ.update(changed)
        added = changed.get("PYTHONPATH", "").split(os.pathsep)[0]
        if added:
            sys.path.insert(0, added)  # processes that are spawned here get this path
        try:
            yield chosen
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            if added:
                sys.path.remove(added)


@contextmanager
def attached(options: Options, environment: Mapping[str, str], *, elsewhere: bool = False) -> Iterator[dict[str, str]]:
    """The variables that make an engine record itself; they are valid within the block.

    elsewhere: the engine may run on another Python, which gets copies of the files that it needs
    """
    changed = {ENV: replace(options, run=options.run or f"{time.time():.6f}").spelled()}
    for one in PLUGINS.values():
        if environment.get(one.restricts) or (one.restricts in environment and not one.empty_allows):
            changed[one.restricts] = f"{environment[one.restricts]},{NAME}"
    installed = all(one.entry in {entry.value for entry in entry_points(group=one.group)} for one in PLUGINS.values())
    if installed and not elsewhere:
        yield changed
        return
    with tempfile.TemporaryDirectory(prefix="instep-attach-") as made:
        _declare(Path(made))
        if elsewhere:
            _copy(Path(made))
        path = [made, *filter(None, [environment.get("PYTHONPATH")])]
        yield {**changed, "PYTHONPATH": os.pathsep.join(path)}


def _declare(folder: Path) -> None:
    """Write what importlib.metadata reads: a distribution with the entry points. It hides an installed one."""
    info = folder / "instep-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: instep\nVersion: 0.1.0\n")
    lines = (f"[{one.group}]\n{NAME} = {one.entry}\n" for one in PLUGINS.values())
    (info / "entry_points.txt").write_text("\n".join(lines))


def _copy(folder: Path) -> None:
    package = Path(__file__).resolve().parents[1]
    for part in PARTS:
        (folder / "instep" / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(package / part, folder / "instep" / part)
    (folder / "instep" / "__init__.py").write_text('"""The parts of instep that record a running engine."""\n')

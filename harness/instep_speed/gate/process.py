"""The gate's side of an arm: its source, the process that serves it, and the requests to that process.

An arm is an op set by name, or a source tree: a folder with the packages at its top or as in a checkout. A package that
a tree does not have is taken from here. Leaves out: the process itself (`worker.py`).
"""

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from select import select
from typing import Any

import msgspec
from safetensors.torch import load_file

from instep.adapters import find, in_a_shell
from instep.setting import moves_labels
from instep_optimized.ops import BY_NAME
from instep_optimized.ops.op_protocols import Ops
from instep_reference.contract.engine import RequestState
from instep_reference.contract.errors import BadInput, Unsupported

from .cases import Shown

PACKAGES = {"instep_reference": "reference", "instep_optimized": "optimized", "instep": "harness"}
GATE = Path(__file__).resolve().parent
GRACE_S = 5.0  # seconds that an arm may take to end after the gate has closed its input

# Starts the worker: this folder is the gate's own, everything else is the tree's.
START = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location
home = {str(GATE)!r}
spec = spec_from_file_location("instep_speed.gate", home + "/__init__.py", submodule_search_locations=[home])
sys.modules["instep_speed.gate"] = module_from_spec(spec)
try:
    from instep_speed.gate.worker import main
except ImportError as error:
    if not (error.name or "").startswith("instep"):
        raise
    sys.exit(f"{{error}}; the tree's instep is of another revision than this gate. In a folder that has only optimized "
             "and reference of the tree, the gate uses its own instep instead")
main()
"""


@dataclass(frozen=True)
class Source:
    """One arm: its name on the command line (`said`), its op set, and the first folders on its path."""

    said: str
    ops: str
    roots: tuple[Path, ...]
    packages: frozenset[str]

    @classmethod
    def of(cls, said: str, ops: str, arm: str = "arm") -> "Source":
        """An op set of ours takes precedence over a folder of the same name. An arm that cannot be timed is refused.

        arm: its name in errors
        """
        folder = Path(said).resolve()
        tree = said not in BY_NAME and folder.is_dir()
        try:
            _computes(ops if tree else said)
        except BadInput as error:
            if tree or ":" in said:
                raise
            there = "that is no folder" if folder.exists() else "no such folder"
            raise BadInput(f"{arm} {said}", found=f"{error.found}; {there}",
                           expected=f"a source tree, {error.expected}", hint=error.hint) from None  # fmt: skip
        if not tree:
            return cls(said, in_a_shell(said, searched=False), (), frozenset())
        homes = {
            package: home for package, root in PACKAGES.items()
            for home in (folder, folder / root) if (home / package / "__init__.py").is_file()
        }
        if "instep_optimized" not in homes:
            expected = "instep_optimized in it, flat or under optimized/"
            raise BadInput(f"source tree {said}", found=sorted(homes) or "none of the packages", expected=expected)
        return cls(said, in_a_shell(ops, searched=False), tuple(dict.fromkeys(homes.values())), frozenset(homes))


def _computes(ops: str) -> None:
    found = find(ops)
    if isinstance(found, Ops) and moves_labels(found):
        raise Unsupported(f"timing {ops!r}: it moves labels and computes nothing")


class ArmFailed(Exception):
    """The arm raised, its process ended, or it did not answer in time."""


class Arm:
    """A worker process. `ask` is `tell` and then `hear`; apart, they let arms work side by side while nothing is timed.

    Use it as a context: the process ends with it. It also ends after `patience_s` without an answer.
    """

    def __init__(self, source: Source, log: Path, patience_s: float) -> None:
        self.source, self._log, self._patience_s, self._asked = source, log, patience_s, ""
        self._errors = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START], env=_environment(source), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )

    def __enter__(self) -> "Arm":
        return self

    def __exit__(self, *raised: object) -> None:
        if any(raised):  # its answer is no longer needed
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # it had ended before, and `hear` has reported it
                    pipe.close()
        self._ended()
        self._errors.close()

    def ask(self, do: str, **given: Any) -> dict[str, Any]:
        self.tell(do, **given)
        return self.hear()

    def tell(self, do: str, **given: Any) -> None:
        assert self._process.stdin is not None
        self._asked = do
        try:
            self._process.stdin.write(msgspec.json.encode({"do": do, **given}).decode() + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ArmFailed(self._last_words()) from None

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # An answer is one line, so nothing of it is left in the buffer of `readline`, into which select cannot look.
        if not select([self._process.stdout], [], [], self._patience_s)[0]:
            self._process.kill()
            raise ArmFailed(f"no answer to `{self._asked}` within {self._patience_s:g} s (--patience)")
        line = self._process.stdout.readline()
        if not line:
            raise ArmFailed(self._last_words())
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise ArmFailed(f"{answer['type']}: {answer['error']}")
        return answer

    def built(self, answer: dict[str, Any]) -> dict[str, str]:
        """Package -> digest of the source that serves. Raises if it is not the source of the tree."""
        for package in self.source.packages:
            if not any(Path(answer["files"][package]).is_relative_to(root) for root in self.source.roots):
                raise ArmFailed(f"{package} was served from {answer['files'][package]}")
        served: dict[str, str] = answer["served"]
        return served

    def show(self, file: Path) -> Shown:
        """The states and the acceptance after one walk through the course."""
        answer = self.ask("show", file=str(file))
        memory: dict[str, dict[str, Any]] = {}
        for name, tensor in load_file(file).items():
            request, field, layer = name.rsplit("/", 2)
            memory.setdefault(request, {}).setdefault(field, {})[int(layer)] = tensor
        empty: dict[str, Any] = {"conv": {}, "state": {}, "keys": {}, "values": {}}
        states = {
            request: RequestState(length, root, None, None, **(empty | memory.get(request, {})))
            for request, (length, root) in answer["numbers"].items()
        }
        return Shown(states, answer["acceptance"])

    def _last_words(self) -> str:
        code = self._ended()
        said = self._log.read_text(errors="replace").strip().splitlines()
        return f"its process ended ({code}): {said[-1] if said else 'without a word'}"

    def _ended(self) -> int:
        """The exit status of the process. It has GRACE_S to end by itself."""
        try:
            return self._process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _environment(source: Source) -> dict[str, str]:
    """The tree's folders come first, then ours; the working directory is not used. All arms have the same hash seed."""
    ours = [Path(str(import_module(package).__file__)).resolve().parent.parent for package in PACKAGES]
    path = [str(root) for root in dict.fromkeys((*source.roots, *ours))]
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *([given] if given else [])]), "PYTHONHASHSEED": "0"}

"""An entry: one peer, its command, its traces, and its expected result.

Leaves out: running it (`run.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from instep_reference.contract.errors import BadInput

AGREE = "agree"


@dataclass(frozen=True)
class Entry:
    """name      what was judged: a function, or an engine and how it was led
    package, version   whose release
    door      op, keeper, engine, recording, or script: the way by which it comes in. A kernel of the door native needs
              a card: it is not judged, and `expected` is the reason
    command   as a shell would have it; {trace} is each of `traces` in turn, {unpacked} where the wheels lie
    traces    paths from the repository's top, or {unpacked}/traces/.. (`kernels/recorded.py`); a command without
              {trace} is run once
    expected  "agree", or words that the finding must contain, one after the other between semicolons
    needs     what pip installs;  unpacked: wheels that are downloaded alone and unpacked, because they pin another
              torch
    modules   modules that must be importable. Without them, or with another installed version of `needs` or `unpacked`,
              the entry is listed as missing
    apart     the name of a separate environment, if its needs conflict with those of other entries
    seconds   the limit of one run
    since     the first version that is known to behave so, if earlier ones were tried
    switch    the options of the engine that select what is judged; "default" if it needs none
    calls     the judged functions, which the release must call: names, or name(keyword) (`dispatch.py`)
    facts     names in the release's source with the values that the switch gives them
    """

    name: str
    package: str
    version: str
    door: str
    command: str
    traces: tuple[str, ...] = ()
    expected: str = AGREE
    needs: tuple[str, ...] = ()
    unpacked: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    apart: str = ""
    seconds: int = 300
    since: str = ""
    switch: str = ""
    calls: tuple[str, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Entry":
        """An entry from a plain dict, whose lists may be lists."""
        known = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise BadInput("peers: entry", found=f"{unknown[0]!r} in {given.get('name')!r}", expected=", ".join(known))
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in given.items()})

    @property
    def title(self) -> str:
        return f"{self.package} {self.version} {self.name}"

    def runs(self) -> tuple[str | None, ...]:
        """The trace of each run."""
        if "{trace}" not in self.command:
            return (None,)
        if not self.traces:
            raise BadInput("peers: traces", found=f"none for {self.name!r}", expected="one: its command has {trace}")
        return self.traces

    def met(self, told: str) -> bool:
        """Whether the verdict and the finding are what is expected."""
        if self.expected == AGREE:
            return told.startswith(f"{AGREE}: ")
        for word in self.expected.split(";"):
            _, found, told = told.partition(word.strip())
            if not found:
                return False
        return True

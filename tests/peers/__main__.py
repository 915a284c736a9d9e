"""`python -m peers`: run every entry, print and write the results. Exit 1: a result is not as expected.

Leaves out: what the entries are (`engines/`, `kernels/`, `recordings/`).
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instep.report.result import Result

from .entry import Entry
from .environment import TOP, environment, install, python_of, unpack
from .run import served

FAMILIES = ("peers.kernels", "peers.engines", "peers.recordings")
RESULT = TOP / "fixtures" / "results" / "peers.json"


def entries() -> list[Entry]:
    """All entries, by family."""
    here = [family for family in FAMILIES if find_spec(family)]
    return [Entry.of(one) for family in here for one in import_module(family).ENTRIES]


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers", description="Other people's kernels and engines, judged.")
    parser.add_argument("--venv", type=Path, default=TOP / ".venv-peers", help="the environment; it is made if missing")
    parser.add_argument("--only", action="append", default=[], help="entries with this in their title; repeatable")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help=f"left out, and with every entry: {RESULT.relative_to(TOP)}")
    parser.add_argument("--commit", help="revision of the source, for the result file")
    options = parser.parse_args(given)
    chosen = [one for one in entries() if not options.only or any(word in one.title for word in options.only)]
    rows = run(chosen, options.venv, options.jobs)
    code = 0 if rows and all(row["met"] for row in rows) else 1
    if place := options.json or (None if options.only else RESULT):
        Result(code, "cpu", {"rows": rows}, options.commit).write(place)
    return code


def run(chosen: list[Entry], venv: Path, jobs: int) -> list[dict[str, Any]]:
    """The rows of the entries, in their order; each is printed when it is finished."""
    python, unpacked = python_of(venv), venv / "unpacked"
    unpacked.mkdir(exist_ok=True)
    pythons = {"": python} | {apart: python_of(venv / apart) for apart in {one.apart for one in chosen} - {""}}
    for said in (*(install(its, [need for one in chosen if one.apart == apart for need in one.needs])
                   for apart, its in pythons.items()),
                 *(unpack(python, unpacked, wheel) for wheel in sorted({w for one in chosen for w in one.unpacked}))):
        if said:
            print(f"peers: {said}", file=sys.stderr, flush=True)  # its entries are listed as missing

    def one(entry: Entry) -> dict[str, Any]:
        places = [unpacked / wheel.replace("==", "-") for wheel in entry.unpacked]
        row = served(entry, environment(places), unpacked, str(pythons[entry.apart]))
        mark = "  " if row["met"] else "! "
        events = f"{row['events']} of {row['of']} events, {row['seconds']} s"
        print(f"{mark}{entry.title}: {row['verdict']}, {events}. {row['finding']}", flush=True)
        return row

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, chosen))


if __name__ == "__main__":
    sys.exit(main())

"""`python -m peers`: run every entry, print and write the results. Exit 1: a result is not as expected.

Leaves out: what the entries are (`engines/`, `kernels/`, `recordings/`).
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instep.report.result import Result

from .entry import Entry
from .environment import TOP, environment, install, python_of, unpack
from .kernels.recorded import FOLDER, record
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
    whole = f"left out, and with every entry: {RESULT.relative_to(TOP)}. With --only, its other rows stay"
    parser.add_argument("--json", type=Path, help=whole)
    parser.add_argument("--commit", help="revision of the source, for the result file")
    options = parser.parse_args(given)
    chosen = [one for one in entries() if not options.only or any(word in one.title for word in options.only)]
    rows = run(chosen, options.venv, options.jobs)
    code = 0 if rows and all(row["met"] for row in rows) else 1
    if place := options.json or (None if options.only else RESULT):
        found = updated(rows, place) if options.only and place.exists() else rows
        Result(code, "cpu", {"rows": found}, options.commit).write(place)
    return code


def updated(rows: list[dict[str, Any]], place: Path) -> list[dict[str, Any]]:
    """The rows of a result file with these instead of older ones, in the order of the entries.

    A row that stays has the revision of the run that made it. Rows without an entry are dropped.
    """
    before = json.loads(place.read_text())
    stay = [{"commit": before["commit"]} | row for row in before["rows"]]
    named = {_title(row): row for row in (*stay, *rows)}
    return [named[entry.title] for entry in entries() if entry.title in named]


def _title(row: dict[str, Any]) -> str:
    return f"{row['package']} {row['version']} {row['name']}"


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
    if any(trace.startswith(f"{{unpacked}}/{FOLDER}") for one in chosen for trace in one.traces):
        record(unpacked / FOLDER)

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

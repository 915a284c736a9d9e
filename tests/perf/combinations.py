"""Every served combination of options, replayed on a small random model until the time is up.

Run it as a script; it continues the file if there is one. The rows that contain every pair come first, then all others
in random order:
    python tests/perf/combinations.py --minutes 8 --jobs 2 --json fixtures/results/combinations.json --commit REVISION
Leaves out: what a row is (`tests/support/inputs/option_combinations.py`).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from random import Random

from instep.report.divergence_message import where
from instep.report.result import Result
from instep.run.replay import Replay
from instep.trace.file import Trace
from instep.verdict import Exit
from support.inputs.option_combinations import (
    FACTORS,
    Row,
    array,
    cells,
    name_of,
    pairwise,
    refusals,
    setting,
    trace,
    whole,
    words,
)

SEED = 0  # of the order
TOGETHER = {"pairs": 2, "triples": 3, "fours": 4}
TRACES: dict[str, Trace] = {}  # of this process


def main(argv: list[str]) -> int:
    told, rows, factors = _parsed(argv), in_order(), {name: len(values) for name, values in FACTORS.items()}
    before = json.loads(told.json.read_text()) if told.json is not None and told.json.is_file() else {}
    if before.get("factors", factors) != factors:
        print(f"{told.json} was begun with other factors: {before['factors']}; now {factors}", file=sys.stderr)
        return int(Exit.BAD_INPUT)
    run, found, begun = before.get("run", 0), before.get("found", []), time.monotonic()
    sums = Counter({name: before.get(name, 0) for name in ("events", "blocks", "elements")})
    with tempfile.TemporaryDirectory() as folder, get_context("spawn").Pool(told.jobs) as pool:
        left = rows[run:]
        for row, (exit, says, counts) in zip(left, pool.imap(ran, ((folder, one) for one in left)), strict=True):
            run, sums = run + 1, sums + counts
            if exit != Exit.AGREED:
                found.append({"row": row, "exit": exit, "says": says})
                print(f"{words(row)}: {says}", flush=True)
            if time.monotonic() >= begun + 60 * told.minutes:
                break
    seconds = round(before.get("seconds", 0) + time.monotonic() - begun, 1)
    result = Result(Exit.worst(one["exit"] for one in found) if found else Exit.AGREED, "cpu", {
        "factors": factors, "refused": refused(), "served": len(rows),
        "run": run, "met": met(rows[:run]), **sums, "seconds": seconds, "found": found,
    }, told.commit)  # fmt: skip
    if told.json is not None:
        result.write(told.json)
    print(f"{run:,} of {len(rows):,} that are served in {seconds:.0f} s: {len(found)} do not agree", flush=True)
    return int(result.exit)


def in_order() -> list[Row]:
    """Every row that is served."""
    first = list(pairwise())
    others = [row for row in whole() if not refusals(row) and row not in first]
    Random(SEED).shuffle(others)
    return first + others


def ran(asked: tuple[str, Row]) -> tuple[int, str, Counter[str]]:
    """One row, in a separate process: exit code, findings, and the amounts that were compared."""
    folder, row = asked
    if (name := name_of(row)) not in TRACES:
        TRACES[name] = trace(Path(folder) / str(os.getpid()), row)
    verdict = Replay(TRACES[name], setting(row)).run().verdict
    blocks = sum(one.blocks for one in verdict.compared)
    says = "".join(f"{where(one)}: {one.diagnosis}" for one in verdict.findings[:1])
    return int(verdict.exit), says, Counter(events=verdict.events, blocks=blocks, elements=verdict.elements)


def refused() -> dict[str, int]:
    """Reason -> rows of the product that are refused for it; a row may have several."""
    return dict(Counter(why for row in whole() for why in refusals(row)))


def met(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """How many pairs, triples and fours these rows contain, and how many all served rows contain."""
    return {
        name: (len({some for row in rows for some in cells(row, together)}), len(array(together).rows))
        for name, together in TOGETHER.items()
    }


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, required=True, help="of this session")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--json", type=Path, help="the result file, which may hold what earlier sessions ran")
    parser.add_argument("--commit")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

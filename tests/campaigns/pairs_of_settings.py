"""Run every committed trace in pairs of settings, and print the pairs that were not run.

    PYTHONPATH=reference:tests:harness:optimized python -m campaigns.pairs_of_settings --cpu-minutes 25

The traces are those of `fixtures/results/settings-cpu.json` that were run with all values of each setting; a covering
array of pairs is added for each. Several calls go on where the last one stopped. Leaves out: choosing and running rows
(`instep.campaign.all_settings`), and the table in the documentation (`documentation/tables.py`).
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from instep.atomic_write import write_atomically
from instep.campaign.all_settings import document

TOP = Path(__file__).resolve().parents[2]
FILE = TOP / "fixtures" / "results" / "settings-cpu.json"
PAIRED = "strategy,conv,layout,graphs,prompt-graphs,overlap,guarded,ranks,stages,micro-batches,dp"
OF_A_TRACE = 6.0  # minutes that a trace may take


def main() -> None:
    asks = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asks.add_argument("--cpu-minutes", type=float, default=25.0, help="processor time after which no trace is begun")
    asks.add_argument("--commit", default="", help="the revision that runs")
    asked = asks.parse_args()
    result = json.loads(FILE.read_text())
    paired = {array["trace"] for array in result["arrays"] if array["settings"].startswith(PAIRED.partition(",")[0])}
    for array in [*result["arrays"]]:
        if array["settings"] == "each" and array["trace"] not in paired and spent() < 60 * asked.cpu_minutes:
            result["arrays"].append(in_pairs(array, asked.commit))
            write_atomically({FILE: spelled(result).encode()})
    print("\n".join(lines(result)))


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def in_pairs(array: dict[str, Any], commit: str) -> dict[str, Any]:
    """Run one trace, and return its array in the form of the file."""
    given = {word.removeprefix("--") for word in array["command"].split() if word.startswith("--")}
    settings = ",".join(name for name in PAIRED.split(",") if name not in given)  # a given value stays
    command = array["command"].replace("--settings each", f"--settings {settings}")
    trace = next((TOP / "fixtures" / "traces").rglob(f"{array['trace']}.jsonl"))
    words = [str(trace) if word.endswith(".jsonl") else word for word in command.split()[1:]]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        words += ["--minutes", str(OF_A_TRACE), "--json", str(file)]
        ran = subprocess.run([sys.executable, "-m", "instep", *words],
                             check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)  # fmt: skip
        if not file.exists():
            sys.exit(f"{array['trace']}: {ran.stderr.strip()}")
        found = json.loads(file.read_text())
    (rows,), (sums,) = found["arrays"], found["coverage"]
    print("\n".join(line for line in (*document(found).notes, *document(found).omitted)), flush=True)
    return {
        **{name: array[name] for name in ("trace", "ops", "until", "strategy")}, "settings": settings, "commit": commit,
        "command": command.replace(str(TOP), "").strip(), "exit": found["exit"],
        **{name: sums[name] for name in ("met", "of", "size", "elements", "seconds", "left")},
        "ran": [[one["row"], one["exit"], one["events"], one["elements"], one["seconds"]] for one in rows["ran"]],
        "not_run": by_reason(sums["not_run"]),
    }


def by_reason(not_run: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: dict[str, list[Any]] = {}
    for one in not_run:
        found.setdefault(one["why"], []).append(one["values"])
    return [{"why": why, "values": values} for why, values in found.items()]


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The pairs of the whole campaign that were not run: how many traces, which pairs, and why."""
    reasons: dict[str, dict[str, set[str]]] = {}
    for array in result["arrays"]:
        for one in (*array["not_run"], {"why": "the time was over", "values": array.get("left", [])}):
            pairs = {" with ".join(f"{name} {value}" for name, value in values) for values in one["values"]}
            for pair in pairs:
                reasons.setdefault(one["why"], {}).setdefault(pair, set()).add(array["trace"])
    for why, pairs in reasons.items():
        listed = ", ".join(f"{pair} ({len(traces)})" for pair, traces in sorted(pairs.items()))
        yield f"not run, with the number of traces: {listed}: {why}"
    met, of = (sum(array[name] for array in result["arrays"]) for name in ("met", "of"))
    yield f"{met} of {of} in {len(result['arrays'])} arrays were run"


def spelled(result: dict[str, Any]) -> str:
    """The file with a line for each array."""
    head = json.dumps({name: value for name, value in result.items() if name != "arrays"})
    rows = ",\n".join(json.dumps(array) for array in result["arrays"])
    return f'{head[:-1]}, "arrays": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    main()

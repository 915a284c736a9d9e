"""`python -m peers.live.judge`: audit what `peers.live.run` brought back, and write the verdict of every case.

Each recording is audited on a CPU in a process with a time limit, and each answer is compared with the same release's
answer without speculation. A case whose files did not change since the last result is not audited again, so a run
that was stopped continues. Leaves out: running an engine.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from instep.report.result import Result, read
from instep.verdict import Exit

from ..entry import AGREE
from ..environment import environment
from ..run import SAID, sentence
from . import TOP, extract
from .cases import DIES, RIGHT, UNJUDGED, WRONG, Case, by_name
from .run import LOG, OUTCOME, RECORDING
from .serve import ANSWERS

RESULT = TOP / "fixtures" / "results" / "live.json"
MODEL = "fixtures/tiny"
TOKENS = 64  # of each answer that is judged without a recording
GRACE = 120  # seconds after its own limit until an audit is killed
DIED, UNFINISHED, NOTHING = "died", "stopped", "no recording"
RUN = "python -m peers.live.run BUNDLE OUT --only "


def opened(folder: Path, into: Path) -> dict[str, Path]:
    """The folders of cases in a folder, by name, after its tar files are unpacked into another one."""
    for archive in sorted(folder.glob("*.tar")):
        with tarfile.open(archive) as file:
            extract(file, into)
    return {found.parent.name: found.parent for root in (into, folder) for found in sorted(root.glob(f"*/{OUTCOME}"))}


def judged(case: Case, own: Path, plain: Mapping[tuple[int, ...], list[int]] | None, minutes: float) -> dict[str, Any]:
    """The row of one case. plain: prompt -> its answer without speculation; None: this case is that reference."""
    outcome = json.loads((own / OUTCOME).read_text())
    row: dict[str, Any] = {
        "name": case.name, "package": "sglang", "version": case.release, "what": case.what, "expected": case.expected,
        "run": RUN + case.name, "outcome": outcome["outcome"], "engine_seconds": outcome["seconds"],
        "digest": digest(own), "answers": compared(answers(own), plain),
    }  # fmt: skip
    recording = next(iter(sorted(file.parent for file in own.glob(f"{RECORDING}/**/recording.json"))), None)
    whole = recording is not None and not outcome["stopped"]
    row |= audited(recording if whole and recording else own / ANSWERS, whole, minutes) | {"recorded": whole}
    if not whole:
        why = outcome["stopped"] or NOTHING
        row["not_covered"] = [f"states, windows and counts: {why}", *row["not_covered"]]
    if outcome["code"] != 0 and row["verdict"] != SAID[Exit.DIVERGED]:
        died = outcome["code"] is not None
        row["verdict"], row["finding"] = DIED if died else UNFINISHED, outcome["error"]
    return row | {"met": met(case, row, own)}


def met(case: Case, row: Mapping[str, Any], own: Path) -> bool:
    """Whether the verdict is the expected one."""
    kind = next(one for one in (RIGHT, WRONG, DIES, UNJUDGED) if case.expected.startswith(one))
    words, log = case.expected.removeprefix(kind), own / LOG
    if kind == DIES:
        return row["verdict"] == DIED and words in log.read_text()
    if kind == WRONG:
        return row["verdict"] == SAID[Exit.DIVERGED] and words in row["finding"]
    return bool(row["verdict"] == AGREE)


def audited(what: Path, whole: bool, minutes: float) -> dict[str, Any]:
    """The verdict on a recording, or on a file of answers. whole: it is a recording without a gap."""
    shown = f"instep audit OUT/{what.parent.name}/{what.name} --model {MODEL} --first"
    if not whole:
        shown += f" --tokens {TOKENS} --dtype bfloat16"
    found: dict[str, Any] = {"command": shown, "verdict": NOTHING, "finding": "", "remarks": [], "elements": 0,
                             "events": 0, "of": 0, "decided": 0, "tokens": 0, "audit_seconds": 0.0,
                             "not_covered": []}  # fmt: skip
    if not what.exists() or (what.is_file() and not what.read_text().strip()):
        return found | {"command": ""}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "instep", *shown.split()[1:], "--minutes", str(minutes), "--json", str(file)]
        command[command.index("audit") + 1] = str(what.absolute())
        try:
            done = subprocess.run(command, cwd=TOP, env={**os.environ, **environment([])}, stdin=subprocess.DEVNULL,
                                  capture_output=True, text=True, errors="replace",
                                  timeout=60 * minutes + GRACE)  # fmt: skip
            said = (done.stderr or done.stdout).strip().splitlines()[-1:]
        except subprocess.TimeoutExpired:
            said = [f"the audit did not end within its {minutes:g} minutes"]
        result = json.loads(file.read_text()) if file.exists() else None
    found["audit_seconds"] = round(time.monotonic() - begun, 1)
    if result is None:
        return found | {"verdict": SAID[Exit.HARNESS_FAILED], "finding": "".join(said)}
    return found | of_audit(result)


def of_audit(result: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row in the result of `instep audit --json`."""
    runs = result.get("runs", [])
    parts = [(part["findings"][0]["event"], part["message"]) for part in (result, *runs) if part["findings"]]
    elements = result["elements"] + sum(run["elements"] for run in runs)
    stopped = result["judged"]["stopped"]
    verdict = Exit.DIVERGED if parts else Exit.AGREED if elements and not stopped else Exit.INCONCLUSIVE
    missing = [one["what"] for part in (result, *runs) for one in part.get("not_judged", ())]
    steps = result["step_counts"]
    covered = [*([f"step counts: {steps}"] if steps.startswith("not judged") else []), *result["notes"], *missing]
    return {
        "verdict": SAID[verdict], "finding": sentence(min(parts)[1]) if parts else stopped,
        "remarks": list(result["remarks"]) if parts else [], "elements": elements,
        "events": sum(run["events"] for run in runs), "of": sum(run["of"] for run in runs),
        "decided": result["decided"], "tokens": result["tokens"], "not_covered": list(dict.fromkeys(covered)),
    }  # fmt: skip


def answers(own: Path) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> its answer."""
    file = own / ANSWERS
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {tuple(line["prompt"]): line["tokens"] for line in lines}


def compared(
    found: Mapping[tuple[int, ...], Sequence[int]], plain: Mapping[tuple[int, ...], list[int]] | None
) -> dict[str, int | None]:
    """Answers that equal plain decoding as far as both go; first: the first other token of all answers."""
    pairs = [(said, plain[prompt]) for prompt, said in found.items() if plain and prompt in plain]
    other = [next((at for at, (ours, theirs) in enumerate(zip(*pair, strict=False)) if ours != theirs), None)
             for pair in pairs]  # fmt: skip
    places = [at for at in other if at is not None]
    return {"equal": len(pairs) - len(places), "of": len(pairs), "first": min(places, default=None)}


def digest(own: Path) -> str:
    """The digest of the files that a row depends on."""
    total = hashlib.sha256()
    for file in sorted(one for one in own.rglob("*") if one.is_file()):
        total.update(f"{file.relative_to(own)} {file.stat().st_size}\n".encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:16]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.judge", description="Audit recordings of released SGLangs.")
    parser.add_argument("folder", type=Path, help="the cases' folders, or the tar files of peers.live.run")
    parser.add_argument("--json", type=Path, default=RESULT, help="the result; rows of other cases stay in it")
    parser.add_argument("--only", help="names of cases, with commas; left out: all that are there")
    parser.add_argument("--minutes", type=float, default=4.0, help="limit of each audit")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--commit", help="revision of the source that ran, for the result file")
    options = parser.parse_args(given)
    into = Path(tempfile.mkdtemp(prefix="instep-live-"))
    try:
        return _judge_all(options, opened(options.folder, into))
    finally:
        shutil.rmtree(into)


def _judge_all(options: argparse.Namespace, folders: Mapping[str, Path]) -> int:
    rows = {row["name"]: row for row in read(options.json)["rows"]} if options.json.exists() else {}
    chosen = [case for case in by_name(options.only) if case.name in folders]
    plain: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for case in by_name(None):
        if not case.steps and case.name.startswith("plain") and case.name in folders:
            plain[case.release] = answers(folders[case.name])

    def one(case: Case) -> None:
        own, before = folders[case.name], rows.get(case.name)
        if before is None or before["digest"] != digest(own):
            reference = None if case.name.startswith("plain") else plain.get(case.release, {})
            rows[case.name] = judged(case, own, reference, options.minutes) | {"commit": options.commit}
        else:  # what is expected may have changed
            rows[case.name] = {**before, "expected": case.expected, "met": met(case, before, own)}
        write(rows, options)
        row = rows[case.name]
        mark = "  " if row["met"] else "! "
        print(f"{mark}{case.name}: {row['verdict']}, {row['audit_seconds']} s. {row['finding']}", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, chosen))
    return write(rows, options)


def write(rows: Mapping[str, Mapping[str, Any]], options: argparse.Namespace) -> int:
    """Write the rows in the order of the cases -> 0 if all are as expected."""
    order = [rows[case.name] for case in by_name(None) if case.name in rows]
    code = 0 if order and all(row["met"] for row in order) else 1
    found = {"command": "python -m peers.live.judge OUT", "rows": order}
    Result(code, "cpu", found, options.commit).write(options.json)
    return code


if __name__ == "__main__":
    sys.exit(main())

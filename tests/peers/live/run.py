"""`python -m peers.live.run`: run cases of a bundle on a GPU, several at a time, and pack their results.

Each case is an engine in a process group with a port and a time limit; at its end the group is killed. A case leaves a
folder with its recording, its answers, the end of its log and `outcome.json`. Leaves out: the judgement (`judge.py`).
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.attach import Options, attached

from . import ARCHIVE, TOP, extract
from .cases import Case, by_name
from .serve import ANSWERS

QUIET = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false", "SGLANG_ENABLE_JIT_DEEPGEMM": "false", "OMP_NUM_THREADS": "4",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
}  # fmt: skip
SERVE = (sys.executable, "-m", "peers.live.serve")
SECONDS = 240  # limit of a case
AT_LEAST = 60  # seconds that must be left for a case to be started
FIRST_PORT, PORTS = 31000, 600  # an engine takes more ports after its own
OUTCOME, LOG, RECORDING = "outcome.json", "log.txt", "recording"
LINES = 150  # of a log that are kept
OF_CASE, OF_ALL, OF_FILE = 6 << 20, 58 << 20, 15 << 20  # bytes that come back from the machine
RECORDED = {"requests": ("w",), "every": 8, "before": 1, "after": 2}


def unpacked(bundle: Path) -> Path:
    """The folder of a bundle's files; its archive is unpacked once."""
    files = bundle / "files"
    if not (files / "releases.json").exists():
        with tarfile.open(bundle / ARCHIVE) as archive:
            extract(archive, files)
    return files


def environment(files: Path, release: str) -> dict[str, str]:
    """Variables of the engine's process: the packed packages come first, then those of the machine."""
    facts = json.loads((files / "releases.json").read_text())
    if release not in facts:
        raise SystemExit(f"{files} has {', '.join(facts)}, and not {release}: name other cases with --only")
    parts = "stubs", f"engine/{release}", f"kernels/{facts[release]['kernel']}", "site"
    path = [*(str(files / part) for part in parts), str(TOP / "tests")]
    libraries = [str(files / "lib"), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, **QUIET, "PEERS_STUBS": ",".join(facts[release]["stubs"]),
            "PYTHONPATH": os.pathsep.join(path), "LD_LIBRARY_PATH": os.pathsep.join(libraries)}  # fmt: skip


def run(case: Case, files: Path, out: Path, port: int, seconds: float, groups: set[int]) -> dict[str, Any]:
    """Run one case -> its outcome, which is also written.

    seconds: limit; with less than AT_LEAST nothing is started.  groups: process groups that run now
    """
    own, begun = out / case.name, time.monotonic()
    own.mkdir(parents=True)
    if seconds < AT_LEAST:
        return _outcome(own, case, "not started: no time was left", None, begun)
    options = Options(str(own.absolute() / RECORDING), **RECORDED | dict(case.record))
    command = [*SERVE, str(files), case.name, str(own.absolute()), "--port", str(port)]
    given = environment(files, case.release) | dict(case.environment)
    with open(own / LOG, "wb") as log, attached(options, given, elsewhere=True) as changed:
        engine = subprocess.Popen(command, cwd=own, env=given | changed, stdin=subprocess.DEVNULL, stdout=log,
                                  stderr=subprocess.STDOUT, start_new_session=True)  # fmt: skip
        groups.add(engine.pid)
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = engine.wait(min(SECONDS, seconds))
        groups.remove(engine.pid)
        kill(engine.pid)  # at the end, too: an engine may leave processes
        with suppress(subprocess.TimeoutExpired):
            engine.wait(10)
    said = "stopped: time limit" if code is None else "ended" if code == 0 else f"died: exit code {code}"
    return _outcome(own, case, said, code, begun)


def kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _outcome(own: Path, case: Case, said: str, code: int | None, begun: float) -> dict[str, Any]:
    """Write what became of a case, with the last lines of its log that name an error."""
    log = own / LOG
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    log.write_text("\n".join(lines[-LINES:]) + "\n")
    errors = [line for line in lines if "Error" in line and "warn" not in line.lower()]
    recorded = own / RECORDING / "recording.json"
    facts = json.loads(recorded.read_text()) if recorded.exists() else {}
    answers = own / ANSWERS
    found = {
        "case": case.name, "outcome": said, "code": code, "seconds": round(time.monotonic() - begun, 1),
        "error": errors[-1].strip()[-400:] if errors and code != 0 else "",
        "answers": len(answers.read_text().splitlines()) if answers.exists() else 0,
        "recorded": bool(facts), "stopped": (facts.get("attached") or {}).get("stopped", ""),
    }
    (own / OUTCOME).write_text(json.dumps(found) + "\n")
    why = found["error"] or found["stopped"]
    print(f"{case.name}: {said}, {found['seconds']} s, {found['answers']} answers. {why}", flush=True)
    return found


def run_all(cases: Sequence[Case], files: Path, out: Path, at_once: int, minutes: float) -> list[dict[str, Any]]:
    """Run the cases in their order, `at_once` at a time, within `minutes`."""
    end, groups = time.monotonic() + 60 * minutes, set[int]()

    def one(numbered: tuple[int, Case]) -> dict[str, Any]:
        number, case = numbered
        return run(case, files, out, FIRST_PORT + PORTS * (number % 50), end - time.monotonic(), groups)

    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(one, enumerate(cases)))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(groups):
                kill(group)
            raise


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def trim(own: Path, limit: int) -> None:
    """Delete tensors of the last events of a recording until the folder of its case has `limit` bytes."""
    left, deleted = size_of(own) - limit, 0
    for file in sorted(own.glob(f"{RECORDING}/**/*.safetensors"), reverse=True):
        if left <= 0:
            break
        left -= file.stat().st_size
        file.unlink()
        deleted += 1
    stated = own / RECORDING / "recording.json"
    if deleted and stated.exists():  # the audit prints these numbers
        facts = json.loads(stated.read_text())
        attached = facts["attached"]
        facts["attached"] = attached | {"written": attached["written"] - deleted,
                                        "dropped": attached["dropped"] + deleted}  # fmt: skip
        stated.write_text(json.dumps(facts, indent=1) + "\n")


def level(sizes: Sequence[int], total: int) -> int:
    """The largest number so that the sizes, each cut to it, sum to at most `total`."""
    left = total
    for count, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        if size * count > left:
            return left // count
        left -= size
    return max(sizes, default=0)


def pack(out: Path, into: Path) -> list[Path]:
    """Pack the folders of all cases into tar files of at most OF_FILE bytes, together OF_ALL. Trims recordings."""
    folders = sorted(file.parent for file in out.glob(f"*/{OUTCOME}"))
    limit = min(OF_CASE, level([min(size_of(one), OF_CASE) for one in folders], OF_ALL))
    groups, room = list[list[Path]](), 0
    for folder in folders:
        trim(folder, limit)
        needs = size_of(folder) * 21 // 20 + (64 << 10)  # with the headers of tar
        if needs > room:
            groups.append([])
            room = OF_FILE
        groups[-1].append(folder)
        room -= needs
    into.mkdir(parents=True, exist_ok=True)
    made = [into / f"live-{number}.tar" for number in range(1, len(groups) + 1)]
    for file, group in zip(made, groups, strict=True):
        with tarfile.open(file, "w") as archive:
            for folder in group:
                archive.add(folder, folder.name)
    return made


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="peers.live.run", description="Run packed SGLangs, recorded, on a GPU.")
    parser.add_argument("bundle", type=Path, help="the folder that peers.live.bundle made")
    parser.add_argument("out", type=Path, help="a folder for the results; a case that it has is run again")
    parser.add_argument("--only", help="names of cases, with commas; left out: all")
    parser.add_argument("--at-once", type=int, default=6, help="engines that run side by side")
    parser.add_argument("--minutes", type=float, default=8.0, help="limit of the whole run")
    parser.add_argument("--packed", type=Path, help="a folder for tar files with everything")
    options = parser.parse_args(given)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    begun, cases = time.monotonic(), by_name(options.only)
    files = unpacked(options.bundle.absolute())  # an engine runs in the folder of its case
    print(f"unpacked in {time.monotonic() - begun:.1f} s", flush=True)
    for case in cases:
        environment(files, case.release)
        if (options.out / case.name).exists():
            shutil.rmtree(options.out / case.name)
    left = options.minutes - (time.monotonic() - begun) / 60
    found = run_all(cases, files, options.out, options.at_once, left)
    for archive in pack(options.out, options.packed) if options.packed else ():
        print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB", flush=True)
    return 0 if all(one["outcome"] == "ended" for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())

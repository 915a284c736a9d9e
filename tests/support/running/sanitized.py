"""As a program: compute-sanitizer over replays on a GPU, with one line for each: a verdict, and not a log.

    make sanitize
    python -m support.running.sanitized memcheck replay fixtures/traces/faults/kimi.jsonl --ops mine:OPS --device cuda

Without arguments it runs each tool over the recurrences and the ranks, and over an op set with an access that this tool
must find. memcheck finds reads and writes outside of an allocation, racecheck races in shared memory, initcheck reads
of memory that nothing wrote. Each allocation is torch's own, so that a read after its end is seen; graphs are off,
because they need torch's allocator. Exit codes are those of `instep replay`: 0 if every line is as expected, 1 if a
tool found something, or missed what is planted, 3 if a tool gave no verdict. Leaves out: kernels at real sizes
(`on_gpu.sh`, part race).
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

TOOLS = ("memcheck", "racecheck", "initcheck")
LIMIT_S, AT_A_TIME = 280, 8
AGREES, FINDS, NOTHING = "agrees", "FINDS", "NO VERDICT"
WRONG = "support.kernels.under_stress"
RUNS = {  # name -> options of a replay
    "gdn": "faults/ragged.jsonl --ops triton --until 5",
    "gdn, bf16, folded": "faults/ragged.jsonl --ops triton --dtype bfloat16 --strategy lazy_rerun --until 5",
    "kda": "faults/kimi.jsonl --ops triton --until 4",
    "kda, two ranks": "faults/kimi.jsonl --ops triton --ranks 2 --until 4",
}
PLANTED = {"memcheck": "PAST_THE_END", "racecheck": "RACED", "initcheck": "UNWRITTEN"}
SUMMARY = re.compile(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (?:\d+ hazards? displayed \()?(\d+) error", re.M)
FIRST = re.compile(r"^=+ ((?:Invalid|Uninitialized|Error: Race|Potential|Warning: Race|Program hit)[^\n]*)", re.M)
AT = re.compile(r"^=+ +(?:at |.* access by thread .* at )(\S.*)", re.M)


class Line(NamedTuple):
    """One line of the output. verdict: AGREES, FINDS or NOTHING; says: the errors, or why there is no verdict"""

    verdict: str
    says: str


def read(log: str, ended: int | None) -> Line:
    """The verdict of a log. ended: the exit status of the replay; None: it was stopped at its limit"""
    found = SUMMARY.search(log)
    if ended is None or found is None:
        return Line(NOTHING, f"stopped after {LIMIT_S} s" if ended is None else "the tool printed no summary")
    if count := int(found[1]):
        first = [one[1] for one in (FIRST.search(log), AT.search(log)) if one]
        return Line(FINDS, f"{count} error{'s' * (count > 1)}: {', '.join(first)}")
    if ended:
        return Line(NOTHING, f"0 errors, but the replay ended with {ended}")
    return Line(AGREES, "0 errors")


def sanitized(tool: str, words: Sequence[str]) -> Line:
    """Run a command of instep under a tool."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "3", sys.executable, "-m", "instep", *words]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        process = subprocess.Popen(command, env=environment, text=True, start_new_session=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    except FileNotFoundError:
        return Line(NOTHING, "no compute-sanitizer here; it comes with the CUDA toolkit")
    try:
        return read(process.communicate(timeout=LIMIT_S)[0], process.returncode)
    except subprocess.TimeoutExpired:
        return read("", None)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the replay, too, which outlives the tool
        process.communicate()


def main(given: Sequence[str]) -> int:
    if given:
        runs = [(given[0], " ".join(given[1:]), [*given[1:]], AGREES)]
    else:
        runs = [(tool, name, options.split(), AGREES) for tool in TOOLS for name, options in RUNS.items()]
        runs += [(tool, f"planted {ops}", f"faults/kimi.jsonl --ops {WRONG}:{ops} --until 2".split(), FINDS)
                 for tool, ops in PLANTED.items()]  # fmt: skip
        runs = [(tool, name, ["replay", f"fixtures/traces/{trace}", *options, "--device", "cuda", "--no-ladder"], due)
                for tool, name, (trace, *options), due in runs]  # fmt: skip
    codes = [0]

    def one(run: tuple[str, str, list[str], str]) -> None:
        tool, name, words, due = run
        begun = time.monotonic()
        line = sanitized(tool, words)
        missed = ", but it must find what is planted" * (line.verdict == AGREES != due)
        codes.append(3 if line.verdict == NOTHING else int(line.verdict != due))
        print(f"{tool}, {name}: {line.verdict}: {line.says}{missed}  ({time.monotonic() - begun:.0f} s)", flush=True)

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(one, runs))
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The gate's verdicts for known slow-downs: its own loop and verdict, over the noise of measured pairs.

Run it as a script on the file of an A/A run, `instep gate plain plain --json FILE`:
    PYTHONPATH=reference:optimized:harness:tests python tests/perf/gate_resampled.py FILE --runs 200
A pair is drawn from the file's, with all cases and clocks of its moment. The median difference between processes of one
source is removed, and `after` is multiplied by the given slow-down. So it shows what noise within pairs hides. It does
not show how one process differs from the next, nor effects that last longer than a pair, such as a neighbour: these
`instep gate --calibrate` has. Leaves out: checks, time, and files of a GPU.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from instep.report.result import read
from instep.verdict import Exit
from instep_reference.contract.errors import BadInput
from instep_speed.gate import gate
from instep_speed.gate.clock import CLOCKS
from instep_speed.gate.input_and_result import Question, Report

WORDS = {Exit.AGREED: "held", Exit.DIVERGED: "slower", Exit.INCONCLUSIVE: "inconclusive"}
SLOWED = (0.0, 0.01, 0.02, 0.03, 0.04, 0.05, 0.08)


class Drawn:
    """Arms that answer with pairs of a file: the k-th answer of each is of the k-th pair that was drawn."""

    def __init__(self, measured: Mapping[str, np.ndarray], cases: tuple[str, ...], slowed: float, seed: int) -> None:
        self._measured, self._cases, self._slowed = measured, cases, slowed
        self._generator, self._pairs = np.random.default_rng(seed), list[int]()

    def arms(self) -> dict[str, Any]:
        return {name: SimpleNamespace(ask=self._asked(name), source=None) for name in gate.ARMS}

    def _asked(self, name: str) -> Any:
        count = 0

        def ask(what: str, **_: Any) -> dict[str, Any]:
            nonlocal count
            if count == len(self._pairs):
                self._pairs.append(int(self._generator.integers(len(self._measured[name]))))
            one = self._measured[name][self._pairs[count]] * (1 + self._slowed if name == "after" else 1)
            count += 1
            return {"seconds": dict(zip(self._cases, one.tolist(), strict=True))}

        return ask


def measured(found: Mapping[str, Any]) -> tuple[Question, dict[str, np.ndarray]]:
    """-> the question, and arm -> pairs, cases, clocks, without what arms differ by in the median."""
    if not found.get("judged"):
        raise SystemExit("a file without pairs; expected one that `instep gate plain plain --json` wrote")
    if found["setting"]["device"] != "cpu":
        raise SystemExit(f"a file of {found['setting']['device']}; expected one of a CPU")
    judged = {(one["case"], one["clock"]): np.array(one["samples"]) for one in found["judged"]}
    if len({len(samples) for samples in judged.values()}) != 1:
        raise SystemExit("clocks that read different pairs; expected all of each pair")
    cases, clocks = (tuple(dict.fromkeys(names)) for names in zip(*judged, strict=True))
    every = np.full((3, len(next(iter(judged.values()))), len(cases), len(CLOCKS)), np.nan)
    for (case, clock), samples in judged.items():
        ratios = samples / samples[:, :1]
        even = samples / np.median(ratios, axis=0)
        every[:, :, cases.index(case), CLOCKS.index(clock)] = even.T
    asked = {name: found["setting"][name] for name in ("pairs", "allowed", "seed")}
    question = Question("plain", "plain", Path("model"), cases, clocks=clocks, **asked)
    return question, dict(zip(gate.ARMS, every, strict=True))


def run(question: Question, samples: Mapping[str, np.ndarray], slowed: float, seed: int) -> tuple[str, str, int]:
    """-> the verdict, the verdict without the pairs after those that decide on slower, and the number of pairs"""
    arms, orders = Drawn(samples, question.cases, slowed, seed).arms(), cycle(gate.ORDERS)
    first = gate.timed(arms, question, 1, orders, lambda done, of: None)
    decided = len(first["before"])
    every = gate.timed(arms, question, 1, orders, lambda done, of: None, behind=first,
                       enough=lambda asked, taken: gate.answered(asked, taken, decided=decided))  # fmt: skip
    whole, early = (Report(question, judged=gate.judge(question, taken, 1, decided)).exit for taken in (every, first))
    return WORDS[whole], WORDS[early], len(every["before"])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--slowed", type=float, nargs="*", default=SLOWED, help="0.05 is 5%%")
    told = parser.parse_args(argv)
    try:
        question, samples = measured(read(told.file))
    except BadInput as error:
        raise SystemExit(str(error)) from None
    print(f"{told.runs} runs each, {len(samples['before'])} pairs measured; allowed {question.allowed:.0%}")
    for slowed in told.slowed:
        found = [run(question, samples, slowed, seed) for seed in range(told.runs)]
        late, early = (Counter(one[at] for one in found) for at in (0, 1))
        counts = ", ".join(f"{word} {late[word]} ({early[word]})" for word in WORDS.values())
        print(f"{slowed:.1%}: {counts}; {np.mean([one[2] for one in found]):.0f} pairs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

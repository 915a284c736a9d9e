"""Tables of speed for the README and docs/results.md, from a result of `instep bench`: of one kind of work or of all.

A cell without a time says what is wrong with its answers. Leaves out: making the result
(`instep bench --json fixtures/results/bench-native.json`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Results = Mapping[str, Any]
AXES = ("batch", "window", "rows", "sequences", "tokens", "behind", "heads", "state", "op", "layers", "drafter")
# What stands in the one table of the README: kind -> the cells that matter, by some of their axes.
SHOWN: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "strategies": tuple({"batch": batch, "window": 4, "heads": 32, "state": "float32"} for batch in (1, 8, 32)),
    "decode": ({"batch": 32, "heads": 32, "state": "float32"},),
    "prefill": ({"sequences": 1, "tokens": 2048, "heads": 32}, {"sequences": 1, "tokens": 8192, "heads": 32}),
    "attend": ({"batch": 1, "rows": 2048}, {"batch": 32, "rows": 4, "behind": 4096},
               {"batch": 1, "rows": 4, "behind": 4096}),
    "conv": ({"batch": 32, "rows": 4},),
    "pick": ({"rows": 1},),
    "rounds": tuple({"batch": batch, "layers": 32} for batch in (1, 8, 32)),
}  # fmt: skip
LAYERS = 32  # of the 9B shape
UNEVEN = 0.05  # from here on a mean is told beside a median
FIGURES = {"tokens_per_s": ".0f", "round_ms": ".2f", "latency_s": ".3f", "accepted": ".2f"}  # of a whole text


def rows_of(result: Results, kind: str, **axes: Any) -> list[Results]:
    return [row for row in result["rows"] if row["kind"] == kind and axes.items() <= row["cell"].items()]


def strategies(result: Results) -> str:
    """MiB per request and layer, and microseconds of one verify with its commit, per layer, by batch."""
    rows = {row["cell"]["batch"]: row for row in rows_of(result, "strategies", window=4, heads=32, state="float32")}
    lines = _head(["strategy", "MiB a request", *(f"B = {batch}" for batch in rows), "exact"])
    floors = " | ".join(f"{row['floor_us']:.1f}" for row in rows.values())
    lines.append(f"| *one read and one write* |  | {floors} |  |")
    for name in next(iter(rows.values()))["arms"]:
        arms = [row["arms"].get(name, {}) for row in rows.values()]
        held = f"{sum(arms[0]['bytes'].values()) / 2**20:.2f}" if "bytes" in arms[0] else ""
        peer = any(arm.get("peer") for arm in arms)
        exact = "" if peer else "bit by bit" if not any(arm.get("finding") for arm in arms) else "NO"
        shown = name if peer else f"`{name}`"
        lines.append("| " + " | ".join((shown, held, *map(spread, arms), exact)) + " |")
    return "\n".join(lines)


def effect(result: Results) -> str:
    """Whole texts, by step count: with the controller beside each fixed count."""
    lines = _head(["drafter", "arm", "tokens/s", "ms a round", "latency s", "accepted", "windows by accepted drafts"])
    for row in rows_of(result, "decoding", layers=LAYERS):
        for name, arm in row["arms"].items():
            counts = ", ".join(f"{count}: {windows}" for count, windows in arm.get("distribution", {}).items())
            figures = [f"{arm.get(name, math.nan):{form}}" for name, form in FIGURES.items()]
            cells = [*figures, counts] if "us" in arm else [f"no speed: {arm['finding']}", *[""] * len(FIGURES)]
            lines.append("| " + " | ".join((row["cell"]["drafter"], name, *cells)) + " |")
    return "\n".join(lines)


def speed(result: Results) -> str:
    """The cells that matter of every kind: ours, the floor and how far it is, and the fastest peer with its answers."""
    lines = _head(["work", "cell", "ours, us", "floor, us", "of the floor", "fastest peer, us", "its answers"])
    for kind, cells in SHOWN.items():
        for axes in cells:
            lines += [f"| {kind} | {line} |" for line in _lines(rows_of(result, kind, **axes))]
    return "\n".join(lines)


def _lines(rows: list[Results]) -> Iterator[str]:
    for row in rows[:1]:
        timed = {name: arm for name, arm in row["arms"].items() if "us" in arm}
        ours = {name: arm for name, arm in timed.items() if not arm["peer"]}
        peers = {name: arm for name, arm in timed.items() if arm["peer"]}
        if not ours:
            continue
        best, peer = _fastest(ours), _fastest(peers) if peers else ""
        told = f"{spread(ours[best])} `{best}`"
        cells = ", ".join(f"{axis} {row['cell'][axis]}" for axis in AXES if axis in row["cell"])
        floor = row["floor_us"]
        theirs = (f"{spread(peers[peer])} {peer}", peers[peer]["finding"] or "right") if peer else ("", "")
        yield " | ".join((cells, told, f"{floor:.1f}", f"{_average(ours[best]) / floor:.2f}", *theirs))


def _fastest(arms: Mapping[str, Results]) -> str:
    return min(arms, key=lambda name: float(arms[name]["mean"]))


def _average(arm: Results) -> float:
    """The median, or the mean where rounds differ so much that it is told."""
    return float(arm["mean"] if abs(arm["mean"] / arm["us"] - 1) > UNEVEN else arm["us"])


def spread(arm: Results) -> str:
    """12.3 ±0.4: the median, and half the interquartile range; the mean where rounds differ, as some store and others
    do not."""
    if "us" not in arm:
        return "no speed" if arm else ""
    mean = f", mean {arm['mean']:.1f}" if _average(arm) != arm["us"] else ""
    return f"{arm['us']:.1f} ±{(arm['upper'] - arm['lower']) / 2:.1f}{mean}"


def _head(names: list[str]) -> list[str]:
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]

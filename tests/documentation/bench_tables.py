"""Tables of speed for the README and docs/results.md, from a result of `instep bench`: of one kind of work or of all.

A cell without a time shows how its answers are wrong. If a peer's kernels also compute norms and gates, the table
compares them with our arm that does the same, and notes it if the result has no such arm. Leaves out: making the result
(`instep bench --json fixtures/results/bench-native.json`).
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from instep_speed.bench.bench_types import TOO

from . import markdown

Results = Mapping[str, Any]
AXES = ("form", "batch", "window", "rows", "sequences", "tokens", "prompt", "behind", "kv", "tree", "heads", "state",
        "op", "layers", "ranks", "drafter")  # fmt: skip
# The one table of the README: kind -> the cells that it shows, by some of their axes.
SHOWN: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "strategies": tuple({"batch": batch, "window": 4, "heads": 32, "state": state}
                        for batch, state in ((1, "float32"), (32, "float32"), (1, "bfloat16"))),
    "decode": tuple({"batch": 32, "heads": 32, "state": state} for state in ("float32", "bfloat16")),
    "channel_decay": (*({"form": "rerun", "batch": batch} for batch in (1, 8, 64)),
                      {"form": "decode", "batch": 8}, {"form": "prefill", "batch": 1, "tokens": 8192}),
    "mixer": ({"batch": 32, "heads": 32, "state": "float32"},),
    "prefill": tuple({"sequences": sequences, "tokens": tokens, "heads": 32}
                     for sequences, tokens in ((1, 2048), (8, 2048))),
    "attend": ({"batch": 1, "rows": 2048}, {"batch": 32, "rows": 4, "behind": 4096}),
    "rounds": tuple({"batch": batch, "layers": 32} for batch in (1, 8, 32)),
}  # fmt: skip
BRIEF: Mapping[str, Mapping[str, Any]] = {
    "decode": {"batch": 32, "heads": 32, "state": "float32"},
    "strategies": {"batch": 32, "window": 4, "heads": 32, "state": "float32"},
    "prefill": {"sequences": 1, "tokens": 2048, "heads": 32},
}
WORK = {"decode": "decode", "strategies": "verify and commit", "prefill": "prefill"}
LAYERS = 32  # of the 9B shape
# Work that is in a peer's time, and in ours only for the arms that end with `TOO`.
NORMS = "kernels of SGLang and FlashInfer compute norms and gates, too"
INSIDE = {"strategies": f"{NORMS}, and ReplaySSM moves its cursors", "decode": NORMS}
FIGURES = {"tokens_per_s": ".0f", "round_ms": ".2f", "latency_s": ".3f", "accepted": ".2f"}  # of a whole text


def rows_of(result: Results, kind: str, **axes: Any) -> list[Results]:
    return [row for row in result["rows"] if row["kind"] == kind and axes.items() <= row["cell"].items()]


def strategies(result: Results) -> str:
    """MiB per request and layer, and microseconds of one verify with its commit, per layer, by batch."""
    rows = {row["cell"]["batch"]: row for row in rows_of(result, "strategies", window=4, heads=32, state="float32")}
    heads = ("strategy", "MiB a request", *(f"B = {batch}" for batch in rows), "exact")
    lines = [("*one read and one write*", "", *(figure(row["floor_us"]) for row in rows.values()), "")]
    for name in next(iter(rows.values()))["arms"]:
        arms = [row["arms"].get(name, {}) for row in rows.values()]
        held = f"{sum(arms[0]['bytes'].values()) / 2**20:.2f}" if "bytes" in arms[0] else ""
        peer = any(arm.get("peer") for arm in arms)
        wrong = [f"B = {batch}" for batch, arm in zip(rows, arms, strict=True) if arm.get("finding")]
        exact = f"off at {', '.join(wrong)}" * bool(wrong) if peer else "NO" if wrong else "bit by bit"
        lines.append((name if peer else _own(name), held, *map(spread, arms), exact))
    return "\n".join([markdown.table(heads, lines), *_unlike([*rows.values()])])


def effect(result: Results) -> str:
    """Whole texts, by step count: the controller compared with each fixed count."""
    lines = []
    for row in rows_of(result, "decoding"):
        cell = [str(row["cell"][axis]) for axis in ("drafter", "layers", "batch")]
        for name, arm in row["arms"].items():
            counts = ", ".join(f"{count}: {windows}" for count, windows in arm.get("distribution", {}).items())
            figures = [f"{arm.get(name, math.nan):{form}}" for name, form in FIGURES.items()]
            if "us" in arm:  # tokens/s with half the interquartile range, as times have it
                figures[0] += f" ±{(1e6 / arm['lower'] - 1e6 / arm['upper']) / 2:.0f}"
            cells = [*figures, counts] if "us" in arm else [f"no speed: {arm['finding']}", *[""] * len(FIGURES)]
            lines.append((*cell, name, *cells))
    return markdown.table(("drafter", "layers", "batch", "arm", "tokens/s", "ms a round", "latency s", "accepted",
                           "windows by accepted drafts"), lines)


def speed(result: Results) -> str:
    """The cells that matter of every kind: ours, the floor and how far it is, and the fastest peer with its answers."""
    heads = ("work", "cell", "ours, us", "floor, us", "mean / floor", "fastest peer, us", "its answers")
    rows = [row for kind, cells in SHOWN.items() for axes in cells
            for row in sorted(rows_of(result, kind, **axes), key=lambda row: len(row["cell"]))[:1]]  # fmt: skip
    lines = ((row["kind"], *line) for row in rows for line in _lines(row))
    return "\n".join([markdown.table(heads, lines), *_unlike(rows)])


def over_ranks(result: Results) -> str:
    """A round on one rank and on several, by batch: its time and floor, and the time in its collectives."""
    lines = list[tuple[object, ...]]()
    for row in sorted(rows_of(result, "rounds"), key=lambda row: (row["cell"]["batch"], row["cell"]["ranks"])):
        for arm in row["arms"].values():
            cell = row["cell"]["batch"], row["cell"]["ranks"]
            if "us" not in arm:
                lines.append((*cell, f"no speed: {arm['finding']}", *[""] * 5))
                continue
            found = arm.get("collectives")
            parts = ["", "", ""] if found is None else [
                f"{figure(found['floor_us'])} for {found['calls']:.0f} calls, {found['bytes'] / 1e6:.2f} MB",
                ", ".join(f"rank {rank} {figure(us)}" for rank, us in enumerate(found["us"])),
                figure(found["moving_us"]) if found["us"] else ""]  # fmt: skip
            lines.append((*cell, spread(arm), figure(row["floor_us"]), f"{arm['of_floor']:.2f}", *parts))
    return markdown.table(("batch", "ranks", "a round, us", "floor, us", "mean / floor", "of that collectives, us",
                           "in collectives, us", "of that with all ranks there"), lines)


def brief(result: Results) -> str:
    """One cell each of decode, verify with commit, and prefill: ours, the floor, and the fastest peer that is right."""
    lines = []
    for kind, axes in BRIEF.items():
        (row,) = (row for row in rows_of(result, kind, **axes) if row["cell"].keys() == axes.keys())
        ours, peers = _timed(row)
        right = {name: arm for name, arm in peers.items() if not arm["finding"]}
        best, peer = _fastest(ours), _fastest(right)
        lines.append((WORK[kind], _cell(row), f"{spread(ours[best])} {_own(best)}", figure(row["floor_us"]),
                      f"{spread(right[peer])} {peer}"))
    return markdown.table(("work", "cell", "ours, us", "floor, us", "fastest peer that is right, us"), lines)


def behind(result: Results) -> str:
    """Every cell in which a peer with right answers is faster by half a percent of the means: how many times."""
    lines, cells = list[tuple[str, ...]](), 0
    for row in result["rows"]:
        ours, peers = _timed(row)
        right = {name: arm for name, arm in peers.items() if not arm["finding"]}
        if not ours or not right:
            continue
        best, peer = _fastest(ours), _fastest(right)
        times, cells = ours[best]["mean"] / right[peer]["mean"], cells + 1
        if round(times, 2) > 1:
            lines.append((row["kind"], _cell(row), f"{spread(ours[best])} {_own(best)}",
                          f"{spread(right[peer])} {peer}", f"{times:.2f}"))
    heads = ("work", "cell", "ours, us", "fastest peer that is right, us", "ours, times the peer's")
    return f"{markdown.table(heads, lines)}\n\nThese are {len(lines)} of {cells} cells that have such a peer."


def _cell(row: Results) -> str:
    return ", ".join(f"{axis} {row['cell'][axis]}" for axis in AXES if axis in row["cell"])


def _lines(row: Results) -> Iterator[tuple[str, ...]]:
    """One, or none where nothing of ours has a time."""
    ours, peers = _timed(row)
    if not ours:
        return
    best, peer = _fastest(ours), _fastest(peers) if peers else ""
    floor, times = row["floor_us"], f"{ours[best]['mean'] / row['floor_us']:.2f}"
    theirs = (f"{spread(peers[peer])} {peer}", peers[peer]["finding"] or "right") if peer else ("", "")
    yield _cell(row), f"{spread(ours[best])} {_own(best)}", figure(floor), times, *theirs


def _timed(row: Results) -> tuple[Mapping[str, Results], Mapping[str, Results]]:
    """Our arms that are compared with the peers, and the peers."""
    timed = {name: arm for name, arm in row["arms"].items() if "us" in arm}
    ours, peers = ({name: arm for name, arm in timed.items() if bool(arm["peer"]) is foreign}
                   for foreign in (False, True))  # fmt: skip
    return {name: arm for name, arm in ours.items() if name.endswith(TOO)} or ours, peers


def _unlike(rows: list[Results]) -> Iterator[str]:
    """Below a table: what the peers do in it and ours do not."""
    kinds = dict.fromkeys(row["kind"] for row in rows if row["kind"] in INSIDE for ours, peers in [_timed(row)]
                          if peers and not any(name.endswith(TOO) for name in ours))  # fmt: skip
    if kinds:
        said = "; in ".join(f"`{kind}` {INSIDE[kind]}" for kind in kinds)
        yield from ("", f"In {said}. No arm of ours in this result does.")


def _fastest(arms: Mapping[str, Results]) -> str:
    return min(arms, key=lambda name: float(arms[name]["mean"]))


def _own(name: str) -> str:
    """`rerun`, norms and gates too"""
    return f"`{name.removesuffix(TOO)}`{TOO * name.endswith(TOO)}"


def spread(arm: Results) -> str:
    """12.3 ±0.4, mean 12.6: the median, half the interquartile range, and the mean where its three digits differ."""
    if "us" not in arm:
        return "no speed" if arm else ""
    mean = f", mean {figure(arm['mean'])}" if f"{arm['mean']:.3g}" != f"{arm['us']:.3g}" else ""
    return f"{figure(arm['us'])} ±{(arm['upper'] - arm['lower']) / 2:.{max(1, _places(arm['us']))}f}{mean}"


def figure(value: float) -> str:
    """With three digits at least, and no more places than these need: 9.40, 53.5, 10270"""
    return f"{value:.{_places(value)}f}"


def _places(value: float) -> int:
    return max(0, 2 - math.floor(math.log10(float(f"{abs(value) or 1:.2e}"))))

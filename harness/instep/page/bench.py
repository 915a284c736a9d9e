"""The page of `instep bench`: time beside floor and peers, a round's time by kind of work, what checks of answers said.

An arm of ours whose answers are wrong has no time: its finding stands in the time's place. Leaves out: measuring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..bench import KINDS, kind
from ..bench.base import key
from ..bench.plots import grouped, works
from ..bench.work import gap
from ..verdict import Exit
from .document import Listing, Page
from .parts import Data

BAD = [["bad", "its answers are wrong: beside its time, or, at the top, instead of it"]]


def page(found: Data) -> Page:
    rows, setting, rates = found["rows"], found["setting"], found["rates"]
    wrong = [(row, arm, told) for row in rows for arm, told in row["arms"].items() if told["finding"]]
    ours = [f"WRONG  {row['kind']}, {key(row['cell'])}: {arm}: {told['finding']}; no speed is shown"
            for row, arm, told in wrong if not told["peer"]]  # fmt: skip
    said = [f"{', '.join(setting['ops'])}, {setting['dtype']}, on {setting['device']}: {len(rows)} cells, "
            f"{len(ours)} wrong answers of ours",
            f"this machine copies {rates['copy'] / 1e12:.3g} TB/s, reads {rates['read'] / 1e12:.3g} TB/s, multiplies "
            f"{rates['product'] / 1e12:.3g} TFLOP/s"]  # fmt: skip
    return Page(
        "Times", Exit(found["exit"]), said, "Every answer is checked before it is timed; the floor is what the machine "
        "needs to move and multiply what a cell must.", ["\n".join(ours)] * bool(ours), [_kinds(found), _peers(rows)],
        {"plots": [*_curves(rows), *_work(rows)], "legend": BAD if wrong else []}, [_table(rows)],
        word={Exit.DIVERGED: "WRONG", Exit.AGREED: "right"}.get(Exit(found["exit"]), ""),
    )  # fmt: skip


def _kinds(found: Data) -> Listing:
    lines = []
    for name in dict.fromkeys([row["kind"] for row in found["rows"]] + list(found["left_out"])):
        mine = [row for row in found["rows"] if row["kind"] == name]
        arms = [arm for row in mine for arm in row["arms"].values() if not arm["peer"]]
        floors = sorted(arm["of_floor"] for arm in arms if "of_floor" in arm)
        lines.append((
            name, KINDS.get(name, ""), str(len(mine)), str(found["left_out"].get(name, 0)),
            str(sum(bool(arm["finding"]) for arm in arms)), f"{floors[len(floors) // 2]:.2f}" if floors else "",
        ))  # fmt: skip
    heads = ("kind", "what", "cells", "left out", "wrong answers of ours", "mean / floor, median")
    return Listing(heads, lines, "Kinds of work", [number for number, line in enumerate(lines) if line[4] != "0"])


def _peers(rows: list[Data]) -> Listing:
    """What the checks said of other packages' answers, by kernel."""
    arms: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for arm, told in row["arms"].items():
            if told["peer"]:
                arms.setdefault((told["peer"], arm, row["kind"]), []).append(told["finding"])
    lines = [(*names, f"{sum(not one for one in said)} of {len(said)}", next(filter(None, said), ""))
             for names, said in sorted(arms.items())]  # fmt: skip
    return Listing(("peer", "arm", "kind", "right in", "first finding"), lines, "What checks said of peers",
                   [number for number, line in enumerate(lines) if line[-1]])  # fmt: skip


def _table(rows: list[Data]) -> Listing:
    lines, bad = list[tuple[str, ...]](), list[int]()
    for row in rows:
        for arm, told in row["arms"].items():
            bad += [len(lines)] * bool(told["finding"])
            lines.append((row["kind"], key(row["cell"]), arm, told["peer"], *_figures(row, told), _said(told)))
        lines += [(row["kind"], key(row["cell"]), arm, *[""] * 6, why) for arm, why in row["absent"].items()]
    heads = ("kind", "cell", "arm", "package", "us", "quartiles", "mean", "floor", "mean / floor",
             "how, or what is wrong")  # fmt: skip
    return Listing(heads, lines, "Every cell", bad, [line[0] for line in lines])


def _figures(row: Data, told: Data) -> tuple[str, str, str, str, str]:
    if "us" not in told:
        return ("wrong" if told["finding"] else "", "", "", "", "")
    floor = (f"{row['floor_us']:.1f}", f"{told['of_floor']:.2f}") if "of_floor" in told else ("", "")
    return (f"{told['us']:.1f}", f"{told['lower']:.1f}-{told['upper']:.1f}", f"{told['mean']:.1f}", *floor)


def _said(told: Data) -> str:
    beside = f"; {told['above']}" if "above" in told else ""
    return (f"WRONG: {told['finding']}" if told["finding"] else str(told.get("how", ""))) + beside


def _curves(rows: list[Data]) -> Iterator[dict[str, Any]]:
    """Time against the kind's own axis."""
    for (name, rest), mine in grouped(rows).items():  # type: ignore[arg-type]
        x, unit = kind(name).x, kind(name).unit
        lines = defaultdict[str, list[list[Any]]](list)
        for row in mine:
            at, floor = row["cell"][x], row["floor_us"]
            if floor:
                lines["floor"].append([at, floor, 0, {"title": f"floor: {floor:.4g} us"}])
            for arm, told in row["arms"].items():
                if "us" in told or told["finding"]:
                    lines[arm].append([at, told.get("us", 0), int(bool(told["finding"])), _point(row, arm)])
        if len({point[0] for points in lines.values() for point in points}) > 1:
            drawn = [{"name": arm, "points": points} for arm, points in lines.items()]
            yield {"form": "curves", "title": f"{name}, {rest}".strip(", "), "group": name, "x": x.replace("_", " "),
                   "y": f"us, {unit}", "lines": drawn}  # fmt: skip


def _point(row: Data, arm: str) -> dict[str, Any]:
    told = row["arms"][arm]
    us, quartiles, mean, floor, of_floor = _figures(row, told)
    numbers = f"{us} us, quartiles {quartiles}, mean {mean}" if "us" in told else "no speed is shown"
    title = ", ".join((f"{arm} ({told['peer']})" if told["peer"] else arm, row["kind"], key(row["cell"])))
    beside = f"the mean is {of_floor} times the floor of {floor} us" if floor else ""
    return {"title": title, "lines": [numbers, beside, _said(told)]}


def _work(rows: list[Data]) -> Iterator[dict[str, Any]]:
    """A round's time by kind of work."""
    for row, work in works(rows):  # type: ignore[arg-type]
        parts = list(dict.fromkeys(part for arm in work.values() for part in arm))
        told = [[gap(one)] if "launches" in one else []
                for one in (row["arms"][arm] for arm in work)]  # fmt: skip
        yield {"form": "bars", "title": f"{row['kind']}, {key(row['cell'])}: us by kind of work", "group": row["kind"],
               "x": "us", "names": list(work), "parts": parts, "told": told,
               "values": {part: [arm.get(part, 0) for arm in work.values()] for part in parts}}  # fmt: skip

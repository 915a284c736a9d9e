"""The document of `instep bench`: times, floors and peers, a round's time by kind of work, and checks of answers.

An arm of ours with wrong answers has no time: the page shows its finding instead. Leaves out: measuring.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import log
from statistics import median
from typing import Any

from instep.report.document import Data, Document, Kind, Listing
from instep.verdict import Exit

from . import KINDS, kind
from .bench_types import TOO, key
from .profile import collectives, gap
from .run import chosen

LOUD = ("WRONG", "ABOVE")
DIGITS = 12  # of a digest
ON_CPU = "on a CPU: `plain`, called eagerly, tiny shapes; for regressions only, not for speed"
MOST_LINES, MOST_ARMS = 4, 100  # of a plot of curves on a page, its base line included; in a picture
BAD = [["bad", "its answers are wrong: a mark at its time, or at the top if it has no time"]]


def document(found: Data) -> Document:
    rows, setting, rates = found["rows"], found["setting"], found["rates"]
    wrong = [(row, arm, told) for row in rows for arm, told in row["arms"].items() if told["finding"]]
    ours = [f"WRONG  {row['kind']}, {key(row['cell'])}: {arm}: {told['finding']}; no speed is shown"
            for row, arm, told in wrong if not told["peer"]]  # fmt: skip
    said = [f"{', '.join(setting['ops'])}, {setting['dtype']}, on {setting['device']}: {len(rows)} cells, "
            f"{len(ours)} wrong answers of ours",
            f"this machine copies {rates['copy'] / 1e12:.3g} TB/s, reads {rates['read'] / 1e12:.3g} TB/s, multiplies "
            f"{rates['product'] / 1e12:.3g} TFLOP/s"]  # fmt: skip
    said += [] if setting["device"].startswith("cuda") else [ON_CPU]
    kinds = dict.fromkeys([row["kind"] for row in rows] + list(found["left_out"]))
    of_kind = {name: [row for row in rows if row["kind"] == name] for name in kinds}
    return Document(
        "Times", Exit(found["exit"]), said, "Every answer is checked before it is timed. The floor is the time that "
        "this machine needs for the bytes and products of a cell.", ["\n".join(ours)] * bool(ours),
        [_kinds(found, of_kind), _peers(rows)],
        {"plots": [*_ratios(rows), *_curves(rows), *_work(rows)], "legend": BAD if wrong else []},
        [_table(name, mine) for name, mine in of_kind.items() if mine],
        [*_differing(found["sessions"]), *_not_measured(found, of_kind), *_further(rows), *_merged(_notes(rows))],
        word={Exit.DIVERGED: "WRONG", Exit.AGREED: "right"}.get(Exit(found["exit"]), ""),
    )  # fmt: skip


def _differing(sessions: Sequence[Data]) -> Iterator[str]:
    """Settings that affect speed and differ between calls."""
    for name in ("torch", "triton", "kernels_syntax"):
        values = Counter((one["machine"].get(name) or "none")[:DIGITS] for one in sessions)
        if len(values) > 1:
            told = ", ".join(f"{value} in {count}" for value, count in values.items())
            yield f"{len(sessions)} calls measured these rows, which differ in {name}: {told}"


def _not_measured(found: Data, of_kind: Mapping[str, list[Data]]) -> Iterator[str]:
    """Kinds whose rows all come from calls with `--at`, and kinds with cells left out."""
    sessions = found["sessions"]
    for name, rows in of_kind.items():
        axes = dict.fromkeys(chosen(sessions[row["session"]].get("at") or {}) for row in rows if sessions)
        if axes and "" not in axes:
            yield f"{name}: only cells with {'; '.join(axes)} were requested"
        if count := found["left_out"].get(name):
            yield f"{name}: {count} cells left out{found.get('left_because', {}).get(name, '')}"


def _further(rows: Sequence[Data]) -> Iterator[str]:
    """Further fields of arms: those of whole texts, and of a round's kinds of work."""
    for row in rows:
        for arm, told in row["arms"].items():
            if "tokens_per_s" in told:
                counts = ", ".join(f"{count}: {windows}" for count, windows in told["distribution"].items())
                steps = ", ".join(f"{count}: {number}" for count, number in told["steps"].items())
                said = f"{told['tokens_per_s']:.0f} tokens/s, latency {told['latency_s']:.3f} s"
                more = f"{told['accepted']:.2f} drafts a window ({counts}); rounds by step count {steps}"
            elif "work" in told or "proposals_us" in told:
                alone = {"proposals alone": told["proposals_us"]} if "proposals_us" in told else {}
                parts = [f"{kind} {us:.0f}" for kind, us in (told.get("work", {}) | alone).items()]
                said, more = ", ".join(parts), gap(told) if "work" in told else "in us"
            else:
                said = more = ""
            if said:
                yield f"{key(row['cell'])}, {arm}: {said}; {more}"
            if "collectives" in told:
                yield f"{key(row['cell'])}, {arm}: {collectives(told['collectives'])}"


def _notes(rows: Sequence[Data]) -> Iterator[tuple[str, str]]:
    """Place and text: wrong answers of peers, errors above a peer's, arms that a cell does not have."""
    for row in rows:
        where = f"{row['kind']}, {key(row['cell'])}"
        for arm, told in row["arms"].items():
            if told["finding"] and told["peer"]:
                yield f"WRONG  {where}: {told['peer']} {arm}", told["finding"]
            if "above" in told:
                yield f"ABOVE  {where}", f"{arm} {told['above']}"
        yield from ((where, f"no {arm}: {why}") for arm, why in row["absent"].items())


def _merged(notes: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Merge equal texts of several cells, with their number; wrong answers and errors are kept apart."""
    places: dict[tuple[str, str], list[str]] = {}
    for where, text in notes:
        places.setdefault((text, where * where.startswith(LOUD)), []).append(where)
    for (text, _), cells in places.items():
        yield f"{cells[0]}: {text}" + f" (and {len(cells) - 1} cells more)" * (len(cells) > 1)


def _kinds(found: Data, of_kind: Mapping[str, list[Data]]) -> Listing:
    lines = []
    for name, mine in of_kind.items():
        arms = [arm for row in mine for arm in row["arms"].values() if not arm["peer"]]
        floors = sorted(arm["of_floor"] for arm in arms if "of_floor" in arm)
        lines.append((
            name, KINDS.get(name, ""), str(len(mine)), str(found["left_out"].get(name, 0)),
            str(sum(bool(arm["finding"]) for arm in arms)), f"{floors[len(floors) // 2]:.2f}" if floors else "",
        ))  # fmt: skip
    heads = ("kind", "what", "cells", "left out", "wrong answers of ours", "mean / floor, median")
    return Listing(heads, lines, "Kinds of work", [number for number, line in enumerate(lines) if line[4] != "0"])


def _peers(rows: list[Data]) -> Listing:
    """Whether the answers of other packages are right, by kernel."""
    arms: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for arm, told in row["arms"].items():
            if told["peer"]:
                arms.setdefault((told["peer"], arm, row["kind"]), []).append(told["finding"])
    lines = [(*names, f"{sum(not one for one in said)} of {len(said)}", next(filter(None, said), ""))
             for names, said in sorted(arms.items())]  # fmt: skip
    return Listing(("peer", "arm", "kind", "right in", "first finding"), lines, "Checks of peers",
                   [number for number, line in enumerate(lines) if line[-1]])  # fmt: skip


def _table(name: str, rows: list[Data]) -> Listing:
    """A line for each arm. Some cells have more axes than others."""
    axes = list(dict.fromkeys(axis for row in rows for axis in row["cell"]))
    places = list(dict.fromkeys(
        what for row in rows for told in row["arms"].values() for what in told.get("errors", ())))
    heads: dict[str, Kind] = {
        **{axis.replace("_", " "): "number" for axis in axes}, "arm": "word", "package": "detail",
        f"us, {kind(name).unit}": "number", "quartiles": "number", "mean": "number", "floor": "number",
        "mean / floor": "number", "how": "word", **({f"off by: {', '.join(places)}": "word"} if places else {}),
        "what is wrong": "detail",
    }  # fmt: skip
    lines, bad = list[tuple[str, ...]](), list[int]()
    for row in rows:
        for arm, told in row["arms"].items():
            bad += [len(lines)] * bool(told["finding"])
            lines.append((*(str(row["cell"].get(axis, "")) for axis in axes), arm, told["peer"], *_figures(row, told),
                          told.get("how", ""), *[_off(told, places)] * bool(places), _said(told)))  # fmt: skip
    return Listing(heads, lines, f"{name}: {KINDS.get(name, '')}", bad, [name] * len(lines))


def _off(told: Data, places: list[str]) -> str:
    """Format errors relative to fp64, by the norm: 1.9e-03, 2.1e-03"""
    found = told.get("errors", {})
    return ", ".join(f"{found[what]:.1e}" if what in found else "-" for what in places) if found else ""


def _figures(row: Data, told: Data) -> tuple[str, str, str, str, str]:
    if "us" not in told:
        return ("wrong" if told["finding"] else "", "", "", "", "")
    floor = (f"{row['floor_us']:.1f}", f"{told['of_floor']:.2f}") if "of_floor" in told else ("", "")
    return (f"{told['us']:.1f}", f"{told['lower']:.1f}-{told['upper']:.1f}", f"{told['mean']:.1f}", *floor)


def _said(told: Data) -> str:
    return "; ".join(filter(None, (f"WRONG: {told['finding']}" * bool(told["finding"]), told.get("above"))))


def _ratios(rows: Sequence[Data]) -> Iterator[dict[str, Any]]:
    """A row for each kind of work: the fastest arm of ours, as a multiple of the fastest peer that is right."""
    kinds = defaultdict[str, list[tuple[float, str]]](list)
    for row in rows:
        ours, peers = _times(row)
        if ours and peers:
            kinds[row["kind"]].append((min(ours.values()) / min(peers.values()), key(row["cell"])))
    drawn = []
    for name, ratios in kinds.items():
        values, (most, where) = sorted(ratio for ratio, _ in ratios), max(ratios)
        middle, slower = median(values), sum(value > 1 for value in values)
        told = {"title": name, "lines": [
            f"ours / fastest peer: median {middle:.3g}, {values[0]:.3g} to {most:.3g}, {len(values)} cells",
            f"ours takes longer in {slower} of them; most in {where}"]}  # fmt: skip
        drawn.append({"name": name, "value": middle, "low": values[0], "high": most, "dots": values, "told": told,
                      "color": "line-1" if slower else "line-0"})  # fmt: skip
    if drawn:
        yield {"form": "intervals", "title": "Ours / fastest peer that is right: median and range; a dot is a cell",
               "x": "ours / fastest peer; below 1 ours is faster", "band": [1, 1], "rows": drawn}  # fmt: skip


def _times(row: Data) -> tuple[dict[str, float], dict[str, float]]:
    """Arm -> its mean: ours, and those of other packages. Arms with wrong answers are skipped.

    If a peer's kernel computes norms and gates, too, only our arms that do so are compared with it.
    """
    ours, peers = ({
        arm: told["mean"] for arm, told in row["arms"].items()
        if bool(told["peer"]) is peer and "us" in told and not told["finding"]
    } for peer in (False, True))
    return {arm: mean for arm, mean in ours.items() if arm.endswith(TOO)} or ours, peers


def pictures(rows: Sequence[Data]) -> list[dict[str, Any]]:
    """The plots of `--plots`: curves with every arm, and a round's time by kind of work."""
    return [*_curves(rows, most=MOST_ARMS), *_work(rows)]


def works(rows: Sequence[Data]) -> Iterator[tuple[Data, dict[str, dict[str, float]]]]:
    """Rows whose arms have times by kind of work, in the order of the plotted axis: arm -> kind of work -> us."""
    for row in sorted(rows, key=lambda row: float(row["cell"].get(kind(row["kind"]).x, 0))):
        if work := {name: arm["work"] for name, arm in row["arms"].items() if "work" in arm}:
            yield row, work


def grouped(rows: Sequence[Data]) -> dict[tuple[str, str], list[Data]]:
    """Group rows that differ in the plotted axis alone, by kind and the other axes, in the order of that axis."""
    groups: dict[tuple[str, str], list[Data]] = {}
    for row in rows:
        x = kind(row["kind"]).x
        if x in row["cell"]:
            rest = key({name: value for name, value in row["cell"].items() if name != x})
            groups.setdefault((row["kind"], rest), []).append(row)
    return {group: sorted(mine, key=lambda row: float(row["cell"][kind(row["kind"]).x]))
            for group, mine in groups.items()}


def _curves(rows: Sequence[Data], most: int = MOST_LINES) -> Iterator[dict[str, Any]]:
    """For each kind, against its axis: times of the fastest arms and the floor; ours as multiples of a peer.

    most: lines of a plot. Arms with wrong answers that are not among the fastest have separate plots.
    """
    for (name, rest), mine in grouped(rows).items():
        x, title = kind(name).x, f"{name}, {rest}".strip(", ")
        if len({row["cell"][x] for row in mine}) < 2:
            continue
        frame = {"form": "curves", "group": name, "x": x.replace("_", " ")}
        floor, lines = _lines(mine, x)
        chosen = _fastest(mine, lines, most)
        some = f": {len(chosen)} of {len(lines)} arms" if len(chosen) < len(lines) else ""
        yield {**frame, "title": f"{title}{some}", "y": f"us, {kind(name).unit}", "lines": [*floor, *chosen]}
        wrong = [line for line in lines if line not in chosen and any(bad for _, _, bad, _ in line["points"])]
        for begin in range(0, len(wrong), most - 1):
            some = f"{title}: arms with wrong answers"
            several = [*floor, *wrong[begin : begin + most - 1]]
            yield {**frame, "title": some, "y": f"us, {kind(name).unit}", "lines": several}
        if against := _against_peers(mine, x, most):
            yield {**frame, "title": f"{title}: ours / fastest peer", "y": "times", "lines": against}


def _lines(rows: Sequence[Data], x: str) -> tuple[list[Data], list[Data]]:
    """The floor, if there is one, and every arm."""
    floor, lines = list[list[Any]](), defaultdict[str, list[list[Any]]](list)
    for row in rows:
        at = row["cell"][x]
        if row["floor_us"]:
            floor.append([at, row["floor_us"], 0, {"title": f"floor: {row['floor_us']:.4g} us"}])
        for arm, told in row["arms"].items():
            if "us" in told or told["finding"]:
                lines[arm].append([at, told.get("us", 0), int(bool(told["finding"])), _point(row, arm)])
    base: list[Data] = [{"name": "floor", "base": True, "points": floor}] if floor else []
    return base, [{"name": arm, "points": points} for arm, points in lines.items()]


def _fastest(rows: Sequence[Data], lines: Sequence[Data], most: int) -> list[Data]:
    """The arms of the plot of times: the fastest of ours, then the fastest peers, then others of ours."""
    peers = {arm for row in rows for arm, told in row["arms"].items() if told["peer"]}
    ranked = sorted(lines, key=_rank)
    ours, theirs = ([line for line in ranked if (line["name"] in peers) is of] for of in (False, True))
    chosen = [*ours[:1], *theirs[: most - 1 - len(ours[:1])]]
    chosen += ours[1:][: most - 1 - len(chosen)]
    return [line for line in lines if line in chosen]


def _rank(line: Data) -> tuple[int, float]:
    """Arms with more points come first, then those with a smaller product of their values."""
    values = [y for _, y, *_ in line["points"] if y > 0]
    return -len(values), sum(map(log, values))


def _against_peers(rows: Sequence[Data], x: str, most: int) -> list[Data]:
    """The fastest arms of ours, and the fastest peer that is right as the line at 1."""
    base, lines = list[list[Any]](), defaultdict[str, list[list[Any]]](list)
    for row in rows:
        ours, peers = _times(row)
        if ours and peers:
            peer = min(peers, key=lambda arm: peers[arm])
            title = {"title": f"fastest peer: {peer}", "lines": [f"mean {peers[peer]:.4g} us"]}
            base.append([row["cell"][x], 1, 0, title])
            for arm, mean in ours.items():
                told = _point(row, arm)
                said = f"{mean / peers[peer]:.3g} times {peer}, whose mean is {peers[peer]:.4g} us"
                lines[arm].append([row["cell"][x], mean / peers[peer], 0, {**told, "lines": [said, *told["lines"]]}])
    if len(base) < 2:
        return []
    arms = sorted(({"name": arm, "points": points} for arm, points in lines.items()), key=_rank)
    return [{"name": "fastest peer", "base": True, "points": base}, *arms[: most - 1]]


def _point(row: Data, arm: str) -> dict[str, Any]:
    told = row["arms"][arm]
    us, quartiles, mean, floor, of_floor = _figures(row, told)
    numbers = f"{us} us, quartiles {quartiles}, mean {mean}" if "us" in told else "no speed is shown"
    title = ", ".join((f"{arm} ({told['peer']})" if told["peer"] else arm, row["kind"], key(row["cell"])))
    of_the_floor = f"the mean is {of_floor} times the floor of {floor} us" if floor else ""
    return {"title": title, "lines": [numbers, of_the_floor, told.get("how", ""), _said(told)]}


def _work(rows: Sequence[Data]) -> Iterator[dict[str, Any]]:
    """A round's time by kind of work."""
    for row, work in works(rows):
        told = [[gap(one)] if "launches" in one else [] for one in (row["arms"][arm] for arm in work)]
        title = f"{row['kind']}, {key(row['cell'])}: us by kind of work"
        yield {**bars_of(title, work), "group": row["kind"], "told": told}


def bars_of(title: str, work: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A plot with a bar for each name.  work: name -> kind of work -> us"""
    parts = list(dict.fromkeys(part for one in work.values() for part in one))
    return {"form": "bars", "title": title, "x": "us", "names": list(work), "parts": parts,
            "values": {part: [one.get(part, 0) for one in work.values()] for part in parts}}  # fmt: skip

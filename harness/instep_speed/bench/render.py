"""Print the results of the benchmark: a table per kind and axes, floors next to times, findings below.

Leaves out: measuring, and plots (`plots.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from instep.report import terminal_tables

from . import KINDS, kind
from .bench_types import key
from .profile import gap
from .run import Bench, Row, Session, chosen, matches

LOUD = ("WRONG", "ABOVE")  # prefixes of notes that are printed in red
DIGITS = 12  # of a digest
ON_CPU = "on a CPU: `plain`, called eagerly, tiny shapes; for regressions only, not for speed"


def show(found: Bench, console: Console) -> None:
    asked, rates = found.asked, found.rates
    if not asked.device.startswith("cuda"):
        terminal_tables.say(console, ON_CPU, style="yellow")
    moved = f"copies {rates.copy / 1e12:.3g} TB/s, reads {rates.read / 1e12:.3g} TB/s"
    terminal_tables.say(console, f"this machine {moved}, multiplies {rates.product / 1e12:.3g} TFLOP/s", style="dim")
    for said in _differing(found.sessions):
        terminal_tables.say(console, said, style="yellow")
    for name in asked.kinds:
        rows = [row for row in found.rows if row["kind"] == name]
        if rows:
            _table(name, rows, console)
        for said in (_chosen(found, rows), _left(found, name)):
            if said:
                terminal_tables.say(console, f"{name}: {said}", style="yellow")


def _differing(sessions: Sequence[Session]) -> Iterator[str]:
    """Settings that affect speed and differ between calls."""
    for name in ("torch", "triton", "kernels_syntax"):
        values = Counter((one.machine.get(name) or "none")[:DIGITS] for one in sessions)
        if len(values) > 1:
            told = ", ".join(f"{value} in {count}" for value, count in values.items())
            yield f"{len(sessions)} calls measured these rows, which differ in {name}: {told}"


def _chosen(found: Bench, rows: Sequence[Row]) -> str:
    """For a kind whose rows all come from calls with `--at`: the chosen cells."""
    told = dict.fromkeys(chosen(found.sessions[row["session"]].at) for row in rows)
    return f"only cells with {'; '.join(told)} were requested" if told and "" not in told else ""


def _left(found: Bench, name: str) -> str:
    asked, left = found.asked, found.left
    if name not in left:
        return ""
    some = any(matches(at, asked.at) for at in asked.cells(name))
    return f"{left[name]} cells left out, {found.ended if some else f'none has {chosen(asked.at)}'}"


def _table(name: str, rows: list[Row], console: Console) -> None:
    unit = kind(name).unit
    axes = list(dict.fromkeys(axis for row in rows for axis in row["cell"]))  # some cells have more axes than others
    places = list(dict.fromkeys(
        what for row in rows for told in row["arms"].values() for what in told.get("errors", ())))
    made = terminal_tables.table(f"{name}: {KINDS[name]}", {
        **{axis.replace("_", " "): "number" for axis in axes}, "arm": "word", f"us, {unit}": "number",
        "quartiles": "number", "mean": "number", "floor": "number", "mean / floor": "number", "how": "word",
        **({f"off by: {', '.join(places)}": "word"} if places else {}),
    })
    notes = list[str]()
    for row in rows:
        for number, (arm, told) in enumerate(row["arms"].items()):
            cell = [str(row["cell"].get(axis, "")) if not number else "" for axis in axes]
            floor = f"{row['floor_us']:.1f}" if row["floor_us"] and not number else ""
            made.add_row(*cell, arm, *_figures(told), floor, f"{told['of_floor']:.2f}" if "of_floor" in told else "",
                         told.get("how", ""), *[_off(told, places)] * bool(places))  # fmt: skip
            if told["finding"]:
                which = f"{told['peer']} {arm}" if told["peer"] else arm
                speed = "" if told["peer"] else "; no speed is shown"
                notes.append(f"WRONG  {name}, {key(row['cell'])}: {which}: {told['finding']}{speed}")
            if "above" in told:
                notes.append(f"ABOVE  {name}, {key(row['cell'])}: {arm} {told['above']}")
        notes += [f"{name}, {key(row['cell'])}: no {arm}: {why}" for arm, why in row["absent"].items()]
    terminal_tables.show(made, console)
    _texts(rows, console)
    for note in _once(notes):
        terminal_tables.say(console, note, style="red" if note.startswith(LOUD) else "dim")


def _texts(rows: list[Row], console: Console) -> None:
    """Further fields of arms: those of whole texts, and of a round's kinds of work."""
    for row in rows:
        for arm, told in row["arms"].items():
            if "tokens_per_s" in told:
                counts = ", ".join(f"{count}: {windows}" for count, windows in told["distribution"].items())
                steps = ", ".join(f"{count}: {number}" for count, number in told["steps"].items())
                said = f"{told['tokens_per_s']:.0f} tokens/s, latency {told['latency_s']:.3f} s"
                more = f"{told['accepted']:.2f} drafts a window ({counts}); rounds by step count {steps}"
            elif "work" in told:
                said = ", ".join(f"{kind} {us:.0f}" for kind, us in told["work"].items())
                more = gap(told)
            else:
                continue
            terminal_tables.say(console, f"{key(row['cell'])}, {arm}: {said}; {more}")


def _figures(told: Mapping[str, Any]) -> tuple[str, str, str]:
    if "us" not in told:
        return ("wrong" if told["finding"] else "", "", "")
    return f"{told['us']:.1f}", f"{told['lower']:.1f}-{told['upper']:.1f}", f"{told['mean']:.1f}"


def _off(told: Mapping[str, Any], places: list[str]) -> str:
    """Format errors relative to fp64, by the norm: 1.9e-03, 2.1e-03"""
    found = told.get("errors", {})
    return ", ".join(f"{found[what]:.1e}" if what in found else "-" for what in places) if found else ""


def _once(notes: list[str]) -> list[str]:
    """Merge equal notes of several cells, with their number."""
    said: dict[str, list[str]] = {}
    for note in notes:
        head, _, text = note.partition(": ")
        said.setdefault(text if not head.startswith(LOUD) else note, []).append(note)
    return [alike[0] + (f" (and {len(alike) - 1} cells more)" if len(alike) > 1 else "") for alike in said.values()]

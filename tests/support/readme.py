"""The README's tables, made from the files under `fixtures/`: `python -m support.readme` writes them in.

Leaves out: measuring. `tests/test_readme.py` holds the README to what stands in the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .parity_table import stored, table

TOP = Path(__file__).resolve().parents[2]
README = TOP / "README.md"
RESULTS = TOP / "fixtures" / "results"
SECTION = re.compile(r"<!-- generated: (\w+) -->\n(.*?)<!-- end -->", re.DOTALL)


def parity() -> str:
    return table(stored())


def replay() -> str:
    """One line per run of the committed results; headrooms are the worst part of an allowance that was used."""
    tiers = ("T2", "T2d", "T3")
    lines = ["| run | where | events | blocks | elements | T0, T1 | " + " | ".join(tiers) + " |", "|---" * 9 + "|"]
    for file in sorted(RESULTS.glob("replay-*.json")):
        result = json.loads(file.read_text())
        for run in result["runs"]:
            used = {tier["tier"]: tier["headroom"] for tier in run["tiers"]}
            kind = run["dtype"] if "T2" in used else "labels"
            cells = (
                f"`{run['ops']}` {kind}, {run['layout']}", _machine(result["machine"]),
                f"{run['events']} of {run['of']}", f"{sum(tier['blocks'] for tier in run['tiers']):,}",
                f"{run['elements']:,}", "exact", *(f"{used[tier]:.2f}" if tier in used else "" for tier in tiers),
            )  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tiny() -> str:
    quality = json.loads((TOP / "fixtures" / "tiny" / "quality.json").read_text())
    bits, decoding = quality["bits_per_byte"]["held_out"], quality["decoding"]
    rows = {
        "bits per byte, held-out text": f"{bits['trunk']:.2f}",
        "accepted of 3 drafts, greedy decoding from held-out prompts": f"{decoding['mean_accepted_drafts']:.2f}",
        "the same, single rounds within held-out text": f"{decoding['held_out_text']['mean_accepted_drafts']:.2f}",
        "file": f"{(TOP / 'fixtures' / 'tiny' / 'model.safetensors').stat().st_size:,} bytes",
    }
    return "\n".join(["| measured | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


SECTIONS: dict[str, Callable[[], str]] = {"replay": replay, "parity": parity, "tiny": tiny}


def rendered(text: str) -> str:
    """The README with every generated section as the files have it."""

    def fill(found: re.Match[str]) -> str:
        make = SECTIONS.get(found[1])
        return found[0] if make is None else f"<!-- generated: {found[1]} -->\n{make()}\n<!-- end -->"

    return SECTION.sub(fill, text)


def section(name: str) -> str:
    """What stands in the README under a name."""
    return next(found[2] for found in SECTION.finditer(README.read_text()) if found[1] == name)


def _machine(machine: dict[str, Any]) -> str:
    """Where it ran: "NVIDIA H200, torch 2.11.0, triton 3.6.0", or "CPU, torch 2.13.0"."""
    if machine["device"] == "cpu":
        return f"CPU, torch {machine['torch']}"
    return f"{machine['device_name']}, torch {machine['torch']}, triton {machine['triton']}"


if __name__ == "__main__":
    README.write_text(rendered(README.read_text()))

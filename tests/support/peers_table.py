"""The table of results of other people's kernels and engines, from `fixtures/results/peers.json`.

Leaves out: running them (`tests/peers`).
"""

from __future__ import annotations

from typing import Any

HEAD = (
    "judged", "release", "selected by", "door", "tiers", "events served, or tokens decided", "verdict", "finding",
    "command",
)


def table(result: dict[str, Any]) -> str:
    """One line per entry of `make peers`, with a note if the result is not the expected one."""
    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, cells(row))) + " |" for row in result["rows"])])


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    since = f" (since {row['since']})" if row["since"] and row["finding"] else ""
    odd = "" if row["met"] else ", not as expected"
    served = f"{row['events']} of {row['of']}" if row["of"] else ""
    served = f"{row['decided']} of {row['tokens']} tokens" if row.get("tokens") else served
    return (
        row["name"], f"{row['package']} {row['version']}", row.get("switch", ""), row["door"],
        " ".join(row["tiers"]), served, f"{row['verdict']}{odd}", f"{row['finding']}{since}", f"`{row['command']}`",
    )  # fmt: skip


def controllers(result: dict[str, Any]) -> str:
    """One line per release of `python -m peers.controllers`."""
    lines = ["| release | dialect | default file | runs that differ (reference, optimized) | runs that differ with a "
             "mistake of ours |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        odd = "" if row["right"] else ", not as expected"
        differ = ", ".join(f"{count}" for count in row["differ"].values())
        wrong = {f"rules of {name}": count for name, count in row.get("differ from", {}).items()}
        wrong = {**row.get("mistakes", {}), **wrong}
        cells = (f"{row['package']} {row['release']}", f"{row['dialect']}{odd}", row.get("default file of", ""),
                 f"{differ} of {row['runs']}", ", ".join(f"{name}: {count}" for name, count in wrong.items()))
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

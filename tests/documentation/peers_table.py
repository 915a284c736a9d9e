"""The table of results of other people's kernels and engines, from the files in `fixtures/results`.

Leaves out: running them (`tests/peers`).
"""

from typing import Any

from . import markdown

HEAD = (
    "judged", "release", "selected by", "door", "tiers", "events served, or tokens decided", "verdict", "finding",
    "command",
)


def table(result: dict[str, Any]) -> str:
    """One line per entry of `make peers`, with a note if the result is not the expected one."""
    return markdown.table(HEAD, map(cells, result["rows"]))


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    since = f" (since {row['since']})" if row["since"] and row["finding"] else ""
    odd = "" if row["met"] else ", not as expected"
    served = f"{row['events']} of {row['of']}" if row["of"] else ""
    served = f"{row['decided']} of {row['tokens']} tokens" if row.get("tokens") else served
    return (
        row["name"], f"{row['package']} {row['version']}", row.get("switch", ""), row["door"],
        " ".join(row["tiers"]), served, f"{row['verdict']}{odd}", f"{row['finding']}{since}",
        f"`{row['command']}`" if row["command"] else "",
    )  # fmt: skip


def controllers(result: dict[str, Any]) -> str:
    """One line per release of `python -m peers.controllers`."""
    lines = []
    for row in result["rows"]:
        odd = "" if row["right"] else ", not as expected"
        differ = ", ".join(f"{count}" for count in row["differ"].values())
        wrong = {f"rules of {name}": count for name, count in row.get("differ from", {}).items()}
        wrong = {**row.get("mistakes", {}), **wrong}
        lines.append((f"{row['package']} {row['release']}", f"{row['dialect']}{odd}", row.get("default file of", ""),
                      f"{differ} of {row['runs']}", ", ".join(f"{name}: {count}" for name, count in wrong.items())))
    return markdown.table(("release", "dialect", "default file", "runs that differ (reference, optimized)",
                           "runs that differ with a mistake of ours"), lines)


def live(result: dict[str, Any]) -> str:
    """One line per configuration of `python -m peers.live.judge`, then what no audit that agrees covered."""
    always, lines = uncovered(result), []
    head = ("case", "SGLang", "configuration", "verdict", "finding", "numbers compared", "tokens decided",
            "answers equal to plain decoding", "seconds on the GPU, of the audit", "also not covered")  # fmt: skip
    for row in result["rows"]:
        answers, odd = row["answers"], "" if row["met"] else ", not as expected"
        alone = "" if row["recorded"] or row["verdict"] != "agree" else ", tokens alone"
        first = "" if answers["first"] is None else f", another one from token {answers['first']} on"
        equal = f"{answers['equal']} of {answers['of']}{first}" if answers["of"] else ""
        found = "; ".join([row["finding"], *row["remarks"]]) if row["finding"] else ""
        also = [one for one in row["not_covered"] if one not in always] if row["verdict"] == "agree" else []
        lines.append((row["name"], row["version"], row["what"], f"{row['verdict']}{alone}{odd}", found,
                      f"{row['elements']:,}", f"{row['decided']} of {row['tokens']}", equal,
                      f"{row['engine_seconds']:.0f}, {row['audit_seconds']:.0f}", "; ".join(also)))
    said = ["", "No audit of a recording that agrees covered:", "", *(f"- {one}" for one in always)]
    return "\n".join([markdown.table(head, lines), *said])


def uncovered(result: dict[str, Any]) -> list[str]:
    """The parts of an engine that no audit of a recording covered, of those that agree."""
    rows = [row["not_covered"] for row in result["rows"] if row["verdict"] == "agree" and row["recorded"]]
    return [one for one in rows[0] if all(one in row for row in rows)] if rows else []


def live_in_short(result: dict[str, Any]) -> str:
    """One sentence: releases, configurations, and the releases with each verdict other than agree."""
    rows = result["rows"]
    releases, by = sorted({row["version"] for row in rows}), dict[str, list[str]]()
    for row in rows:
        by.setdefault(row["verdict"], []).append(row["version"])
    said = (f"{len(found)} {verdict}" + f" ({', '.join(dict.fromkeys(found))})" * (verdict != "agree")
            for verdict, found in sorted(by.items()))  # fmt: skip
    alone = sum(not row["recorded"] for row in rows if row["verdict"] == "agree")
    return (f"Whole SGLang engines, {releases[0]} to {releases[-1]}, in {len(rows)} configurations on a GPU: "
            f"{', '.join(said)}; {alone} of those that agree by tokens alone "
            f"([live results](docs/live-results.md)).")  # fmt: skip

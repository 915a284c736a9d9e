"""The result of `instep fuzz` as data and as a document: drawn runs, conditions that occurred, and the finding.

The document shows the smallest failing run, event by event. Leaves out: drawing and counting (`campaign.py`,
`coverage.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...report.divergence_message import divergence
from ...report.document import Data, Document, Kind, Listing, findings, messages, short, word
from ...report.outcome_data import finding, listed_findings
from ...report.result import Result as File
from ...report.result import read
from ...verdict import Exit
from .campaign import Result, place
from .coverage import listed


def document(found: Data) -> Document:
    campaigns = found["campaigns"]
    names = [f"{one.get('engine') or one['ops']}{', engines stay' * ('rounds' in one)}" for one in campaigns]
    said = [_verdict(name, one) for name, one in zip(names, campaigns, strict=True)]
    said += ["interrupted: the figures are those of the runs until then"] * any(
        one.get("interrupted") for one in campaigns)
    said += [f"shrinking was cut short: {one['cut']}" for one in campaigns if one.get("cut")]
    said += ["found once, but not when its trace was replayed: its cause is outside the trace"] * any(
        not one.get("again", True) for one in campaigns)
    return Document(
        "Drawn runs", Exit(found["exit"]), said, "No sequence of legal events makes engine and reference differ.",
        messages(campaigns), [_campaigns(names, campaigns)], more=[findings(campaigns), _met(names, campaigns)],
        notes=[f"events of {name}: {', '.join(f'{count:,} {kind}' for kind, count in one['kinds'].items())}"
               for name, one in zip(names, campaigns, strict=True) if one.get("kinds")] + [
            line for name, one in zip(names, campaigns, strict=True) for line in listed(name, one.get("impossible", {}))
        ],
    )


def _verdict(name: str, one: Data) -> str:
    much = f"{short(one['elements'])} numbers compared" if one["elements"] else "nothing was compared"
    why = "".join(f"; {says}" for says in one.get("untested", ()) if one["elements"])
    trials = one.get("trials", 1)
    seeds = f"--seed {one['seed']} draws the same runs" if trials == 1 else f"{trials} trials from --seed {one['seed']}"
    runs = f"{one['rounds']:,} rounds" if "rounds" in one else f"{one['examples']:,} runs"
    return f"{name} {word(one['exit'])}: {much} in {runs}, {one['events']:,} events{why}; {seeds}"


def _campaigns(names: list[str], campaigns: list[Data]) -> Listing:
    numbers = ("runs", "events", "numbers", "pairs of events", "pairs of facts", "draws refused", "seconds")
    heads: dict[str, Kind] = {
        "op set": "word", "seed": "detail", **dict.fromkeys(numbers, "number"), "its trace": "detail",
    }  # fmt: skip
    counts = ("examples", "events", "elements", "pairs", "histories", "refused")
    return Listing(heads, [
        (name, str(one["seed"]), *(f"{one.get(count, 0):,}" for count in counts), str(one["seconds"]),
         f"{one['trace']}, {one['shrunk']} events" if "trace" in one else "")
        for name, one in zip(names, campaigns, strict=True)
    ], "Drawn runs", [number for number, one in enumerate(campaigns) if one["exit"] == Exit.DIVERGED])


def _met(names: list[str], campaigns: list[Data]) -> Listing:
    """How often each condition occurred, by op set."""
    conditions = dict.fromkeys(name for one in campaigns for name in one["met"])
    rows = [(name, *(f"{one['met'][name]:,}" if one["met"].get(name) else "-" if name in one.get("impossible", {})
                     else "never" for one in campaigns)) for name in conditions]  # fmt: skip
    heads: dict[str, Kind] = {"condition": "text", **dict.fromkeys(names, "number")}
    return Listing(heads, rows, "Conditions that occurred, by number of events")


def of(results: Sequence[Result], commit: str | None = None) -> File:
    """The result of the campaigns of several op sets; the last one may have a finding."""
    worst = Exit.worst(result.exit for result in results)
    device = next((result.settings.setting.device for result in results), "")  # none yet: the first one still runs
    return File(worst, device, {"campaigns": [_data(result) for result in results]}, commit)


# Fields of a campaign of several trials. The pairs of two trials may be the same ones, so only the most are known.
SUMS, MOST, COUNTS = ("examples", "events", "elements", "seconds", "refused"), ("pairs", "histories"), ("met", "kinds")


def joined(paths: Sequence[Path], machines: Sequence[Mapping[str, object]], commit: str | None = None) -> File:
    """The result of several trials: one campaign per op set, and each trial with a finding separately."""
    found, device = dict[tuple[object, ...], dict[str, Any]](), ""
    for one in (one for path in paths for one in read(path)["campaigns"]):
        key = (one["ops"], one.get("engine"), one["seed"] if one["exit"] == Exit.DIVERGED else None)
        there, device = found.setdefault(key, one), one["device"]
        if there is one:
            there["trials"] = 1
            continue
        there["trials"] += 1
        for name in SUMS:
            there[name] = round(there[name] + one[name], 1)
        for name in MOST:
            there[name] = max(there[name], one[name])
        for name in COUNTS:
            there[name] = {key: there[name].get(key, 0) + one[name].get(key, 0) for key in there[name] | one[name]}
        there["interrupted"] |= one["interrupted"]
        there["untested"] = [says for says in there.get("untested", ()) if says in one.get("untested", ())]
        there["exit"] = int(Exit.AGREED if there["elements"] and not there["untested"] else Exit.INCONCLUSIVE)
    campaigns = list(found.values())
    worst = Exit.worst(Exit(one["exit"]) for one in campaigns)
    return File(worst, device, {"campaigns": campaigns, "machines": machines}, commit)


def _data(result: Result) -> dict[str, Any]:
    settings, found = result.settings, result.found
    return {
        **settings.setting.data(), "seed": settings.seed, "exit": int(result.exit), "examples": result.examples,
        "events": result.events, "elements": result.elements, "seconds": round(result.seconds, 1),
        "pairs": len(result.coverage.pairs), "histories": len(result.coverage.histories.met),
        "refused": sum(result.refused.values()),
        "met": dict(result.coverage.counts()), "kinds": dict(result.coverage.events.most_common()),
        "impossible": result.coverage.impossible, "interrupted": result.interrupted, "findings": [],
        **({} if result.rounds is None else {"rounds": result.rounds}),
        **({"untested": result.untested} if result.untested and found is None else {}),
        **({} if found is None else {
            "trace": place(settings).name, "shrunk": found.of, "again": result.again, "cut": result.cut,
            "message": f"{divergence(found)}\n  found in "
                       f"{f'run {result.examples}' if result.rounds is None else f'round {result.rounds}'}, "
                       f"shrunk to {found.of} events: {place(settings)}",
            "findings": [finding(one) for one in listed_findings(found.verdict.findings)],
        }),
    }  # fmt: skip

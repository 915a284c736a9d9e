"""The page of `instep fuzz`: drawn runs, conditions that occurred, and the smallest failing run, event by event.

Leaves out: drawing (`instep.campaign.fuzz`).
"""

from __future__ import annotations

from ...report.html.document import Listing, Page
from ...report.html.page_parts import Data, findings, messages, name_of, word
from ...report.terminal import short
from ...verdict import Exit


def page(found: Data) -> Page:
    campaigns = found["campaigns"]
    names = [name_of(one) for one in campaigns]
    said = [f"{name} {word(one['exit'])}: {short(one['elements'])} numbers compared in {one['examples']:,} runs, "
            f"{one['events']:,} events; --seed {one['seed']} draws the same runs"
            for name, one in zip(names, campaigns, strict=True)]  # fmt: skip
    said += [f"shrinking was cut short: {one['cut']}" for one in campaigns if one.get("cut")]
    said += ["found once, but not when its trace was replayed: its cause is outside the trace"] * any(
        not one.get("again", True) for one in campaigns)
    return Page(
        "Drawn runs", Exit(found["exit"]), said, "No sequence of legal events makes engine and reference differ.",
        messages(campaigns), [_campaigns(names, campaigns)], more=[findings(campaigns), _met(names, campaigns)],
    )


def _campaigns(names: list[str], campaigns: list[Data]) -> Listing:
    heads = ("op set", "seed", "runs", "events", "numbers", "pairs of events", "draws refused", "seconds", "its trace")
    counts = ("examples", "events", "elements", "pairs", "refused")
    return Listing(heads, [
        (name, str(one["seed"]), *(f"{one[count]:,}" for count in counts), str(one["seconds"]),
         f"{one['trace']}, {one['shrunk']} events" if "trace" in one else "")
        for name, one in zip(names, campaigns, strict=True)
    ], "Drawn runs", [number for number, one in enumerate(campaigns) if one["exit"] == Exit.DIVERGED])


def _met(names: list[str], campaigns: list[Data]) -> Listing:
    """How often each condition occurred, by op set."""
    conditions = dict.fromkeys(name for one in campaigns for name in one["met"])
    rows = [(name, *(f"{one['met'][name]:,}" if one["met"].get(name) else "never" for one in campaigns))
            for name in conditions]  # fmt: skip
    return Listing(("condition", *names), rows, "Conditions that occurred")

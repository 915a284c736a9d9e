"""The document of `instep fuzz`: drawn runs, conditions that occurred, and the smallest failing run, event by event.

Leaves out: drawing (`instep.campaign.fuzz`).
"""

from ...report.document import Data, Document, Kind, Listing, findings, messages, short, word
from ...verdict import Exit


def document(found: Data) -> Document:
    campaigns = found["campaigns"]
    names = [str(one.get("engine") or one["ops"]) for one in campaigns]
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
               for name, one in zip(names, campaigns, strict=True) if one.get("kinds")],
    )


def _verdict(name: str, one: Data) -> str:
    much = f"{short(one['elements'])} numbers compared" if one["elements"] else "nothing was compared"
    why = "".join(f"; {says}" for says in one.get("untested", ()) if one["elements"])
    trials = one.get("trials", 1)
    seeds = f"--seed {one['seed']} draws the same runs" if trials == 1 else f"{trials} trials from --seed {one['seed']}"
    return f"{name} {word(one['exit'])}: {much} in {one['examples']:,} runs, {one['events']:,} events{why}; {seeds}"


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
    rows = [(name, *(f"{one['met'][name]:,}" if one["met"].get(name) else "never" for one in campaigns))
            for name in conditions]  # fmt: skip
    heads: dict[str, Kind] = {"condition": "text", **dict.fromkeys(names, "number")}
    return Listing(heads, rows, "Conditions that occurred, by number of events")

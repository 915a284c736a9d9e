"""Tables of calibration for docs/results.md, from `fixtures/results/calibration.json` and `one-sided.json`.

Leaves out: measuring (`instep calibrate`).
"""

from typing import Any

from . import markdown


def alarms(result: dict[str, Any]) -> str:
    """One line per tier, over all storages."""
    lines = []
    for tier in dict.fromkeys(rate["tier"] for rate in result["false_alarms"]):
        rates = [rate for rate in result["false_alarms"] if rate["tier"] == tier]
        blocks, called = (sum(rate[what] for rate in rates) for what in ("blocks", "alarms"))
        worst = max(rates, key=lambda rate: rate["worst"])
        used = f"{worst['worst']:.2f} ({worst['by']}, {worst['storage']})" if worst["worst"] else "exact"
        under = f"{3 / blocks:.0e}" if not called else "see the file"
        lines.append((tier, f"{blocks:,}", called, under, used))
    return markdown.table(("tier", f"blocks judged, {result['variants']} correct engines", "called wrong",
                           "upper bound of the rate (95%)", "most of an allowance used"), lines)


def undecided(result: dict[str, Any]) -> float:
    """The part of the pairs of a block and a wrong state that T2d could not decide."""
    counted = sum(rate["undecided"] for rate in result["false_alarms"] if rate["tier"] == "T2d")
    return float(counted / result["pairs"])


def of_a_correct_engine(limit: dict[str, Any]) -> float:
    """Its largest error at the place of an injected one; older files call it "honest"."""
    return float(limit["correct"] if "correct" in limit else limit["honest"])


def limits(result: dict[str, Any]) -> str:
    """The smallest injected error that every run finds, by place and storage."""
    tiers = list(result["limits"][0]["found"])
    head = ["what is off", "activations", "error of a correct engine there", *(f"found by {one} from" for one in tiers)]
    lines = []
    for limit in result["limits"]:
        sizes = ("never" if limit["found"][tier] is None else f"{limit['found'][tier]:.0e}" for tier in tiers)
        lines.append((limit["place"], limit["storage"], f"{of_a_correct_engine(limit):.0e}", *sizes))
    return markdown.table(head, lines)


SHOWN = ("log_decay", "beta", "normed", "post_normed", "gated", "q", "k", "mixed", "qkv", "mixer", "mlp", "state")


def slips(result: dict[str, Any]) -> str:
    """The part of the heads and channels of a place at which a slip of each size is found in one long run."""
    long = result["long"]
    every = ((place, *long["found"][place]) for place in SHOWN)
    table = markdown.table(("place", "heads and channels", *(f"{size:g}" for size in long["slips"])), (
        (place, groups, *(f"{each / groups:.0%}" for each in found)) for place, groups, *found in every))
    accused = f"{len(long['alarms'])} of {long['engines']} correct engines accused"
    used = f"at most {long['used']:.2f} of a limit was used ({long['by']})"
    return f"{accused} in {long['groups']:,} judged heads and channels; {used}.\n\n{table}"

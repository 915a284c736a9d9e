"""Tables of calibration for docs/results.md, from `fixtures/results/calibration.json` and `one-sided.json`.

Leaves out: measuring (`instep calibrate`).
"""

from typing import Any


def alarms(result: dict[str, Any]) -> str:
    """One line per tier, over all storages."""
    lines = [
        f"| tier | blocks judged, {result['variants']} correct engines | called wrong | upper bound of the rate (95%) "
        "| most of an allowance used |", "|---" * 5 + "|",
    ]  # fmt: skip
    for tier in dict.fromkeys(rate["tier"] for rate in result["false_alarms"]):
        rates = [rate for rate in result["false_alarms"] if rate["tier"] == tier]
        blocks, called = (sum(rate[what] for rate in rates) for what in ("blocks", "alarms"))
        worst = max(rates, key=lambda rate: rate["worst"])
        used = f"{worst['worst']:.2f} ({worst['by']}, {worst['storage']})" if worst["worst"] else "exact"
        under = f"{3 / blocks:.0e}" if not called else "see the file"
        lines.append(f"| {tier} | {blocks:,} | {called} | {under} | {used} |")
    return "\n".join(lines)


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
    fixed = ("what is off", "activations", "error of a correct engine there")
    head = [*fixed, *(f"found by {tier} from" for tier in tiers)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for limit in result["limits"]:
        sizes = ("never" if limit["found"][tier] is None else f"{limit['found'][tier]:.0e}" for tier in tiers)
        cells = limit["place"], limit["storage"], f"{of_a_correct_engine(limit):.0e}", *sizes
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


SHOWN = ("log_decay", "beta", "normed", "post_normed", "gated", "q", "k", "mixed", "qkv", "mixer", "mlp", "state")


def slips(result: dict[str, Any]) -> str:
    """The part of the heads and channels of a place at which a slip of each size is found in one long run."""
    long = result["long"]
    lines = ["| place | heads and channels |" + "".join(f" {size:g} |" for size in long["slips"]),
             "|---" * (2 + len(long["slips"])) + "|"]  # fmt: skip
    for place in SHOWN:
        groups, *found = long["found"][place]
        lines.append(f"| {place} | {groups} |" + "".join(f" {each / groups:.0%} |" for each in found))
    accused = f"{len(long['alarms'])} of {long['engines']} correct engines accused"
    used = f"at most {long['used']:.2f} of a limit was used ({long['by']})"
    return f"{accused} in {long['groups']:,} judged heads and channels; {used}.\n\n" + "\n".join(lines)

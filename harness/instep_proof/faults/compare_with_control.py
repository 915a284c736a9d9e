"""Compare a fault with its control: void, or found, named, located; and the effect on text and acceptance.

Leaves out: running them (`fault_runs.py`, `campaign.py`).
    void     no conclusion: the control is not clean, the planted source did not run, or nothing fired
    found    a check that is meant to see the fault has a finding
    named    the first finding's diagnosis, which a reader sees first, contains the expected sentence; if a mistake of
             the catalogue explains it, then it is the fault's
    located  the first finding is at the fault's first event, stage, layer and component
A catalogue outside the tree may expect no certain finding. Then any finding counts, no place is judged, and named means
that the sentence is no size; whether it is right, a reader decides.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from instep.checks.check_interface import verb
from instep.checks.experts import Experts
from instep.checks.grown_trees import Grown
from instep.report.result import Session as Called
from instep.verdict import Exit, Tier

from .catalogue import FAMILY_OF
from .catalogue.fault import BARE, Expected, Fault
from .fault_runs import Arm, Said
from .plant import ENGINE

TIERS = [tier.value for tier in Tier]
MADE_OF = {Experts.name, Grown.name}  # checks of T4 that compare the numbers from which a choice was made
# The maker of the sentence that names a fault: the check, from what it compares; the bank of explanations, which fits
# any op; or a hypothesis that was written for this mistake.
HYPOTHESIS = "hypothesis"
NAMERS = ("check", "bank", HYPOTHESIS)
# Codes of problems without an explanation, and sentences, that name no mistake, if the catalogue does not state the
# sentence that does. An error names it by the file, the line and the function, next to the event and the op.
NAMELESS, NO_NAME = ("poison", "not_finite", "unidentified"), re.compile(f"{BARE.pattern}|is poison")
LOCATED = 0.95  # share of the faults that fire which must be located exactly


@dataclass(frozen=True)
class Heard:
    """The view that a test of accuracy has of a fault.

    agreement   share of the control's tokens that are at the same place in its text
    acceptance  share of drafts that were accepted; usual: with the control
    states      whether any request's final logical state differs from the control's
    error       why it stopped early, or was not run
    """

    agreement: float = 0.0
    acceptance: float | None = None
    usual: float | None = None
    states: bool = False
    error: str = ""

    @property
    def equal(self) -> bool:
        """Whether the text is the same while the states differ."""
        return not self.error and self.agreement == 1 and self.states

    @property
    def raised(self) -> bool:
        """Whether more drafts are accepted than without the fault."""
        return not self.error and (self.acceptance or 0) > (1 if self.usual is None else self.usual)


class Session(Called):
    """One call of the command: number of processes, processor seconds, the digest of the model that it named."""

    jobs: int = 1
    processor_seconds: float = 0.0
    model: str | UnsetType = UNSET  # unset: the traces' own model, or not recorded


@dataclass(frozen=True)
class Judged:
    """A fault with its arms; void: why there is no conclusion, or empty; heard: None if no text was requested.

    session  the call in which it was planted
    """

    fault: Fault
    control: Arm
    arm: Arm
    void: str
    heard: Heard | None = None
    session: Session = field(default_factory=lambda: Session("", None, {}))

    @property
    def seen(self) -> dict[str, str]:
        """Map each check with a finding to its tier, in the order of tiers."""
        found = {finding["check"]: finding["tier"] for finding in self.arm.findings}
        return dict(sorted(found.items(), key=lambda each: (TIERS.index(each[1]), each[0])))

    @property
    def found(self) -> bool:
        meant = set(self.fault.seen_by) or (set(self.seen) if self.fault.outside else set())
        return not self.void and bool(self.seen.keys() & meant)

    @property
    def unknown(self) -> bool:
        """Whether its catalogue, which is outside the tree, expects no certain finding: no place can be wrong."""
        return self.fault.outside and self.fault.event < 0

    @property
    def named(self) -> bool:
        return bool(self.named_by)

    @property
    def named_by(self) -> str:
        """One of NAMERS; empty: nobody."""
        says, first = self.fault.says, self.arm.findings[0] if self.arm.findings else None
        if not (self.found and first is not None and (says or self.unknown)):
            return ""
        explained = first["explained"]
        at = first.get("raised")  # None: the engine raised nothing, and its answer has a wrong form
        if self.unknown and first.get("code") == "failed" and at is not None:
            return "check" if at["file"].startswith(ENGINE) and at["line"] and at["function"] else ""
        nameless = explained is None and first.get("code") in NAMELESS
        if self.unknown and explained is None and self._breaks_a_contract(first):
            return "check"
        if self.unknown and (nameless or len((explained or {}).get("names", ())) > 1 or NO_NAME.search(
                explained["says"] if explained is not None else first["diagnosis"] or "unknown")):  # fmt: skip
            return ""
        if explained is not None and says in explained["says"]:
            mistake = self.fault.mistake
            return "" if mistake and mistake not in explained.get("names", (mistake,)) else str(explained["by"])
        return "check" if says in first["diagnosis"] else ""

    def _breaks_a_contract(self, first: Mapping[str, Any]) -> bool:
        """Whether an op call at the first finding's place breaks a contract, which that finding's sentence quotes."""
        at = ("event", "stage", "layer", "component")
        return any(one.get("code") == "broken_contract" and all(one[name] == first[name] for name in at)
                   for one in self.arm.findings)  # fmt: skip

    @property
    def located(self) -> bool:
        first = self.arm.findings[0] if self.arm.findings else None
        return self.found and first is not None and (self.fault.event, *self.fault.place, self.fault.expected.rank) == (
            first["event"], first["stage"], first["layer"], first["component"], first.get("rank", UNSET)
        )

    @property
    def decisions_only(self) -> bool:
        """Whether nothing but tokens and acceptance revealed it."""
        return self.found and set(self.seen.values()) == {Tier.DECISIONS.value} and not MADE_OF & self.seen.keys()


def updated(known: Mapping[str, Expected], judged: Iterable[Judged]) -> dict[str, Expected]:
    """The expected findings, replaced by the first findings of these faults.

    A part of a sentence remains as long as the sentence has it, and an empty one remains empty. A sentence with a size
    is no name, nor is one that lists several mistakes.
    """
    found = dict(known)
    for one in judged:
        if one.found:
            first, says = one.arm.findings[0], one.fault.says
            explained = first["explained"] or {"says": first["diagnosis"], "names": ()}
            if not (one.named or (one.fault.id in known and not says)):
                says = "" if BARE.search(explained["says"]) or len(explained["names"]) > 1 else explained["says"]
            place = first["stage"], first["layer"], first["component"]
            found[one.fault.id] = Expected(first["event"], *place, says, first.get("rank", UNSET))
    return {id: found[id] for id in FAMILY_OF if id in found}


@dataclass(frozen=True)
class Result:
    """A campaign, or several joined."""

    judged: tuple[Judged, ...]

    @property
    def sessions(self) -> list[Session]:
        """Every call that has a fault here, once."""
        found: list[Session] = []
        for one in self.judged:
            if one.session not in found:
                found.append(one.session)
        return found

    @property
    def fired(self) -> tuple[Judged, ...]:
        return tuple(one for one in self.judged if not one.void)

    @property
    def named_by(self) -> dict[str, int]:
        """How many are named, by each of NAMERS."""
        return {who: sum(one.named_by == who for one in self.fired) for who in NAMERS}

    @property
    def failures(self) -> tuple[str, ...]:
        """Requirements that are not met, a sentence each."""
        fired = self.fired
        missed = [one.fault.id for one in fired if not one.found]
        only = [one.fault.id for one in fired if one.decisions_only]
        elsewhere = [one.fault.id for one in fired if not (one.located or one.unknown)]
        said = []
        if missed:
            said.append(f"not found: {', '.join(missed)}")
        if only:
            said.append(f"found by tokens or acceptance alone: {', '.join(only)}")
        if len(elsewhere) > (1 - LOCATED) * sum(not one.unknown for one in fired):
            known = sum(not one.unknown for one in fired)
            there = known - len(elsewhere)
            said.append(f"{there} of {known} {verb(there, 'is', 'are')} located exactly, {LOCATED:.0%} must be; "
                        f"not {', '.join(elsewhere)}")  # fmt: skip
        return tuple(said)

    @property
    def exit(self) -> Exit:
        """The exit code; as everywhere, a divergence outranks an inconclusive run."""
        if self.failures:
            return Exit.DIVERGED
        return Exit.AGREED if self.judged and len(self.fired) == len(self.judged) else Exit.INCONCLUSIVE


def judge(
    fault: Fault, control: Arm, arm: Arm, right: Mapping[str, str], planted: Mapping[str, str],
    said: tuple[Said, Said] | None = None,
) -> Judged:
    """Judge a fault. right, planted: digests of the control's and the fault's source; said: control, fault."""
    heard = None if said is None else hear(said[0], said[1], planted)
    return Judged(fault, control, arm, next(_reasons(control, arm, right, planted), ""), heard)


def _reasons(
    control: Arm, arm: Arm, right: Mapping[str, str], planted: Mapping[str, str]
) -> Iterator[str]:
    """Why there is no conclusion."""
    if not control.clean:
        yield f"the control is not clean: {control.message or control.error or f'exit code {control.code}'}"
    elif control.served != right:
        yield "the control was served by another source"
    elif arm.served and (arm.served != planted or planted == right):
        yield "the planted source did not serve"
    elif arm.code == Exit.DIVERGED and not arm.findings:
        yield f"it ended with exit code 1 and without a result: {arm.error}"
    elif not fired(control, arm):
        yield "it never fired: every byte, every answer and every call is the control's"


def fired(control: Arm, arm: Arm) -> bool:
    """Whether the faulty run differs in anything: a finding, a refusal, an answer, a byte anywhere, a call."""
    if arm.findings or arm.code not in (Exit.AGREED, Exit.DIVERGED):
        return True
    return arm.trail != control.trail or arm.calls != control.calls


def hear(control: Said, faulty: Said, planted: Mapping[str, str]) -> Heard:
    """Compare two texts token by token."""
    if control.error:
        return Heard(error=f"the control broke: {control.error}")
    if faulty.served and faulty.served != planted:
        return Heard(error="the planted source did not serve")
    pairs = [
        (token, faulty.texts.get(name, ())[place : place + 1])
        for name, text in control.texts.items() for place, token in enumerate(text)
    ]
    same = sum((token,) == there for token, there in pairs)
    return Heard(
        same / max(len(pairs), 1), faulty.acceptance, control.acceptance, faulty.states != control.states, faulty.error
    )

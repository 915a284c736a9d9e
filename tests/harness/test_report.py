"""Output for users: the message of a divergence, counts, and texts.

Leaves out: commands (`test_cli.py`).
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from instep.report import outcome_data
from instep.report.divergence_message import divergence, spelled
from instep.report.document import document_of, short
from instep.report.outcome_data import tiers
from instep.run.run_variants import Variant, patch_of
from instep.run.trace_history import Text
from instep.setting import Setting
from instep.subject.declared_rounding import Declared
from instep.verdict import Exit, Located, Raised, Skipped, Tier
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place
from support.inputs import outcomes
from support.inputs.outcomes import comparison, outcome
from support.running.golden import Golden, sections


def shown(*runs: Any) -> str:
    return outcomes.shown(outcome_data.of(runs))


def test_messages_and_tables(golden: Golden) -> None:
    found = comparison(
        worst=0.9996, request="b", slot=5, head=2, columns=(8, 15),
        diagnosis="holds the state after 2 tokens; 3 tokens were accepted",
    )
    derived = {"worst": 1.0, "tier": Tier.DERIVED}
    hidden, conv = (comparison(place=Place("trunk", 3, name), **derived) for name in ("hidden", "qkv"))
    says = "cause: event 41 writes wrong memory (with the reference's memory restored, events 42 to 60 agree)"
    located = Located(found, "memory", None, says, ("--graft trunk.3.state@41",), ("matches if transposed",), 3)
    raised = Raised("LookupError", "nobody is at home", "/engine.py", 7, "commit", "its own frames", "all frames")
    skipped = outcome(comparison(), scratch={("conv", layer): frozenset({0, 1}) for layer in (0, 2)})
    skipped.verdict.add([Skipped("poison", event, "no free memory") for event in (1, 2)])
    patches = tuple(map(patch_of, ("trunk.0.core@2", "trunk.3.state@41", "trunk.0.core@42")))
    golden("replay-report", sections({
        "agreed": shown(outcome(comparison(), comparison(tier=Tier.BITWISE, worst=0.0, allowed=0.0))),
        "diverged": shown(outcome(comparison(event=3), found)),
        "the cause is before the command": shown(outcome(found, located=located)),
        "the first in data flow is first, and others are counted": divergence(outcome(hidden, conv)),
        "a number that is none": divergence(outcome(comparison(worst=float("nan")))),
        "no diagnosis, and no rounding declared": divergence(outcome(conv, declared=Declared({}, {}))),
        "what was raised": divergence(outcome(comparison(worst=1.0, raised=raised))),
        "inconclusive": shown(outcome()),
        "some tiers": shown(outcome(comparison(), tiers=frozenset(Tier) - {Tier.DERIVED})),
        "skipped, and scratch": shown(skipped),
        "several runs, one otherwise": shown(
            outcome(comparison()), outcome(comparison(worst=1.0), variant=Variant({"gdn": "plain"}, patches))
        ),
    }))  # fmt: skip


def test_levels_of_one_trace_are_named_and_shared_notes_are_printed_once() -> None:
    said = shown(*(outcome(comparison(), name=f"a trace, {level} level", declared=Declared({}, {}))
                   for level in ("op", "model")))  # fmt: skip
    assert "a trace, op level: triton agrees: " in said and "a trace, model level: triton agrees: " in said
    assert said.count("triton: declared rounding: no rounding") == said.count("step counts  ") == 1, said
    strategies = [outcome(comparison(), plan=SimpleNamespace(
        setting=Setting("triton", strategy=name), checkpoint=SimpleNamespace(digest="d" * 64)))
        for name in ("rerun", "columns")]  # fmt: skip
    said = shown(*strategies)
    assert "triton, rerun agrees: " in said and "triton, columns agrees: " in said


def test_the_cause_is_written_as_data() -> None:
    located = Located(comparison(), "memory", None, "says", ("--graft trunk.3.state@41",), ("if transposed",), 3)
    assert outcome_data.of([outcome(comparison(worst=1.0), located=located)]).data()["runs"][0]["located"] == {
        "cause": "memory", "op": None, "says": "says", "options": ["--graft trunk.3.state@41"],
        "hints": ["if transposed"], "replays": 3,
    }


def test_the_measure_of_a_number_is_named() -> None:
    for check, tier, said in (
        ("undecidable", Tier.DIRECTED, "(part 0.6, limit 0.5;"), ("ties", Tier.DECISIONS, "(ties 0.6, limit 0.5;"),
        ("directed", Tier.DIRECTED, "(projection 0.6000, limit 0.5;"), ("derived", Tier.DERIVED, "(error 0.6,"),
    ):  # fmt: skip
        assert said in divergence(outcome(comparison(check=check, tier=tier, worst=0.6)))


def test_undecided_pairs_are_printed_with_their_total() -> None:
    pairs = [comparison(undecided=3, pairs=1200, blocks=8), comparison(undecided=1, pairs=300, blocks=2)]
    ties = [comparison(tier=Tier.DECISIONS, undecided=1, blocks=40), comparison(tier=Tier.DERIVED, blocks=5)]
    table = document_of(outcome_data.of([outcome(*pairs, *ties)]).data()).tables[0]
    rows = {row[2]: row[-2] for row in table.rows}
    assert rows == {"T2d": "4 of 1.5k", "T4": "1 of 40", "T2": ""}


def test_a_nan_is_the_worst() -> None:
    assert math.isnan(tiers(outcome(comparison(), comparison(worst=float("nan")), comparison()))[0].used)


def test_the_command_repeats_what_is_not_usual() -> None:
    plan = SimpleNamespace(setting=Setting(
        "plain", "cpu", "bfloat16", "KV", "columns", "widened", drafter="vanilla", graphs=True, overlap=True,
        guarded=False,
    ))
    found = comparison(worst=1.0, place=Place("extend", STAGE_LEVEL, "fused"))
    message = divergence(outcome(found, plan=plan, elsewhere=Path("my/model")))
    assert message.endswith(
        "--until 41 --dtype bfloat16 --layout KV --strategy columns --conv widened --drafter vanilla --graphs "
        "--overlap --no-guarded --checkpoint my/model"
    )


def test_the_command_repeats_the_variant() -> None:
    patches = tuple(map(patch_of, ("trunk.0.core@2", "trunk.3.state@41", "trunk.0.core@42")))
    told = outcome(comparison(worst=1.0), variant=Variant({"gdn": "plain"}, patches))
    assert divergence(told).endswith(  # memory is replaced after event 41; the replacement at 42 changed nothing
        "--ops triton --until 42 --layer 3 --swap gdn=plain --graft trunk.0.core@2 --graft trunk.3.state@41"
    )
    run = outcome_data.of([told]).data()["runs"][0]
    assert run["swap"] == {"gdn": "plain"}
    assert run["graft"] == ["trunk.0.core@2", "trunk.3.state@41", "trunk.0.core@42"]


def test_the_command_of_streams_always_has_the_strategy() -> None:
    """Left out, it is every strategy there, and the usual one of a replay."""
    found = comparison(worst=1.0)
    assert "--strategy" not in divergence(outcome(found))
    assert divergence(outcome(found, again=("instep", "streams", "--level", "op"))).endswith("--strategy rerun")


def test_places_are_spelled_in_words() -> None:
    assert spelled(Place("chain.2", 0, "hidden")) == "draft step 3 layer 0 hidden rows"
    assert spelled(Place("extend", AFTER_LAYERS, "logits")) == "draft extend logits"
    assert spelled(Place("extend.2", 2, "key")) == "draft extend 2 layer 2 key"
    assert spelled(Place("trunk", STAGE_LEVEL, "embedding")) == "embedding"


def test_totals_are_per_tier_and_name_exact_tiers() -> None:
    totals = tiers(outcome(
        comparison(), comparison(worst=0.4, undecided=3), comparison(tier=Tier.BITWISE, worst=0.0, allowed=0.0),
    ))
    assert [(t.tier, t.comparisons, t.blocks, t.undecided, t.used) for t in totals] == [
        (Tier.BITWISE, 1, 8, 0, None), (Tier.DIRECTED, 2, 16, 3, 0.8),
    ]


def test_counts_are_short() -> None:
    assert [short(n) for n in (0, 950, 12_345, 408_000_000, 3 * 10**9)] == ["0", "950", "12.3k", "408M", "3G"]


def test_other_vocabularies_are_spelled_as_tokens() -> None:
    assert Text("a", (), (300, 2), 1000).spelled((300, 2)) == "300 2"


def test_the_worst_run_decides_the_exit_code() -> None:
    good, empty, bad = outcome(comparison()), outcome(), outcome(comparison(worst=2.0))
    assert outcome_data.worst([good]) is Exit.AGREED
    assert outcome_data.worst([good, empty]) is Exit.INCONCLUSIVE
    assert outcome_data.worst([bad, empty, good]) is Exit.DIVERGED
    assert outcome_data.worst([]) is Exit.INCONCLUSIVE

"""The tables of speed compare like with like, print a mean that is not the median, and no speed of wrong kernels.

Leaves out: whether the pages have them as the files say (`test_readme.py`).
"""

from typing import Any

import pytest
import torch

from documentation import bench_tables
from documentation.bench_tables import figure, over_ranks, spread
from instep_speed.bench import KINDS
from instep_speed.bench import kind as kind_of
from instep_speed.bench.bench_types import TOO, Ground
from instep_speed.bench.interleaved_timing import Rates

CELL = {"batch": 32, "window": 4, "heads": 32, "state": "float32"}
SAID = "No arm of ours in this result does."


def arm(us: float, mean: float | None = None, peer: str = "", finding: str = "") -> dict[str, Any]:
    told = {"us": us, "mean": us if mean is None else mean, "lower": us - 1, "upper": us + 1}
    return told | {"peer": peer, "finding": finding}


def result(kind: str, **arms: dict[str, Any]) -> dict[str, Any]:
    return {"rows": [{"kind": kind, "cell": CELL, "floor_us": 10.0, "arms": arms}]}


OFF = {"finding": "off", "peer": ""}
PEER = {"sglang": arm(30.0, peer="sglang 1")}
WITHIN = {f"rerun{TOO}": arm(24.0, 26.0), f"columns{TOO}": arm(25.0)}  # by the mean the second is the faster


@pytest.mark.parametrize(("kind", "arms", "ours", "unlike"), [
    ("strategies", {"rerun": arm(20.0)} | WITHIN | PEER, f"25.0 ±1.0 `columns`{TOO} | 10.0 | 2.50 | 30.0", False),
    ("strategies", {"rerun": arm(20.0)} | PEER, "20.0 ±1.0 `rerun` | 10.0 | 2.00 | 30.0 ±1.0 sglang", True),
    ("strategies", {"rerun": arm(20.0), f"rerun{TOO}": OFF} | PEER, "20.0 ±1.0 `rerun` |", True),
    ("strategies", {"rerun": arm(20.0, 24.0)}, "20.0 ±1.0, mean 24.0 `rerun` | 10.0 | 2.40 |", False),
    ("decode", {"triton": arm(20.0), f"triton{TOO}": arm(24.0)} | PEER, f"24.0 ±1.0 `triton`{TOO}", False),
    ("decode", {"triton": arm(20.0)} | PEER, "20.0 ±1.0 `triton`", True),
    ("conv", {"triton": arm(20.0)} | PEER, "20.0 ±1.0 `triton`", False),
], ids=["within", "without", "wrong within", "no peer", "decode", "decode without", "nothing inside"])  # fmt: skip
def test_our_arm_does_the_same_work_as_the_peer_or_the_table_notes_it(
    kind: str, arms: dict[str, Any], ours: str, unlike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_tables, "SHOWN", {kind: (CELL,)})
    table = bench_tables.speed(result(kind, **arms))
    assert ours in table and (SAID in table) is unlike and (f"In `{kind}` kernels of SGLang" in table) is unlike
    if kind == "strategies":
        assert (SAID in bench_tables.strategies(result(kind, **arms))) is unlike


def test_the_table_of_strategies_has_every_arm() -> None:
    told = {"rerun": arm(20.0) | {"bytes": {"slot": 2**20}}} | WITHIN | PEER | {"columns": OFF}
    lines = bench_tables.strategies(result("strategies", **told)).splitlines()
    assert lines[3:] == [
        "| `rerun` | 1.00 | 20.0 ±1.0 | bit by bit |", f"| `rerun`{TOO} |  | 24.0 ±1.0, mean 26.0 | bit by bit |",
        f"| `columns`{TOO} |  | 25.0 ±1.0 | bit by bit |", "| sglang |  | 30.0 ±1.0 |  |",
        "| `columns` |  | no speed | NO |",
    ]  # fmt: skip


def test_a_peer_with_wrong_answers_is_shown_with_their_place() -> None:
    rows = [{"kind": "strategies", "cell": CELL | {"batch": batch}, "floor_us": 10.0,
             "arms": {"rerun": arm(20.0), "sglang": arm(30.0, peer="sglang 1", finding="state is off" * (batch > 8))}}
            for batch in (8, 32, 64)]  # fmt: skip
    lines = bench_tables.strategies({"rows": rows}).splitlines()
    assert lines[4] == "| sglang |  | 30.0 ±1.0 | 30.0 ±1.0 | 30.0 ±1.0 | off at B = 32, B = 64 |"


def test_every_cell_with_a_faster_correct_peer_is_listed() -> None:
    right, wrong = arm(20.0, peer="sglang 1"), arm(10.0, peer="fla 1", finding="state is off")
    for peers, told in (({"sglang": right, "fla": wrong}, ["25.0 ±1.0 `triton` | 20.0 ±1.0 sglang | 1.25 |"]),
                        ({"fla": wrong}, []), ({"sglang": arm(26.0, peer="sglang 1")}, []),
                        ({"sglang": arm(24.0, 26.0, peer="sglang 1")}, []),  # the means decide
                        ({"sglang": arm(24.95, peer="sglang 1")}, [])):  # level  # fmt: skip
        _, _, *lines, _, count = bench_tables.behind(result("conv", triton=arm(25.0), **peers)).splitlines()
        assert [line.partition("float32 | ")[2] for line in lines] == told
        assert count == f"These are {len(told)} of {int('sglang' in peers)} cells that have such a peer."


def test_no_two_cells_of_the_benchmark_have_the_same_name() -> None:
    ground = Ground(torch.device("cpu"), torch.bfloat16, {}, Rates(1e10, 2e10, 1e11), 0, peers=False)
    for name in KINDS:
        cells = [dict(at) for at in kind_of(name).cells(ground, "full")]
        assert len({bench_tables._cell({"cell": at}) for at in cells}) == len(cells), name
    for name, shown in bench_tables.SHOWN.items():
        cells = [dict(at) for at in kind_of(name).cells(ground, "default")]
        assert all(any(axes.items() <= at.items() for at in cells) for axes in shown), name


def test_whole_texts_are_sorted_by_drafter_layers_batch_and_arm() -> None:
    timed = arm(1e6 / 1377.6) | {"tokens_per_s": 1377.6, "round_ms": 10.701, "latency_s": 0.3591, "accepted": 2.574,
                        "distribution": {"0": 4, "3": 9}}  # fmt: skip
    cell = {"batch": 8, "drafter": "eagle", "layers": 32}
    rows = [{"kind": "decoding", "cell": cell | more, "arms": {"adaptive": timed, "always 1": OFF}}
            for more in ({}, {"drafter": "ngram", "batch": 1}, {"layers": 8})]  # fmt: skip
    lines = bench_tables.effect({"rows": rows}).splitlines()
    assert {line.count("|") for line in lines} == {10}
    assert lines[2:] == [f"| {which} | {line} |" for which in ("eagle | 32 | 8", "ngram | 32 | 1", "eagle | 8 | 8")
                         for line in ("adaptive | 1378 ±2 | 10.70 | 0.359 | 2.57 | 0: 4, 3: 9",
                                      "always 1 | no speed: off |  |  |  | ")]  # fmt: skip


@pytest.mark.parametrize(("value", "shown"), [
    (0.3251, "0.325"), (9.4013, "9.40"), (9.996, "10.0"), (53.54, "53.5"), (99.96, "100"), (171.18, "171"),
    (10269.6, "10270"), (0.0, "0.00"),
])  # fmt: skip
def test_a_figure_has_three_digits(value: float, shown: str) -> None:
    assert figure(value) == shown


@pytest.mark.parametrize(("us", "mean", "shown"), [
    (43.48, 43.51, "43.5 ±1.0"), (43.44, 43.51, "43.4 ±1.0, mean 43.5"), (171.2, 170.7, "171 ±1.0"),
    (10269.6, 10441.6, "10270 ±1.0, mean 10442"),
])  # fmt: skip
def test_a_mean_is_printed_if_it_differs_from_the_median(us: float, mean: float, shown: str) -> None:
    assert spread(arm(us, mean)) == shown


def test_rounds_over_ranks_show_the_time_in_collectives() -> None:
    time = {"us": 4000.0, "lower": 3990.0, "upper": 4010.0, "mean": 4000.0, "of_floor": 1.25, "peer": "", "finding": ""}
    found = {"calls": 83.0, "bytes": 2.5e6, "floor_us": 410.0, "ranks_us": [4000.0, 4010.0], "us": [700.0, 650.0],
             "moving_us": 600.0}  # fmt: skip
    arms = {1: time, 2: {**time, "collectives": found}, 4: {"peer": "", "finding": "rank 1 waits"}}
    rows = [{"kind": "rounds", "cell": {"batch": 8, "layers": 32, "ranks": ranks}, "floor_us": 3200.0,
             "arms": {"triton": arm}} for ranks, arm in arms.items()]  # fmt: skip
    assert over_ranks({"rows": rows}).splitlines()[2:] == [
        "| 8 | 1 | 4000 ±10.0 | 3200 | 1.25 |  |  |  |",
        "| 8 | 2 | 4000 ±10.0 | 3200 | 1.25 | 410 for 83 calls, 2.50 MB | rank 0 700, rank 1 650 | 600 |",
        "| 8 | 4 | no speed: rank 1 waits |  |  |  |  |  |",
    ]

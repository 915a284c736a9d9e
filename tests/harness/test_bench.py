"""`instep bench` on a CPU: wrong arms have no speed, peers are judged, a grid is resumed, plots have every mark.

Leaves out: figures, which need a card (`tests/on_gpu.sh`), the clock (`test_bench_clock.py`), and what single kinds
need (`test_bench_kinds.py`).
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from xml.etree import ElementTree

import pytest
import torch

from instep.campaign import runner
from instep.report.svg import bars as svg_of
from instep.verdict import Exit
from instep_optimized.graphs.prompt_segments import PromptGraphs
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ranks import Call
from instep_reference.contract.errors import BadInput, Unsupported
from instep_speed.bench import KINDS, bench_types, kernels_of_peers, kind, run
from instep_speed.bench.bench_types import TOO, Arm
from instep_speed.bench.kinds import decoding, pick, prefill, rounds, strategies
from instep_speed.bench.profile import HOLD, OTHER, by_kind, gap, kind_of, of_ranks, without_meetings
from instep_speed.bench.result_document import bars_of, works
from instep_speed.bench.run import Asked, Bench, bench
from instep_speed.commands.bench import draw
from support.inputs.bench_runs import FP32, MACHINE, ground, make_up_peer, measured_cells, text
from support.running.command import Runner, complaint
from support.running.covering import WHOLE, few

SLOW = pytest.mark.slow
# Kinds that have a plot on a CPU: two cells in one line.
DRAWN = ("strategies", "decode", "mixer", "conv", "pick", "products")


def without_the_last_token(*, parts: Any, **given: Any) -> torch.Tensor:
    """A window that has one row only is served."""
    return PLAIN.gdn(parts=tuple(replace(one, count=one.count - (one.count > 1).long()) for one in parts), **given)


def with_one_decay_for_all(*, inputs: Any, **given: Any) -> torch.Tensor:
    return PLAIN.gdn(inputs=inputs._replace(log_decay=inputs.log_decay.mean(1, keepdim=True).expand(
        -1, inputs.log_decay.shape[1])), **given)  # fmt: skip


def old_windows(*, parts: Any, **given: Any) -> torch.Tensor:
    return PLAIN.conv(parts=tuple(replace(one, store=None) for one in parts), **given)


def blind_to_itself(*, pages: Any, **given: Any) -> torch.Tensor:
    return PLAIN.attend(pages=replace(pages, before=pages.before - (pages.before > 0).long()), **given)


def last_of_ties(*, logits: torch.Tensor, to: Any) -> torch.Tensor:
    return logits.shape[1] - 1 - logits.flip(1).argmax(1)


def narrow(*, x: torch.Tensor, **given: Any) -> torch.Tensor:
    return PLAIN.linear(x=x.bfloat16().float(), **given)


def falls(*args: Any, **given: Any) -> torch.Tensor:
    raise ValueError("planted")


@pytest.fixture
def narrow_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_types.STATES, "tiny", ("bfloat16",))


@pytest.mark.usefixtures('quick')
@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "says"), [
    pytest.param(None, None, marks=SLOW), (without_the_last_token, "the read-out of round 1 of head"),
    (with_one_decay_for_all, "the read-out of round 1 of head"),
])  # fmt: skip
def test_states_of_16_bits_are_held_to_plain(
    wrong: Callable[..., Any] | None, says: str | None, narrow_states: None
) -> None:
    """Another order of summation is no fault there; the bits of a launch with fp32 states are none of a 16-bit one."""

    def otherwise_rounded(*, inputs: Any, **given: Any) -> torch.Tensor:
        return PLAIN.gdn(inputs=inputs._replace(log_decay=inputs.log_decay * (1 + 2e-7)), **given)

    found = measured_cells(replace(PLAIN, name="it", gdn=wrong or otherwise_rounded), "strategies")
    arms = {name: arm for row in found.rows for name, arm in row["arms"].items()}
    assert set(arms) == {"snapshot", "columns", "rerun"} and "lazy_rerun" in found.rows[0]["absent"]
    assert all(says in arm["finding"] if says else "us" in arm for arm in arms.values())


@pytest.mark.usefixtures('quick')
@pytest.mark.slow
@pytest.mark.parametrize(("name", "op", "wrong", "says"), [
    pytest.param("strategies", "gdn", without_the_last_token, "the read-out of round 1", marks=SLOW),
    pytest.param("strategies", "advance", lambda **given: None, "the read-out of round 2", marks=SLOW),
    ("decode", "gdn", with_one_decay_for_all, "is off by"),
    ("mixer", "gdn", with_one_decay_for_all, "is off by"),
    ("mixer", "conv", old_windows, "windows: "),
    ("conv", "conv", old_windows, "the windows differ"),
    ("prefill", "gdn", without_the_last_token, "is off by"),
    ("attend", "attend", blind_to_itself, "attended of head"),
    ("pick", "pick", last_of_ties, "have other bits"),
    ("products", "linear", narrow, "is off by"),
    ("decode", "gdn", falls, "ValueError: planted"),
])  # fmt: skip
def test_wrong_arm_has_no_speed(name: str, op: str, wrong: Callable[..., Any], says: str) -> None:
    found = measured_cells(replace(PLAIN, name="wrong", **{op: wrong}), name)
    said = {arm["finding"] for row in found.rows for arm in row["arms"].values()}
    assert found.exit is Exit.DIVERGED and any(says in one for one in said), said
    assert all("us" not in arm for row in found.rows for arm in row["arms"].values() if arm["finding"])
    assert "no speed is shown" in text(found)


@pytest.mark.usefixtures('quick')
@few(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", [
    pytest.param("strategies", marks=SLOW), "decode", "mixer", "conv", "prefill", "attend", "pick", "products",
])  # fmt: skip
def test_correct_arm_is_timed_and_plotted(name: str, tmp_path: Path) -> None:
    found = measured_cells(PLAIN, name)
    assert found.exit is Exit.AGREED and "no speed" not in text(found)
    for row in found.rows:
        assert row["floor_us"] > 0 and all(arm["lower"] <= arm["us"] <= arm["upper"] for arm in row["arms"].values())
        assert all(arm["of_floor"] == arm["mean"] / row["floor_us"] for arm in row["arms"].values())
    drawn = [ElementTree.parse(file).getroot() for file in draw(found.rows, tmp_path / "new")]
    marks = [mark[0].text for svg in drawn for mark in svg.iter("{http://www.w3.org/2000/svg}circle")]
    x = kind(name).x
    due = [f"{arm}, {x} {row['cell'][x]:g}: {us:.4g} us, {kind(name).unit}"
           for row in found.rows if _in_a_plot(row, found, x)
           for arm, us in [("floor", row["floor_us"]), *((one, told["us"]) for one, told in row["arms"].items())]]
    assert bool(due) is (name in DRAWN) and sorted(filter(None, marks)) == sorted(due)


def _in_a_plot(row: run.Row, found: Bench, x: str) -> bool:
    """Whether another cell differs from it in the plotted axis alone."""
    rest = {name: value for name, value in row["cell"].items() if name != x}
    return sum({name: value for name, value in one["cell"].items() if name != x} == rest for one in found.rows) > 1


@pytest.mark.usefixtures('quick')
def test_subtracted_work_leaves_the_rounds_unchanged() -> None:
    """Between two timed rounds the index ops are timed alone; still every round runs the accepted tokens again."""
    again = list[int]()

    def gdn(*, parts: Any, **given: Any) -> torch.Tensor:
        again.extend(int(one.ring.pending.max()) for one in parts if one.ring is not None)
        return PLAIN.gdn(parts=parts, **given)

    at = {"batch": 2, "window": 4, "heads": 4, "state": "float32"}
    arms = strategies.make(ground(peers=False, it=replace(PLAIN, gdn=gdn)), at).arms
    arm = next(arm for arm in arms if arm.name == "rerun")
    assert arm.work is not None and arm.less is not None
    for _ in range(3):
        arm.work()
        arm.less()
    layers = arm.units
    assert again == [0] * layers + [strategies.accepted_of(4)] * 2 * layers


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize("name", ["strategies", "decode"])
def test_second_arm_makes_its_inputs_in_every_layer_for_peers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first arm gets prepared inputs. Nothing is subtracted from the second, and it is checked with its own
    inputs.
    """
    made = list[int]()

    def gdn_inputs(**given: Any) -> Any:
        made.append(len(given["mixed"]))
        return PLAIN.gdn_inputs(**given)

    monkeypatch.setitem(kernels_of_peers.PEERS, name, {})
    at = {"batch": 2, "window": 4, "heads": 4, "state": "float32"}
    arms = {arm.name: arm for arm in kind(name).make(ground(it=replace(PLAIN, gdn_inputs=gdn_inputs)), at).arms}
    first = {one: arm for one, arm in arms.items() if not one.endswith(TOO)}
    assert first and arms.keys() == first.keys() | {one + TOO for one in first}
    for one, alone in first.items():
        within = arms[one + TOO]
        assert alone.work and within.work and alone.units == within.units
        assert (alone.less is not None) is (name == "strategies") and within.less is None
        made.clear()
        alone.work()
        assert not made
        assert within.check() == "" and made
        made.clear()
        within.work()
        assert made == [2 * (4 if name == "strategies" else 1)] * within.units


@pytest.mark.usefixtures('quick')
@few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rounds", "decoding"])
def test_whole_rounds_and_texts_are_checked_then_timed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Counts are copied after their round and read after the next one's launch, or else rounds do not overlap.

    Graphs are made for the batch of the rounds alone, in the checked engine and in the timed one.
    """
    monkeypatch.setattr(rounds, "HostCopy", copied := Mock())
    monkeypatch.setattr(rounds, "outcome", checked := Mock(wraps=rounds.outcome))
    monkeypatch.setattr(rounds, "engine", timed := Mock(wraps=rounds.engine))
    found = measured_cells({"plain": PLAIN}, name)  # they take op sets by name
    assert found.exit is Exit.AGREED
    arms = [arm for row in found.rows for arm in row["arms"].values()]
    assert all(arm["us"] > 0 and arm["how"] == "rounds" for arm in arms)
    blocks = [row["cell"].get("drafter") == "block" for row in found.rows]
    assert [0 < arm.get("proposals_us", 0) < 1e7 for arm in arms] == blocks or name == "decoding"
    order = "".join("r" if what else "c" for what, *_ in copied.mock_calls)
    assert name == "decoding" or re.fullmatch(r"(c(cr)+){3}", order), order
    for made in (checked, timed):
        batches = [call.kwargs["batches"] for call in made.call_args_list]
        assert batches == ([(1,), (2,), (2,)] if name == "rounds" else [])
    if name == "decoding":
        assert set(found.rows[0]["arms"]) == {"adaptive", "always 1", "always 3"}
        assert all(sum(arm["distribution"].values()) and arm["checked_events"] for arm in arms)
        assert "tokens/s" in text(found)


@pytest.mark.usefixtures('quick')
@WHOLE
@pytest.mark.slow
def test_rounds_with_prompts_are_timed_eagerly_and_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request comes and leaves within each round. Graphs that never run have no time."""
    found = measured_cells({"plain": PLAIN}, "prompts")
    assert found.exit is Exit.AGREED
    arms = found.rows[0]["arms"]
    assert list(arms) == ["plain, prompts run eagerly", "plain, in graphs of 64 rows"]
    assert all(arm["us"] > 0 and arm["how"] == "rounds" for arm in arms.values())
    monkeypatch.setattr(PromptGraphs, "target", lambda self, plan, see: None)
    eager, graphs = measured_cells({"plain": PLAIN}, "prompts").rows[0]["arms"].values()
    assert "us" in eager and "us" not in graphs and "0 graphs were replayed" in graphs["finding"]


@pytest.mark.usefixtures('quick')
@pytest.mark.slow
def test_a_wrong_engine_has_no_rounds() -> None:
    swapped = measured_cells({"support.wrong.ops:SWAPPED": PLAIN}, "rounds")
    assert swapped.exit is Exit.DIVERGED and all("us" not in arm for arm in swapped.rows[0]["arms"].values())


# Peers


def made_up(logits: list[torch.Tensor], answer: Callable[[torch.Tensor], Any], work: Callable[[], Any]) -> Arm:
    def check() -> str:
        return "" if torch.equal(answer(logits[0]), PLAIN.pick(logits=logits[0], to=pick.TO)) else "picks others"

    return Arm("made up", work, check, len(logits), peer="made-up 1.0")


def not_here(*given: Any, **drawn: Any) -> Arm:
    raise ModuleNotFoundError("No module named 'made_up_kernels'", name="made_up_kernels")


def serves_no(*given: Any, **drawn: Any) -> Arm:
    raise Unsupported("rows of this kind")


def lacks_a_file(*given: Any, **drawn: Any) -> Arm:
    raise RuntimeError("no build:\n'/made/up/place/kernel.cu' and /made/up/other.so, needed by ../here/cache")


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(("maker", "finding", "timed_too", "absent"), [
    (lambda g, at, name, logits: made_up(logits, lambda x: x.argmax(1), lambda: 0), "", True, ""),
    (lambda g, at, name, logits: made_up(logits, lambda x: x.argmin(1), lambda: 0), "picks others", True, ""),
    (lambda g, at, name, logits: made_up(logits, falls, lambda: 0), "ValueError: planted", True, ""),
    (lambda g, at, name, logits: made_up(logits, lambda x: x.argmax(1), falls), "ValueError: planted", False, ""),
    (not_here, None, False, "its package is not here (made_up_kernels)"),
    (serves_no, None, False, "rows of this kind"),
    (falls, None, False, "planted"),
    (lacks_a_file, None, False, "RuntimeError: no build: 'kernel.cu' and other.so, needed by ../here/cache"),
    (lambda g, at, name, logits: made_up(logits, lacks_a_file, lambda: 0), "no build: 'kernel.cu' and", True, ""),
], ids=["right", "wrong", "falls in its check", "falls in its work", "missing", "refused", "falls", "lacks a file",
        "lacks a file in its check"])  # fmt: skip
def test_peer_is_judged_and_its_finding_is_next_to_its_speed(
    maker: Callable[..., Arm], finding: str | None, timed_too: bool, absent: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_up_peer(monkeypatch, "pick", maker)
    found = measured_cells(PLAIN, "pick", peers=True)
    assert found.exit is Exit.AGREED and all("us" in row["arms"]["it"] for row in found.rows)  # it is not ours
    arm = found.rows[0]["arms"].get("made up")
    assert absent in found.rows[0]["absent"].get("made up", "") and (arm is None) is (finding is None)
    if arm is not None and finding is not None:
        assert finding in arm["finding"] and bool(finding) is bool(arm["finding"]) and ("us" in arm) is timed_too
        assert finding in text(found) and ("made-up 1.0" in text(found)) is bool(finding)


# The grid


@pytest.mark.usefixtures('quick')
def test_cells_without_time_are_skipped_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured_cells(PLAIN, "conv", "pick", minutes=1e-9)
    assert found.left == {name: len(list(kind(name).cells(ground(), "tiny"))) for name in ("conv", "pick")}
    assert found.exit is Exit.INCONCLUSIVE and "cells left out" in text(found)


# Clocks and words


@pytest.mark.usefixtures('quick')
def test_only_requested_cells_are_measured() -> None:
    asked = Asked({"plain": PLAIN}, "cpu", FP32, ("decode", "pick"), "tiny", peers=False, at={"batch": ("2",)})
    found = bench(asked)
    assert [(row["kind"], row["cell"]["batch"]) for row in found.rows] == [("decode", 2)]
    assert found.result().found["setting"]["at"] == {"batch": ["2"]}
    with pytest.raises(BadInput, match=r"batch=2 rows=3, which no cell of this grid has at once, expected batch 1, 2"):
        bench(replace(asked, at={"batch": ("2",), "rows": ("3",)}))


@pytest.mark.usefixtures('quick')
def test_a_floor_is_of_what_moves_and_of_what_is_multiplied() -> None:
    assert MACHINE.floor(1e10, 1e10) == pytest.approx(2.0)  # both at the rate of copying
    assert MACHINE.floor(2e10, 0) == pytest.approx(1.0)
    assert MACHINE.floor(2e10, 1e10) == pytest.approx(2.5)
    assert MACHINE.floor(1.0, 1.0, 3e11) == pytest.approx(3.0)


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(("kernel", "what"), [
    ("_window_kernel", "states"), ("nvjet_tst_192x8_64x3", "products"), ("Memcpy DtoD", "copies and fills"),
    ("_attend_split", "attention"), ("read_parts", "attention"), ("_plan_ring", OTHER), ("_gated_norm", "norms"),
    ("read_chunk_staged", "attention"), ("read_alone", "attention"), ("_draft_inputs", "norms"),
    ("_gdn_inputs", "conv and its inputs"),
    ("prepare_staged", "states"), ("staged_decode", "states"), ("carry_staged", "states"), ("fused_staged", "states"),
    ("fused_recurrent_gated_delta_rule_fwd_kernel", "states"), ("_gather", "copies and fills"),
])  # fmt: skip
def test_a_kernel_has_a_kind_of_work_by_its_name(kernel: str, what: str) -> None:
    assert kind_of(kernel) == what


@pytest.mark.usefixtures('quick')
def test_gaps_are_between_kernels_of_a_round_where_no_other_kernel_runs() -> None:
    first = [(0.0, 90.0, HOLD), (92.0, 100.0, "_window"), (93.0, 97.0, "_norm"), (102.0, 110.0, "slim_linear")]
    second = [(500.0, 590.0, HOLD), (510.0, 511.0, "Memcpy HtoD"), (560.0, 561.0, "Memcpy HtoD"),
              (590.0, 600.0, "_window"), (601.0, 603.0, "slim_linear")]  # fmt: skip
    found = by_kind([*first, *second], 2, held=True)
    work = {"states": 9.0, "products": 5.0, "norms": 2.0, "copies and fills": 1.0}
    assert found == {"work": work, "launches": 4, "gap_us": 2.0}
    assert gap(found) == "4 launches, longest gap 2.0 us"
    assert gap(by_kind([*first, *second], 2, held=False)) == "4 launches"
    assert gap(by_kind([*first, *second[1:]], 2, held=True)) == "4 launches", "where the second begins is not known"


def test_time_in_collectives_counts_no_meeting_of_the_ranks() -> None:
    """Ranks meet after the hold. A rank that comes first to a collective waits within it."""
    reduce, gather, waits = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ncclDevKernel_AllGather_RING_LL", 7.0
    one = [(0.0, 9.0, HOLD), (9.0, 40.0, reduce), (40.0, 50.0, "slim_linear"), (50.0, 62.0, reduce),
           (62.0, 70.0, gather)]  # fmt: skip
    other = [(0.0, 3.0, HOLD), (3.0, 40.0, reduce), (40.0, 43.0, "slim_linear"), (43.0, 55.0 + waits, reduce),
             (62.0, 69.0, gather)]  # fmt: skip
    every = [without_meetings(spans) for spans in (one, other)]
    assert of_ranks(every, 1) == ([20.0, 26.0], 19.0)
    assert by_kind(every[0], 1, held=True)["work"] == {"collectives": 20.0, "products": 10.0}
    assert [of_ranks(*one) for one in (([every[0], every[1][:-1]], 1), (every, 2), ([[], []], 1))] == [None] * 3
    link = rounds.Link(seconds=1e-5, bytes_per_s=1e9)
    calls = [Call("all_reduce", (4, 100_000), torch.bfloat16), Call("all_gather", (4, 5000), torch.bfloat16),
             Call("broadcast", (4,), torch.int64)]  # fmt: skip
    assert link.floor(calls, 2) == (1_600_000 + 40_000 + 16, pytest.approx(1.6e-3 + 4e-5 + 1e-5))


@pytest.mark.usefixtures('quick')
def test_the_kernel_that_holds_the_device_back_is_known_by_its_name() -> None:
    card = pytest.importorskip("instep_speed.gate.gpu_operations", reason="Triton is not here")
    assert card._hold.fn.__name__ == HOLD


@pytest.mark.usefixtures('quick')
def test_a_round_by_kind_of_work_is_drawn() -> None:
    svg = svg_of(bars_of("rounds", {"triton": {"products": 30.0, "states": 10.0}}))
    bars = [bar for bar in svg.iter("rect") if len(bar)]
    assert [bar[0].text for bar in bars] == ["triton, products: 30 us", "triton, states: 10 us"]
    assert float(bars[0].get("width", 0)) == pytest.approx(3 * float(bars[1].get("width", 0)))
    ElementTree.fromstring(ElementTree.tostring(svg))


@pytest.mark.usefixtures('quick')
def test_rounds_are_listed_by_batch_in_any_order_of_measurement() -> None:
    """As in a file that was joined of several calls."""
    rows: list[run.Row] = [{"kind": "rounds", "cell": {"batch": batch}, "arms": {"it": {"work": {"states": 1.0}}}}
                           for batch in (32, 8, 1)]  # fmt: skip
    assert [row["cell"]["batch"] for row, _ in works(rows)] == [1, 8, 32]


# The command


@pytest.mark.usefixtures('quick')
@pytest.mark.parametrize(("words", "says"), [
    (["--ops", "triton", "--device", "cpu"], "its kernels are interpreted there"),
    (["--ops", "ledger"], "expected an op set that computes"), (["--kind", "speed"], "--kind"),
    (["--grid", "full"], "--json FILE as well"), (["--grid", "large"], "default or full"),
    (["--minutes", "0"], "--minutes"), (["--at", "batch"], "expected AXIS=VALUE"),
    (["--kind", "pick", "--plots", "README.md"], "expected a folder"),
    (["--ranks", "2", "--kind", "pick"], "expected --kind rounds alone"),
    (["--ranks", "3", "--device", "cpu"], "a divisor of the model's 2 key heads"),
])  # fmt: skip
def test_unmeasurable_request_is_refused_in_one_line(instep: Runner, words: list[str], says: str) -> None:
    assert says in complaint(instep("bench", *words))


@pytest.mark.usefixtures('quick')
def test_command_explains_cpu_times_and_writes_its_result(instep: Runner, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    done = instep("bench", "--kind", "pick", "--json", str(file), "--plots", str(tmp_path / "p"), "--commit", "a1",
                  "--html", str(tmp_path / "page.html"))  # fmt: skip
    found = json.loads(file.read_text())
    assert done.code == 0 and "for regressions only" in done.out
    assert found["command"].endswith("bench --kind pick --commit a1")
    assert (found["commit"], found["exit"], len(found["rows"])) == ("a1", 0, 2) and found["machine"]["cores"]
    assert [file.name for file in (tmp_path / "p").iterdir()] == ["pick.svg"]
    assert '"form":"curves","group":"pick",' in (tmp_path / "page.html").read_text()
    assert set(KINDS) == {
        "strategies", "decode", "mixer", "conv", "prefill", "attend", "pick", "products", "rounds", "prompts",
        "decoding", "channel_decay",
    }  # fmt: skip


GROUND = ground()


class Clock:
    """Cells that take the given seconds of their kind, while nothing else takes any time."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.seconds, self.order = 0.0, seconds, list[str]()

    def monotonic(self) -> float:
        return self.now

    def row(self, name: str, ground: Any, at: Any) -> run.Row:
        self.now += self.seconds[name]
        self.order.append(name)
        return {"kind": name, "cell": dict(at), "floor_us": None, "arms": {}, "absent": {}}


def timed(clock: Clock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(runner, "time", clock)
    monkeypatch.setattr(run, "_row", clock.row)
    return measured_cells(PLAIN, *clock.seconds, minutes=seconds / 60)


def test_unused_minutes_go_to_cells_that_had_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four attentions of 10 seconds, with a share of 17, then two quick kinds; everything fits into 50."""
    assert [len(list(kind(name).cells(GROUND, "tiny"))) for name in ("attend", "pick", "prefill")] == [4, 2, 2]
    found = timed(clock := Clock(attend=10.0, pick=0.5, prefill=1.0), 50.0, monkeypatch)
    assert clock.order == ["attend"] * 2 + ["pick"] * 2 + ["prefill"] * 2 + ["attend"] * 2
    assert not found.left and len({run.key(row) for row in found.rows}) == len(found.rows) == 8


def test_cell_that_does_not_fit_the_minutes_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(clock := Clock(attend=10.0, pick=0.5), 20.6, monkeypatch)
    assert clock.order == ["attend"] * 2 + ["pick"] * 2 and found.left == {"attend": 2}


def test_default_grid_varies_other_axes_for_few_batches() -> None:
    cells = list(strategies.cells(GROUND, "default"))
    first = {"window": 4, "heads": 32, "state": "float32"}
    others = [at for at in cells if first.items() - at.items()]
    assert [at["batch"] for at in cells if at not in others] == [1, 8, 32, 64, 128]
    assert {(axis, at[axis]) for at in others for axis in first} == {
        *first.items(), ("window", 2), ("window", 8), ("heads", 16), ("heads", 64), ("state", "bfloat16")}  # fmt: skip
    assert len(others) == 5 * len(strategies.FEW) and {at["batch"] for at in others} == set(strategies.FEW)
    full = list(strategies.cells(GROUND, "full"))
    assert all(at in full for at in cells) and len(full) == 8 * 8 * 5 * 2


def test_prompts_of_few_heads_are_in_the_full_grid_only() -> None:
    heads = {size: {at["heads"] for at in prefill.cells(GROUND, size)} for size in ("default", "full")}  # type: ignore
    assert heads == {"default": {32, 64}, "full": {16, 24, 32, 48, 64}}


def test_texts_explain_the_missing_vanilla_drafter() -> None:
    eagle, ngram = (decoding.make(ground(plain=PLAIN), {"batch": 2, "drafter": name}) for name in ("eagle", "ngram"))
    assert eagle.absent == {"vanilla": "it takes an MTP layer per draft, and the trained model has 1"}
    assert not ngram.absent and [arm.name for arm in ngram.arms] == [arm.name for arm in eagle.arms]
    assert [at["drafter"] for at in decoding.cells(GROUND, "default")] == ["eagle", "ngram"]


@pytest.mark.parametrize(("words", "says"), [
    (("--kind", "pick", "--at", "rows=1", "--at", "rows=77"), "found rows=77, which no cell of this grid has, ex"),
    (("--kind", "decode", "--kind", "pick", "--at", "rows=1", "--at", "batch=2"), "batch=2 rows=1, which no cell of"),
    (("--kind", "attend", "--at", "kv=None"), "kv=None, which no cell of this grid has, expected"),
    (("--kind", "attend", "--at", "rows=33", "--at", "tree=binary"), "at once"),
])  # fmt: skip
def test_a_value_that_no_cell_has_is_refused_at_once(
    words: tuple[str, ...], says: str, instep: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "rates", Mock(side_effect=AssertionError("the machine was measured first")))
    assert says in complaint(instep("bench", "--device", "cpu", *words))


def test_requested_kind_without_a_chosen_cell_is_reported(tmp_path: Path, instep: Runner) -> None:
    file, words = tmp_path / "found.json", ("bench", "--device", "cpu", "--at", "rows=1", "--json")
    ran = instep(*words, file, "--kind", "pick", "--kind", "decode")
    found = json.loads(file.read_text())
    assert ran.code == 0 and "decode: 2 cells left out, none has rows=1" in ran.out
    assert found["left_out"] == {"decode": 2} and [row["cell"] for row in found["rows"]] == [{"rows": 1}]

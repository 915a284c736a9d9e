"""SGLang's ring of a GDN verify under changing step counts, as a commit strategy: which releases are right, and when.

The ring of a release is wrong where its entries do not reach: `write_pos` + accepted tokens > 16 entries, and in 0.5.16
also in a flush round that is wider than the round before. Leaves out: step changes under our strategies.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib import import_module

import pytest
import torch

from instep.campaign.relations import held, relations, step_changes
from instep.campaign.relations.case import Case
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit, Tier
from instep_reference.contract.errors import Unsupported
from peers.environment import TOP, environment
from support.inputs.step_schedules import SCHEDULES, first_wrong
from support.running.covering import few
from support.worlds.fake_ring import modules
from support.worlds.installed_modules import forgotten, put_modules

pytestmark = pytest.mark.slow  # whole replays

OPS, STRATEGY = "instep.adapters.sglang_ring:RING", "sglang_ring"
OURS = ("instep.adapters.sglang", "instep.adapters.sglang_ring")
# Release -> schedule -> the first wrong window, counted from 0.
OVERFLOWS = {"14 x 1, 4": 14, "6 x 2, 8": 6}
WRONG = {
    "0.5.16": OVERFLOWS | {"6 x 2, 4": 7, "6 x 2, 8 of which 3": 7}, "0.5.18": {}, "0.5.20": OVERFLOWS,
    "0.5.23": OVERFLOWS,
}  # fmt: skip
IN_PLACE = "of a ring of 16 entries in place of the window's last"
Put = Callable[..., None]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """`put("0.5.23")`: from now on SGLang's modules have the functions of `fake_ring`."""

    with forgotten(*OURS):
        yield lambda release, margin=None: put_modules(monkeypatch, modules(release, margin), *OURS)


def wrong(release: str) -> dict[str, int | None]:
    return {name: WRONG[release].get(name) for name in SCHEDULES}


@few(1)
@pytest.mark.parametrize(("release", "graphs"), [
    ("0.5.16", False), ("0.5.23", True), ("0.5.18", True), ("0.5.18", False), ("0.5.23", False), ("0.5.16", True),
])  # fmt: skip
def test_a_ring_serves_a_trace_of_every_kind_of_event(release: str, graphs: bool, put: Put, trace: Trace) -> None:
    put(release)
    verdict = Replay(trace, Setting(OPS, strategy=STRATEGY, graphs=graphs, overlap=graphs)).run().verdict
    assert verdict.exit is Exit.AGREED and verdict.events == len(trace.events), verdict.findings[:1]


@few(1)
@pytest.mark.parametrize(("release", "name"), [
    ("0.5.16", "6 x 2, 4"), ("0.5.18", "6 x 2, 8"), ("0.5.23", "14 x 1, 4"), ("0.5.23", "6 x 2, 8 of which 3"),
])  # fmt: skip
def test_a_rise_of_the_step_count_is_wrong_where_the_ring_ends(release: str, name: str, put: Put) -> None:
    put(release)
    found = first_wrong(name, OPS, STRATEGY)
    assert (found and found[0]) == WRONG[release].get(name), found
    assert found is None or found[1].startswith("directed state: "), found


@pytest.mark.whole
def test_a_ring_with_the_margin_of_the_widest_window_is_right(put: Put) -> None:
    put("0.5.23", margin=8)
    assert [first_wrong(name, OPS, STRATEGY) for name in OVERFLOWS] == [None, None]


def test_a_state_that_lacks_the_last_tokens_is_named(put: Put) -> None:
    put("0.5.23")
    assert first_wrong("6 x 2, 8", OPS, STRATEGY) == (
        6, "directed state: holds the state after 4 tokens; 8 tokens were accepted"
    )  # fmt: skip


@few(1)
@pytest.mark.parametrize(("release", "change", "says"), [
    ("0.5.23", (2, 6), "2 to 6 after 12, all accepted: holds the state after 4 tokens; 6 tokens were accepted"),
    ("0.5.16", (2, 4), f"2 to 4 after 14, all accepted: has the 2 oldest tokens {IN_PLACE} 2"),
    ("0.5.20", (1, 8), f"1 to 8 after 10, all accepted: has the 2 oldest tokens {IN_PLACE} 2"),
    ("0.5.23", (2, 4), None), ("0.5.18", (2, 6), None),
])  # fmt: skip
def test_any_fill_of_a_ring_is_tried_before_a_rise(
    release: str, change: tuple[int, int], says: str | None, put: Put, trace: Trace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(release)
    monkeypatch.setattr(step_changes, "CHANGES", (change,))
    case = Case.of(trace, Replay(trace, Setting(OPS, strategy=STRATEGY)).plan)
    verdict = held(case, relations(["step-changes"]))[0].verdict
    said = [f"{one.request}: {one.diagnosis}" for one in verdict.findings if one.kind in ("commit", "forward")]
    assert said[:1] == ([] if says is None else [says]) and verdict.exit is (Exit.DIVERGED if says else Exit.AGREED)
    assert {one.tier for one in verdict.compared} == {Tier.DIRECTED}


@pytest.mark.parametrize(("ops", "strategy", "says"), [
    ("plain", OPS.replace("RING", "KEEPER"), "which does not fill it"), (OPS, STRATEGY, "this release has none"),
])  # fmt: skip
def test_a_ring_that_no_op_fills_or_a_release_lacks_is_refused(
    ops: str, strategy: str, says: str, put: Put, trace: Trace
) -> None:
    put("0.5.23")
    if ops == OPS:
        import_module("instep.adapters.sglang_ring")
        del sys.modules["sglang.kernels.ops.attention.linear.gdn_replayssm_spec_decode"]
    with pytest.raises(Exception, match=says):
        Replay(trace, Setting(ops, strategy=strategy)).run()


@pytest.mark.parametrize(("release", "rows", "device", "refused"), [
    ("0.5.23", torch.float32, "cuda", True), ("0.5.23", torch.bfloat16, "cuda", False),
    ("0.5.23", torch.float32, "cpu", False), ("0.5.16", torch.float32, "cuda", False),
])  # fmt: skip
def test_fp32_rows_are_refused_if_a_card_folds_them_in_tf32(
    release: str, rows: torch.dtype, device: str, refused: bool, put: Put
) -> None:
    put(release)
    ring = import_module("instep.adapters.sglang_ring")
    with pytest.raises(Unsupported, match="--dtype bfloat16") if refused else nullcontext():
        ring.must_have_narrow_rows(ring.ring_of_release(), rows, torch.device(device))


@pytest.mark.whole
@pytest.mark.interpreted
@pytest.mark.parametrize("release", WRONG)
def test_a_released_ring_is_wrong_exactly_where_it_ends(release: str) -> None:
    """The kernels of the wheel, interpreted. The states of a wrong commit are named, and the run ends there."""
    wheel = TOP / ".venv-peers" / "unpacked" / f"sglang-{release}"
    if not (wheel / "sglang").is_dir():
        pytest.skip(f"sglang {release} is not unpacked in {wheel.parent.relative_to(TOP)}: make peers")
    command = [sys.executable, "-W", "ignore", "-m", "support.inputs.step_schedules", "--json"]
    ran = subprocess.run(command, env={**os.environ, **environment([wheel]), "TRITON_INTERPRET": "1"}, cwd=TOP,
                         capture_output=True, text=True, timeout=600)  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {name: one and one[0] for name, one in found.items()} == wrong(release), found
    assert all(one is None or one[1].startswith("directed state: ") for one in found.values()), found

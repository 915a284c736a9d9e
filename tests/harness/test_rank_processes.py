"""Ranks and stages in processes over gloo: the verdict is that of lock step, and one that leaves is reported.

Leaves out: ranks in lock step (`test_ranks.py`), stages in lock step (`test_stages.py`).
"""

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep.bundled import model
from instep.checks.ranks import Agreement, Collectives, Replicas, Stages
from instep.diagnose import diagnose
from instep.run import rank_processes
from instep.run.replay import Outcome, Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.verdict import Exit
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ranks.lockstep import RankKilled, RankRaised, RankWaits
from instep_optimized.ranks.processes import Processes
from instep_proof.faults.catalogue import FAMILIES
from instep_proof.faults.catalogue.fault import Edit, Wrap
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput, InstepError
from instep_reference.contract.place_names import Place
from instep_speed.bench.bench_types import Ground
from instep_speed.bench.kinds import rounds
from support.inputs.bench_runs import measured_cells
from support.inputs.traces import first, recording
from support.running.command import Runner
from support.running.covering import WHOLE
from support.running.planting import planted_here

pytestmark = pytest.mark.slow  # whole replays

OVER, PROCESSES = "instep_optimized/ranks/ops_over_ranks.py", "instep_optimized/ranks/processes.py"
REDUCED = "return {added(rows, to) => %s} if to.component == BY_ROW else rows"
MLP = "return {added(ops.mlp(to=to, **given), to) => added(%s, to)}"
OWN = "ops.mlp(to=to, **given)"
STAGE, ROWS = "instep_optimized/pipeline/stage_engine.py", "instep_optimized/pipeline/ops_of_stage.py"
SENT = "comm.send({x => %s}, stage.number + 1, FINAL)"

three_layers = recording(first(4), num_hidden_layers=3, full_attention_interval=2)


def replayed(trace: Trace, *edits: Edit | Wrap, until: int | None = 3, **how: Any) -> Outcome:
    with planted_here(*edits):
        return diagnose(Replay(trace, Setting(**{"ranks": 2, "comm": "gloo", **how})), until=until)


@pytest.mark.parametrize("how", [
    {"ops": "ledger"}, pytest.param({"ops": "plain", "until": None}, marks=WHOLE),
    pytest.param({"ops": "ledger", "graphs": True, "strategy": "snapshot", "until": 9}, marks=WHOLE),
], ids=lambda how: "-".join(map(str, how.values())))
def test_ranks_in_processes_are_judged_like_those_in_turns(four_rounds: Trace, how: dict[str, Any]) -> None:
    found, right = (replayed(four_rounds, **how, comm=comm).verdict for comm in ("gloo", "lockstep"))
    assert found.exit == Exit.AGREED and found.events == right.events >= 4
    for check in (Agreement.name, Replicas.name, Collectives.name, "derived", "identity"):
        counts = [sum(one.elements for one in verdict.compared if one.check == check) for verdict in (found, right)]
        assert counts[0] == counts[1], check
    assert {one.check for one in found.compared} == {one.check for one in right.compared}


@pytest.mark.parametrize(("edit", "check", "component", "rank", "says"), [
    pytest.param(Edit.of(OVER, REDUCED % "rows if comm.rank else added(rows, to)"), "serves", "gated", None,
                 "rank 0 waits in all_reduce for trunk layer 0 mixer of (4, 32) float32; rank 1 waits at trunk layer 0",
                 id="skips-one"),
    pytest.param(Edit.of(OVER, REDUCED % "(added(added(rows, to), to) if comm.rank else added(rows, to))"), "serves",
                 "gated", None, "rank 0 waits at trunk layer 0 mixer of (4, 32) float32; rank 1 waits in all_reduce",
                 id="makes-two", marks=WHOLE),
    pytest.param(Edit.of(OVER, MLP % f"{OWN}[comm.rank :]"), "serves", "post_normed", None,
                 "trunk layer 0 mlp of (4, 32) float32; rank 1 waits in all_reduce for trunk layer 0 mlp of (3, 32)",
                 id="another-shape", marks=WHOLE),
    pytest.param(Edit.of(OVER, MLP % f"{OWN} if comm.rank == 0 else os._exit(3)"), "serves", "post_normed", 1,
                 "rank 1 exited; rank 0 waits in all_reduce for trunk layer 0 mlp of (4, 32)", id="exits", marks=WHOLE),
    pytest.param(Edit.of(OVER, MLP % f"{OWN} if comm.rank == 0 else os.abort()"),
                 "serves", "post_normed", 1,
                 "rank 1 was ended by SIGABRT; rank 0 waits in all_reduce for trunk layer 0 mlp", id="is-ended"),
    pytest.param(Edit.of(OVER, MLP % f"(time.sleep(9 * comm.rank), {OWN})[1]"), "serves", "post_normed", 1,
                 "rank 1 did not come within 0.5 s, after it was at trunk layer 0 post_normed of (4, 32) float32; "
                 "rank 0 waits in all_reduce for trunk layer 0 mlp", id="hangs", marks=WHOLE),
    pytest.param(Edit.of(OVER, REDUCED % "2 * added(rows, to)"), "derived", "mixer", None, "has every partial sum",
                 id="wrong-sum", marks=WHOLE),
    pytest.param(Edit.of(OVER, REDUCED % "(added(rows, to), rows)[1]"), "replicas", "mixer", 1,
                 "lacks the sum over the ranks: it is the partial sum of rank 0; rank 1 holds other bits than rank 0",
                 id="drops-every-sum", marks=WHOLE),
])  # fmt: skip
def test_rank_that_leaves_the_others_is_reported(
    four_rounds: Trace, edit: Edit, check: str, component: str, rank: int | None, says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the event and both calls, at once; only a rank that hangs is waited for."""
    from instep_optimized.ranks import ops_over_ranks

    monkeypatch.setattr(ops_over_ranks, "os", os, raising=False)
    monkeypatch.setattr(ops_over_ranks, "time", time, raising=False)
    if "did not come" in says:
        monkeypatch.setattr(rank_processes, "LIMIT_S", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a rank that the finding names is killed without a second report
        (found, *_) = replayed(four_rounds, edit).verdict.findings
    assert (found.event, found.check, found.place.component, found.rank) == (2, check, component, rank)
    assert says in found.diagnosis


@WHOLE
def test_rank_that_computes_longer_than_the_limit_is_waited_for(
    four_rounds: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from instep_optimized.ranks import ops_over_ranks

    due = [3.0]

    def compute(rank: int) -> None:
        until = time.process_time() + (due.pop() if due and rank else 0.0)
        while time.process_time() < until:
            pass

    monkeypatch.setattr(ops_over_ranks, "compute", compute, raising=False)
    monkeypatch.setattr(rank_processes, "LIMIT_S", 1.5)
    verdict = replayed(four_rounds, Edit.of(OVER, MLP % f"(compute(comm.rank), {OWN})[1]")).verdict
    assert verdict.exit == Exit.AGREED, verdict.findings[:1]


def staged(trace: Trace, *edits: Edit, until: int | None = None, **how: Any) -> Outcome:
    with planted_here(*edits):
        return diagnose(Replay(trace, Setting(**{"stages": 3, "micro_batches": 2, "comm": "gloo", **how})), until=until)


@pytest.mark.parametrize("how", [
    {"ops": "ledger", "until": 7}, pytest.param({"ops": "plain", "graphs": True, "overlap": True}, marks=WHOLE),
    pytest.param({"ops": "ledger", "graphs": True, "strategy": "snapshot", "stages": 2}, marks=WHOLE),
], ids=lambda how: "-".join(map(str, how.values())))
def test_stages_in_processes_are_judged_like_those_in_turns(three_layers: Trace, how: dict[str, Any]) -> None:
    found, right = (staged(three_layers, **how, comm=comm).verdict for comm in ("gloo", "lockstep"))
    assert found.exit == Exit.AGREED and found.events == right.events >= 8
    assert (found.relayed, found.overlapped) == (right.relayed, right.overlapped) and found.relayed
    for check in (Agreement.name, Stages.name, "labels", "identity", "derived", "projected", "final"):
        counts = [sum(one.elements for one in verdict.compared if one.check == check) for verdict in (found, right)]
        assert counts[0] == counts[1], check
    assert {one.check for one in found.compared} == {one.check for one in right.compared}


@pytest.mark.parametrize(("edit", "check", "rank", "says"), [
    pytest.param(Edit.of(ROWS, SENT % "x.flip(0)"), "labels", 1, "", id="rows-exchanged", marks=WHOLE),
    pytest.param(Edit.of(ROWS, "{comm.send => stage.number or comm.send}(x, stage.number + 1, FINAL)"), "serves", None,
                 "rank 2 waits in recv from rank 1 for trunk final", id="sends-nothing"),
    pytest.param(Edit.of(ROWS, SENT % "(stage.number or comm.send(x, 2, FINAL), x)[1]"), "serves", None,
                 "rank 0 was in send to rank 2 for trunk final of (3, 32) int64; rank 2 has served the event and did "
                 "not receive it, nor 1 more", id="sends-more"),
    pytest.param(Edit.of(ROWS, SENT % "x[:, 1:]"), "serves", 1, "rank 0 is in send to rank 1 for trunk final",
                 id="shape", marks=WHOLE),
    pytest.param(Edit.of(ROWS, SENT % "x[: 1 // (1 - stage.number) * 9]"), "serves", 1,
                 "rank 1 raised ZeroDivisionError (integer division or modulo by zero); ranks 0, 2 did not",
                 id="raises"),
    pytest.param(Edit.of(ROWS, SENT % "x if stage.number == 0 else os._exit(3)"), "serves", 1, "rank 1 exited",
                 id="exits", marks=WHOLE),
    pytest.param(Edit.of(STAGE, "self._note(ops, {bonus => last}, inputs.slots, 0)"), "agreement", None, "",
                 id="old-root", marks=WHOLE),
])  # fmt: skip
def test_stage_that_leaves_the_others_is_reported(
    three_layers: Trace, edit: Edit, check: str, rank: int | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, although a stage waits for one other stage alone."""
    from instep_optimized.pipeline import ops_of_stage

    monkeypatch.setattr(ops_of_stage, "os", os, raising=False)
    begun = time.monotonic()
    (found, *_) = staged(three_layers, edit, ops="ledger").verdict.findings
    assert (found.check, found.rank if rank is not None else None) == (check, rank) and says in found.diagnosis
    assert time.monotonic() - begun < rank_processes.LIMIT_S


def test_rank_that_is_killed_from_outside_is_no_finding(
    four_rounds: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a system that is out of memory: nothing is known about the engine."""
    from instep_optimized.ranks import ops_over_ranks

    monkeypatch.setattr(ops_over_ranks, "os", os, raising=False)
    edit = Edit.of(OVER, MLP % f"{OWN} if comm.rank == 0 else os.kill(os.getpid(), 9)")
    with pytest.raises(RankKilled, match="rank 1: its process was ended by SIGKILL, while rank 0 waits in all_reduce"):
        replayed(four_rounds, edit)
    assert issubclass(RankKilled, InstepError)  # one line, exit code 2


def test_exception_of_an_op_in_one_process_has_its_line(four_rounds: Trace) -> None:
    process = os.getpid()

    def mlp(**given: Any) -> torch.Tensor:
        if os.getpid() != process:
            raise ValueError("only even rows")
        return PLAIN.mlp(**given)

    (found, *_) = replayed(four_rounds, handed=replace(PLAIN, mlp=mlp)).verdict.findings
    assert (found.event, found.check, found.rank) == (2, "serves", 1)
    assert "rank 1 raised ValueError (only even rows); rank 0 did not" in found.diagnosis
    assert found.raised is not None and found.raised.file == __file__ and found.raised.function.endswith("mlp")


@WHOLE
def test_wrong_memory_of_another_process_is_found(four_rounds: Trace) -> None:
    """Rank 1 writes beyond its own slot: rank 0 has other pools, and gets the finding."""
    process = os.getpid()

    def advance(**given: Any) -> Any:
        if os.getpid() != process:
            given["length"][5] += 1
        return PLAIN.advance(**given)

    findings = replayed(four_rounds, handed=replace(PLAIN, advance=advance), until=None).verdict.findings
    assert findings and {one.rank for one in findings} == {1}


@WHOLE
def test_findings_in_processes_are_those_in_turns(four_rounds: Trace) -> None:
    """Also findings about bits, whose known wrong contents are computed by closures."""
    edits = next(fault.edits for fault in FAMILIES["rollback"] if fault.id == "commit-index-minus-one")
    found, right = (replayed(four_rounds, *edits, ops="plain", strategy="snapshot", until=None, comm=comm)
                    for comm in ("gloo", "lockstep"))  # fmt: skip
    keys = [{(one.event, one.check, one.place, one.request, one.explained) for one in outcome.verdict.findings}
            for outcome in (found, right)]  # fmt: skip
    assert keys[0] == keys[1] and any(one.check == "bytes" for one in found.verdict.findings)


@WHOLE
@pytest.mark.parametrize(("end", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_processes_end_with_the_command(end: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "instep", "replay", "--ops", "plain", "--ranks", "2", "--comm", "gloo"]
    ran = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: len(alive(ran.pid)) == 2 and (time.sleep(1) or len(alive(ran.pid)) == 2))
    if end == signal.SIGINT:
        os.killpg(ran.pid, end)  # as a terminal does
    else:
        ran.send_signal(end)
    assert ran.wait(30) == code
    wait_until(lambda: not alive(ran.pid))


def alive(session: int) -> list[str]:
    """The processes of a session that have not ended."""
    found = subprocess.run(["ps", "-o", "stat=", "-s", str(session)], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.split() if not line.startswith("Z")]


def wait_until(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_other_machines_do_not_reach_the_store() -> None:
    """Its values are pickled."""
    store = rank_processes._served()
    tables = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    found = {address.partition(":")[0] for _, address, _, state, *_ in tables
             if address.endswith(f":{store.port:04X}") and state == "0A"}  # fmt: skip
    assert found == {"0100007F"}  # 127.0.0.1


def test_tensors_of_any_size_reach_the_other_ranks() -> None:
    """A value in the store has at most 8 MiB. Calls that are not compared leave nothing in it."""
    dtypes = torch.float32, torch.bfloat16, torch.int64, torch.bool

    def given(rank: int) -> dict[str, Any]:
        made = [torch.arange(3 * (rank + 1)).view(rank + 1, 3).to(dtype).T for dtype in dtypes]
        return {"large": torch.full((3 << 20,), rank + 1.0), "made": (*made, torch.tensor(rank), torch.empty(0, 2)),
                "says": f"rank {rank}"}  # fmt: skip

    def sent(group: Processes) -> tuple[list[dict[str, Any]], torch.Tensor, int]:
        found, number = group.gather([given(group.rank)]), group._number
        with group.uncompared():
            total = group.all_reduce(torch.ones(2))
            group.run([lambda: None])
        return found, total, group._number - number

    found, total, posted = rank_processes.over_processes(2, "gloo", sent, sent)
    for rank, one in enumerate(found):
        right = given(rank)
        assert one["says"] == right["says"] and torch.equal(one["large"], right["large"])
        for mine, due in zip(one["made"], right["made"], strict=True):
            assert mine.dtype == due.dtype and mine.shape == due.shape and torch.equal(mine, due)
    assert total.tolist() == [2, 2] and posted == 0


def test_value_that_cannot_be_sent_is_reported_at_once() -> None:
    def sends(group: Processes) -> None:
        group.run([lambda: group.gather([sends if group.rank else 0])])

    with pytest.raises(RankRaised, match=r"rank 1 raised .*pickle.*; rank 0 did not"):
        rank_processes.over_processes(2, "gloo", sends, sends)


@WHOLE
def test_rounds_over_ranks_are_timed_next_to_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that are made as on cards. A wrong engine has a finding instead of a time."""
    monkeypatch.setitem(rank_processes.START, "gloo", "spawn")
    alone, over = measured_cells({"plain": PLAIN}, "rounds", ranks=2).rows
    assert [row["cell"]["ranks"] for row in (alone, over)] == [1, 2]
    assert 0.5 < over["bytes"] / alone["bytes"] < 0.6, "norms and `mtp.fc` are on every rank"
    told = over["arms"]["plain"]
    assert told["us"] > 0 and told["finding"] == "" and "collectives" not in alone["arms"]["plain"]
    found = told["collectives"]
    layers = len(Checkpoint.open(model()).config.layers)
    runs = layers, *[1] * rounds.NUM_STEPS  # each with embedding, head and pick, and with mixer and MLP in every layer
    assert found["calls"] == sum(3 + 2 * layers for layers in runs) and len(found["ranks_us"]) == 2
    assert over["floor_us"] > found["floor_us"] > 0 and over["floor_us"] < told["us"]
    monkeypatch.undo()
    for edits, ops, says in (
        ((Edit.of(OVER, REDUCED % "rows if comm.rank else added(rows, to)"),), "plain", "rank 0 waits in all_reduce"),
        ((), "support.wrong.ops:SWAPPED", "KV keys"),
        ((Edit.of(PROCESSES, "self._transport.{allreduce([x]).wait() => allreduce([x.mul_(2)]).wait()}"),), "plain",
         "all_reduce over the ranks is not the sum"),
        ((Edit.of(PROCESSES, "return torch.cat({parts => parts[::-1]}, axis)"),), "plain", "all_gather over the ranks"),
        ((Edit.of(PROCESSES, "self._transport.broadcast([{found => found.mul_(2)}], dist.BroadcastOptions()).wait()"),),
         "plain", "broadcast is not"),
    ):
        with planted_here(*edits):
            wrong = measured_cells({ops: PLAIN}, "rounds", ranks=2, at={"ranks": ("2",)})
        (told,) = (arm for row in wrong.rows for arm in row["arms"].values())
        assert says in told["finding"] and "us" not in told and wrong.exit == Exit.DIVERGED


@pytest.mark.parametrize(("leave", "kind", "says"), [
    (lambda: os._exit(3), RankRaised, "rank 1 exited; rank 0 waits in all_reduce for trunk layer 0 mixer of"),
    (lambda: 1 // 0, RankRaised, "rank 1 raised ZeroDivisionError (integer division or modulo by zero); rank 0 waits"),
    (lambda: os.kill(os.getpid(), 9), RankKilled, "rank 1: its process was ended by SIGKILL, while rank 0 waits in"),
    pytest.param(lambda: time.sleep(60), RankWaits, "for trunk layer 0 mixer of (2,) float32, and got nothing within 1",
                 marks=WHOLE),
], ids=["exits", "raises", "is-killed", "hangs"])
def test_rank_that_leaves_uncompared_calls_is_reported(
    leave: Callable[[], object], kind: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the timed rounds of `bench`: nothing but the data and the end of the process shows it."""
    monkeypatch.setattr(rank_processes, "LIMIT_S", 1.0)
    monkeypatch.setattr(rank_processes, "LEAVES_S", 0.1)

    def rounds_of(group: Processes) -> None:
        with group.uncompared():
            for _ in range(3):
                group.all_reduce(torch.ones(2))
            if group.rank:
                leave()
            group.all_reduce(torch.ones(2), Place("trunk", 0, "mixer"))

    with warnings.catch_warnings(), pytest.raises(kind) as raised:
        warnings.simplefilter("ignore")  # a rank that hangs is killed
        rank_processes.over_processes(2, "gloo", rounds_of, rounds_of)
    assert says in str(raised.value)


@WHOLE
def test_processes_that_are_not_forked_are_given_all(four_rounds: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with NCCL: they read the trace and the model again."""
    monkeypatch.setitem(rank_processes.START, "gloo", "spawn")
    assert replayed(four_rounds, ops="plain").verdict.exit == Exit.AGREED
    with pytest.raises(BadInput, match="gloo with an op set or a model in memory"):
        replayed(four_rounds, handed=PLAIN)


@pytest.mark.parametrize(("words", "says"), [
    (("--comm", "mpi"), "--comm: found mpi, expected one of lockstep, gloo, nccl"),
    (("--comm", "gloo"), "--comm: found gloo with one rank, expected --ranks 2 or more"),
    (("--ranks", 2, "--comm", "nccl"), "--comm: found nccl with --device cpu, expected gloo with cpu, nccl with cuda"),
    (("--ranks", 3, "--comm", "gloo"), "--ranks: found 3, expected a divisor of the model's 2 key heads"),
])  # fmt: skip
def test_unknown_way_to_exchange_data_is_refused(
    four_rounds: Trace, instep: Runner, words: tuple[Any, ...], says: str
) -> None:
    ran = instep("replay", four_rounds.path, "--ops", "plain", *words)
    assert ran.code == Exit.BAD_INPUT and says in ran.err + ran.out


@WHOLE
def test_process_that_does_not_end_is_killed_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "LEAVES_S", 0.1)
    with pytest.warns(RuntimeWarning, match=r"the process of rank 1 had not ended 0\.1 s after the run"):
        assert rank_processes.over_processes(2, "gloo", lambda group: "done", lambda group: time.sleep(60)) == "done"


@pytest.mark.gpu
def test_rank_over_nccl_is_timed_and_ends_with_its_graphs() -> None:
    """A group of one rank, which one card can have: calls of NCCL in a graph, and the clock of rounds over ranks."""
    kept = []

    def own(group: Processes) -> tuple[str, rounds.Run, list[float]]:
        graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device="cuda")
        group.add_in_place(x)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            total = group.all_reduce(x)
        group.ends_before(graph)
        graph.replay()
        kept.append(graph)  # as a traceback may
        (shown,) = group.gather([{"total": total}])
        ground = Ground(torch.device("cuda"), torch.bfloat16, {}, rounds.UNKNOWN, 0)
        checkpoint = rounds.checkpoint_of(ground, 4)
        run = rounds.Run(rounds.laid(checkpoint, 2, rounds.count_of(ground)), checkpoint,
                         Setting("triton", device="cuda", dtype="bfloat16", graphs=True, overlap=True))  # fmt: skip
        run.group = group
        wrong = run.checked()
        run._join(group, rounds.Link(1e-6, 1e9))
        return wrong, run, shown["total"].tolist()

    begun = time.monotonic()
    wrong, run, total = rank_processes.over_processes(1, "nccl", own, own)
    assert wrong == "" and total == [1] * 4 and len(run.seconds) > 100
    assert run.work["collectives"]["calls"] == 0 and "work" in run.work and time.monotonic() - begun < 120

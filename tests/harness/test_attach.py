"""`instep attach`: a fake SGLang records itself, and `instep audit` judges the recording.

Leaves out: the names of released engines (`test_attach_cost.py`), and the judgement (`test_audit.py`).
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file

import instep.attach as room
from instep.attach import Options, options_in, sglang
from instep.attach.sglang_names import RELEASES
from instep.audit.audit import audit, opened
from instep.cli.attach import _report as report
from instep.cli.attach import attach
from instep.verdict import Exit
from instep_reference.contract.errors import BadInput
from support.inputs.recordings import lines, stated
from support.inputs.recordings import shown as tensors_of
from support.running.covering import WHOLE
from support.worlds import fake_sglang
from support.worlds.attached_engines import EVERY, SMALL, A, B, accepted, attached, events, facts, judged
from support.worlds.fake_sglang import Model, Served

pytestmark = pytest.mark.slow

ROOTS = [str(Path(root).absolute()) for root in ("reference", "optimized", "harness", "tests")]


@pytest.fixture(scope="module")
def model() -> fake_sglang.Model:
    return fake_sglang.Model(SMALL)


@pytest.fixture
def engine(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that makes a fake engine of a release, which records itself to `tmp_path/recording`."""
    with ExitStack() as until:

        def make(release: str, options: dict[str, Any] | None = EVERY, renamed: bool = False, **named: Any) -> Served:
            monkeypatch.setattr(sglang, "_loaded", False)
            until.enter_context(fake_sglang.imported(fake_sglang.write(tmp_path, release, renamed=renamed)))
            until.enter_context(torch.inference_mode())
            if options is not None:
                until.enter_context(room.recording(tmp_path / "recording", **options))
            __import__("sglang.srt.managers.scheduler")
            return Served(model, release, SMALL, **named)

        yield make


def serve(served: Served) -> None:
    """Chunks, a sampled request, one with an adapter, two step switches, a retraction, a prefix hit, and 0 steps."""
    served.request("a", A, 14)
    served.request("b", B, 12)
    served.request("c", B, 6)
    served.request("sampled", b"xyz", 4, top_k=5)
    served.request("adapted", b"xyz", 1, lora_id="theirs")
    served.prefill("a", tokens=6)
    served.prefill("a", "b", "sampled", "adapted")
    served.verify(4, a=3, b=1, sampled=0)
    served.verify(4, a=0, b=2, sampled=0)
    served.verify(2, a=1, b=0, sampled=0)
    served.retract("b")
    served.prefill("c", cached=8)
    served.verify(1, a=0, c=0)
    served.prefill("b")
    served.verify(4, a=1, b=3, c=0)
    served.verify(4, a=3, b=3, c=1)
    served.verify(4, b=3, c=2)
    served.settle()


def shown(tmp_path: Path) -> dict[int, set[str]]:
    """The names of the tensors of every event that has some."""
    found = {}
    for file in sorted((tmp_path / "recording" / "tensors").iterdir()):
        with safe_open(str(file), framework="pt") as stored:
            found[int(file.stem)] = set(stored.keys())
    return found


def kinds(tmp_path: Path) -> list[str]:
    return [one["event"] for one in events(tmp_path)]


# recordings that are right


@pytest.mark.parametrize(("release", "how"), [
    pytest.param("0.5.12", {"speaks_v1": True}, id="worker v1", marks=WHOLE), pytest.param("0.5.13", {}, marks=WHOLE),
    pytest.param("0.5.14", {"overlap": True}, id="overlap", marks=WHOLE),
    pytest.param("0.5.19", {"overlap": True}, marks=WHOLE),
    pytest.param("0.5.16", {"ring": 16}, id="ring", marks=WHOLE),
    pytest.param("0.5.23", {"ring": 16, "overlap": True}, id="ring by row"),
])  # fmt: skip
def test_a_right_engine_agrees(engine: Callable[..., Any], tmp_path: Path, release: str, how: dict[str, Any]) -> None:
    serve(engine(release, **how))
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED, found.replay and found.replay.verdict.findings
    assert facts(tmp_path) == {"missing": {}, "stopped": "", "written": 11, "dropped": 0, "left_out": 1}
    said = accepted(tmp_path)
    # with overlap the round that was in flight when b lost its memory has no result of b
    assert said == {"a": [3, 0, 1, 1, 3], "b": [1, 2, 3, 3] if how.get("overlap") else [1, 2, 0, 3], "c": [0, 1, 2],
                    "sampled": [0, 0, 0]}  # fmt: skip
    assert {text.request: len(text.said) for text in found.told.texts if text.given} == {"sampled": 4}
    assert found.tokens.ties.made == sum(len(text.said) for text in found.told.texts) - 4
    assert [one["num_steps"] for one in events(tmp_path) if one["event"] == "set_num_steps"] == [3, 1, 0, 3]
    assert found.told.windows == sum(map(len, said.values()))


@pytest.mark.parametrize(("release", "overlap", "wrong", "says"), [
    pytest.param("0.5.14", False, 4, "steps stay 3; the controller sglang-0.5.14 requests 1", marks=WHOLE),
    pytest.param("0.5.13", False, 4, "steps stay 3; the controller sglang-0.5.13 requests 1", marks=WHOLE),
    ("0.5.23", True, 2, "steps 3 -> 1; the controller sglang-0.5.14 requests 3"),
])  # fmt: skip
@pytest.mark.parametrize("right", [True, False])
def test_step_counts_are_judged_by_the_engines_own_controller(
    engine: Callable[..., Any], tmp_path: Path, right: bool, release: str, overlap: bool, wrong: int, says: str
) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps({"1": {"candidate_steps": [1, 3], "ema_alpha": 1.0, "update_interval": 1,
                                      "warmup_batches": 0, "down_hysteresis": 0.0}}))  # fmt: skip
    served = engine(release, overlap=overlap, adaptive=file)
    served.request("a", A, 20)
    served.request("b", B, 5)  # over after its first round: with overlap its row is in the second one, too
    served.prefill("a", "b")
    # Without overlap: 3, 3 after an average of 3, 1 after one of 0, 3. With overlap one round later, and the ended row
    # of b keeps the average of the second round at 1.5.
    rounds = [(4, 3, 3), (4, 0, 3), (4, 0, None), (4, 0, None), (2, 1, None)] if overlap else [
        (4, 3, 3), (4, 0, None), (2, 1, None), (4, 3, None)]  # fmt: skip
    for number, (width, a, b) in enumerate(rounds):
        if not right and number == 2:
            width = wrong
        served.verify(width, a=min(a, width - 1), **({} if b is None else {"b": b}))
    served.settle()
    found = judged(tmp_path)
    steps = [one for one in found.verdict.compared if one.check == "step counts"]
    assert len(steps) == len(rounds) == found.rounds
    if right:
        assert found.exit is Exit.AGREED, (found.verdict.findings, found.replay and found.replay.verdict.findings)
    else:
        first = next(one for one in steps if not one.agrees)
        assert found.exit is Exit.DIVERGED and first.diagnosis.startswith(says)


def test_logits_and_final_rows_are_judged(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("0.5.14", {"logits": True, "final": True})
    served.request("a", A, 5)
    served.prefill("a", tokens=6)
    served.prefill("a")
    served.verify(3, a=1)
    served.decode("a")
    served.verify(1, a=0)
    served.settle()
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED and found.recorded.shows == ("final", "logits", "states")
    assert {one.place.component for one in found.replay.verdict.compared} >= {"logits", "final"}


def test_slots_and_rows_are_those_of_the_engine(engine: Callable[..., Any], tmp_path: Path) -> None:
    serve(engine("0.5.14"))
    found = lines(tmp_path / "recording" / "batches.jsonl")
    assert found[1]["batch"] == 4 and found[1]["rows"] == {"a": 0, "b": 1, "sampled": 2}, "the fourth has an adapter"
    assert found[1]["slots"] == {"a": 3, "b": 5, "sampled": 7}, "rows 7 to 5, which have the slots 2 * (8 - row) + 1"
    names = kinds(tmp_path)
    assert all(names[one["event"]] in ("forward", "commit") for one in found)


# recordings that are wrong


@pytest.mark.parametrize("how", [pytest.param({"overlap": True}, id="overlap", marks=WHOLE), {"ring": 16}])
def test_a_wrong_commit_is_named(engine: Callable[..., Any], tmp_path: Path, how: dict[str, Any]) -> None:
    served = engine("0.5.16", wrong=1, **how)
    serve(served)
    found = judged(tmp_path, first=True)
    assert found.exit is Exit.DIVERGED
    first = next(one for one in found.replay.verdict.findings if one.place.component == "state")
    commits = [number for number, kind in enumerate(kinds(tmp_path)) if kind == "commit"]
    assert (first.event, first.request, first.place.layer, first.slot) == (commits[1], "a", 0, 3)
    assert "holds the state from before the step; 1 token was accepted" in first.diagnosis


@pytest.mark.parametrize(("wrong", "options", "exit"), [
    (None, EVERY, Exit.AGREED), (1, EVERY, Exit.DIVERGED), (None, {"triggers": [], "every": 0}, Exit.INCONCLUSIVE),
    (None, {"triggers": ["prefix"], "every": 0}, Exit.INCONCLUSIVE),
], ids=["right", "wrong", "no states", "no cause"])  # fmt: skip
def test_a_request_that_samples_is_judged_by_its_states(
    engine: Callable[..., Any], tmp_path: Path, wrong: int | None, options: dict[str, Any], exit: Exit
) -> None:
    served = engine("0.5.23", options, wrong=wrong)
    served.request("sampled", A, 8, top_k=5)
    served.prefill("sampled")
    for right in (2, 1, 0):
        served.verify(4, sampled=right)
    served.settle()
    found = judged(tmp_path)
    assert found.exit is exit and found.tokens.ties.made == 0 and accepted(tmp_path) == {"sampled": [2, 1, 0]}
    if wrong:
        first = next(one for one in found.replay.verdict.findings if one.place.component == "state")
        assert "holds the state after 1 token; 2 tokens were accepted" in first.diagnosis


def of_two_ranks(engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, wrong: int | None = None) -> None:
    """Serve once for each rank, as its process does. wrong: the commit that rank 1 makes for one token too few"""
    for name, value in (("is_initialized", lambda: True), ("get_world_size", lambda: 2)):
        monkeypatch.setattr(torch.distributed, name, value)
    for rank in range(2):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        serve(engine("0.5.23", {**EVERY, "run": "monday"}, rank=rank, ranks=2, wrong=wrong if rank else None))


def test_ranks_of_tensor_parallelism_are_one_recording(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two_ranks(engine, monkeypatch)
    assert sorted(one.name for one in (tmp_path / "recording").iterdir()) == ["rank-0", "rank-1"]
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED, found.replay and found.replay.verdict.findings
    assert found.told.windows == 15 and found.replay.verdict.elements > 90_000


def test_a_wrong_commit_of_one_rank_is_named(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_two_ranks(engine, monkeypatch, wrong=1)
    found = judged(tmp_path, first=True)
    first = next(one for one in found.replay.verdict.findings if one.place.component == "state")
    assert found.exit is Exit.DIVERGED and (first.request, first.rank, first.head) == ("a", 1, 2)
    assert "holds the state from before the step; 1 token was accepted" in first.diagnosis


def test_processes_that_are_not_only_ranks_have_a_recording_each(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With data-parallel attention every process has all heads, and other requests."""
    for name, value in (("is_initialized", lambda: True), ("get_world_size", lambda: 2), ("get_rank", lambda: 1)):
        monkeypatch.setattr(torch.distributed, name, value)
    served = engine("0.5.23")
    vars(served.scheduler.server_args).update(tp_size=2, enable_dp_attention=True)
    serve(served)
    assert [one.name for one in (tmp_path / "recording").iterdir()] == ["process1"]
    assert audit(tmp_path / "recording" / "process1", SMALL).exit is Exit.AGREED


@pytest.mark.parametrize(("how", "expected"), [
    ({}, 4), ({"pp_size": 2}, 1), ({"attn_cp_size": 2}, 1), ({"attn_dp_size": 4}, 1), ({"attn_dp_size": 1}, 4),
    ({"enable_dp_attention": True}, 1),
])  # fmt: skip
def test_only_tensor_parallelism_has_ranks(how: dict[str, Any], expected: int) -> None:
    arguments = {"tp_size": 4, "pp_size": 1, "attn_cp_size": 1, "enable_dp_attention": False} | how
    assert sglang.ranks_of(SimpleNamespace(**arguments)) == expected


# the selection


def test_two_layers_are_written_around_a_step_switch(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("0.5.14", {})
    served.request("a", A, 17)
    served.prefill("a")
    for width in (4, 4, 4, 4, 2, 2, 2, 2):
        served.verify(width, a=1)
    served.settle()
    commits = [number for number, kind in enumerate(kinds(tmp_path)) if kind == "commit"]
    assert sorted(shown(tmp_path)) == commits[2:6], "two before the switch, the one after it, and one more"
    assert shown(tmp_path)[commits[4]] == {"slot.a", "conv.a.0", "state.a.0", "conv.a.2", "state.a.2"}
    assert judged(tmp_path).exit is Exit.AGREED


@pytest.mark.parametrize(("lacks", "message"), [
    ("state.a.2", "state.a.2: found nothing, expected shape"),
    ("layers", "attached.layers: found .3., expected some of"),
])  # fmt: skip
def test_a_damaged_selection_is_refused(engine: Callable[..., Any], tmp_path: Path, lacks: str, message: str) -> None:
    served = engine("0.5.14", {"every": 1})
    served.request("a", A, 3)  # its end ends the recording
    served.prefill("a")
    served.verify(4, a=1)
    served.settle()
    made = tmp_path / "recording"
    if lacks == "layers":
        stated(made, attached=attached(tmp_path) | {"layers": [3]})
    else:
        number = max(shown(tmp_path))
        kept = {name: one for name, one in tensors_of(made, number).items() if name != lacks}
        save_file(kept, made / "tensors" / f"{number:06d}.safetensors")
    with pytest.raises(BadInput, match=message):
        judged(tmp_path)


@pytest.mark.parametrize(("triggers", "written"), [([], 0), (["prefix"], 4), (["retraction"], 4), (["switch"], 8)])
def test_triggers_are_chosen(engine: Callable[..., Any], tmp_path: Path, triggers: list[str], written: int) -> None:
    served = engine("0.5.14", {"triggers": triggers, "every": 0})
    serve(served)
    found = attached(tmp_path)
    assert (found["written"], found["triggers"]) == (written, triggers)
    assert found["written"] + found["dropped"] <= 11 and len(shown(tmp_path)) == written
    assert (found["dropped"] == 0 and "no trigger" in found["no_states"]) == (not triggers)
    if written:
        assert f"dropped at {found['dropped']}" in opened(tmp_path / "recording").notes[-1]


def test_every_nth_event_is_written(engine: Callable[..., Any], tmp_path: Path) -> None:
    serve(engine("0.5.14", {"triggers": [], "every": 3, "requests": ["b"]}))
    names = set.union(*shown(tmp_path).values())
    assert len(shown(tmp_path)) == 2 and {name.split(".")[1] for name in names} == {"b"}
    assert judged(tmp_path).exit is Exit.AGREED


def test_a_retracted_request_is_recorded_again_with_its_text(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("0.5.14", overlap=True)
    serve(served)
    found = [one for one in events(tmp_path) if one.get("request") == "b"]
    assert [one["event"] for one in found] == ["admit", "abort", "admit", "finish"]
    assert found[2]["prompt"][: len(found[0]["prompt"])] == found[0]["prompt"] == list(B)
    assert len(found[2]["prompt"]) > len(B)


# the engine goes on


def test_the_engine_goes_on_when_a_hook_fails(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Any, runner: Any, now: Any) -> None:
        if len(self.live) and now.verify and self.with_states > 2:
            raise RuntimeError("no memory for a copy")

    take = sglang.SglangRecorder._take
    monkeypatch.setattr(sglang.SglangRecorder, "_take", lambda *given: (fails(*given), take(*given)))
    served = engine("0.5.14")
    serve(served)
    assert all(len(one.output_ids) >= one.limit for one in served.requests.values())
    assert "no memory for a copy (test_attach.py:" in attached(tmp_path)["stopped"]
    assert "recording stopped: RuntimeError" in capsys.readouterr().err
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED and "the recorder stopped: RuntimeError" in found.recorded.notes[1]


def test_an_exception_of_the_engine_passes_through(engine: Callable[..., Any]) -> None:
    served = engine("0.5.14")
    served.request("a", A, 4)
    served.runner.compute = lambda batch: (_ for _ in ()).throw(ZeroDivisionError("the engine's own"))
    with pytest.raises(ZeroDivisionError, match="the engine's own"):
        served.prefill("a")


def test_nothing_is_hooked_without_the_variable(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(room.ENV, raising=False)
    served = engine("0.5.14", None)
    sglang.load()
    assert served.at["plugins/hook_registry"].HookRegistry.hooks == [] and not sglang._loaded
    serve(served)
    assert not (tmp_path / "recording").exists()


def test_an_unknown_release_records_what_it_can(engine: Callable[..., Any], tmp_path: Path) -> None:
    serve(engine("0.5.99", renamed=True))
    told = attached(tmp_path)
    assert told["names"] == "0.5.23" and "commit_mamba_states_after_verify" in told["missing"]["commit"]
    assert "state.a.0" in set.union(*shown(tmp_path).values()), "the states of prefills are there"
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED and any("no commit that the recorder knows" in one for one in found.recorded.notes)


def test_trees_stop_the_recording(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("0.5.14")
    fake_sglang.TOPK = 4
    try:
        served.request("a", A, 6)
        served.prefill("a")
        served.verify(4, a=1)
        served.settle()
    finally:
        fake_sglang.TOPK = 1
    assert "trees of drafts are not recorded" in attached(tmp_path)["stopped"]


# the environment


def test_the_recorder_imports_nothing_else_of_instep(tmp_path: Path) -> None:
    program = ("import sys\n"
               "from importlib import import_module\n"
               "for engine in ('vllm', 'sglang'):\n"
               "    import_module('instep.attach.' + engine).load()\n"
               "    print(sorted(name for name in sys.modules if name.split('.')[0] == 'instep'))\n"
               "print(sorted({name.split('.')[0] for name in sys.modules} & "
               "{'triton', 'instep_optimized', 'instep_reference', 'typer', 'rich', 'msgspec', 'numpy', 'sglang', "
               "'vllm'}))")
    with room.attached(Options(str(tmp_path)), {}, elsewhere=True) as changed:
        assert not os.path.exists(os.path.join(changed["PYTHONPATH"], "instep", "cli"))
        done = subprocess.run([sys.executable, "-c", program], env=os.environ | changed, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    of_vllm, both, foreign = map(eval, done.stdout.splitlines())
    assert set(foreign) <= {"numpy"}, "torch itself imports numpy"
    parts = ("device_states", "recorder", "releases", "vllm", "vllm_names")
    assert of_vllm == ["instep", "instep.attach", *(f"instep.attach.{one}" for one in parts), "instep.audit",
                       "instep.audit.write"]
    assert {*both} - {*of_vllm} == {f"instep.attach.sglang{one}" for one in ("", "_names")}


def test_the_command_starts_the_engine_with_the_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "theirs")
    program = ("import os, json, sys; from importlib.metadata import entry_points; "
               "found = [one.value for one in entry_points(group='sglang.srt.plugins') if one.name == 'instep']; "
               "json.dump([found, os.environ['SGLANG_PLUGINS'], json.loads(os.environ['INSTEP_ATTACH'])], "
               "open(sys.argv[1], 'w')); sys.exit(5)")
    seen = tmp_path / "seen.json"
    with pytest.raises(typer.Exit) as left:
        attach("sglang", [sys.executable, "-c", program, str(seen)], tmp_path / "recording", layers="0,2", every=7)
    assert left.value.exit_code == 3, "nothing was recorded"
    found, plugins, options = json.loads(seen.read_text())
    assert found == ["instep.attach.sglang:load"] and plugins == "theirs,instep"
    assert options["layers"] == [0, 2] and options["every"] == 7 and options["folder"] == str(tmp_path / "recording")
    said = capsys.readouterr().err
    assert "ended with code 5" in said and "nothing was recorded" in said


def test_the_command_prints_one_audit_for_all_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        (tmp_path / "r" / f"rank-{rank}").mkdir(parents=True)
        (tmp_path / "r" / f"rank-{rank}" / "recording.json").write_text("{}")
    assert report(tmp_path / "r", ["serve"], 0) == 0
    assert f"next: instep audit {tmp_path / 'r'} --model" in capsys.readouterr().out
    with pytest.raises(BadInput, match="which has a recording"):
        attach("sglang", ["true"], tmp_path / "r")


@pytest.mark.whole
def test_the_command_prints_where_the_recording_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
               "from pathlib import Path\nfrom support.worlds import fake_sglang\n"
               "import sglang.srt.managers.scheduler\n"
               f"model = fake_sglang.Model(Path({str(SMALL.absolute())!r}))\n"
               "served = fake_sglang.Served(model, '0.5.14', Path('nowhere'))\n"
               "served.request('a', b'Return the', 4)\nserved.prefill('a')\nserved.verify(4, a=3)\nserved.settle()")
    fake_sglang.write(tmp_path, "0.5.14")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(ROOTS))
    with pytest.raises(typer.Exit) as left:
        attach("sglang", [sys.executable, "-c", program], folder=tmp_path / "recording", layers="all", every=1)
    said = capsys.readouterr().out
    assert left.value.exit_code == 0 and f"recorded  {tmp_path / 'recording'}" in said
    assert f"next: instep audit {tmp_path / 'recording'} --model" in said
    assert judged(tmp_path).exit is Exit.AGREED


@pytest.mark.parametrize(("given", "message"), [
    ({"engine": "tgi"}, "expected one of sglang, vllm"), ({"layers": "x"}, "expected numbers"),
    ({"triggers": "switches"}, "expected some of switch"), ({"command": ["no-such-program"]}, "No such file"),
])  # fmt: skip
def test_the_command_refuses_bad_input(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        attach(**{"engine": "sglang", "command": ["true"], "folder": tmp_path} | given)


def test_options_survive_the_environment() -> None:
    options = Options("/tmp/x", layers=(), requests=("a",), triggers=("switch",), logits=True)
    assert options_in({room.ENV: options.spelled()}) == options
    assert options_in({room.ENV: "/tmp/x"}) == Options("/tmp/x") and options_in({}) is None
    with pytest.raises(ValueError, match="unknown options colour"):
        options_in({room.ENV: '{"folder": "x", "colour": 1}'})


def test_every_release_has_names() -> None:
    assert len(RELEASES) == 12 and sglang.names_of("0.5.12.post1") == (RELEASES["0.5.12"], "0.5.12")
    assert sglang.names_of("0.6.0")[1] == "0.5.23" and sglang.names_of("0.4.1")[1] == "0.5.12"

"""`instep attach vllm`: a fake vLLM records itself with both model runners, and `instep audit` judges the recording.

Leaves out: the names of released engines (`test_attach_cost.py`), and what recorders share (`test_attach.py`).
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import instep.attach as room
from instep.attach import vllm
from instep.attach.recorder import Chooses
from instep.attach.vllm import places, window
from instep.verdict import Exit
from instep_reference.contract.checkpoint import OnDisk
from peers.live import bundle_vllm
from support.inputs.recordings import lines
from support.running.covering import WHOLE
from support.worlds import fake_vllm
from support.worlds.attached_engines import EVERY, SMALL, A, B, accepted, attached, events, facts, judged
from support.worlds.fake_sglang import Model
from support.worlds.fake_vllm import Served

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(SMALL)


@pytest.fixture
def engine(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A function that makes a fake engine of a release, which records itself to `tmp_path/recording`."""
    with ExitStack() as until:

        def make(runner: str, options: dict[str, Any] = EVERY, release: str = "0.33.0", **named: Any) -> Served:
            monkeypatch.setattr(vllm, "_loaded", False)
            at = until.enter_context(fake_vllm.imported(release))
            until.enter_context(torch.inference_mode())
            until.enter_context(room.recording(tmp_path / "recording", **options))
            return Served(at, model, SMALL, runner, **named)

        yield make


def serve(served: Served) -> None:
    """Chunks next to windows, windows of two widths, a decode, a preemption, a prefix hit, and a request that samples.

    Another one has an adapter.
    """
    served.request("a", A, 14)
    served.request("b", B, 12)
    served.request("c", B, 6)
    served.request("sampled", b"xyz", 5, temperature=0.7)
    served.request("adapted", b"xyz", 1, lora="theirs")
    served.step(prefill={"a": 6})
    served.step(prefill={"a": 4, "sampled": 3, "adapted": 3})
    served.step(verify={"a": (4, 3)}, prefill={"b": 9})
    served.step(prefill={"b": 6}, verify={"a": (4, 0)}, decode=["sampled"])
    served.step(verify={"b": (4, 1), "a": (4, 1)})
    served.step(verify={"a": (2, 1), "b": (2, 0)})
    served.preempt("b")
    served.step(prefill={"c": 7}, cached=8, verify={"a": (2, 0)})
    served.step(prefill={"b": len(served._told("b"))}, decode=["c"])
    served.step(verify={"b": (4, 3), "c": (4, 3)})
    served.step(verify={"a": (4, 3), "b": (4, 3)})
    served.idle()


@pytest.mark.parametrize(("runner", "how"), [
    ("v1", {}), pytest.param("v1", {"dims_first": True}, marks=WHOLE),
    pytest.param("v2", {"dims_first": True, "overlap": True}, marks=WHOLE),
])  # fmt: skip
def test_a_right_vllm_agrees(engine: Callable[..., Any], tmp_path: Path, runner: str, how: dict[str, bool]) -> None:
    serve(engine(runner, **how))
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED, found.replay and found.replay.verdict.findings
    assert facts(tmp_path) == {"missing": {}, "stopped": "", "written": 10, "dropped": 0, "left_out": 1}
    said = accepted(tmp_path)
    assert said == {"a": [3, 0, 1, 1, 0, 3], "b": [1, 0, 3, 3], "c": [3]}
    assert {text.request: len(text.said) for text in found.told.texts if text.given} == {"sampled": 2}
    assert found.told.windows == sum(map(len, said.values()))
    kinds = [one["event"] for one in events(tmp_path)]
    assert kinds.count("finish") == 3 and kinds.count("abort") == 1, "the idle step ends the requests"


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_a_preempted_request_that_samples_is_recorded_again(
    engine: Callable[..., Any], tmp_path: Path, runner: str
) -> None:
    """The runner V1 gets no sampling parameters when it resumes. Its states are right; a wrong one is found."""
    served = engine(runner, wrong=3)
    served.request("sampled", A, 9, temperature=0.7)
    served.step(prefill={"sampled": 10})
    served.step(verify={"sampled": (4, 1)})
    served.preempt("sampled")
    served.step(prefill={"sampled": 13})
    served.step(verify={"sampled": (4, 3)})
    served.step(verify={"sampled": (4, 1)})
    served.idle()
    assert [one["given"] for one in events(tmp_path) if one["event"] == "admit"] == [True, True]
    found = judged(tmp_path)
    wrong = [one.event for one in found.replay.verdict.findings if one.place.component == "state"]
    commits = [number for number, one in enumerate(events(tmp_path)) if one["event"] == "commit"]
    assert found.exit is Exit.DIVERGED and min(wrong) == commits[1] and found.tokens.ties.made == 0


@pytest.mark.parametrize(("how", "expected"), [
    ({}, "ARGMAX"), ({"temperature": 0.7}, "GIVEN"), ({"repetition_penalty": 1.1}, "GIVEN"),
    ({"bad_words": ["x"]}, "GIVEN"), ({"thinking_token_budget": 9}, "GIVEN"), ({"structured_outputs": {}}, "ARGMAX"),
    ({"structured_outputs": {"regex": "x"}}, "BY_MORE"),
])  # fmt: skip
def test_tokens_of_parameters_that_change_the_choice_are_given(how: dict[str, Any], expected: str) -> None:
    params = SimpleNamespace(temperature=0, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, min_tokens=0)
    vars(params).update(how)
    new = SimpleNamespace(sampling_params=params, pooling_params=None, lora_request=None, mm_features=[],
                          prompt_embeds=None)  # fmt: skip
    assert vllm.chooses(new) is Chooses[expected]
    for other in ({"lora_request": "x"}, {"mm_features": ["x"]}, {"prompt_embeds": "x"}, {"pooling_params": "x"}):
        assert vllm.chooses(SimpleNamespace(**vars(new) | other)) is Chooses.BY_MORE


def test_states_are_written_at_the_event_of_each_request(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("v1")
    served.request("a", A, 8)
    served.request("b", B, 8)
    served.step(prefill={"a": 10})
    served.step(verify={"a": (4, 1)}, prefill={"b": 9})
    served.step(prefill={"b": 6}, verify={"a": (4, 1)})
    served.idle()
    batches = lines(tmp_path / "recording" / "batches.jsonl")
    assert [(one["batch"], one["rows"]) for one in batches] == [
        (1, {"a": 0}), (2, {"b": 1}), (2, {"a": 0}), (2, {"b": 1}), (2, {"a": 0})]
    kinds = [one["event"] for one in events(tmp_path)]
    assert [kinds[one["event"]] for one in batches] == ["forward", "forward", "commit", "forward", "commit"]
    blocks = served.requests["a"].blocks
    assert batches[2]["slots"] == {"a": blocks[1]}, "one draft was accepted: the second block"
    assert batches[1]["slots"] == {"b": served.requests["b"].blocks[0]}
    assert judged(tmp_path).exit is Exit.AGREED


@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=WHOLE)])
def test_wrong_blocks_are_named(engine: Callable[..., Any], tmp_path: Path, runner: str) -> None:
    serve(engine(runner, wrong=4))
    found = judged(tmp_path, first=True)
    assert found.exit is Exit.DIVERGED
    first = next(one for one in found.replay.verdict.findings if one.place.component == "state")
    commits = [number for number, one in enumerate(events(tmp_path)) if one["event"] == "commit"]
    assert (first.event, first.request, first.place.layer) == (commits[2], "b", 0)
    assert "holds the state after 1 token; 2 tokens were accepted" in first.diagnosis


def test_logits_and_final_rows_of_a_mixed_batch_are_judged(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("v1", {**EVERY, "logits": True, "final": True})
    served.request("a", A, 8)
    served.request("b", B, 8)
    served.step(prefill={"a": 10})
    served.step(prefill={"b": 9}, verify={"a": (4, 2)})
    served.step(verify={"a": (4, 1)}, prefill={"b": 6})
    served.idle()
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED and found.recorded.shows == ("final", "logits", "states")


def test_the_rounding_of_cpu_kernels_is_declared(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("v1", dtype=torch.bfloat16)
    served.request("a", A, 4)
    served.step(prefill={"a": 10})
    stated = json.loads((tmp_path / "recording" / "recording.json").read_text())
    assert stated["rounds"] == dict.fromkeys(("beta", "q", "k"), "bfloat16") and stated["layout"] == "KV"
    assert stated["products"].keys() == {"conv", "gdn.chunk"}


def test_a_padded_end_of_a_prompt_is_recorded_without_its_padding(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("v2", {**EVERY, "logits": True})
    served.request("a", A, 8)
    served.step(prefill={"a": 9})
    served.step(prefill={"a": 1}, padded=["a"])
    served.step(verify={"a": (4, 2)})
    served.idle()
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED, found.replay and found.replay.verdict.findings
    rows = [row for one in events(tmp_path) if one["event"] == "forward" for row in one["rows"]]
    assert [(row["kind"], row.get("tokens")) for row in rows] == [("prefill", 9), ("prefill", 1), ("verify", None)]


TABLE = [(3, 4, 1), (1, 2, 3)]


@pytest.mark.parametrize(("how", "widths", "says"), [
    ({"table": TABLE}, (4, 2, 2, 4), None),
    ({"table": TABLE}, (4, 4, 2, 4), "steps stay 3; the controller vllm-table requests 1"),
    pytest.param({}, (4, 4, 2, 4), "steps 3 -> 1; the controller constant requests 3", marks=WHOLE),
    pytest.param({"table": TABLE}, (4, 2, 4, 4), "steps 1 -> 3; the controller vllm-table requests 1", marks=WHOLE),
    pytest.param({"table": TABLE}, (4, 2, 2, 2), "steps stay 1; the controller vllm-table requests 3", marks=WHOLE),
    pytest.param({"table": TABLE, "overlap": True}, (4, 2, 2, 4), None, marks=WHOLE),
    pytest.param({}, (4, 4, 4, 4), None, marks=WHOLE),
])  # fmt: skip
@pytest.mark.parametrize("runner", ["v1", pytest.param("v2", marks=WHOLE)])
def test_the_number_of_drafts_of_vllm_is_judged_by_its_table(
    engine: Callable[..., Any], tmp_path: Path, runner: str, how: dict[str, Any], widths: tuple[int, ...],
    says: str | None,
) -> None:
    served = engine(runner, method="mtp", **how)
    for name, prompt in (("a", A), ("b", B), ("c", A)):
        served.request(name, prompt, 20)
    served.request("sampled", b"xyz", 3, temperature=0.7)
    served.step(prefill={"a": 10, "b": 4})  # two rows: 3 drafts, of a alone, as b is in its prompt
    served.step(verify={"a": (widths[0], 1)}, prefill={"b": 11, "sampled": 3})  # three rows: 1 draft
    served.step(verify={"a": (widths[1], 0), "b": (widths[1], 1), "sampled": (2, 0)})  # three rows
    served.step(verify={"a": (widths[2], 0), "b": (widths[2], 1)})  # two rows
    served.step(verify={"a": (widths[3], 0), "b": (2, 0)}, prefill={"c": 10})  # one window is narrower
    served.idle()
    found = judged(tmp_path)
    steps = [one for one in found.verdict.compared if one.check == "step counts"]
    assert len(steps) == found.rounds == 4, "a row that comes out of its prompt shows a count, too"
    wrong = [one.diagnosis for one in steps if not one.agrees]
    assert found.exit is (Exit.AGREED if says is None else Exit.DIVERGED)
    assert wrong[:1] == ([] if says is None else [says])


def test_windows_that_vllm_cuts_are_not_judged(engine: Callable[..., Any], tmp_path: Path) -> None:
    served = engine("v1", method="mtp", longest=24)
    served.request("a", A, 9)
    served.step(prefill={"a": 10})
    served.step(verify={"a": (4, 1)})  # 14 tokens, and room for two windows of 4
    served.step(verify={"a": (4, 3)})  # 16
    served.step(verify={"a": (2, 0)})  # no room: its count says nothing, nor does the next one
    served.step(verify={"a": (2, 0)})
    served.idle()
    found = judged(tmp_path)
    assert found.exit is Exit.AGREED and found.rounds == 2
    stated = [one for line in lines(tmp_path / "recording" / "batches.jsonl") for one in line.get("rounds", ())]
    assert [one["steps"] for one in stated] == [None, 3, 3, None, None]


def test_a_method_that_proposes_as_many_as_it_finds_is_not_judged(engine: Callable[..., Any], tmp_path: Path) -> None:
    serve(engine("v1"))
    assert judged(tmp_path).rounds is None


def test_an_unknown_release_of_vllm_records_what_it_can(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(fake_vllm.RunnerV1, "_build_attention_metadata")
    monkeypatch.setattr(fake_vllm.RunnerV1, "execute_model", renamed(fake_vllm.RunnerV1.execute_model))
    serve(engine("v1", release="0.99.1"))
    told = attached(tmp_path)
    assert told["names"] == "0.33.0" and "RunnerV1 has no _build_attention_metadata" in told["missing"]["prepared"]
    assert told["stopped"] == "" and told["no_states"] == "no recurrent layer that was chosen"
    assert judged(tmp_path).exit is Exit.AGREED, "the tokens are there"


def renamed(original: Any) -> Any:
    def execute_model(self: Any, scheduled: Any) -> Any:
        self._build_attention_metadata = lambda metadata: (metadata, None)
        return original(self, scheduled)

    return execute_model


def test_vllm_goes_on_when_a_hook_fails(
    engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Any, now: Any, lengths: torch.Tensor) -> None:
        raise RuntimeError("no memory for a copy")

    monkeypatch.setattr(vllm.VllmRecorder, "_take", fails)
    served = engine("v1")
    serve(served)
    unfinished = [name for name, one in served.requests.items() if len(one.output_token_ids) < one.limit]
    assert unfinished == ["sampled"], "no step of the test lets it end"
    assert "no memory for a copy" in attached(tmp_path)["stopped"]
    assert "recording stopped: RuntimeError" in capsys.readouterr().err


def test_an_exception_of_vllm_passes_through(engine: Callable[..., Any]) -> None:
    served = engine("v1")
    served.request("a", A, 4)
    served.run = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        served.step(prefill={"a": 4})


def test_no_worker_is_hooked_without_the_variable(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(room.ENV, raising=False)
    monkeypatch.setattr(vllm, "_loaded", False)
    with fake_vllm.imported("0.33.0") as at:
        vllm.load()
        serve(Served(at, model, SMALL))
    assert not vllm._loaded and not (tmp_path / "recording").exists()


def test_places_follow_the_mask_of_windows() -> None:
    metadata = type("Metadata", (), {
        "spec_sequence_masks": torch.tensor([False, True, False, True, False]),  # padded for a graph
        "spec_state_indices_tensor": torch.tensor([[10, 11, 12], [20, 21, 22], [0, 0, 0]], dtype=torch.int32),
        "non_spec_state_indices_tensor": torch.tensor([7, 8], dtype=torch.int32)})  # fmt: skip
    found = places(metadata, torch.tensor([1, 3, 0, 2]), 4)
    assert found.state.tolist() == [7, 12, 8, 21]
    assert found.conv.tolist() == [7, 10, 8, 20] and found.column.tolist() == [0, 2, 0, 1]


def test_a_conv_window_begins_at_its_column() -> None:
    rows = torch.arange(2 * 8 * 6).view(2, 8, 6)
    found = window(rows, torch.tensor([0, 2]), 3)
    assert torch.equal(found[0], rows[0, :, :3]) and torch.equal(found[1], rows[1, :, 2:5])
    assert torch.equal(window(rows.mT.contiguous(), torch.tensor([0, 2]), 3), found)


@pytest.mark.parametrize(("given", "expected"), [(None, None), ("", ",instep"), ("theirs", "theirs,instep")])
def test_allowed_plugins_of_vllm_get_the_recorder(tmp_path: Path, given: str | None, expected: str | None) -> None:
    environment = {} if given is None else {"VLLM_PLUGINS": given}
    with room.attached(room.Options(str(tmp_path)), environment, elsewhere=True) as changed:
        assert changed.get("VLLM_PLUGINS") == expected
        made = Path(changed["PYTHONPATH"].partition(":")[0])
        assert "[vllm.general_plugins]\ninstep = instep.attach.vllm:load" in next(
            made.glob("*.dist-info/entry_points.txt")).read_text()


def test_a_bundle_of_vllm_has_one_extension_and_says_what_it_lacks() -> None:
    names = ("vllm/v1/worker/gpu_worker.py", "vllm/_C.abi3.so", bundle_vllm.STABLE, "vllm/vllm_flash_attn/ops/x.py")
    assert [bundle_vllm.of_vllm(name) for name in names] == [True, False, True, False]
    module: dict[str, Any] = {}
    exec(bundle_vllm.EXTENSIONS["vllm_flash_attn/__init__"], module)
    assert module["is_fa_version_supported"](3) is False
    with pytest.raises(RuntimeError, match="flash_attn_varlen_func: its extension was left out"):
        module["__getattr__"]("flash_attn_varlen_func")(1)


@WHOLE
def test_a_bundle_of_vllm_has_the_small_model_as_that_release_loads_it(tmp_path: Path) -> None:
    bundle_vllm.write_model(tmp_path / "model")
    opened = OnDisk.open(tmp_path / "model")
    assert (opened.config.key_dim, opened.config.value_dim) == (64, 64)
    names = load_file(tmp_path / "model" / "model.safetensors")
    assert {name[: name.index(".", 6)] for name in names if name[:5] == "model"} == {"model.language_model"}
    # the recorded process imports it with the recorder alone, which has no commands
    subprocess.run([sys.executable, "-c", "import peers.live.bundle_vllm"], check=True, env={"PYTHONPATH": "tests"})

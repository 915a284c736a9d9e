"""Bad input through the command line: exit code 2, one clear line, no traceback, nothing written half.

Leaves out: which rule of the file or of the events found it (`test_trace.py`, `test_event_rules.py`).
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from instep.trace.file import Trace, beside, read
from instep.trace.header import SCHEMA, Part, Recording
from instep_reference.contract import engine as e
from instep_reference.contract.errors import BadInput
from support.checkpoints import write as write_checkpoint
from support.command import complaint
from support.traces import VOCAB, lines_of, policy, recorded, seal


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Trace:
    return recorded(tmp_path_factory.mktemp("bad"), policy(deeds=()))


@pytest.fixture
def trace(made, tmp_path) -> Trace:
    """A copy of a trace and its model, to be spoilt."""
    shutil.copytree(made.path.parent, tmp_path / "copy")
    return read(tmp_path / "copy" / made.path.name)


def edit(path: Path, old: bytes, new: bytes) -> None:
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))


def replayed(instep, trace: Trace) -> str:
    return complaint(instep("replay", trace.path, "--ops", "plain", "--json", trace.path.parent / "r.json"))


@pytest.fixture(autouse=True)
def nothing_is_written(request, tmp_path):
    """No refusal leaves a result, or a part of one, behind."""
    yield
    assert not list(tmp_path.rglob("r.json")) and not list(tmp_path.rglob(".whole-*"))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("experts", "said"), [
    (2**31, "mlp.gate.weight: found shape [4, 32], expected shape [2147483648, 32]"), (2**63, "num_experts"),
])  # fmt: skip
def test_more_experts_than_the_checkpoint_has(instep, tmp_path, fused, experts, said):
    model = write_checkpoint(tmp_path / "model", "moe", fused=fused)
    edit(model / "config.json", b'"num_experts": 4', b'"num_experts": %d' % experts)
    assert said in complaint(instep("generate", model, "--prompt", "a", "--json", tmp_path / "r.json"))


def test_no_such_trace(instep, tmp_path):
    assert "No such file" in complaint(instep("replay", tmp_path / "none.jsonl"))


@pytest.mark.slow
def test_a_trace_cut_anywhere(instep, trace):
    """At every end of a line, before it, and in the middle of every line."""
    text, end = trace.path.read_bytes(), 0
    for line in text.splitlines(keepends=True):
        for cut in (end, end + len(line) // 2, end + len(line) - 1):
            trace.path.write_bytes(text[:cut])
            said = replayed(instep, trace)
            assert "the trace was cut" in said or "found nothing, expected a header" in said, (cut, said)
        end += len(line)


def test_tensors_cut_anywhere(instep, trace):
    stored = beside(trace.path).read_bytes()
    for cut in (0, 7, 8, 100, len(stored) // 2, len(stored) - 1):
        beside(trace.path).write_bytes(stored[:cut])
        assert "safetensors" in replayed(instep, trace)


def test_bytes_that_are_no_text(instep, trace):
    text = trace.path.read_bytes()
    trace.path.write_bytes(text[:300] + b"\xff\xfe" + text[302:])
    assert "not UTF-8" in replayed(instep, trace)


def test_folders_and_nothing_where_files_should_be(instep, trace):
    assert "directory" in complaint(instep("replay", trace.path.parent))
    assert "expected a header" in complaint(instep("replay", "/dev/null"))
    beside(trace.path).unlink()
    assert "the tensors of the trace beside it" in replayed(instep, trace)
    beside(trace.path).mkdir()
    assert "the tensors of the trace beside it" in replayed(instep, trace)


def test_an_edited_trace(instep, trace):
    edit(trace.path, b'"event":"draft"', b'"event":"Draft"')
    assert "the trace was edited" in replayed(instep, trace)


def test_another_schema_version(instep, trace):
    lines = trace.path.read_bytes().splitlines()[:-1]
    seal(trace.path, [lines[0].replace(b'"schema":2', b'"schema":3'), *lines[1:]])
    assert "line 1: schema: found 3, expected 1 to 2; a newer instep wrote it" in replayed(instep, trace)


def test_a_trace_of_the_first_schema_is_read_and_its_drafter_is_the_recordings(trace):
    header, *lines = trace.path.read_bytes().splitlines()[:-1]
    first = json.loads(header) | {"schema": 1, "replay": [{"ops": "plain", "until": 3, "drafter": "vanilla"}]}
    del first["recording"]
    seal(trace.path, [json.dumps(first).encode(), *lines])
    found = read(trace.path).header
    assert (found.schema, found.recording) == (SCHEMA, Recording("vanilla", "float64"))
    assert found.replay == (Part("plain", 3),)
    assert found == replace(trace.header, replay=found.replay, recording=found.recording)


def test_a_trace_of_the_first_schema_has_one_drafter(trace):
    header, *lines = trace.path.read_bytes().splitlines()[:-1]
    parts = [{"ops": "ledger"}, {"ops": "plain", "drafter": "vanilla"}]
    first = json.loads(header) | {"schema": 1, "replay": parts}
    del first["recording"]
    seal(trace.path, [json.dumps(first).encode(), *lines])
    with pytest.raises(BadInput, match="the drafters eagle and vanilla, expected one for all parts"):
        read(trace.path)


def test_a_token_outside_the_vocabulary(instep, trace):
    events = [msgspec.structs.replace(trace.events[0], prompt=(3, VOCAB)), *trace.events[1:]]
    seal(trace.path, lines_of(trace.header, events))
    assert f"small.jsonl line 2: prompt[1]: found token {VOCAB}" in replayed(instep, trace)


def test_an_illegal_event(instep, trace):
    seal(trace.path, lines_of(trace.header, [e.Finish("nobody"), *trace.events]))
    assert 'line 2: request: found "nobody", which is not there' in replayed(instep, trace)


def test_a_trace_for_another_checkpoint(instep, trace):
    small = {"vocab_size": VOCAB, "num_hidden_layers": 2, "full_attention_interval": 2}
    write_checkpoint(trace.path.parent / "model", seed=1, **small)
    assert "checkpoint.digest" in replayed(instep, trace)
    write_checkpoint(trace.path.parent / "model", seed=1, **small, rms_norm_eps=1e-5)
    assert "recorded with another checkpoint" in replayed(instep, trace)


def test_no_checkpoint_where_the_trace_says(instep, trace):
    shutil.rmtree(trace.path.parent / "model")
    assert "model" in replayed(instep, trace)


def test_a_pickle_beside_the_trace(instep, trace):
    beside(trace.path).write_bytes(pickle.dumps({"weights": [1, 2, 3]}))
    assert "safetensors; nothing else is opened" in replayed(instep, trace)


def test_a_pickle_for_weights(instep, trace):
    weights = trace.path.parent / "model" / "model.safetensors"
    torch.save({"weights": torch.zeros(3)}, weights)
    assert "model.safetensors" in replayed(instep, trace)
    weights.rename(weights.with_name("pytorch_model.bin"))
    assert "pickle" in replayed(instep, trace)


def test_weights_that_are_not_numbers(instep, trace):
    weights = trace.path.parent / "model" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, weights, {"format": "pt"})
    assert "model.norm.weight: found NaN" in replayed(instep, trace)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("linear_key_head_dim", 0), ("linear_value_head_dim", 0), ("linear_num_value_heads", 3),
        ("num_attention_heads", 0), ("num_key_value_heads", 3), ("hidden_size", "many"), ("model_type", "gpt2"),
    ],
)
def test_an_impossible_configuration(instep, trace, field, value):
    file = trace.path.parent / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), field: value}))
    assert field in replayed(instep, trace)


@pytest.mark.parametrize("changes", [{"max_tokens": 3}, {"pages": (1,), "page_size": 2}])
def test_a_window_wider_than_the_pool(instep, trace, changes):
    room = msgspec.structs.replace(trace.header.capacity, **changes)
    seal(trace.path, lines_of(msgspec.structs.replace(trace.header, capacity=room), list(trace.events)))
    assert "the widest window" in replayed(instep, trace)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slots": (0, 1)}, "capacity.slots"), ({"slots": (1, 1)}, "capacity.slots"), ({"slots": ()}, "capacity.slots"),
        ({"pages": (1, 1, 2, 3)}, "capacity.pages"), ({"page_size": 0}, "capacity.page_size"),
        ({"slots": (10**12, 1)}, "fit into the memory"), ({"slots": (10**18, 1)}, "fit into the memory"),
        ({"page_size": 10**15}, "fit into the memory"), ({"pages": (10**12, *range(1, 9))}, "fit into the memory"),
    ],
)
def test_impossible_room(instep, trace, changes, said):
    room = msgspec.structs.replace(trace.header.capacity, **changes)
    seal(trace.path, lines_of(msgspec.structs.replace(trace.header, capacity=room), list(trace.events)))
    assert said in replayed(instep, trace)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (f'"vocab":{VOCAB}', '"vocab":1000', "checkpoint.vocab"), ('"mtp_layers":1', '"mtp_layers":0', "mtp_layers"),
        ('"page_size":8', f'"page_size":{10**40}', "fit into the memory"), ('"lag":0', '"lag":0.5', "lag"),
        ('"lag":0', '"lag":0,"more":1', "unknown field"), ('"until":null', '"until":-5', "at least 0"),
    ],
)
def test_a_header_that_cannot_be(instep, trace, old, new, said):
    first, *others = lines_of(trace.header, list(trace.events))
    assert old.encode() in first
    seal(trace.path, [first.replace(old.encode(), new.encode(), 1), *others])
    assert said in replayed(instep, trace)


@pytest.mark.slow
def test_a_header_without_a_plan(instep, trace):
    seal(trace.path, lines_of(msgspec.structs.replace(trace.header, replay=()), list(trace.events)))
    assert "or --ops to name it" in complaint(instep("replay", trace.path))
    assert instep("replay", trace.path, "--ops", "ledger").code == 0


def test_prompts_beside_the_trace_that_are_not_its_own(instep, trace):
    stored = load_file(beside(trace.path))
    stored["prompt.0"] = stored["prompt.0"] + 1
    save_file(stored, beside(trace.path), {"trace_sha256": trace.sha256})
    assert "prompt.0: found other tokens" in replayed(instep, trace)


def test_a_request_that_is_admitted_twice(instep, trace):
    seal(trace.path, lines_of(trace.header, [trace.events[0], *trace.events]))
    assert "line 3: request: found \"a\", expected a name that no live request has" in replayed(instep, trace)


def test_candidates_that_do_not_follow_from_the_adaptive_file(instep, trace):
    header = msgspec.structs.replace(trace.header, candidates=(1, 2, 3))
    seal(trace.path, lines_of(header, list(trace.events)))
    assert "line 1: candidates: found (1, 2, 3), expected (1, 3)" in replayed(instep, trace)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ops", "magic"), "ledger, plain, triton"), (("--dtype", "int3"), "float32"),
        (("--layout", "KVV"), "VK or KV"), (("--device", "tpu"), "cpu or cuda"),
    ],
)
def test_options_that_do_not_exist(instep, trace, words, said):
    assert said in complaint(instep("replay", trace.path, *words))


def test_a_result_that_cannot_be_written(instep, trace):
    """Refused before anything is run."""
    folder = trace.path.parent
    for where, said in (
        (folder / "no" / "folder" / "out.json", "a folder that can be written"), (folder, "the name of a file"),
        (trace.path / "out.json", "a folder that can be written"),
    ):  # fmt: skip
        ran = instep("replay", trace.path, "--ops", "ledger", "--json", where)
        assert said in complaint(ran) and not ran.out


@pytest.mark.parametrize("command", [("relations", "slots"), ("faults",)])
def test_a_result_takes_the_place_of_nothing_that_the_command_needs(instep, trace, command):
    name, *words = command
    given, outputs = [(trace.path, *words), (trace.path, beside(trace.path))] if name == "relations" else [(), ()]
    link = trace.path.with_name("link.json")
    link.symlink_to(trace.path)
    before = [path.read_bytes() for path in (trace.path, beside(trace.path))]
    for output in (*outputs, *[link] * len(outputs)):
        assert "a file of its own" in complaint(instep(name, *given, "--json", output))
    if name == "faults":
        both = ("--json", trace.path.parent / "r.svg", "--picture", trace.path.parent / "model" / ".." / "r.svg")
        assert "a file of its own" in complaint(instep(name, *both))
    assert before == [path.read_bytes() for path in (trace.path, beside(trace.path))]


def test_record_refuses_a_bad_policy_and_writes_nothing(instep, trace, tmp_path):
    (tmp_path / "prompts.json").write_text('[{"name": "few", "tokens": [1, 2, 999]}]')
    told = policy(deeds=(), arrivals=tuple(a for a in policy().arrivals if a.prompt == "few"))
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(told))
    words = ("--checkpoint", trace.path.parent / "model", "--prompts", tmp_path / "prompts.json",
             "--policy", tmp_path / "policy.json", "--out", tmp_path / "new.jsonl")
    assert "prompt[2]: found token 999" in complaint(instep("record", *words))
    (tmp_path / "prompts.json").write_text('[{"name": "few", "tokens": [1]}, {"name": "few", "tokens": [2]}]')
    assert "a name of its own" in complaint(instep("record", *words))
    (tmp_path / "prompts.json").write_bytes(b'[{"name": "\xff"}]')
    assert "not UTF-8" in complaint(instep("record", *words))
    for field, value in (("arrivals", ()), ("rounds", 0), ("accept", (-1,))):
        changed = msgspec.structs.replace(told, **{field: value})
        (tmp_path / "policy.json").write_bytes(msgspec.json.encode(changed))
        assert f"policy.json: {field}" in complaint(instep("record", *words))
    assert "the name of a file" in complaint(instep("record", *words[:-1], tmp_path))
    assert not list(tmp_path.glob("new*"))


def test_activations_that_cannot_hold_the_weights_are_refused(instep, trace):
    said = complaint(instep("replay", trace.path, "--ops", "plain", "--dtype", "bfloat16"))
    assert "dtype: found bfloat16" in said and "float32" in said and "cast the checkpoint first" in said

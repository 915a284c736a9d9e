"""Bad input through the command line: exit code 2, one clear line, no traceback, nothing written half.

Leaves out: which rule of the file or the law found it (`test_trace.py`, `test_legal.py`).
"""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.trace.file import Trace, beside, read
from instep_reference.contract import engine as e
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


def test_no_such_trace(instep, tmp_path):
    assert "No such file" in complaint(instep("replay", tmp_path / "none.jsonl"))


def test_a_cut_trace(instep, trace):
    trace.path.write_bytes(trace.path.read_bytes()[:-200])
    assert "the trace was cut" in replayed(instep, trace)


def test_an_edited_trace(instep, trace):
    edit(trace.path, b'"event":"draft"', b'"event":"Draft"')
    assert "the trace was edited" in replayed(instep, trace)


def test_another_schema_version(instep, trace):
    lines = trace.path.read_bytes().splitlines()[:-1]
    seal(trace.path, [lines[0].replace(b'"schema":1', b'"schema":2'), *lines[1:]])
    assert "line 1: schema: found 2, expected 1" in replayed(instep, trace)


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
    where = trace.path.parent / "no" / "folder" / "out.json"
    assert "a folder that can be written" in complaint(instep("replay", trace.path, "--ops", "ledger", "--json", where))


def test_record_refuses_a_bad_policy_and_writes_nothing(instep, trace, tmp_path):
    (tmp_path / "prompts.json").write_text('[{"name": "few", "tokens": [1, 2, 999]}]')
    told = policy(deeds=(), arrivals=tuple(a for a in policy().arrivals if a.prompt == "few"))
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(told))
    words = ("--checkpoint", trace.path.parent / "model", "--prompts", tmp_path / "prompts.json",
             "--policy", tmp_path / "policy.json", "--out", tmp_path / "new.jsonl")
    assert "prompt[2]: found token 999" in complaint(instep("record", *words))
    assert not list(tmp_path.glob("new*"))

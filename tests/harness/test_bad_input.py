"""Bad input through the command line: exit code 2, one clear line, no traceback, nothing written half.

Leaves out: which rule of the file or of the events found it (`test_trace.py`, `test_event_rules.py`).
"""

import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator
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
from support.inputs.checkpoints import write as write_checkpoint
from support.inputs.traces import VOCAB, lines_of, policy, recording, seal
from support.running.command import Runner, complaint
from support.running.golden import Golden, sections

Spoil = Callable[[Trace], object]


made = recording(policy(deeds=()))


@pytest.fixture
def trace(made: Trace, tmp_path: Path) -> Trace:
    """A copy of a trace and its model, to be spoilt."""
    return read(copied(made, tmp_path / "copy"))


def copied(made: Trace, folder: Path) -> Path:
    return Path(shutil.copytree(made.path.parent, folder)) / made.path.name


def edit(path: Path, old: bytes, new: bytes) -> None:
    text = path.read_bytes()
    assert old in text
    path.write_bytes(text.replace(old, new, 1))


def replayed(instep: Runner, trace: Trace) -> str:
    return complaint(instep("replay", trace.path, "--ops", "plain", "--json", trace.path.parent / "r.json"))


@pytest.fixture(autouse=True)
def nothing_is_written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """No refusal leaves a result or a partial one."""
    yield
    assert not list(tmp_path.rglob("r.json")) and not list(tmp_path.rglob(".whole-*"))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("experts", "said"), [
    (2**31, "mlp.gate.weight: found shape [4, 32], expected shape [2147483648, 32]"), (2**63, "num_experts"),
])  # fmt: skip
def test_more_experts_than_the_checkpoint_has(
    instep: Runner, tmp_path: Path, fused: bool, experts: int, said: str
) -> None:
    model = write_checkpoint(tmp_path / "model", "moe", fused=fused)
    edit(model / "config.json", b'"num_experts": 4', b'"num_experts": %d' % experts)
    assert said in complaint(instep("generate", model, "--prompt", "a", "--json", tmp_path / "r.json"))


def test_no_such_trace(instep: Runner, tmp_path: Path) -> None:
    assert "No such file" in complaint(instep("replay", tmp_path / "none.jsonl"))


@pytest.mark.slow
def test_a_trace_cut_anywhere(instep: Runner, trace: Trace) -> None:
    """At every end of a line, before it, and in the middle of every line."""
    text, end = trace.path.read_bytes(), 0
    for line in text.splitlines(keepends=True):
        for cut in (end, end + len(line) // 2, end + len(line) - 1):
            trace.path.write_bytes(text[:cut])
            said = replayed(instep, trace)
            assert "the trace was cut" in said or "found nothing, expected a header" in said, (cut, said)
        end += len(line)


def test_tensors_cut_anywhere(instep: Runner, trace: Trace) -> None:
    stored = beside(trace.path).read_bytes()
    for cut in (0, 7, 8, 100, len(stored) // 2, len(stored) - 1):
        beside(trace.path).write_bytes(stored[:cut])
        assert "safetensors" in replayed(instep, trace)


def test_missing_model_names_the_option_for_it(instep: Runner, trace: Trace) -> None:
    folder = trace.path.parent / trace.header.checkpoint.near
    shutil.rmtree(folder)
    said = complaint(instep("replay", trace.path))
    assert f"no directory {folder}" in said and "--model DIR" in said


def test_folders_and_nothing_where_files_should_be(instep: Runner, trace: Trace) -> None:
    assert "directory" in complaint(instep("replay", trace.path.parent))
    assert "expected a header" in complaint(instep("replay", "/dev/null"))
    beside(trace.path).unlink()
    assert "the tensors of the trace, next to it" in replayed(instep, trace)
    beside(trace.path).mkdir()
    assert "the tensors of the trace, next to it" in replayed(instep, trace)


def of_the_first_schema(trace: Trace, *parts: dict[str, object]) -> Path:
    """The trace as the first schema has it, with these parts to replay."""
    header, *lines = trace.path.read_bytes().splitlines()[:-1]
    first = json.loads(header) | {"schema": 1, "replay": parts}
    del first["recording"], first["tensors_sha256"]
    seal(trace.path, [json.dumps(first).encode(), *lines])
    return trace.path


def test_schema_1_trace_takes_its_drafter_from_the_recording(trace: Trace) -> None:
    found = read(of_the_first_schema(trace, {"ops": "plain", "until": 3, "drafter": "vanilla"})).header
    assert (found.schema, found.recording) == (SCHEMA, Recording("vanilla", "float64"))
    assert found.replay == (Part("plain", 3),)
    assert found == replace(trace.header, replay=found.replay, recording=found.recording, tensors_sha256=None)


def test_a_trace_of_the_first_schema_has_one_drafter(trace: Trace) -> None:
    path = of_the_first_schema(trace, {"ops": "ledger"}, {"ops": "plain", "drafter": "vanilla"})
    with pytest.raises(BadInput, match="the drafters eagle and vanilla, expected one for all parts"):
        read(path)


@pytest.mark.slow
def test_a_header_without_a_plan(instep: Runner, trace: Trace) -> None:
    seal(trace.path, lines_of(replace(trace.header, replay=()), list(trace.events)))
    assert "or --ops to name it" in complaint(instep("replay", trace.path))
    assert instep("replay", trace.path, "--ops", "ledger").code == 0


def test_a_result_that_cannot_be_written(instep: Runner, trace: Trace) -> None:
    """Refused before anything is run."""
    folder = trace.path.parent
    for where, said in (
        (folder / "no" / "folder" / "out.json", "a folder that can be written"), (folder, "the name of a file"),
        (trace.path / "out.json", "a folder that can be written"),
    ):  # fmt: skip
        ran = instep("replay", trace.path, "--ops", "ledger", "--json", where)
        assert said in complaint(ran) and not ran.out


@pytest.mark.parametrize("command", [("relations", "slots"), ("faults",)])
def test_result_file_never_replaces_an_input_of_the_command(
    instep: Runner, trace: Trace, command: tuple[str, ...]
) -> None:
    name, *words = command
    given, outputs = [(trace.path, *words), (trace.path, beside(trace.path))] if name == "relations" else [(), ()]
    link = trace.path.with_name("link.json")
    link.symlink_to(trace.path)
    before = [path.read_bytes() for path in (trace.path, beside(trace.path))]
    for output in (*outputs, *[link] * len(outputs)):
        assert "another file" in complaint(instep(name, *given, "--json", output))
    if name == "faults":
        both = ("--json", trace.path.parent / "r.svg", "--picture", trace.path.parent / "model" / ".." / "r.svg")
        assert "another file" in complaint(instep(name, *both))
    assert before == [path.read_bytes() for path in (trace.path, beside(trace.path))]


def test_record_refuses_bad_prompts_and_policies_and_writes_nothing(
    instep: Runner, trace: Trace, tmp_path: Path, golden: Golden
) -> None:
    told = policy(deeds=(), arrivals=tuple(a for a in policy().arrivals if a.prompt == "few"))
    right, out, said = b'[{"name": "few", "tokens": [1, 2]}]', tmp_path / "new.jsonl", {}
    for prompts, changes, where in (
        (b'[{"name": "few", "tokens": [1, 2, 999]}]', {}, out),
        (b'[{"name": "few", "tokens": [1]}, {"name": "few", "tokens": [2]}]', {}, out),
        (b'[{"name": "\xff"}]', {}, out), (right, {"arrivals": ()}, out), (right, {"rounds": 0}, out),
        (right, {"accept": (-1,)}, out), (right, {}, tmp_path),
    ):
        (tmp_path / "prompts.json").write_bytes(prompts)
        (tmp_path / "policy.json").write_bytes(msgspec.json.encode(replace(told, **changes)))
        words = ("--checkpoint", trace.path.parent / "model", "--prompts", tmp_path / "prompts.json",
                 "--policy", tmp_path / "policy.json", "--out", where)
        said[f"{prompts!r} {changes or ''} {where}"] = complaint(instep("record", *words))
    assert not list(tmp_path.glob("new*"))
    golden("bad-policies", sections(said), FOLDER=tmp_path)


def with_lines(trace: Trace, events: Iterable[e.AnyEvent] | None = None, **header: object) -> None:
    """The trace with other events, other fields of its header."""
    seal(trace.path, lines_of(replace(trace.header, **header), list(trace.events if events is None else events)))


def with_room(**changes: object) -> Spoil:
    return lambda trace: with_lines(trace, capacity=replace(trace.header.capacity, **changes))


def with_config(**changes: object) -> Spoil:
    def spoil(trace: Trace) -> None:
        file = trace.path.parent / "model" / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return spoil


def with_header(old: str, new: str) -> Spoil:
    """Its first line has `new` where it had `old`."""

    def spoil(trace: Trace) -> None:
        first, *others = lines_of(trace.header, list(trace.events))
        assert old.encode() in first
        seal(trace.path, [first.replace(old.encode(), new.encode(), 1), *others])

    return spoil


def with_model(**config: object) -> Spoil:
    """Another model where the trace's was."""
    small = {"vocab_size": VOCAB, "num_hidden_layers": 2, "full_attention_interval": 2}
    return lambda trace: write_checkpoint(trace.path.parent / "model", seed=1, **small, **config)


def with_tensor(name: str, change: Callable[[torch.Tensor], None], beside_trace: bool = False) -> Spoil:
    def spoil(trace: Trace) -> None:
        file = beside(trace.path) if beside_trace else weights_of(trace)
        tensors = load_file(file)
        change(tensors[name])
        save_file(tensors, file, {"trace_sha256": trace.sha256} if beside_trace else {"format": "pt"})

    return spoil


def weights_of(trace: Trace) -> Path:
    return trace.path.parent / "model" / "model.safetensors"


SPOILT: dict[str, Spoil] = {
    "bytes that are no text": lambda trace: edit(trace.path, b'"claim":"', b'"claim":"\xff\xfe'),
    "edited": lambda trace: edit(trace.path, b'"event":"draft"', b'"event":"Draft"'),
    "of a newer schema": with_header('"schema":2', '"schema":3'),
    "a token outside the vocabulary":
        lambda trace: with_lines(trace, [replace(trace.events[0], prompt=(3, VOCAB)), *trace.events[1:]]),
    "an illegal event": lambda trace: with_lines(trace, [e.Finish("nobody"), *trace.events]),
    "a request that is admitted twice": lambda trace: with_lines(trace, [trace.events[0], *trace.events]),
    "of another checkpoint's weights": with_model(),
    "of another checkpoint": with_model(rms_norm_eps=1e-5),
    "no checkpoint there": lambda trace: shutil.rmtree(trace.path.parent / "model"),
    "a pickle beside it": lambda trace: torch.save({"weights": torch.zeros(3)}, beside(trace.path)),
    "a pickle for weights": lambda trace: torch.save({"weights": torch.zeros(3)}, weights_of(trace)),
    "a pickle alone for weights":
        lambda trace: weights_of(trace).rename(weights_of(trace).with_name("pytorch_model.bin")),
    "weights that are not numbers": with_tensor("model.norm.weight", lambda weight: weight[3:4].fill_(float("nan"))),
    "prompts that are not its own": with_tensor("prompt.0", lambda prompt: prompt.add_(1), beside_trace=True),
    "a flipped byte in its tensors": with_tensor("own.2", lambda own: own[:1].add_(255 << 32), beside_trace=True),
    "a choice outside of the vocabulary, and no digest": lambda trace: seal(
        trace.path, lines_of(trace.header, list(trace.events)), {"own.2": torch.tensor([255 << 32])},
    ),
    "candidates that do not follow": lambda trace: with_lines(trace, candidates=(1, 2, 3)),
    **{f"config: {field} {value}": with_config(**{field: value}) for field, value in (
        ("linear_key_head_dim", 0), ("linear_value_head_dim", 0), ("linear_num_value_heads", 3),
        ("num_attention_heads", 0), ("num_key_value_heads", 3), ("hidden_size", "many"), ("model_type", "gpt2"),
    )},
    **{f"room: {changes}": with_room(**changes) for changes in (
        {"max_tokens": 3}, {"pages": (1,), "page_size": 2}, {"slots": (0, 1)}, {"slots": (1, 1)}, {"slots": ()},
        {"pages": (1, 1, 2, 3)}, {"page_size": 0}, {"slots": (10**12, 1)}, {"slots": (10**18, 1)},
        {"page_size": 10**15}, {"pages": (10**12, *range(1, 9))},
    )},
    **{f"header: {new}": with_header(old, new) for old, new in (
        (f'"vocab":{VOCAB}', '"vocab":1000'), ('"mtp_layers":1', '"mtp_layers":0'),
        ('"page_size":8', f'"page_size":{10**40}'), ('"lag":0', '"lag":0.5'), ('"lag":0', '"lag":0,"more":1'),
        ('"until":null', '"until":-5'),
    )},
}  # fmt: skip


DIGEST, LIBRARY = r"\b[0-9a-f]{12}\.\.", r"Error while deserializing header: [^,)]*"


@pytest.mark.slow
def test_a_trace_that_is_spoilt(instep: Runner, made: Trace, tmp_path: Path, golden: Golden) -> None:
    said = {}
    for name, spoil in SPOILT.items():
        trace = read(copied(made, tmp_path / "copy"))
        spoil(trace)
        said[name] = replayed(instep, trace)
        shutil.rmtree(tmp_path / "copy")
    golden("bad-traces", sections(said), DIGEST, LIBRARY, FOLDER=tmp_path / "copy")


COMMANDS = {
    "replay": ("TRACE --ops magic", "TRACE --dtype int3", "TRACE --layout KVV", "TRACE --device tpu", "none.jsonl",
               "fixtures", "/dev/null", "TRACE --ops plain --dtype bfloat16", "TRACE --layer 55", "TRACE --tiers T9",
               "TRACE --until 9999", "TRACE --swap gdn", "TRACE --swap none=plain", "TRACE --graft core",
               "TRACE --strategy luck", "fixtures/traces/faults/kimi.jsonl --drafter eagle"),
    "streams": ("TRACE --layer 55", "TRACE --until 9999", "TRACE --level none"),
    "relations": ("TRACE marriage", "TRACE slots --until 9999", "TRACE slots --drafter nobody"),
    "faults": ("commit-index-minus-two", "--family rolback", "--ops nobody", "--family numerics --ops ledger",
               "commit-index-minus-one --family graph"),
    "fuzz": ("--checkpoint nowhere", "--ops nobody", "--checkpoint fixtures/kimi --drafter vanilla --seed 6"),
    "gate": ("plain plain --device tpu", "plain plain --dtype int8", "plain plain --strategy none",
             "plain plain --case decode", "plain plain --pairs 10", "plain plain --allowed 3", "plain plain --batch 0",
             "plain plain --rounds 0", "plain plain --patience 0", "nobody plain", "ledger plain", "tests plain"),
    "generate": tuple(f"fixtures/tiny {words}" for words in (
        "--ops ledger", "--ops nothing", "--device tpu", "--layout XX", "--device cpu:x", "--strategy luck",
        "--dtype float16", "--dtype int8", "--prompt a --prompts prompts.json", "--prompts none.json", "--prompt ''",
        "--adaptive fixtures/tiny/config.json", "--json /nowhere/r.json",
    )),
    "memory": ("nothing", "fixtures/tiny/prompts.json", *(f"qwen3.5-9b {words}" for words in (
        "--candidates 1,x", "--candidates 1 --num-steps 2", "--dtype int8", "--layout XX", "--gib inf",
    ))),
    "shapes": ("nothing", "qwen3.5-9b --layers 99", "qwen3.5-0.8b --ops plain --vocab 64 --until 9999"),
    "record": ("--checkpoint nowhere --prompts none.json --policy none.json --out new.jsonl",),
}  # fmt: skip


@pytest.mark.slow
def test_unknown_commands_are_refused(instep: Runner, trace: Trace, golden: Golden) -> None:
    """A line for each, whatever the command."""
    said = {
        f"instep {command} {words}":
            complaint(instep(command, *(str(trace.path) if word == "TRACE" else word for word in shlex.split(words))))
        for command, lines in COMMANDS.items() for words in lines
    }
    golden("bad-words", sections(said), FOLDER=trace.path.parent, TOP=Path.cwd())

"""The input of an audit: the writer's own cases, dumps of SGLang's dumper, and the walk through the layers.

Leaves out: judging (`test_audit.py`).
"""

import ast
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.audit import write
from instep.audit.audit import audit, opened
from instep.audit.layerwise_reference import Precision, pieces, walk
from instep.audit.recording import as_usual
from instep.audit.token_origins import Origin, Text
from instep.audit.write import Recording, digest
from instep.setting import Setting
from instep.tier_allowances import TRUTH_ERROR
from instep.verdict import Exit
from instep_reference import trunk
from instep_reference.contract.checkpoint import Checkpoint, OnDisk
from instep_reference.contract.declared_rounding import Product
from instep_reference.contract.errors import BadInput
from instep_reference.weights import Weights
from support.inputs.checkpoints import write as write_checkpoint
from support.inputs.recordings import TINY, lines, stated
from support.running.command import Runner, complaint
from support.running.covering import few
from support.worlds.fake_sglang import Model

pytestmark = pytest.mark.slow  # recordings in many formats

PROMPT = list(b"Return the")


@pytest.fixture(scope="module")
def answer() -> list[int]:
    """The model's own tokens after the prompt."""
    weights = Weights.of(Checkpoint.open(TINY))
    tokens: list[int] = []
    for _ in range(10):
        final, _ = trunk.advance(weights, [*PROMPT, *tokens], trunk.empty_memories(weights), 0)
        tokens.append(int(trunk.logits(weights, final[-1:]).argmax()))
    return tokens


# the writer


def test_the_writer_is_one_file_that_needs_safetensors_alone() -> None:
    tree = ast.parse(Path(write.__file__).read_text())
    names = {(node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).split(".")[0]
             for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)}  # fmt: skip
    assert names - sys.stdlib_module_names == {"safetensors"}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_digest_of_a_model_is_over_its_weights_alone(tmp_path: Path, kind: str) -> None:
    """Other files, wrapped names, visual weights and another config.json leave it; a changed bit or name does not."""
    plain = write_checkpoint(tmp_path / "plain", kind)
    tensors = load_file(plain / "model.safetensors")
    wrapped = {f"model.language_{name}" if name.startswith("model.") else name: one for name, one in tensors.items()}
    names = sorted(wrapped)
    files = {"a.safetensors": names[::2], "b.safetensors": [*names[1::2], "model.visual.x"]}
    wrapped["model.visual.x"] = torch.ones(3)
    other = tmp_path / "other"
    other.mkdir()
    for file, held in files.items():
        save_file({name: wrapped[name] for name in held}, other / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest(plain) == digest(other)
    name = next(one for one in names[1::2] if wrapped[one].dim() == 2)
    for changed in ({name: -wrapped[name]}, {name: wrapped[name].reshape(-1)}):
        save_file({one: changed.get(one, wrapped[one]) for one in files["b.safetensors"]}, other / "b.safetensors")
        assert digest(plain) != digest(other)
    save_file({one + "y" * (one == name): wrapped[one] for one in files["b.safetensors"]}, other / "b.safetensors")
    assert digest(plain) != digest(other)


@pytest.fixture
def loaded(tmp_path: Path, instep: Runner) -> Path:
    """The trained model, as SGLang loads it."""
    assert instep("fixtures", tmp_path / "sglang", "--for", "sglang").code == 0
    return Path(tmp_path / "sglang")


def small(folder: Path, answer: list[int], model: Path) -> Path:
    made = Recording(folder, engine="by hand", model=model)
    made.admit("a", PROMPT)
    made.forward("a", [10], range(10), PROMPT, [[answer[0]]])
    made.finish("a")
    made.close()
    return folder


def test_a_recording_of_wrapped_weights_is_accepted(tmp_path: Path, answer: list[int], loaded: Path) -> None:
    wrapped = json.loads((loaded / "config.json").read_text())
    assert wrapped["architectures"] == ["Qwen3_5ForConditionalGeneration"] and "vision_config" in wrapped
    assert OnDisk.open(loaded).config == OnDisk.open(TINY).config and digest(loaded) == digest(TINY)
    found = audit(small(tmp_path / "r", answer, loaded), TINY)
    assert found.exit is Exit.AGREED and found.digest == digest(TINY)
    assert audit(small(tmp_path / "s", answer, TINY), loaded).exit is Exit.AGREED


def test_the_model_for_vllm_is_the_text_model(tmp_path: Path, instep: Runner) -> None:
    ran = instep("fixtures", tmp_path / "vllm", "--for", "vllm")
    assert ran.code == 0 and "skip_tokenizer_init" in ran.out, ran
    config, text = (json.loads((one / "config.json").read_text()) for one in (tmp_path / "vllm", TINY))
    sections = {"mrope_section", "mrope_interleaved"}
    assert text["rope_parameters"].keys() - config["rope_parameters"].keys() == sections
    assert {**config, "rope_parameters": text["rope_parameters"]} == text
    assert digest(tmp_path / "vllm") == digest(TINY)
    assert OnDisk.open(tmp_path / "vllm").config == OnDisk.open(TINY).config
    assert sorted(one.name for one in (tmp_path / "vllm").iterdir()) == ["config.json", "model.safetensors"]


def test_the_model_for_vllm_on_a_cpu_has_the_same_states(tmp_path: Path, instep: Runner) -> None:
    assert instep("fixtures", tmp_path / "vllm", "--for", "vllm-cpu").code == 0
    wide, own = Model(tmp_path / "vllm"), Model(TINY)
    assert wide.config.key_dim == wide.config.value_dim == own.config.value_dim != own.config.key_dim
    prompt = b"Return the"
    assert wide.text(prompt, 12) == own.text(prompt, 12)
    (found, _, after), (expected, _, memory) = (one.run(prompt, one.nothing(), 0) for one in (wide, own))
    assert torch.allclose(found, expected, atol=1.5), "the epsilon of a norm weighs more"
    state, narrow = after[0].state, memory[0].state
    assert torch.allclose(state[:, : narrow.shape[1]], narrow, atol=1e-5) and not state[:, narrow.shape[1] :].any()


@pytest.mark.parametrize(("field", "value", "says"), [
    ("rms_norm_eps", 1e-5, "recording.json: config: eps: found 1e-05, expected 1e-06, as in"),
    ("full_attention_interval", 2, ""),  # layer_types are stated
    ("layer_types", ["linear_attention"] * 4, "recording.json: config: layers: found"),
    ("mtp_num_hidden_layers", 0, "recording.json: config: mtp_layers: found 0, expected 1"),
    ("hidden_size", "wide", "recording.json: config.json: hidden_size: found 'wide'"),
    ("model_type", "llama", "recording.json: config.json: model_type: found 'llama'"),
    ("max_position_embeddings", 7, ""),
])
def test_a_field_that_the_reference_reads_is_refused_by_name(
    tmp_path: Path, instep: Runner, answer: list[int], loaded: Path, field: str, value: Any, says: str
) -> None:
    config = json.loads((loaded / "config.json").read_text())
    config["text_config"][field] = value
    if field == "model_type":
        config.pop("model_type")
    (loaded / "config.json").write_text(json.dumps(config))
    ran = instep("audit", small(tmp_path / "r", answer, loaded), "--model", TINY)
    assert says in complaint(ran) if says else ran.code == 0, ran


def test_a_recording_of_an_older_writer_is_checked_by_its_files(tmp_path: Path, answer: list[int]) -> None:
    made = small(tmp_path / "r", answer, TINY)
    stated(made, weights=None, config=None, model=OnDisk.open(TINY).digest())
    assert audit(made, TINY).digest == OnDisk.open(TINY).digest()
    stated(made, model="0" * 64)
    with pytest.raises(BadInput, match="another checkpoint"):
        audit(made, TINY)


def test_calls_of_the_writer_become_legal_events(tmp_path: Path, answer: list[int]) -> None:
    """Ragged windows, decodes, reused prefixes and preemption as in vLLM: one call per step, with its tokens."""
    made = Recording(tmp_path / "r", engine="by hand", model=TINY)
    said, length = answer, len(PROMPT)
    for name in "ab":
        made.admit(name, PROMPT, given=name == "b")
    made.forward("a", [6], range(4, 10), PROMPT[4:], [[said[0]]])  # the first four tokens came from a cache
    made.forward("ba", [10, 1], [*range(10), length], [*PROMPT, said[0]], [[said[0]], [said[1]]])
    windows = [[said[1], said[2], 7], [said[0], said[1], said[2], 9, 9]]  # of 2 and of 4 drafts
    at = [*range(length + 1, length + 4), *range(length, length + 5)]
    made.forward("ab", [3, 5], at, windows[0] + windows[1], [said[2:4], said[1:4]])
    made.forward("b", [1], [length + 3], said[3:4], [said[4:5]])
    text = [*PROMPT, *said[:5]]
    made.forward("b", [len(text)], range(len(text)), text, [[said[5]]])  # preempted, and computed again
    made.finish("a")
    made.close()
    found = audit(tmp_path / "r", TINY)
    assert found.exit is Exit.AGREED, found.verdict.findings
    assert [(text.request, text.said, text.given) for text in found.told.texts] == [
        ("b", tuple(said[:5]), True), ("a", tuple(said[:4]), False), ("b", (said[5],), True)]
    assert (found.told.windows, found.told.drafts, found.told.accepted) == (2, 6, 3)


@pytest.mark.parametrize("every", [False, True])
def test_a_reused_prefix_may_show_tensors(tmp_path: Path, answer: list[int], every: bool) -> None:
    """The tensors have the rows that ran; the recording keeps the last row of the prompt."""
    weights = Weights.of(Checkpoint.open(TINY))
    final, _ = trunk.advance(weights, PROMPT, trunk.empty_memories(weights), 0)
    made = Recording(tmp_path / "r", engine="by hand", model=TINY)
    made.admit("a", PROMPT)
    made.forward("a", [6], range(4, 10), PROMPT[4:], [[answer[0]]], final=final[4 if every else -1 :].float())
    made.finish("a")
    made.close()
    found = audit(tmp_path / "r", TINY)
    assert found.exit is Exit.AGREED and found.replay is not None and len(found.recorded.events) == 3


def test_recording_with_selected_states_shows_where_a_reused_prefix_ends(tmp_path: Path, answer: Any) -> None:
    made = Recording(tmp_path / "r", engine="by hand", model=TINY, selected=True)
    made.admit("a", PROMPT)
    made.forward("a", [6], range(4, 10), PROMPT[4:], [[answer[0]]])
    made.close()
    first, second = (one["rows"] for one in lines(tmp_path / "r" / "events.jsonl")[1:])
    assert first == [{"request": "a", "kind": "prefill", "tokens": 4}]
    assert second == [{"request": "a", "kind": "prefill", "tokens": 6, "root": answer[0]}]
    assert audit(tmp_path / "r", TINY).exit is Exit.AGREED


@pytest.mark.parametrize(("call", "says"), [
    (lambda r: r.forward("a", [2], [5, 6], [1, 2], [[]]), "2 tokens at position 5, but 3 are committed"),
    (lambda r: r.forward("a", [7], range(3, 10), PROMPT[3:], [[]]), "no token for the position after 9"),
    (lambda r: r.forward("a", [7], range(3, 10), PROMPT[3:], [[1]], logits=torch.zeros(5, 256)), "5 rows, but the"),
])
def test_impossible_calls_of_the_writer_are_refused(tmp_path: Path, call: Callable[..., Any], says: str) -> None:
    made = Recording(tmp_path / "r", engine="by hand")
    made.admit("a", PROMPT)
    made.forward("a", [3], range(3), PROMPT[:3], [[]])
    with pytest.raises(ValueError, match=says):
        call(made)


# SGLang's dumper


def dumped(folder: Path, steps: list, *, old: bool = False) -> Path:
    """steps: per step the rows (request, first position, tokens, whether it is a verify)."""
    folder.mkdir()
    for step, rows in enumerate(steps):
        values = {
            "input_ids": torch.tensor([one for row in rows for one in row[2]]),
            "positions": torch.tensor([row[1] + n for row in rows for n in range(len(row[2]))]),
            "seq_lens": torch.tensor([row[1] if row[3] else row[1] + len(row[2]) for row in rows]),
            "rids": [row[0] for row in rows],
        }
        for index, (name, value) in enumerate(values.items()):
            tags = {"forward_pass_id" if old else "step": step, "rank": 0, "name": name, "dump_index": index}
            file = folder / ("___".join(f"{key}={tag}" for key, tag in tags.items()) + ".pt")
            torch.save(value if old else {"value": value, "meta": tags}, file)
    return folder


def course(said: list[int]) -> list:
    """A chunked prompt together with another, a window of three drafts with two right ones, decodes."""
    n = len(PROMPT)
    return [
        [("a", 0, PROMPT[:6], False)],
        [("a", 6, PROMPT[6:], False), ("b", 0, PROMPT[:5], False)],
        [("a", n, [*said[:3], 7], True)],
        [("a", n + 3, said[3:4], False)],
        [("a", n + 4, said[4:5], False)],
    ]


@pytest.mark.parametrize("old", [False, True])
def test_dumps_of_sglang_are_read_as_texts_and_windows(tmp_path: Path, answer: list[int], old: bool) -> None:
    found = audit(dumped(tmp_path / "dump", course(answer), old=old), TINY, dtype="float32")
    assert found.exit is Exit.AGREED and [text.said for text in found.told.texts] == [tuple(answer[:5])]
    assert (found.told.windows, found.told.drafts, found.told.accepted) == (1, 3, 2)
    roles = [origin.role for origin in found.told.texts[0].origins]
    assert roles == ["token", "accepted draft 1 of 3", "accepted draft 2 of 3", "bonus", "token"]


def test_a_wrong_bonus_and_a_wrong_count_of_a_dump_are_named(tmp_path: Path, answer: list[int]) -> None:
    wrong = course(answer)
    wrong[3] = [("a", len(PROMPT) + 3, [answer[3] + 1], False)]
    found = audit(dumped(tmp_path / "bonus", wrong), TINY, dtype="float32").verdict.findings[0]
    assert (found.event, found.kind, found.request) == (2, "step", "a") and found.diagnosis.startswith("bonus is")
    short = [*course(answer)[:3], [("a", len(PROMPT) + 2, answer[2:3], False)]]
    found = audit(dumped(tmp_path / "count", short), TINY, dtype="float32").verdict.findings[0]
    assert (found.check, found.event) == ("counts", 2) and found.diagnosis.startswith("accepted 1 of 3 drafts")


class Runs:
    def __reduce__(self) -> tuple[Callable[..., Any] | tuple[str, ...], ...]:
        return print, ("run",)


@pytest.mark.parametrize(("spoil", "says"), [
    (lambda d: file(d, 1, "positions").write_bytes(pickle.dumps(Runs())), "what torch does not open safely"),
    (lambda d: torch.save(torch.tensor([0, 1, 2, 9, 4, 5]), file(d, 0, "positions")), "step 0: positions: found"),
    (lambda d: torch.save(torch.zeros(6), file(d, 0, "input_ids")), "step 0: input_ids: found Tensor"),
    (lambda d: torch.save(torch.zeros(6, dtype=torch.complex64), file(d, 0, "input_ids")), "step 0: input_ids: found"),
    *((lambda d, rids=rids: torch.save(rids, file(d, 0, "rids")), "step 0: found 6 tokens") for rids in (5, None,
                                                                                              torch.tensor([[1]]))),
    (lambda d: file(d, 1, "seq_lens").unlink(), "step 1: found no seq_lens"),
    (lambda d: [one.unlink() for one in d.glob("step=1___*")], "found tokens at position 10, expected position 6"),
])
def test_a_bad_dump_is_refused_in_one_line(
    tmp_path: Path, instep: Runner, answer: list[int], spoil: Callable[..., Any], says: str
) -> None:
    dump = dumped(tmp_path / "dump", course(answer))
    spoil(dump)
    assert says in complaint(instep("audit", dump, "--model", TINY))


def test_steps_of_a_draft_model_are_refused(tmp_path: Path, answer: list[int]) -> None:
    extended = ("a", len(PROMPT) + 5, [*answer[5:8]], False)
    with pytest.raises(BadInput, match="3 tokens of its text"):
        opened(dumped(tmp_path / "dump", [*course(answer), [extended]]))


def test_a_dump_without_its_last_step_is_read_up_to_it(tmp_path: Path, answer: list[int]) -> None:
    dump = dumped(tmp_path / "dump", course(answer))
    file(dump, 4, "positions").unlink()
    assert opened(dump).notes == ("step 4 was cut off (positions is missing), so it is skipped",)


def file(dump: Path, step: int, name: str) -> Path:
    return next(dump.glob(f"step={step}___*name={name}___*"))


# the walk


@pytest.mark.parametrize(("kind", "more"), [
    ("dense", {}), ("next", {}), ("moe", {}), ("dense", {"tie_word_embeddings": True}),
    *((kind, {}) for kind in ("kimi", "ling", "olmo", "nemotron", "lfm2", "minimax", "qwen4")),
])  # fmt: skip
def test_the_walk_equals_the_reference(tmp_path: Path, kind: str, more: dict[str, bool]) -> None:
    model = write_checkpoint(tmp_path / "model", kind, **more)
    origins = (Origin(0, "line"),) * 3
    texts = [Text("a", tuple(range(1, 60)), (5, 6, 7), origins), Text("b", (9,), (3,), origins[:1])]
    precision = Precision(torch.float32, torch.float32, as_usual(torch.float32, torch.float32, {}, {}))
    read = walk(OnDisk.open(model), precision, texts, (0,))
    weights = Weights.of(Checkpoint.open(model))
    whole = [trunk.advance(weights, text.run, trunk.empty_memories(weights), 0)[0] for text in texts]
    right = torch.cat([rows[len(text.prompt) - 1 :] for rows, text in zip(whole, texts, strict=True)])
    assert float((read.final[None] - right).norm() / right.norm()) <= TRUTH_ERROR
    assert bool((read.noise[0] > 1e-8).all()) and bool((read.noise[0] < 1e-4).all()), "fp32 errs by so much"


@few(2)
@pytest.mark.parametrize("said", [
    {"rounds": {"state": torch.bfloat16}}, {"products": {"gdn.chunk": Product("bf16", 64)}},
    {"products": {"gdn.window": Product("tf32")}}, {"rounds": {"value": torch.bfloat16}},
], ids=str)  # fmt: skip
def test_a_narrower_declared_dtype_errs_more(said: dict[str, Any]) -> None:
    texts = [Text("a", tuple(PROMPT * 3), (5,) * 8, (Origin(0, "line"),) * 8)]
    noise = []
    for declared in ({}, said):
        full = {"rounds": {}, "products": {}} | declared
        usual = as_usual(torch.float32, torch.float32, full["rounds"], full["products"])
        read = walk(OnDisk.open(TINY), Precision(torch.float32, torch.float32, usual), texts, (0, 1, 2))
        noise.append(float(read.noise[0].max()))
    assert noise[1] > 5 * noise[0], noise
    apart = (read.noise[1] / read.noise[2]).log().abs()
    assert float(apart.mean()) > 0.1, "further draws share no rounding"


def test_no_piece_mixes_prompt_and_generated_tokens() -> None:
    assert [*pieces(1100, 1030)] == [
        (slice(0, 512), True), (slice(512, 1024), True), (slice(1024, 1030), True), (slice(1030, 1100), False)
    ]
    assert [*pieces(3, 3)] == [(slice(0, 3), True)]


def test_the_json_result_is_complete(tmp_path: Path, instep: Runner, answer: list[int]) -> None:
    said = tmp_path / "said.jsonl"
    said.write_text(json.dumps({"prompt": PROMPT, "tokens": answer}) + "\n")
    assert Setting().dtype == "float32"
    ran = instep("audit", said, "--model", TINY, "--tokens", 4, "--dtype", "float32", "--json", tmp_path / "r.json")
    assert ran.code == 0 and json.loads((tmp_path / "r.json").read_text())["tokens"] == 4

"""The block drafter of the reference: its rows by hand, its context, its acceptance, and its files.

Leaves out: the optimized side (`optimized/test_block_drafter.py`).
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from instep_reference import trunk
from instep_reference.acceptance import block_sampled
from instep_reference.contract.block_drafter import FOLDER
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Capacity, Commit, Draft, Forward, Load, Row
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place
from instep_reference.contract.sampling import Sampling
from instep_reference.engine import ReferenceEngine
from instep_reference.sampling import probabilities
from instep_reference.weights import Weights
from support.inputs.checkpoints import TWO_LAYERS, write, write_block

PROMPT = (3, 9, 27, 17, 2)
FP64 = torch.float64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With an MTP layer, which must not run."""
    return Checkpoint.open(write_block(write(tmp_path_factory.mktemp("block"), **TWO_LAYERS)), "block")


def engine(model: Checkpoint, **how: Any) -> ReferenceEngine:
    return ReferenceEngine(Weights.of(model), num_steps=3, mode="block", **how)


def begun(model: Checkpoint, **how: Any) -> ReferenceEngine:
    made = engine(model, **how)
    made.admit("a", PROMPT)
    made.forward((Row("a", "prefill", len(PROMPT)),))
    return made


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * (1 + weight)


def turned(x: torch.Tensor, position: int, theta: float, channels: int) -> torch.Tensor:
    out, half = x.clone(), channels // 2
    for i in range(half):
        angle = position * theta ** (-2 * i / channels)
        a, b = x[i], x[i + half]
        out[i], out[i + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
    return out


def by_hand(model: Checkpoint, tokens: tuple[int, ...], root: int, drafts: int) -> list[int]:
    """The drafts of a block, one row, one head and one position at a time, from the stored tensors."""
    stored = {name: x.to(FP64) for name, x in model.tensors.items()}
    block, weights = model.config.block, Weights.of(model)
    assert block is not None
    _, _, answers = trunk.advance_with_answers(weights, tokens, trunk.empty_memories(weights), 0)
    fed = torch.cat([answers[layer] for layer in block.target_layer_ids], 1)
    context = [norm(stored["block.fc.weight"] @ row, stored["block.hidden_norm.weight"], block.rms_norm_eps)
               for row in fed]  # fmt: skip
    embedding, width = stored["model.embed_tokens.weight"], block.head_dim
    rows = [embedding[token] for token in (root, *[block.mask_token_id] * drafts)]
    for layer in range(block.num_hidden_layers):
        own = {name.removeprefix(f"block.layers.{layer}."): x for name, x in stored.items()}
        normed = [norm(row, own["input_layernorm.weight"], block.rms_norm_eps) for row in rows]
        keys, values = [], []
        for position, row in enumerate((*context, *normed)):
            key = norm(own["self_attn.k_proj.weight"] @ row, own["self_attn.k_norm.weight"], block.rms_norm_eps)
            keys.append(turned(key, position, block.rope_theta, block.rotary_dim))
            values.append(own["self_attn.v_proj.weight"] @ row)
        after = []
        for number, (row, x) in enumerate(zip(rows, normed, strict=True)):
            heads = []
            for head in (own["self_attn.q_proj.weight"] @ x).view(block.num_attention_heads, 2, width):
                query = norm(head[0], own["self_attn.q_norm.weight"], block.rms_norm_eps)
                query = turned(query, len(tokens) + number, block.rope_theta, block.rotary_dim)
                scores = torch.stack([query @ key for key in keys]) / math.sqrt(width)  # all of them: no mask
                read = sum(share * value for share, value in zip(scores.softmax(0), values, strict=True))
                heads.append(read * torch.sigmoid(head[1]))
            row = row + own["self_attn.o_proj.weight"] @ torch.cat(heads)
            x = norm(row, own["post_attention_layernorm.weight"], block.rms_norm_eps)
            gate = own["mlp.gate_proj.weight"] @ x
            inner = gate * torch.sigmoid(gate) * (own["mlp.up_proj.weight"] @ x)
            after.append(row + own["mlp.down_proj.weight"] @ inner)
        rows = after
    finals = [norm(row, stored["block.norm.weight"], block.rms_norm_eps) for row in rows]
    return [int((stored["lm_head.weight"] @ row).argmax()) for row in finals[1:]]


@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_a_block_is_the_one_by_hand(model: Checkpoint, drafts: int) -> None:
    made = begun(model)
    root = made.state("a").root
    assert root is not None
    said = made.draft(("a",), None, (tuple(range(drafts)),))
    assert said.own.tolist() == [by_hand(model, PROMPT, root, drafts)]
    assert torch.equal(said.own, said.drafts)


def test_given_drafts_change_no_own_draft(model: Checkpoint) -> None:
    free, given = begun(model), begun(model)
    assert torch.equal(free.draft(("a",)).own, given.draft(("a",), ((1, 2, 3),)).own)


def test_a_row_of_a_block_depends_on_rows_after_it(model: Checkpoint) -> None:
    """The first draft of a block of four rows is computed from other bits than that of a block of two."""
    seen: list[torch.Tensor] = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place == Place("block", 0, "attended"):
            seen.append(tensor)
        return tensor

    for width in (1, 3):
        made = begun(model)
        made.watch(see)
        made.draft(("a",), None, (tuple(range(width)),))
    narrow, wide = seen
    assert float((narrow[0] - wide[0]).abs().max()) > 1e-3 and float((narrow[1] - wide[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("right", [0, 2, 3])
def test_context_is_that_of_the_committed_tokens(model: Checkpoint, right: int) -> None:
    """The context is, for all refused drafts, that of a request that had the tokens as its prompt."""
    made = begun(model)
    root = made.state("a").root
    assert root is not None
    text = [*PROMPT, root]
    for _ in range(3):  # what the target says
        alone = engine(model)
        alone.admit("a", tuple(text))
        text.append(alone.forward((Row("a", "prefill", len(text)),)).roots["a"])
    drafts = [token if number < right else (token + 1) % 64 for number, token in enumerate(text[len(PROMPT) + 1 :])]
    made.draft(("a",), (tuple(drafts),))
    made.forward((Row("a", "verify"),))
    assert made.commit(("a",)).num_correct_drafts.tolist() == [right]
    alone = engine(model)
    alone.admit("a", tuple(text[: len(PROMPT) + 1 + right]))
    alone.forward((Row("a", "prefill", len(PROMPT) + 1 + right),))
    ours, theirs = made.state("a"), alone.state("a")
    assert list(ours.block_keys) == [0, 1, 2] and not ours.draft_keys
    for field in ("block_keys", "block_values"):
        for layer, rows in getattr(ours, field).items():
            assert len(rows) == ours.length == len(PROMPT) + 1 + right
            assert float((rows - getattr(theirs, field)[layer]).abs().max()) < 1e-12


def test_a_prefix_keeps_all_rows_of_its_context(model: Checkpoint) -> None:
    room = Capacity(slots=(1, 2), pages=(1, 2, 3, 4), page_size=8, max_tokens=32, track_interval=4)
    made = engine(model, room=room)
    for event in (Admit("a", PROMPT), Forward((Row("a", "prefill", 4, track="x"),)), Admit("b", (*PROMPT[:4], 8, 9)),
                  Load("b", "x")):  # fmt: skip
        event.on(made)
    kept, loaded = made.prefix("x"), made.state("b")
    assert [len(rows) for rows in kept.block_keys.values()] == [4, 4, 4]
    assert all(torch.equal(rows, loaded.block_values[layer]) for layer, rows in kept.block_values.items())


def test_sampled_acceptance_is_that_of_a_block(model: Checkpoint) -> None:
    """A commit of a request that samples has the `correct_len` and the `bonus` of the block form, also with caps.

    They follow from the probabilities. The choice that was drawn at each node changes nothing.
    """
    counts = set()
    for seed in range(12):
        made, seen = engine(model), []
        sampling, uniforms = Sampling(temperature=0.7), torch.rand(5, generator=torch.Generator().manual_seed(seed))
        units = tuple((uniforms * 2**24).floor().div(2**24).tolist())
        made.admit("a", PROMPT, sampling)
        made.forward((Row("a", "prefill", len(PROMPT), uniforms=units[:1]),))

        def see(place: Place, tensor: torch.Tensor, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            if place == Place("trunk", 1 << 16, "logits"):
                seen.append(tensor)
            return tensor

        root = made.state("a").root
        said = made.draft(("a",), ((4, 40, 22),) if seed % 2 else None).drafts[0].tolist()
        made.watch(see)
        made.forward((Row("a", "verify", uniforms=units),))
        made.requests["a"] = replace(made.requests["a"], picks=(63,) * 4)
        caps = (seed % 4,) if seed > 3 else ()
        block, probs = torch.tensor([[root, *said]]), probabilities(torch.cat(seen), sampling)[None]
        drawn = torch.tensor(units, dtype=FP64)
        correct_len, bonus = block_sampled(
            block, probs, drawn[None, :4], drawn[4:], torch.tensor(caps) if caps else None)
        answer = made.commit(("a",), caps=caps)
        assert (answer.num_correct_drafts.tolist(), answer.bonus.tolist()) == (correct_len.tolist(), bonus.tolist())
        counts.add(int(correct_len))
    assert len(counts) > 1, "some drafts are accepted, others are not"


def test_windows_of_own_widths_are_accepted_alone(model: Checkpoint) -> None:
    made = engine(model)
    for name in ("a", "b"):
        made.admit(name, PROMPT)
        made.forward((Row(name, "prefill", len(PROMPT)),))
    root = made.state("a").root
    assert root is not None
    right = by_hand_text(model, (*PROMPT, root), 2)
    made.draft(("a", "b"), ((right[0],), (right[0], right[1], 7)), ((0,), (0, 1, 2)))
    made.forward((Row("a", "verify"), Row("b", "verify")))
    said = made.commit(("a", "b"))
    assert said.num_correct_drafts.tolist()[0] == 1 and said.num_correct_drafts.tolist()[1] >= 2
    assert said.bonus.tolist()[0] == right[1]


def by_hand_text(model: Checkpoint, text: tuple[int, ...], count: int) -> list[int]:
    said: list[int] = []
    for _ in range(count):
        alone = engine(model)
        alone.admit("a", (*text, *said))
        said.append(alone.forward((Row("a", "prefill", len(text) + len(said)),)).roots["a"])
    return said


def test_trees_are_refused(model: Checkpoint) -> None:
    with pytest.raises(Unsupported, match="chains only"):
        begun(model).draft(("a",), ((1, 2),), ((0, 0),))
    room = Capacity((1,), (1, 2), 8, 32, num_draft_tokens=6, topk=2)
    with pytest.raises(Unsupported, match="proposes no trees"):
        engine(model, room=room)


def test_a_checkpoint_without_a_drafter_is_refused(model: Checkpoint) -> None:
    bare = replace(model, config=replace(model.config, block=None))
    with pytest.raises(Unsupported, match="opened without one"):
        engine(bare)


Change = Callable[[dict[str, Any]], None]


@pytest.mark.parametrize(("change", "says"), [
    (lambda data: data.update(target_layer_ids=[1, 0]), "target_layer_ids.*ascending"),
    (lambda data: data.update(target_layer_ids=[0, 2]), "target_layer_ids.*0 to 1"),
    (lambda data: data.update(target_layer_ids=[]), "target_layer_ids"),
    (lambda data: data.update(mask_token_id=64), "mask_token_id.*below 64"),
    (lambda data: data.update(vocab_size=65), "vocab_size.*64, as in the target"),
    (lambda data: data.update(hidden_size=16), "hidden_size.*32, as in the target"),
    (lambda data: data.update(num_attention_heads=3, num_key_value_heads=2), "num_attention_heads.*multiple of 2"),
    (lambda data: data.update(num_key_value_heads=0), "num_key_value_heads.*above 0"),
    (lambda data: data.update(partial_rotary_factor=0.4), "partial_rotary_factor.*even"),
    (lambda data: data.update(block_size=4), "unknown field `block_size`"),
    (lambda data: data.pop("mask_token_id"), "missing required field `mask_token_id`"),
    (lambda data: data.update(model_type="qwen3"), "Invalid enum value|model_type"),
    (lambda data: data.update(num_hidden_layers=2), r"block\.layers\.2.*no such tensor"),
    (lambda data: data.update(num_hidden_layers=4), r"block\.layers\.3.*nothing"),
    (lambda data: data.update(intermediate_size=23), r"mlp\.gate_proj.*shape"),
])  # fmt: skip
def test_a_wrong_drafter_is_bad_input(tmp_path: Path, change: Change, says: str) -> None:
    directory = write_block(write(tmp_path, **TWO_LAYERS))
    file = directory / FOLDER / "config.json"
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(BadInput, match=says):
        Checkpoint.open(directory, "block")
    assert Checkpoint.open(directory).config.block is None, "other drafters do not read it"


def test_a_missing_drafter_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no such file.*block/"):
        Checkpoint.open(write(tmp_path, **TWO_LAYERS), "block")


def test_commit_and_draft_serve_as_events(model: Checkpoint) -> None:
    made = begun(model)
    Draft(("a",)).on(made)
    Forward((Row("a", "verify"),)).on(made)
    assert Commit(("a",)).on(made).accept_lens.tolist()[0] == made.state("a").length - len(PROMPT)

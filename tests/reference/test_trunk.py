"""The model as a value: any split of a prompt gives the same memory, and every place is seen and can be replaced.

Leaves out: the correctness of the numbers (`test_oracle.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from instep_reference import trunk
from instep_reference.attention import AttentionMemory, attend
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL, Place, unseen
from instep_reference.gdn import GdnMemory
from instep_reference.mlp import route
from instep_reference.norms import rms_norm
from instep_reference.weights import Weights
from support.inputs.checkpoints import Kind, config_of, draw, write
from support.inputs.rounds import CLOSE
from support.running.covering import few

AGREE = CLOSE  # fp64, relative to the largest element
LENGTH = 24
LAYERS = ["full_attention", "linear_attention", "linear_attention"]
GDN_PLACES = [
    "normed", "qkv", "z", "b", "a", "mixed", "q", "k", "v", "log_decay", "beta", "core", "update", "gated", "mixer",
]
ATTENTION_PLACES = ["normed", "projected", "key_raw", "query", "key", "value", "attended", "opened", "mixer"]
LAST_PLACES = ["residual", "post_normed", "mlp", "hidden"]


@pytest.fixture(scope="module", params=["dense", "next", "moe"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Weights:
    return load(tmp_path_factory.mktemp(request.param), request.param)


def load(directory: Path, kind: Kind) -> Weights:
    return Weights.of(Checkpoint.open(write(directory, kind, num_hidden_layers=3, layer_types=LAYERS)))


def tokens_of(count: int = LENGTH) -> list[int]:
    return [(7 * index + 3) % 64 for index in range(count)]


def tensors(memories: Sequence[trunk.LayerMemory]) -> list[torch.Tensor]:
    return [tensor for memory in memories for tensor in vars(memory).values()]


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.numel() > 0
    assert float((ours - theirs).abs().max()) <= AGREE * float(theirs.abs().max())


@few(1)
@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(parts=st.lists(st.integers(1, 6), min_size=4, max_size=24).filter(lambda parts: sum(parts) >= LENGTH))
def test_any_split_of_a_prompt_gives_the_same(weights: Weights, parts: list[int]) -> None:
    tokens = tokens_of()
    final, whole = trunk.advance(weights, tokens, trunk.empty_memories(weights), 0)
    memories, rows, begin = trunk.empty_memories(weights), [], 0
    for part in parts:
        if tokens[begin : begin + part]:
            row, memories = trunk.advance(weights, tokens[begin : begin + part], memories, begin)
            rows.append(row)
        begin += part
    assert_close(torch.cat(rows), final)
    for ours, theirs in zip(tensors(memories), tensors(whole), strict=True):
        assert_close(ours, theirs)


def test_memories_are_values(weights: Weights) -> None:
    _, before = trunk.advance(weights, tokens_of(5), trunk.empty_memories(weights), 0)
    kept = [tensor.clone() for tensor in tensors(before)]
    one, _ = trunk.advance(weights, [9], before, 5)
    trunk.advance(weights, [10, 11], before, 5)
    again, _ = trunk.advance(weights, [9], before, 5)
    assert torch.equal(one, again)
    assert all(torch.equal(now, then) for now, then in zip(tensors(before), kept, strict=True))


def test_every_place_is_seen_in_the_order_of_findings(weights: Weights) -> None:
    seen: list[tuple[Place, torch.Size]] = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        seen.append((place, tensor.shape))
        return tensor

    final, _ = trunk.advance(weights, tokens_of(5), trunk.empty_memories(weights), 0, see)
    trunk.pick(trunk.logits(weights, final[-1:], see), see)
    places = [place for place, _ in seen]
    layers = [ATTENTION_PLACES + LAST_PLACES, GDN_PLACES + LAST_PLACES, GDN_PLACES + LAST_PLACES]
    expected = [Place("trunk", index, name) for index, names in enumerate(layers) for name in names]
    assert places[0] == Place("trunk", STAGE_LEVEL, "embedding")
    assert places[1:-3] == expected
    assert places[-3:] == [Place("trunk", AFTER_LAYERS, name) for name in ("final", "logits", "pick")]
    assert sorted(places, key=Place.order) == places
    shapes = {(place.layer, place.component): tuple(shape) for place, shape in seen}
    assert shapes[0, "projected"] == (5, 4, 2, 16) and shapes[0, "key"] == (5, 2, 16)
    assert shapes[1, "qkv"] == (5, 2 * 16 + 64) and shapes[1, "q"] == (5, 2, 8) and shapes[1, "core"] == (5, 4, 16)
    assert shapes[AFTER_LAYERS, "logits"] == (1, 64) and shapes[AFTER_LAYERS, "pick"] == (1,)


@pytest.mark.slow
def test_result_of_see_replaces_the_tensor(weights: Weights) -> None:
    """At every place of every layer a different tensor changes the final rows, and an equal one does not.

    An update goes only into the state, so it changes only the memory of its layer.
    """
    tokens, changed = tokens_of(3), []
    correct, memories = trunk.advance(weights, tokens, trunk.empty_memories(weights), 0)
    places: list[Place] = []
    trunk.advance(weights, tokens, trunk.empty_memories(weights), 0, lambda at, x: (places.append(at), x)[1])
    for target in places:
        def graft(place: Place, tensor: torch.Tensor, target: Place = target) -> torch.Tensor:
            return 0.9 * tensor if place == target else tensor.clone()

        final, after = trunk.advance(weights, tokens, trunk.empty_memories(weights), 0, graft)
        if target.component == "update":
            assert torch.equal(final, correct)
            moved = [layer for layer, pair in enumerate(zip(after, memories, strict=True))
                     if not all(torch.equal(x, y) for x, y in zip(tensors(pair[:1]), tensors(pair[1:]), strict=True))]
            changed.append(moved == [target.layer])
        else:
            changed.append(not torch.equal(final, correct))
    assert [place for place, moved in zip(places, changed, strict=True) if not moved] == []


def test_conv_windows_hold_what_see_returned(weights: Weights) -> None:
    def doubled(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        return torch.full_like(tensor, 7.0) if place.component == "qkv" else tensor

    _, memories = trunk.advance(weights, tokens_of(2), trunk.empty_memories(weights), 0, doubled)
    windows = [memory.window for memory in memories if isinstance(memory, GdnMemory)]
    assert windows and all(torch.equal(window[0], torch.tensor([0.0, 7.0, 7.0]).double()) for window in windows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_every_result_keeps_the_dtype_of_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, "next", dtype=torch.bfloat16))
    weights = Weights.of(checkpoint, dtype)
    found: set[torch.dtype] = set()

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.dtype)
        return tensor

    final, memories = trunk.advance(weights, tokens_of(5), trunk.empty_memories(weights), 0, see)
    trunk.logits(weights, final, see)
    assert found == {dtype} and {tensor.dtype for tensor in tensors(memories)} == {dtype}


def test_layer_runs_alone_on_given_inputs_with_the_same_bits(weights: Weights) -> None:
    tokens = torch.tensor(tokens_of(5))
    hidden = trunk.embed(weights, tokens)
    positions = torch.arange(5)
    for index, memory in enumerate(trunk.empty_memories(weights)):
        hidden, after = trunk.layer(
            weights.config, weights.layers[index], index, "trunk", hidden, memory, positions, unseen)
        assert isinstance(after, AttentionMemory if index == 0 else GdnMemory)
    final, _ = trunk.advance(weights, tokens, trunk.empty_memories(weights), 0)
    assert_close(rms_norm(hidden, weights.final_norm, weights.config.eps), final)


def test_heads_remember_from_a_few_to_hundreds_of_tokens(tmp_path: Path) -> None:
    weights = load(tmp_path, "dense")
    decays: list[torch.Tensor] = []

    def see(place: Place, tensor: torch.Tensor) -> torch.Tensor:
        if place.component == "log_decay":
            decays.append(tensor.exp())
        return tensor

    trunk.advance(weights, tokens_of(), trunk.empty_memories(weights), 0, see)
    kept = torch.cat(decays)
    assert float(kept.min()) < 0.5 and float(kept.max()) > 0.999


def test_a_row_sees_the_rows_up_to_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    keys, values = (torch.randn(5, 2, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    out = attend(query, keys, values)
    for row in range(3):
        for head in range(4):
            seen = slice(0, 5 - 3 + row + 1)
            shares = (keys[seen, head // 2] @ query[row, head] * 2**-0.5).softmax(0)
            assert_close(out[row, head], shares @ values[seen, head // 2])


def test_expert_shares_match_a_hand_calculation() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64).log1p()  # softmax: 1/6, 2/6, 3/6
    config = ModelConfig.from_dict(_mixture(norm_topk_prob=True))
    assert_close(route(config, scores), torch.tensor([[0.0, 0.4, 0.6]], dtype=torch.float64))
    config = ModelConfig.from_dict(_mixture(norm_topk_prob=False))
    assert_close(route(config, scores), torch.tensor([[0.0, 2 / 6, 3 / 6]], dtype=torch.float64))


def _mixture(norm_topk_prob: bool) -> dict[str, object]:
    return config_of("next", num_experts=3, num_experts_per_tok=2, norm_topk_prob=norm_topk_prob)


def test_seed_gives_the_same_weights() -> None:
    config = ModelConfig.from_dict(_mixture(norm_topk_prob=True))
    one, same, other = draw(config, 0), draw(config, 0), draw(config, 1)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])

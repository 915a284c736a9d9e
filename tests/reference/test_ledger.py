"""The ledger by hand: the definition of the algebra, followed for a model small enough to spell out.

Leaves out: that a round equals decoding (`test_properties.py` tests it for labels too).
"""

import time
from zlib import crc32

import torch

from instep_reference.contract.engine import Path, Row
from instep_reference.contract.label_algebra import MIX_A, MIX_B, MIX_C, MIX_D, SPREAD
from instep_reference.contract.place_names import AFTER_LAYERS, STAGE_LEVEL
from instep_reference.label_ledger import LedgerEngine, expand
from instep_reference.label_mixing import mix
from support.inputs.rounds import begin, config, decode, disagreement, play

SIZE = 1 << 64


def by_the_book(a: int, b: int) -> int:
    x = (a * MIX_A + b * MIX_B + MIX_C) % SIZE
    x ^= x >> 29
    x = (x * MIX_D) % SIZE
    return x ^ (x >> 32)


def number(layer: int, component: str, family: str = "trunk") -> int:
    return crc32(f"{family}.{layer}.{component}".encode())


def of(layer: int, component: str, *inputs: int, family: str = "trunk") -> int:
    label, *others = inputs
    for other in others:
        label = by_the_book(label, other)
    return by_the_book(label, number(layer, component, family))


def unsigned(tensor: torch.Tensor) -> int:
    return int(tensor) % SIZE


def test_mix_follows_its_definition_and_depends_on_the_order() -> None:
    assert mix(3, 5) == by_the_book(3, 5) != mix(5, 3)
    assert mix(SIZE - 1, SIZE - 1) == by_the_book(SIZE - 1, SIZE - 1) < SIZE


def test_expanded_element_depends_on_its_index() -> None:
    row = expand([SIZE - 2], (2, 3))
    assert row.shape == (1, 2, 3) and row.dtype == torch.int64
    assert [int(x) % SIZE for x in row.flatten()] == [(SIZE - 2 + j * SPREAD) % SIZE for j in range(6)]
    assert not expand([0], (4,)).any(), "nothing yet is all zeros"


def test_one_token_through_a_gdn_layer_and_an_attention_layer() -> None:
    """Every label between the embedding and the root, spelled out."""
    small = config(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2)
    engine = LedgerEngine(small, num_steps=1)
    begin(engine, (7,))
    hidden = by_the_book(7, number(STAGE_LEVEL, "embedding"))
    normed = of(0, "normed", hidden)
    tap, z, b, a = (of(0, name, normed) for name in ("qkv", "z", "b", "a"))
    mixed = number(0, "mixed")
    for entry in (0, 0, 0, tap):
        mixed = by_the_book(mixed, entry)
    q, k, v, decay, beta = (of(0, name, mixed, a, b) for name in ("q", "k", "v", "log_decay", "beta"))
    update = of(0, "update", 0, k, v, decay, beta)
    chain = by_the_book(0, by_the_book(by_the_book(k, decay), update))
    mixer = of(0, "mixer", of(0, "gated", of(0, "core", chain, q), z))
    hidden = _rest_of_layer(0, hidden, mixer)
    normed = of(1, "normed", hidden)
    projected, raw, value = (of(1, name, normed) for name in ("projected", "key_raw", "value"))
    query, key = of(1, "query", projected, 0), of(1, "key", raw, 0)
    total = by_the_book(by_the_book(key, value), 0)
    opened = of(1, "opened", of(1, "attended", total, query), projected)
    final = of(AFTER_LAYERS, "final", _rest_of_layer(1, hidden, of(1, "mixer", opened)))
    root = (of(AFTER_LAYERS, "logits", final) >> 1) % small.vocab

    state = engine.state("a")
    assert [unsigned(column[0]) for column in state.conv[0].T] == [0, 0, tap]
    assert unsigned(state.state[0][0, 0, 0]) == chain
    assert (unsigned(state.keys[1][0, 0, 0]), unsigned(state.values[1][0, 0, 0])) == (key, value)
    assert state.root == root

    embedded = by_the_book(root, number(STAGE_LEVEL, "embedding", "draft"))
    left = of(STAGE_LEVEL, "normed", embedded, family="draft")
    right = of(STAGE_LEVEL, "post_normed", final, family="draft")
    fused = of(STAGE_LEVEL, "fused", of(STAGE_LEVEL, "joined", left, right, family="draft"), family="draft")
    raw = of(0, "key_raw", of(0, "normed", fused, family="draft"), family="draft")
    assert unsigned(state.draft_keys[0][0, 0, 0]) == of(0, "key", raw, 0, family="draft")


def _rest_of_layer(layer: int, hidden: int, mixer: int) -> int:
    residual = of(layer, "residual", hidden, mixer)
    return of(layer, "hidden", residual, of(layer, "mlp", of(layer, "post_normed", residual)))


def test_before_the_first_token_everything_is_zero() -> None:
    engine = LedgerEngine(config(), num_steps=1)
    engine.admit("a", (1, 2))
    state = engine.state("a")
    assert (state.length, state.root) == (0, None)
    assert not any(kept.any() for kept in (*state.conv.values(), *state.state.values()))
    assert all(kept.shape[0] == 0 for kept in (*state.keys.values(), *state.draft_keys.values()))


def test_rejected_drafts_leave_no_label() -> None:
    engines = [LedgerEngine(config(), num_steps=3) for _ in range(2)]
    for engine, rejected in zip(engines, ((9, 9), (30, 1)), strict=True):
        begin(engine, (1, 2, 3), root=4)
        play(engine, (5, *rejected), Path((1,), 6))
    assert disagreement(engines[0].state("a"), engines[1].state("a")) == 0


def test_labels_differ_for_every_token_and_place() -> None:
    """One step less, one step more, another token, two tokens swapped: none gives the same labels."""
    states = []
    for tokens in ((5, 6), (5,), (5, 6, 7), (5, 8), (6, 5)):
        engine = LedgerEngine(config(), num_steps=0)
        begin(engine, (1, 2, 3), root=4)
        decode(engine, (*tokens, 0))  # the last one is the root, in no memory yet
        states.append(engine.state("a"))
    for layer in states[0].state:
        assert len({unsigned(state.state[layer][0, 0, 0]) for state in states}) == len(states)


def test_long_prompt_takes_about_a_second() -> None:
    """400 tokens over 4 layers; the running total keeps attention linear. The limit is doubled for a busy machine."""
    engine = LedgerEngine(config(), num_steps=3)
    engine.admit("a", tuple(token % 64 for token in range(400)))
    start = time.process_time()
    engine.forward((Row("a", "prefill", 400),))
    assert time.process_time() - start < 2

"""The engines of tests/peers track requests correctly, shown on fakes of the packages with ledgers as states.

Leaves out: the packages themselves, which `make peers` runs.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instep.subject.engines.verbs import Tokens
from peers.engines import gguf_writer, llama_library, llamacpp_engine
from support.worlds import fake_libraries as fake

ROOM = SimpleNamespace(slots=(5, 2, 7), pages=(1, 2, 3), page_size=16, max_tokens=48, max_positions=None)
PROMPT, WINDOW = (1, 2, 3), (3, 1, 2, 1)
LLAMA = ("make", "again", "copied", "with_rows")
EVERY = (*(f"llamacpp_engine:{name}" for name in LLAMA), "mlx_engine:make", "transformers_engine:make")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Build an engine by its name, on the fakes."""
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    (tmp_path / "config.json").write_text(json.dumps(fake.CONFIG))
    monkeypatch.setattr(gguf_writer, "write", lambda directory, file: None)
    monkeypatch.setattr(llamacpp_engine, "library", lambda: fake.Llama(_defaults(), llama_library.Batch))

    def make(name: str) -> Any:
        file, _, function = name.partition(":")
        module = f"peers.engines.{file}"
        sys.modules.pop(module, None) if file != "llamacpp_engine" else None
        found = getattr(importlib.import_module(module), function)
        return found(tmp_path, ROOM, num_steps=3, widest=4, device="cpu", dtype=torch.float32)

    yield make
    for file in ("mlx_engine", "transformers_engine"):  # they hold the fakes
        sys.modules.pop(f"peers.engines.{file}", None)


def _defaults() -> Any:
    params = llama_library.ContextParams()
    for name, value in llama_library.DEFAULTS.items():
        setattr(params, name, value)
    return params


def stands(engine: Any, request: str, tokens: tuple[int, ...]) -> None:
    """The engine holds this history and no other, in the canonical layout."""
    ((layer, (conv, state)),) = engine.state(request).items()
    assert layer == 0
    assert torch.equal(conv, fake.window(tokens)) and torch.equal(state, fake.state(tokens))
    if hasattr(engine, "kv"):
        ((layer, (keys, values)),) = engine.kv(request).items()
        assert layer == 1 and keys[:, 0, 0].tolist() == [*map(float, tokens)] and torch.equal(values, -keys)


def step(engine: Any, *rows: tuple[str, str, int, tuple[int, ...]]) -> dict[str, dict[str, torch.Tensor]]:
    said: dict[str, dict[str, torch.Tensor]] = engine.step(tuple(Tokens(*row) for row in rows))
    return said


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("name", EVERY)
def test_state_after_a_window_has_the_kept_length(made: Any, name: str, length: int) -> None:
    engine = made(name)
    step(engine, ("a", "prefill", 0, PROMPT))
    said = step(engine, ("a", "verify", 3, WINDOW), ("b", "prefill", 0, (2, 2)))
    assert torch.equal(said["logits"]["a"], fake.rows(PROMPT + WINDOW, 3).repeat(1, 2))
    assert torch.equal(said["logits"]["b"], fake.rows((2, 2), 0).repeat(1, 2))
    if "final" in said:
        assert torch.equal(said["final"]["a"], fake.rows(PROMPT + WINDOW, 3))
    engine.keep("a", 3 + length)
    stands(engine, "a", kept := PROMPT + WINDOW[:length])
    stands(engine, "b", (2, 2))
    said = step(engine, ("b", "decode", 2, (3,)), ("a", "decode", len(kept), (2,)))
    assert torch.equal(said["logits"]["a"], fake.rows((*kept, 2), len(kept)).repeat(1, 2))
    step(engine, ("a", "verify", len(kept) + 1, WINDOW))  # alone in its step
    engine.keep("a", len(kept) + 1 + length)
    stands(engine, "a", (*kept, 2, *WINDOW[:length]))
    stands(engine, "b", (2, 2, 3))


@pytest.mark.parametrize("name", EVERY)
def test_request_in_a_reused_slot_starts_empty(made: Any, name: str) -> None:
    engine = made(name)
    for number in range(20):  # more than there are sequences
        step(engine, (f"{number}", "prefill", 0, PROMPT))
        stands(engine, f"{number}", PROMPT)
        engine.drop(f"{number}")


@pytest.mark.parametrize("name", EVERY)
def test_a_copy_is_apart_from_its_request(made: Any, name: str) -> None:
    engine = made(name)
    step(engine, ("a", "prefill", 0, PROMPT))
    engine.save("a", "copy")
    step(engine, ("a", "verify", 3, WINDOW))
    engine.drop("a")  # between a verify and its commit
    engine.load("b", "copy")
    stands(engine, "b", PROMPT)
    step(engine, ("b", "decode", 3, (1,)), ("a", "prefill", 0, (2,)))
    engine.load("c", "copy")
    stands(engine, "a", (2,))
    stands(engine, "b", (*PROMPT, 1))
    stands(engine, "c", PROMPT)


def test_cropping_leaves_refused_tokens_in_the_recurrent_state(made: Any) -> None:
    engine = made("transformers_engine:cropping")
    step(engine, ("a", "prefill", 0, PROMPT))
    step(engine, ("a", "verify", 3, WINDOW))
    engine.keep("a", 5)
    (conv, state), (keys, _) = engine.state("a")[0], engine.kv("a")[1]
    assert torch.equal(conv, fake.window(PROMPT + WINDOW[:2])) and len(keys) == 5
    assert torch.equal(state, fake.state(PROMPT + WINDOW))


def test_llamacpp_rolls_back_only_what_was_refused(made: Any) -> None:
    engine = made("llamacpp_engine:make")
    asked = engine.context.lib.asked
    step(engine, ("a", "prefill", 0, PROMPT))
    step(engine, ("a", "verify", 3, WINDOW))
    engine.keep("a", 7)
    assert not asked
    step(engine, ("a", "verify", 7, WINDOW))
    engine.keep("a", 9)
    assert asked == [("rm", 1, 9)]  # slot 5 is the second of three


@pytest.mark.parametrize(("name", "seen"), [("make", False), ("copied", True)])
def test_llamacpp_copies_by_bytes_or_by_seq_cp(made: Any, name: str, seen: bool) -> None:
    engine = made(f"llamacpp_engine:{name}")
    step(engine, ("a", "prefill", 0, PROMPT))
    engine.save("a", "copy")
    assert (("cp", 1, 3) in engine.context.lib.asked) is seen  # the first sequence after those of the slots


def test_a_refused_rollback_is_raised(made: Any) -> None:
    engine = made("llamacpp_engine:make")
    step(engine, ("a", "prefill", 0, PROMPT))
    step(engine, ("a", "verify", 3, (*WINDOW, 1)))  # wider than `widest`
    with pytest.raises(RuntimeError, match="refuses to roll back to 4 tokens"):
        engine.keep("a", 4)


@pytest.mark.parametrize("field", ["n_batch", "type_k", "embeddings"])
def test_another_layout_of_the_params_is_noticed(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    params = _defaults()
    setattr(params, field, 77)
    with pytest.raises(RuntimeError, match=f"another layout here: .*{field}"):
        llama_library.Context(fake.Llama(params, llama_library.Batch), Path("model.gguf"), n_rs_seq=3)


def test_a_field_that_did_not_arrive_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = fake.Llama(_defaults(), llama_library.Batch)
    monkeypatch.setattr(lib, "llama_n_rs_seq", lambda ctx: 0, raising=False)
    with pytest.raises(RuntimeError, match="n_rs_seq did not arrive"):
        llama_library.Context(lib, Path("model.gguf"), n_rs_seq=3)


@pytest.mark.parametrize(("name", "known"), [
    ("model.embed_tokens.weight", "token_embd.weight"), ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"), ("model.layers.2.linear_attn.A_log", "blk.2.ssm_a"),
    ("model.layers.2.linear_attn.dt_bias", "blk.2.ssm_dt.bias"),
    ("model.layers.3.mlp.up_proj.weight", "blk.3.ffn_up.weight"), ("mtp.fc.weight", "blk.4.nextn.eh_proj.weight"),
    ("mtp.norm.weight", "blk.4.nextn.shared_head_norm.weight"),
    ("mtp.layers.0.self_attn.q_proj.weight", "blk.4.attn_q.weight"),
])
def test_a_tensor_has_llamacpps_name(name: str, known: str) -> None:
    assert gguf_writer.named(name, {"num_hidden_layers": 4}) == known


def test_value_heads_are_tiled_and_norms_and_decays_are_converted() -> None:
    heads = torch.arange(12.0)  # 6 value heads of 2: grouped 0 1 2 | 3 4 5 by key head
    layer = "model.layers.0.linear_attn"
    tiled = torch.tensor([0.0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11])

    def converted(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return gguf_writer.converted(name, tensor, fake.CONFIG)

    assert torch.equal(converted(f"{layer}.in_proj_z.weight", heads[:, None])[:, 0], tiled)
    assert torch.equal(converted(f"{layer}.out_proj.weight", heads[None])[0], tiled)
    qkv = converted(f"{layer}.in_proj_qkv.weight", torch.arange(20.0)[:, None])[:, 0]
    assert qkv.tolist() == [*range(8), *(8 + tiled).tolist()]
    assert converted(f"{layer}.conv1d.weight", torch.zeros(20, 1, 4)).shape == (20, 4)
    six, order = torch.arange(6.0), [0, 3, 1, 4, 2, 5]
    assert torch.equal(converted(f"{layer}.dt_bias", six), six[order])
    assert torch.equal(converted(f"{layer}.A_log", six), -six[order].exp())
    assert torch.equal(converted(f"{layer}.norm.weight", six), six)  # the gated norm is stored as it is
    for norm in ("model.layers.0.input_layernorm", "model.layers.3.self_attn.q_norm", "mtp.norm", "model.norm"):
        assert torch.equal(converted(f"{norm}.weight", six), 1 + six)
    assert torch.equal(gguf_writer.grouped(six[order], 2), six)

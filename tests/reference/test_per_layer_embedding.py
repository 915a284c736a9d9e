"""Per-layer embeddings and residual streams agree with `transformers` in fp64: prompts in chunks, decode, windows."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from documentation.parity_table import ALLOWED
from instep_reference import norms
from instep_reference import per_layer_embedding as ple
from instep_reference.contract.qwen4_config import PleShape
from instep_reference.per_layer_embedding import PleMemory
from instep_reference.weights import PleWeights, StreamWeights
from support.independent.transformers_models import in_double
from support.running.covering import few

pytestmark = [  # imports transformers
    pytest.mark.slow, pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

D, EPS, LENGTH = 8, 1e-6, 30
WAYS = ((30,), (1, 2, 3, 24), (20, *(1,) * 10), (11, 7, 4, 8))  # sizes of the parts of the tokens
BASE = PleShape(ngram=3, taps=4, streams=4, heads=2, vocab=20, least=40, eos=7)
SHAPES = (
    BASE, replace(BASE, ngram=2), replace(BASE, ngram=4, heads=1), replace(BASE, taps=2), replace(BASE, streams=2),
    replace(BASE, index=1), replace(BASE, index=3, seed=5), replace(BASE, least=2), replace(BASE, eos=0),
    replace(BASE, vocab=250000, least=1000), replace(BASE, heads=3, taps=3, streams=3),
)  # fmt: skip
Parts = list[tuple[torch.Tensor, dict[str, torch.Tensor]]]


def theirs(shape: PleShape, seed: int) -> Any:
    """A PLE layer of transformers with drawn weights. Its norms are drawn around 0."""
    width = (shape.ngram - 1) * shape.heads * 4
    config = SimpleNamespace(
        hidden_size=D, hc_count=shape.streams, hc_lowrank=5, ple_embed_dim=width, ple_conv_kernel_size=shape.taps,
        ngram_size=shape.ngram, heads_per_ngram=shape.heads, vocab_size=shape.vocab, seed=shape.seed,
        ngram_vocab_size_base=shape.least, eos_token_id=[shape.eos], make_ngram_vocab_size_divisible_by=8,
        rms_norm_eps=EPS,
    )
    modelling = in_double("transformers.models.qwen4_exp.modeling_qwen4_exp")
    both = modelling.Qwen4ExpTextPLELayer(config, 0, shape.index), modelling.Qwen4ExpTextGatedResidual(config)
    draw = torch.Generator().manual_seed(seed)
    for module in both:
        module.double().requires_grad_(False)
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.5)
    return both


def ours(module: Any) -> PleWeights:
    return PleWeights(
        module.ple_embedding.ngram_embedding.weight, module.key_proj.weight, module.value_proj.weight,
        module.conv1d.weight.squeeze(1), module.norm_key.weight, module.norm_query.weight, module.norm_conv.weight)


def error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).abs().max() / right.abs().max())


def worst(shape: PleShape, ways: tuple[tuple[int, ...], ...] = WAYS) -> float:
    """The worst relative error of rows and memory over all ways in which the tokens come."""
    from transformers import DynamicCache
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    module, _ = theirs(shape, seed=3)
    draw = torch.Generator().manual_seed(4)
    tokens = torch.randint(min(shape.vocab, 20), (LENGTH,), generator=draw).tolist()
    hidden = torch.randn(LENGTH, shape.streams * D, generator=draw, dtype=torch.float64)
    hidden[3], hidden[8] = 0.0, 1e-10 * hidden[8]  # their scores are below the least
    errors = []
    for parts in ways:
        cache = DynamicCache(config=Qwen4ExpTextConfig(
            num_hidden_layers=1, layer_types=["linear_attention"], ple_layer_ids=[1], eos_token_id=0))  # three windows
        nothing = torch.empty(0)
        memory, begin = PleMemory(nothing, nothing, **ple.empty(shape, D, torch.float64, "cpu")), 0
        for size in parts:
            rows, some = hidden[begin : begin + size], tokens[begin : begin + size]
            right = rows + module(rows[None], torch.tensor([some]), cache)[0]
            found, memory = ple.embed(
                shape, ours(module), rows, torch.tensor(some), memory, EPS, lambda _, tensor: tensor)
            errors.append(error(found, right))
            begin += size
        kept = cache.layers[0].conv_states
        assert torch.equal(memory.ngram - 1, kept[2][0][-len(memory.ngram) :])
        errors.append(error(memory.ple_conv, kept[1][0][:, -shape.reach :]))
    return max(errors)


@few(2)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_per_layer_embedding_agrees_with_transformers(shape: PleShape) -> None:
    assert worst(shape) <= ALLOWED["fp64"]


@few(1)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streams_agree_with_transformers(shape: PleShape) -> None:
    _, module = theirs(shape, seed=6)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    hidden, made = draw(9, shape.streams * D), draw(9, D)
    weights = StreamWeights(module.hc_norm.weight, module.input_mix_weight_down.weight,
                            module.input_mix_weight_up.weight, module.block_inject_weight.weight)  # fmt: skip
    mixed, before, strength = module(hidden[None])
    found = ple.read_streams(weights, hidden, shape.streams, EPS)
    for mine, right in zip(found, (mixed, strength), strict=True):
        assert mine is not None and error(mine, right[0]) <= ALLOWED["fp64"]
    right = before + (made[None, :, None] * strength[..., None]).flatten(-2)
    assert found[1] is not None and error(ple.add_to_streams(hidden, made, found[1]), right[0]) <= ALLOWED["fp64"]
    last, nothing = ple.read_streams(replace(weights, inject=None), hidden, shape.streams, EPS)
    assert torch.equal(last, found[0]) and nothing is None


def _entries(monkeypatch: pytest.MonkeyPatch, **wrong: int) -> None:
    entries, embed = ple.entries, ple.embed
    monkeypatch.setattr(ple, "embed", partial(
        embed, grams=lambda shape, *given: entries(replace(shape, **wrong), *given)))


def _across_the_end_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    _entries(monkeypatch, eos=-1)


def _streams_normed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def normed(x: torch.Tensor, weight: torch.Tensor, streams: int, eps: float) -> torch.Tensor:
        return norms.rms_norm(x, weight, eps).unflatten(1, (streams, -1))

    monkeypatch.setattr(ple, "norm_streams", normed)


def _least_score_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ple, "LEAST_SCORE", 1e-2)


def _table_of_the_layer_before(monkeypatch: pytest.MonkeyPatch) -> None:
    _entries(monkeypatch, index=0)


@pytest.mark.whole
@pytest.mark.parametrize(("plant", "shape"), [
    (_across_the_end_of_a_text, BASE), (_streams_normed_together, BASE), (_least_score_left_out, BASE),
    (_table_of_the_layer_before, SHAPES[5]),
])
def test_a_slight_error_of_a_per_layer_embedding_would_be_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], shape: PleShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert worst(shape) > 100 * ALLOWED["fp64"]

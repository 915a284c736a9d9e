"""The configuration of Qwen4-Exp, GDN with residual streams and embeddings of n-grams, from its `config.json`.

Leaves out: the fields that it shares with Qwen3.5 (`config.py`), and what the fields mean (`config.ModelConfig`).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .config_fields import Fields, bad, only
from .recurrences import PLE

QWEN4 = "qwen4_exp"
INDEXER = ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
# Defaults of `Qwen4ExpTextConfig` in transformers 5.24.
STREAMS, RANK, TAPS, NGRAM, HEADS, LEAST, DIVISOR, SEED, PARTS, POSITIONS = (
    4, 320, 4, 3, 8, 20_000_000, 128, 1234, 512, 32768)  # fmt: skip


@dataclass(frozen=True)
class PleShape:
    """Sizes of a per-layer embedding (PLE): N tokens of the longest n-gram, W taps of its convolution, S streams.

    heads  hashed heads of each order of n-grams, 2 to N;  vocab  tokens;  least  entries of the smallest table
    index  number of this PLE among those of the model, from 0;  eos  token at which n-grams begin again
    width  E, that of the embeddings of all heads side by side
    layer  that it precedes;  divisor  of the stored entries;  parts  that a file may store the table in
    """

    ngram: int
    taps: int
    streams: int
    heads: int
    vocab: int
    least: int
    eos: int
    index: int = 0
    seed: int = SEED
    width: int = 0
    layer: int = 0
    divisor: int = 1
    parts: int = 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Entries of the table of each head, order by order: distinct primes, over all PLE layers of a model."""
        count = (self.ngram - 1) * self.heads
        skipped, found, number = self.index * count, list[int](), self.least - 1
        while len(found) < skipped + count:
            number += 1
            if number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
                found.append(number)
        return tuple(found[skipped:])

    @property
    def entries(self) -> int:
        """Stored entries of the tables of all heads, one after another: at least as many as they use."""
        return -(-sum(self.sizes) // self.divisor) * self.divisor

    @property
    def reach(self) -> int:
        """Rows before the own one that the convolution reads: its taps are N rows apart."""
        return (self.taps - 1) * self.ngram


def streams_and_embeddings(f: Fields, layers: tuple[tuple[str, ...], ...], vocab: int, hidden: int) -> dict[str, Any]:
    """Read the fields that Qwen3.5-MoE does not have. MTP layers are refused: the release ignores them.

    With an indexer attention reads chosen tokens alone. While there are no more than it chooses it reads all, and such
    a model is served. A file with longer positions is refused.

    Mirrors: transformers 5.24 `Qwen4ExpTextConfig`.
    """
    streams, preceded = f.whole("hc_count", least=2, default=STREAMS), _preceded(f, layers)
    return dict(
        layers=tuple((PLE, *blocks) if layer in preceded else blocks for layer, blocks in enumerate(layers)),
        streams=streams, stream_rank=f.whole("hc_lowrank", default=RANK), most_positions=_positions(f),
        norm_topk=f.flag("norm_topk_prob", default=True),
        ple=tuple(_ple(f, streams, vocab, hidden, index, layer) for index, layer in enumerate(preceded)),
    )


def _positions(f: Fields) -> int | None:
    """Return the number of tokens of a request up to which attention reads all of them; None: there is no indexer."""
    stated = f.whole("max_position_embeddings", default=POSITIONS)
    if all(f.get(name) is None for name in INDEXER):
        return None
    budget, ratio = f.whole("indexer_budget"), f.whole("indexer_compress_ratio")
    if budget % ratio:
        raise bad("indexer_budget", budget, f"a multiple of indexer_compress_ratio ({ratio})")
    only("indexer_kv_heads", f.get("indexer_kv_heads"), 1)
    most = budget + ratio - 1
    if stated > most:
        raise bad("max_position_embeddings", stated, f"at most {most}: of longer texts the indexer chooses "
                  f"{budget} tokens, and attention to chosen tokens is not computed here. Up to {most} it reads all: "
                  "to serve such texts, state this number in a copy of the file")  # fmt: skip
    return stated


def _preceded(f: Fields, layers: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
    """Return the layers that an embedding of n-grams precedes, in order. The file counts them from 1."""
    stated = f.get("ple_layer_ids") or []
    if not isinstance(stated, list) or not all(type(each) is int and 1 <= each <= len(layers) for each in stated):
        raise bad("ple_layer_ids", stated, f"a list of layer numbers, 1 to {len(layers)}")
    for each in stated:
        if "attention" in layers[each - 1]:
            raise bad("ple_layer_ids", each, "the number of a linear_attention layer")
    return tuple(each - 1 for each in sorted(set(stated)))


def _ple(f: Fields, streams: int, vocab: int, hidden: int, index: int, layer: int) -> PleShape:
    ngram, heads = f.whole("ngram_size", least=2, default=NGRAM), f.whole("heads_per_ngram", default=HEADS)
    width, eos = f.whole("ple_embed_dim", default=hidden), f.get("eos_token_id")
    if width % ((ngram - 1) * heads):
        raise bad("ple_embed_dim", width, f"a multiple of the number of n-gram heads ({(ngram - 1) * heads})")
    eos = eos[0] if isinstance(eos, list) and eos else eos
    if type(eos) is not int or not 0 <= eos < vocab:
        raise bad("eos_token_id", eos, f"a token of 0 to {vocab - 1}: n-grams begin again after it")
    return PleShape(
        ngram=ngram, taps=f.whole("ple_conv_kernel_size", least=2, default=TAPS), streams=streams, heads=heads,
        vocab=vocab, least=f.whole("ngram_vocab_size_base", default=LEAST), eos=eos, index=index,
        seed=f.whole("seed", least=0, default=SEED), width=width, layer=layer,
        divisor=f.whole("make_ngram_vocab_size_divisible_by", default=DIVISOR),
        parts=f.whole("split_ngram_parts", default=PARTS),
    )

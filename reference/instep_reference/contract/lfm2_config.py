"""The configuration of LFM2, short convolutions and attention, from its `config.json`.

Leaves out: what the fields mean (`config.ModelConfig`).
"""

from typing import Any

from .config_fields import Fields, bad, mixers_of, only, positive, turning_heads
from .recurrences import SHORT_CONV

LFM2 = "lfm2"
LAYERS = {"conv": SHORT_CONV.name, "full_attention": "attention"}  # by the names in `layer_types`
CONV_WIDTH, WIDTH_MULTIPLE, THETA = 3, 256, 1e6  # defaults of `Lfm2Config`


def read_lfm2(f: Fields) -> dict[str, Any]:
    """Read a file of LFM2. A bias of conv layers is refused: no release has one.

    Mirrors: transformers 5.24 `Lfm2Config` and `Lfm2MLP`, which derives the width of an MLP from three more fields.
    """
    for name, value in (("conv_bias", False), ("sliding_window", None)):
        only(name, f.get(name), value)
    for name in ("rope_type", "type"):
        only(name, f.rope(name), "default")
    hidden = f.whole("hidden_size")
    heads, kv_heads, head_dim = turning_heads(f, hidden)
    theta = f.rope("rope_theta")
    return dict(
        model_type=LFM2,
        vocab=f.whole("vocab_size"),
        hidden=hidden,
        layers=tuple((mixer, "mlp") for mixer in _mixers(f)),
        eps=f.positive("norm_eps"),
        # the release's name, and that of transformers
        tied=f.flag("tie_embedding", default=f.flag("tie_word_embeddings", default=True)),
        key_heads=1, value_heads=1, key_dim=1, value_dim=1,
        conv_width=f.whole("conv_L_cache", default=CONV_WIDTH),
        output_gate="silu",
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary_dim=head_dim,
        rope_theta=THETA if theta is None else positive("rope_theta", theta),
        intermediate=_width(f),
        experts=0, experts_per_token=0, expert_intermediate=0, shared_intermediate=0, norm_topk=False, mtp_layers=0,
        centred_norms=False, attention_gate=False,
    )


def _width(f: Fields) -> int:
    """Return the width of an MLP: two thirds of the stated one, times a factor, rounded up to a multiple."""
    width = f.whole("intermediate_size" if f.get("block_ff_dim") is None else "block_ff_dim")
    if not f.flag("block_auto_adjust_ff_dim", default=True):
        return width
    factor = f.get("block_ffn_dim_multiplier")
    to = f.whole("block_multiple_of", default=WIDTH_MULTIPLE)
    width = int(positive("block_ffn_dim_multiplier", 1.0 if factor is None else factor) * int(2 * width / 3))
    return -(-width // to) * to


def _mixers(f: Fields) -> tuple[str, ...]:
    """Read the mixers of layers, from `layer_types` or the older list of the layers with attention."""
    layers, stated, listed = f.whole("num_hidden_layers"), f.get("layer_types"), f.get("full_attn_idxs")
    if stated is None:
        if not isinstance(listed, list) or not all(type(index) is int and 0 <= index < layers for index in listed):
            raise bad("full_attn_idxs", listed, f"a list of layer numbers under {layers}")
        stated = ["full_attention" if index in listed else "conv" for index in range(layers)]
    return mixers_of(stated, layers, LAYERS)

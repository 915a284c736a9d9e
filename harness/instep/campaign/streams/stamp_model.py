"""A model made by hand: its conv windows, states and values hold the stamps of the tokens that were taken in.

A token's embedding is one-hot in its key and in every digit. Mixers and MLPs add nothing, so each layer sees the
embedding itself. A GDN layer writes the token's code at the key of the token's position: keys are one-hot and large,
beta is 1, nothing decays. So the delta rule replaces row p % 16 of a state by the code of position p. Attention layers
hold the code as their values. In the draft head, value head 0 holds the code of the next token, and head 1 that of the
row's own token. Leaves out: text. The choices of such a model mean nothing, so all choices are forced.
"""

import hashlib
import math
from collections.abc import Callable
from math import prod
from types import MappingProxyType

import torch

from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.checkpoint_tensor_shapes import expected_shapes
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.recurrences import RECURRENCES

from .token_stamps import DIGIT, DIGITS, KEYS, WIDTH, Stamp, columns, vocabulary

LANE = KEYS + len(DIGITS) * DIGIT  # one-hot features of one token
HIDDEN = 2 * LANE  # the second lane is for the draft head, which joins the hidden row with the next token
ONES = 1 + len(DIGITS)  # how many features of a token are 1
LOUD = 20.0  # in fp32 sigmoid(20) is 1 and softplus(-20) is 0; as a key it is large against every epsilon


USUAL = next(iter(RECURRENCES))
# Only by the delta rule a token replaces the code that a state has at its key. An outer product adds its own to it.
STAMPED = tuple(row.name for row in RECURRENCES.values() if row.update == "delta")


def config(requests: int, *, mtp_layers: int = 1, recurrence: str = USUAL) -> ModelConfig:
    """Three layers with a recurrence, then one attention layer; two value heads per key head, K = V = 16."""
    return ModelConfig(
        model_type="qwen3_5", vocab=vocabulary(requests), hidden=HIDDEN,
        layers=((recurrence, "mlp"),) * 3 + (("attention", "mlp"),), eps=1e-6, tied=True,
        key_heads=2, value_heads=4, key_dim=KEYS, value_dim=WIDTH, conv_width=4, output_gate="silu",
        heads=2, kv_heads=2, head_dim=WIDTH, rotary_dim=4, rope_theta=10000.0,
        intermediate=8, experts=0, experts_per_token=0, expert_intermediate=0, shared_intermediate=0, norm_topk=True,
        mtp_layers=mtp_layers,
    )  # fmt: skip


def stream_checkpoint(made: ModelConfig) -> Checkpoint:
    """The weights, in bf16 as released ones. A tensor that is not set here is 0 and adds nothing."""
    tensors = {name: torch.zeros(size) for name, size in expected_shapes(made).items()}
    tensors["model.embed_tokens.weight"] = _embedding(made)
    tensors["model.norm.weight"] += _unit(ONES)
    for layer in range(len(made.layers)):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] += _unit(ONES)
        recurrent = layer in made.recurrent
        tensors |= _recurrence(made, f"{at}.linear_attn", layer) if recurrent else _values(at, layer, (0, 0))
    if made.mtp_layers:
        tensors |= _draft(made, tensors)
    stored = {name: tensor if name.endswith("A_log") else tensor.bfloat16() for name, tensor in tensors.items()}
    digest = hashlib.sha256(f"stream {made.mixers}".encode())
    for name, tensor in sorted(stored.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode() + tensor.float().numpy().tobytes())
    return Checkpoint(made, MappingProxyType(stored), digest.hexdigest())


def _embedding(made: ModelConfig) -> torch.Tensor:
    table = torch.zeros(made.vocab, HIDDEN)
    for token in range(made.vocab):
        stamp = Stamp.of(token)
        table[token, stamp.key] = 1
        for which, digit in enumerate(stamp.digits):
            table[token, _feature(which, digit)] = 1
    return table


def _feature(which: int, digit: int, lane: int = 0) -> int:
    return lane * LANE + KEYS + which * DIGIT + digit


def _unit(ones: int) -> float:
    """The stored norm weight w (used as 1 + w) with which a row with this many ones does not change."""
    return math.sqrt(ones / HIDDEN) - 1


def _recurrence(made: ModelConfig, at: str, layer: int) -> dict[str, torch.Tensor]:
    keys = made.key_heads * made.key_dim
    key = torch.zeros(keys, HIDDEN)
    for head in range(made.key_heads):
        key[head * KEYS : (head + 1) * KEYS, :KEYS] = LOUD * torch.eye(KEYS)
    value = torch.cat([_coder(head, layer, before_silu) for head in range(made.value_heads)])
    conv = torch.zeros(2 * keys + made.value_heads * made.value_dim, 1, made.conv_width)
    conv[:, 0, -1] = 1  # the token itself
    always, decays = (torch.zeros(prod(made.lengths(axes)), HIDDEN) for axes in (("HV",), made.recurrence.gate))
    always[:, :KEYS] = decays[:, :KEYS] = 1  # a token has exactly one key
    return {
        f"{at}.in_proj_qkv.weight": torch.cat((key, key, value)), f"{at}.conv1d.weight": conv,
        f"{at}.in_proj_b.weight": LOUD * always, f"{at}.in_proj_a.weight": -2 * LOUD * decays,
    }


def _values(at: str, layer: int, lanes: tuple[int, int]) -> dict[str, torch.Tensor]:
    """The weights of values. lanes: for each value head the lane whose code it holds."""
    coders = [_coder(head, layer, lambda value: value, lane) for head, lane in enumerate(lanes)]
    return {f"{at}.self_attn.v_proj.weight": torch.cat(coders)}


def _draft(made: ModelConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """fc puts the next token's features into lane 0 and the hidden row's into lane 1."""
    fc = torch.zeros_like(tensors["mtp.fc.weight"])
    fc[:LANE, :LANE] = fc[LANE:, HIDDEN : HIDDEN + LANE] = torch.eye(LANE)
    found = {"mtp.fc.weight": fc, "mtp.norm.weight": tensors["mtp.norm.weight"] + _unit(2 * ONES)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        found[f"mtp.{name}.weight"] = tensors[f"mtp.{name}.weight"] + _unit(ONES)
    for layer in range(made.mtp_layers):
        at = f"mtp.layers.{layer}"
        name = f"{at}.input_layernorm.weight"
        found |= {name: tensors[name] + _unit(2 * ONES), **_values(at, layer, (0, 1))}
    return found


def _coder(head: int, layer: int, stored: Callable[[float], float], lane: int = 0) -> torch.Tensor:
    """The matrix [16, D] from features to the columns of a code. stored(y): the number to store so that y is read."""
    weight = torch.zeros(WIDTH, HIDDEN)
    for column, (kind, number) in enumerate(columns(head, layer)):
        if kind == "constant":
            weight[column, lane * LANE : lane * LANE + KEYS] = stored(float(number))
            continue
        for digit in range(DIGIT):
            weight[column, _feature(number, digit, lane)] = stored(float(digit + 1))
    return weight


def before_silu(value: float) -> float:
    """The x with x sigmoid(x) = value, for a value of at least 1, by a few steps of Newton's method."""
    x = value
    for _ in range(8):
        gate = 1 / (1 + math.exp(-x))
        x -= (x * gate - value) / (gate * (1 + x * (1 - gate)))
    return x

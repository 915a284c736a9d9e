"""Both engines against a third computation, where `transformers` has none: several MTP layers, and a sigmoid gate.

The witness shares no code with either, and reads the files itself: numpy in fp64, token by token, from the start. It
leaves out memory, batches and acceptance. Leaves out: everything that `transformers` covers.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from instep_reference.contract.adaptive_controller_file import AdaptiveFile, Bracket
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Admit, Commit, Draft, Event, Forward, Row, SetNumSteps
from instep_reference.contract.engine import Path as Way
from support.inputs.checkpoints import write
from support.worlds import engine_and_reference as sides

Array = np.ndarray[Any, np.dtype[np.float64]]


class Witness:
    """`fed` and `paired`: of every MTP layer the rows and tokens that it has taken in so far, as they were then."""

    def __init__(self, folder: Path) -> None:
        self.c: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.w = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
        self.layers = self.c["mtp_num_hidden_layers"]
        self.fed: list[list[Array]] = [[] for _ in range(self.layers)]
        self.paired: list[list[int]] = [[] for _ in range(self.layers)]

    # -- the target ------------------------------------------------------------------------------

    def run(self, tokens: Sequence[int]) -> tuple[Array, dict[int, Array]]:
        """The final rows [T, D], and of every GDN layer the state [HV, K, V] after the last token."""
        x, states = self.w["model.embed_tokens.weight"][list(tokens)], {}
        for number in range(self.c["num_hidden_layers"]):
            at, attention = f"model.layers.{number}", (number + 1) % self.c["full_attention_interval"] == 0
            normed = self.norm(x, f"{at}.input_layernorm")
            if attention:
                mixed = self.attention(at, normed)[0]
            else:
                mixed, states[number] = self.gdn(at, normed)
            x = self.half(at, x + mixed)
        return self.norm(x, "model.norm"), states

    def keys(self, tokens: Sequence[int], layer: int) -> Array:
        """The keys that attention layer `layer` keeps, if every layer before it is a GDN layer."""
        x = self.w["model.embed_tokens.weight"][list(tokens)]
        for number in range(layer):
            at = f"model.layers.{number}"
            x = self.half(at, x + self.gdn(at, self.norm(x, f"{at}.input_layernorm"))[0])
        return self.attention(f"model.layers.{layer}", self.norm(x, f"model.layers.{layer}.input_layernorm"))[1]

    def pick(self, row: Array) -> int:
        return int(np.argmax(self.w["lm_head.weight"] @ row))

    # -- the draft head --------------------------------------------------------------------------

    def head(self, number: int) -> tuple[Array, Array]:
        """y of every row that MTP layer `number` has taken in, and its keys."""
        embedded = self.w["model.embed_tokens.weight"][self.paired[number]]
        left = self.norm(embedded, "mtp.pre_fc_norm_embedding")
        right = self.norm(np.stack(self.fed[number]), "mtp.pre_fc_norm_hidden")
        x = np.concatenate([left, right], 1) @ self.w["mtp.fc.weight"].T
        at = f"mtp.layers.{number}"
        mixed, keys = self.attention(at, self.norm(x, f"{at}.input_layernorm"))
        return self.norm(self.half(at, x + mixed), "mtp.norm"), keys

    def extend(self, final: Array, following: Sequence[int], num_steps: int) -> list[int]:
        """Take in rows whose next tokens are known up to the root -> a draft of every layer.

        Layer i pairs row p with token p + 1 + i. The unknown tokens are those that earlier layers drafted. Layer i
        reads the y of layer i - 1 if there is a step i, and else the target's rows; layer 0 always reads the target's.
        """
        count, ys, drafts = len(final), [], list[int]()
        for number in range(self.layers):
            line = [*following, *drafts]
            self.paired[number] += line[number : number + count]
            self.fed[number] += list(ys[-1] if 0 < number < num_steps else final)
            ys.append(self.head(number)[0][-count:])
            drafts.append(self.pick(ys[-1][-1]))
        return drafts

    # -- parts of a layer ------------------------------------------------------------------------

    def norm(self, x: Array, name: str) -> Array:
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        return x / scale * (1 + self.w[f"{name}.weight"])

    def half(self, at: str, x: Array) -> Array:
        """The second half of a layer: the norm, its MLP, and the residual."""
        normed = self.norm(x, f"{at}.post_attention_layernorm")
        gate, up = (normed @ self.w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate * sigmoid(gate) * up) @ self.w[f"{at}.mlp.down_proj.weight"].T

    def attention(self, at: str, x: Array) -> tuple[Array, Array]:
        heads, kv_heads, width = (self.c[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (x @ self.w[f"{at}.self_attn.{name}_proj.weight"].T for name in "qkv")
        query, gate = np.split(q.reshape(len(x), heads, 2 * width), 2, 2)
        query, key = self.norm(query, f"{at}.self_attn.q_norm"), k.reshape(len(x), kv_heads, width)
        key, value = self.norm(key, f"{at}.self_attn.k_norm"), v.reshape(len(x), kv_heads, width)
        for t in range(len(x)):
            query[t], key[t] = self.turned(query[t], t), self.turned(key[t], t)
        out = np.zeros((len(x), heads, width))
        for t in range(len(x)):
            for head in range(heads):
                of = head // (heads // kv_heads)
                scores = key[: t + 1, of] @ query[t, head] / np.sqrt(width)
                shares = np.exp(scores - scores.max())
                out[t, head] = shares / shares.sum() @ value[: t + 1, of]
        opened = (out * sigmoid(gate)).reshape(len(x), -1)
        return opened @ self.w[f"{at}.self_attn.o_proj.weight"].T, key

    def turned(self, x: Array, position: int) -> Array:
        """Pairs (i, i + R/2) of the first R channels, as complex numbers times e^(i * angle)."""
        rope = self.c["rope_parameters"]
        half = int(self.c["head_dim"] * rope["partial_rotary_factor"]) // 2
        turn = np.exp(1j * position * rope["rope_theta"] ** (-np.arange(half) / half))
        pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * turn
        return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], -1)

    def gdn(self, at: str, x: Array) -> tuple[Array, Array]:
        """The delta rule, written out: S <- e^g S; S <- S + k (beta (v - S^T k))^T; o = S^T q."""
        H, HV, K, V = (self.c[f"linear_{name}"] for name in (
            "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))  # fmt: skip
        own = {name: x @ self.w[f"{at}.linear_attn.in_proj_{name}.weight"].T for name in ("qkv", "z", "a", "b")}
        taps = self.w[f"{at}.linear_attn.conv1d.weight"][:, 0]
        line = np.concatenate([np.zeros((taps.shape[1] - 1, taps.shape[0])), own["qkv"]])
        S, out = np.zeros((HV, K, V)), np.zeros((len(x), HV, V))
        for t in range(len(x)):
            mixed = (line[t : t + taps.shape[1]].T * taps).sum(1)
            mixed = mixed * sigmoid(mixed)
            q, k, v = mixed[: H * K].reshape(H, K), mixed[H * K : 2 * H * K].reshape(H, K), mixed[2 * H * K :]
            for head in range(HV):
                mine, value = head // (HV // H), v.reshape(HV, V)[head]
                query, key = (r[mine] / np.sqrt((r[mine] ** 2).sum() + 1e-6) for r in (q, k))
                a = own["a"][t, head] + self.w[f"{at}.linear_attn.dt_bias"][head]
                S[head] *= np.exp(-np.exp(self.w[f"{at}.linear_attn.A_log"][head]) * np.log1p(np.exp(a)))
                S[head] += np.outer(key, sigmoid(own["b"][t, head]) * (value - S[head].T @ key))
                out[t, head] = S[head].T @ query / np.sqrt(K)
        z = own["z"].reshape(len(x), HV, V)
        opening = sigmoid(z) if self.c.get("output_gate_type") == "sigmoid" else z * sigmoid(z)
        normed = out / np.sqrt((out**2).mean(-1, keepdims=True) + self.c["rms_norm_eps"])
        gated = normed * self.w[f"{at}.linear_attn.norm.weight"] * opening
        return gated.reshape(len(x), -1) @ self.w[f"{at}.linear_attn.out_proj.weight"].T, S


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


CLOSE = 1e-9  # absolute; values are of order 1, and sums of this size err by 1e-14
SHAPE: dict[str, Any] = {"num_hidden_layers": 2, "full_attention_interval": 2, "vocab_size": 24}
PROMPT, ROOT = (5, 9, 3, 2, 11), 17


def engine(side: str, folder: Path, mode: str) -> Any:
    """In fp64, with three drafts a round at first."""
    model, file = Checkpoint.open(folder), AdaptiveFile(flat=Bracket(candidate_steps=(1, 2, 3)))
    if side == "reference":
        return sides.truth(model, adaptive=file, mode=mode)
    return sides.engine(model, adaptive=file, drafter=mode, **sides.WIDE)


def serve(subject: Any, *events: Event) -> Any:
    return [event.on(subject) for event in events][-1]


def off(found: torch.Tensor, right: Array) -> float:
    assert found.shape == right.shape
    return float(np.abs(found.numpy() - right).max())


@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_three_mtp_layers_draft_as_they_are_defined(side: str, tmp_path: Path) -> None:
    """After a prompt, after two accepted drafts of three, and after none of two: fewer steps than layers."""
    folder = write(tmp_path / "model", seed=3, **SHAPE, mtp_num_hidden_layers=3)
    subject, witness = engine(side, folder, "vanilla"), Witness(folder)
    serve(subject, Admit("a", PROMPT), Forward((Row("a", "prefill", len(PROMPT), ROOT),)))
    tokens, drafts = [*PROMPT], witness.extend(witness.run(PROMPT)[0], (*PROMPT[1:], ROOT), 3)
    for steps, picks, taken, bonus in ((3, (4, 8, 2), 2, 6), (2, (1, 19), 0, 12), (1, (7,), 1, 3)):
        serve(subject, SetNumSteps(steps))
        root = subject.state("a").root
        said = serve(subject, Draft(("a",), (picks,)))
        assert said.own[0].tolist() == drafts[:steps]
        serve(subject, Forward((Row("a", "verify"),)), Commit(("a",), (Way(tuple(range(1, taken + 1)), bonus),)))
        accepted = [root, *picks[:taken]]
        tokens += accepted
        final = witness.run(tokens)[0][-len(accepted) :]
        drafts = witness.extend(final, [*accepted[1:], bonus], steps)
        state = subject.state("a")
        for layer in range(3):
            assert off(state.draft_keys[layer], witness.head(layer)[1]) <= CLOSE, (steps, layer)
        assert off(state.proposal_hidden, witness.head(0)[0][-1]) <= CLOSE
        assert state.proposal == drafts[0]


@pytest.mark.parametrize("side", ["reference", "optimized"])
@pytest.mark.parametrize("gate", ["sigmoid", "silu"])
def test_the_gated_norm_uses_the_gate_of_the_configuration(side: str, gate: str, tmp_path: Path) -> None:
    """Layer 1 sees what layer 0 let through; the state of layer 0 does not depend on it."""
    folder = write(tmp_path / "model", **SHAPE, mtp_num_hidden_layers=0, output_gate_type=gate)
    subject, witness = engine(side, folder, "external"), Witness(folder)
    serve(subject, Admit("a", PROMPT))
    picked = serve(subject, Forward((Row("a", "prefill", len(PROMPT)),))).own["a"].tolist()
    final, states = witness.run(PROMPT)
    state = subject.state("a")
    assert picked == [witness.pick(final[-1])]
    assert off(state.state[0], states[0]) <= CLOSE
    assert off(state.keys[1], witness.keys(PROMPT, 1)) <= CLOSE

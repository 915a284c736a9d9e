"""The delta rule follows its equation in both forms; so do the conv and the norms around it.

Leaves out: the layer as a whole (`test_trunk.py`, `test_oracle.py`).
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from instep_reference.chunked_delta_rule import Inverse, merged, recur_by_products, recur_in_chunks, substituted
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.gdn import GdnMemory, absorb, causal_conv, empty, left_by, mix, recur, state_after
from instep_reference.norms import gated_norm, l2_norm, rms_norm
from instep_reference.weights import Weights
from support.inputs.checkpoints import write

AGREE = 1e-12  # fp64, relative to the largest element: 130 tokens times K products times 1.1e-16, and a factor of ten
B, HV, K, V = 2, 3, 8, 5


def drawn(tokens: int, *, channels: bool = False, strong: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k, v, log_decay, erase, write, state; gates per head, or one per channel."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(B, *shape, generator=generator, dtype=torch.float64)

    keys, values = (K, V) if channels else (1, 1)
    q, k = l2_norm(normal(tokens, HV, K)) * K**-0.5, l2_norm(normal(tokens, HV, K))
    log_decay = -strong * F.softplus(normal(tokens, HV, keys) - 1)
    erase = torch.sigmoid(normal(tokens, HV, keys))
    write = torch.sigmoid(normal(tokens, HV, values)) if channels else erase
    return q, k, normal(tokens, HV, V), log_decay, erase, write, normal(HV, K, V)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.numel() > 0
    assert float((ours - theirs).abs().max()) <= AGREE * float(theirs.abs().max())


def test_recurrence_of_one_token_matches_a_hand_calculation() -> None:
    """S = 2 along k; decay halves it to 1; v = 5 and beta = 1/2 move what k recalls halfway, by 2 to 3; q reads 3."""
    k = torch.tensor([1.0, 0.0], dtype=torch.float64)[None, None, None]
    v = torch.tensor([5.0], dtype=torch.float64)[None, None, None]
    half = torch.full((1, 1, 1, 1), 0.5, dtype=torch.float64)
    state = torch.tensor([[2.0], [8.0]], dtype=torch.float64)[None, None]
    out, update, after = recur(k, k, v, log_decay=half.log(), erase=half, write=half, state=state)
    assert_close(after[0, 0], torch.tensor([[3.0], [4.0]], dtype=torch.float64))
    assert_close(out.flatten(), torch.tensor([3.0], dtype=torch.float64))
    assert_close(update.flatten(), torch.tensor([2.0], dtype=torch.float64))


def test_input_state_is_not_modified() -> None:
    *inputs, state = drawn(5)
    before = state.clone()
    _, update, _ = recur(*inputs, state)
    absorb(inputs[1], inputs[3], update, state)
    recur_in_chunks(*inputs, state, chunk=2)
    assert torch.equal(state, before)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("strong", [0.0, 1.0, 300.0])
def test_form_of_published_kernels_takes_a_decay_per_channel(residual: bool, strong: float) -> None:
    q, k, v, log_decay, erase, write, state = drawn(130, channels=True, strong=strong)
    inputs = q, k, v, log_decay, erase[..., :1] if residual else erase, write, state
    right_out, _, right_state = recur(*inputs)
    for chunk in (1, 17, 64, 130):
        found = recur_by_products(*inputs, chunk=chunk, at=lambda _, x: x, residual=residual)
        for ours, theirs in zip(found, (right_out, right_state), strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("inverse", [merged, substituted])
@pytest.mark.parametrize("chunk", [1, 2, 15, 16, 17, 33, 63, 64, 65, 200])
def test_form_of_published_kernels_agrees_with_the_recurrence(chunk: int, inverse: Inverse, residual: bool) -> None:
    """Inverses of 16 rows and less, of two and four blocks, and of a rest that is no whole block."""
    inputs = drawn(130)
    shown: list[str] = []

    def at(name: str, tensor: torch.Tensor) -> torch.Tensor:
        shown.append(name)
        return tensor

    out, state = recur_by_products(*inputs, chunk=chunk, at=at, residual=residual, inverse=inverse)
    right_out, _, right_state = recur(*inputs)
    assert_close(out, right_out)
    assert_close(state, right_state)
    assert shown == (["update"] if residual else ["w", "u", "v_new"]) * -(-130 // chunk)


@pytest.mark.parametrize("channels", [False, True], ids=["scalar gates", "gates per channel"])
@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130])
def test_chunks_agree_with_the_recurrence(tokens: int, chunk: int, channels: bool) -> None:
    inputs = drawn(tokens, channels=channels, seed=tokens)
    out, _, state = recur(*inputs)
    chunked_out, chunked_state = recur_in_chunks(*inputs, chunk=chunk)
    assert_close(chunked_out, out)
    assert_close(chunked_state, state)


@pytest.mark.parametrize("strong", [0.0, 1e-4, 40.0, 300.0])
def test_chunks_agree_whatever_the_decay(strong: float) -> None:
    """Under weak decay nothing fades; under strong decay exp(-sum) would overflow if it were computed."""
    inputs = drawn(65, strong=strong)
    out, _, state = recur(*inputs)
    for ours, theirs in zip(recur_in_chunks(*inputs, chunk=64), (out, state), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("channels", [False, True], ids=["scalar gates", "gates per channel"])
def test_updates_alone_give_the_same_state_bits(channels: bool) -> None:
    """A token's update depends on no later token; update, key and decay determine the state."""
    q, k, v, log_decay, erase, write, state = drawn(6, channels=channels)
    _, update, after = recur(q, k, v, log_decay, erase, write, state)
    assert torch.equal(absorb(k, log_decay, update, state), after)
    _, earlier, _ = recur(*(x[:, :4] for x in (q, k, v, log_decay, erase, write)), state)
    assert torch.equal(earlier, update[:, :4])
    _, elsewhere, _ = recur(q, k, v, log_decay, erase, write, state + 1)
    assert not torch.isclose(elsewhere, update).any()


def test_a_gate_per_channel_generalises_the_scalar() -> None:
    q, k, v, log_decay, erase, write, state = drawn(7)
    wide = recur(q, k, v, log_decay.expand(-1, -1, -1, K), erase.expand(-1, -1, -1, K),
                 write.expand(-1, -1, -1, V), state)
    for ours, theirs in zip(wide, recur(q, k, v, log_decay, erase, write, state), strict=True):
        assert_close(ours, theirs)


def test_value_columns_evolve_independently() -> None:
    q, k, v, log_decay, erase, write, state = drawn(9)
    changed = v.clone()
    changed[..., 2] += 1
    one = recur(q, k, v, log_decay, erase, write, state).state
    other = recur(q, k, changed, log_decay, erase, write, state).state
    same = [column for column in range(V) if torch.equal(one[..., column], other[..., column])]
    assert same == [0, 1, 3, 4]


def test_no_tokens_change_nothing() -> None:
    inputs = drawn(0)
    for *rows, state in (recur(*inputs), recur_in_chunks(*inputs, chunk=4)):
        assert all(x.shape == (B, 0, HV, V) for x in rows) and torch.equal(state, inputs[-1])


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 2, 3, 9])
def test_the_conv_is_torchs_and_its_window_the_last_inputs(tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, width, generator=generator, dtype=torch.float64)
    window = torch.randn(6, width - 1, generator=generator, dtype=torch.float64)
    out, after = causal_conv(x, weight, window)
    history = torch.cat([window, x.T], dim=1)
    assert_close(out, F.conv1d(history[None], weight[:, None], groups=6)[0].T)
    assert torch.equal(after, history[:, tokens:])


def test_norms_match_a_hand_calculation() -> None:
    x = torch.tensor([3.0, 4.0], dtype=torch.float64)  # mean of squares 12.5
    z = torch.tensor([0.0, 2.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0], dtype=torch.float64)
    unit = x / 12.5**0.5
    assert_close(rms_norm(x, weight, 0.0), unit * torch.tensor([2.0, 3.0]))
    assert_close(gated_norm(x, z, weight, 0.0, "sigmoid"), unit * weight * torch.sigmoid(z))
    assert_close(gated_norm(x, z, weight, 0.0, "silu"), unit * weight * z * torch.sigmoid(z))
    assert_close(rms_norm(0 * x + 1, weight, 3.0), (1 + weight) / 2)  # eps on the mean, inside the root
    assert_close(l2_norm(x * 1e-3), x * 1e-3 / 26e-6**0.5)  # eps on the sum, inside the root: 25e-6 + 1e-6


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_left_by_gives_the_state_of_recur(tokens: int) -> None:
    q, *rest = drawn(tokens)
    state = left_by(*rest)
    assert torch.equal(state, recur(q, *rest).state) and torch.equal(state, rest[-1]) is (tokens == 0)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("replaced", [False, True])
def test_state_after_gives_the_state_of_the_layer(tokens: int, replaced: bool, tmp_path: Path) -> None:
    """Compare bit for bit, also if the hook replaces the updates."""
    checkpoint = Checkpoint.open(write(tmp_path))
    weights = Weights.of(checkpoint, torch.float64)
    mixer, config = weights.layers[0].mixer, checkpoint.config
    generator = torch.Generator().manual_seed(1)
    memory = empty(config, torch.float64, "cpu")
    held = (torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (memory.window, memory.state))
    memory = GdnMemory(*held)
    normed = torch.randn(tokens, config.hidden, generator=generator, dtype=torch.float64)
    shown: list[list[str]] = []

    def at(component: str, tensor: torch.Tensor) -> torch.Tensor:
        shown[-1].append(component)
        return tensor + 1 if replaced and component == "update" else tensor

    states = []
    for asked in (lambda: mix(config, mixer, normed, memory, torch.arange(tokens), at)[1].state,
                  lambda: state_after(config, mixer, normed, memory, at)):  # fmt: skip
        shown.append([])
        states.append(asked())
    whole, alone = shown
    assert torch.equal(*states) and alone == [name for name in whole if name not in ("core", "gated", "mixer")]

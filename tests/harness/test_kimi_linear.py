"""Kimi-Linear and Ling: kernels, names of mistakes, and groups that tie.

Leaves out: settings and refusals (`test_families.py`), the layers against `transformers`
(`tests/reference/test_oracle.py`), and planted faults (`kimi_linear` and `ling` of the catalogue).
"""

import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.checks.experts import Experts
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.oracle.expert_routes import Route
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace
from instep.trace.policy import read_policy
from instep.verdict import Exit
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.plain import PLAIN
from instep_proof.faults.catalogue import TRACES
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.catalogue.kimi_linear import DECAY, GDN, MLP
from instep_proof.faults.free_run import POLICY
from instep_reference import mla
from instep_reference.attention import AttentionMemory, attend
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Admit
from instep_reference.contract.place_names import Place
from support.inputs.checkpoints import config_of, write
from support.inputs.traces import committed
from support.running.planting import planted_here
from support.running.verdicts import agreed, first_finding

trace = committed("faults/kimi")
ling, clamped = committed("faults/ling"), committed("faults/ling-clamped")


@pytest.mark.whole
@pytest.mark.parametrize(("ops", "strategy", "until", "more"), [
    ("triton", "columns", None, {"graphs": True, "overlap": True, "conv": "widened"}),
    ("precise", "lazy_rerun", 11, {"dtype": "bfloat16"}),
    ("invariant", "snapshot", 11, {"kv_dtype": "float8_e4m3fn"}),
    ("triton", "rerun", 11, {"dtype": "bfloat16", "conv": "widened"}),
], ids=str)
def test_kernels_serve_ling_under_every_strategy(
    ling: Trace, ops: str, strategy: str, until: int | None, more: dict[str, object]
) -> None:
    """One run has all events. The others end with a plain step after two rounds, for time."""
    verdict = agreed(Replay(ling, Setting(ops, strategy=strategy, **more)).run(until=until))  # type: ignore[arg-type]
    assert {"trunk", "extend", "chain.1"} <= {one.place.stage for one in verdict.compared}


GROUPS = "ranks.view(rows, weights.groups, -1).sort(dim=-1, descending=True)"


WIDE = "rows, x = mixed.shape[0], wide(mixed{ => %s})"


@pytest.mark.whole
@pytest.mark.parametrize(("says", "edit"), [
    ("is made with A_log of the head before", Edit.of(GDN, "wide(A_log).to(q.dtype).exp(){ => .roll(1, 0)}")),
    ("is read one channel too early in the conv's channels", Edit.of(GDN, WIDE % ".roll(1, 1)")),
    ("is read at the segment of k in the conv's channels", Edit.of(GDN, WIDE % ".roll(-key_heads * key_dim, 1)")),
    ("is made with the safe gate", Edit(GDN, DECAY, "log_decay = -5 * sigmoid(rate[:, None] * (a + dt_bias))")),
    ("have the scale of the configuration twice", Edit.of(MLP, "share * weights.scale{ => ** 2}")),
    ("a group is ranked by all of its experts", Edit.of(MLP, f"{GROUPS}.values[..., :{{2 => None}}]")),
    ("a group is ranked without the router's bias", Edit(MLP, GROUPS, GROUPS.replace("ranks", "shares"))),
], ids=lambda one: one if isinstance(one, str) else "")  # fmt: skip
def test_mistakes_that_the_catalogue_lacks_are_named(trace: Trace, says: str, edit: Edit) -> None:
    with planted_here(edit):
        found = first_finding(diagnose(Replay(trace, Setting("plain")), until=2))
    assert says in found.diagnosis


@pytest.mark.whole
@pytest.mark.parametrize(("says", "kept"), [
    ("decays the channels of each head in the opposite order", "Updates(token.k, write.decay.flip(-1), update)"),
    ("decays all channels of a head alike, by the mean of their factors",
     "Updates(token.k, write.decay.mean(-1, keepdim=True).expand_as(write.decay), update)"),
    ("channels of each head as those of the head before", "Updates(token.k, write.decay.roll(1, 1), update)"),
    ("lacks its beta", "Updates(token.k, write.decay, update / write.beta[..., None])"),
    ("was run again with the decays of request ", "Updates(token.k, write.decay.roll(1, 0), update)"),
], ids=lambda one: one[:30])  # fmt: skip
def test_a_ring_that_keeps_other_decays_or_updates_is_named(trace: Trace, says: str, kept: str) -> None:
    """By the row of the table alone: the ring is that of every recurrence."""
    with planted_here(Edit(GDN, "Updates(token.k, write.decay, update)", kept)):
        found = first_finding(diagnose(Replay(trace, Setting("plain")), until=14))
    assert says in found.diagnosis


def test_attention_over_latents_is_that_of_expanded_heads() -> None:
    """Two requests on pages of two, one of them with a second chunk: rows read the same as from expanded heads."""
    config = ModelConfig.from_dict(config_of("kimi"))
    (_, S), (_, R) = config.stored_rows
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, keys, values = drawn(5, config.heads, config.head_dim), drawn(5, 2, 1, S), drawn(5, 2, 1, R)
    up = drawn(config.heads * (config.head_dim - S + config.value_width), R)
    table, whole = torch.tensor([[3, 1], [2, -1]]), torch.tensor
    pages = Pages(keys, values, table, slots=whole([0, 1]), begin=whole([0, 3]), count=whole([3, 2]),
                  before=whole([1, 0]), most=3)  # fmt: skip
    assert PLAIN.attend_latents is not None
    found = PLAIN.attend_latents(query=query, pages=pages, up=up, to=Place("trunk", 0, "attended"))
    for rows, line, length in ((slice(0, 3), [3, 1], 4), (slice(3, 5), [2], 2)):
        memory = AttentionMemory(keys[line].flatten(0, 1)[:length], values[line].flatten(0, 1)[:length])
        torch.testing.assert_close(found[rows], attend(query[rows], *mla.expand(config, up, memory)))


@pytest.fixture(scope="module")
def tied(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The events through a model in which two of four groups tie in one layer: their routers have equal rows."""
    folder = write(tmp_path_factory.mktemp("tied"), "kimi", num_hidden_layers=3, num_expert_group=4, vocab_size=256,
                   linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2]})  # fmt: skip
    file, at = folder / "model.safetensors", "model.layers.2.block_sparse_moe.gate"
    tensors = load_file(file)
    for name in ("weight", "e_score_correction_bias"):
        tensors[f"{at}.{name}"][2:4] = tensors[f"{at}.{name}"][0:2]
    save_file(tensors, file, {"format": "pt"})
    said = {event.request: event.prompt for event in trace.events if isinstance(event, Admit)}
    policy = read_policy(TRACES / f"kimi{POLICY}")
    prompts = {arrival.prompt: said[arrival.request] for arrival in policy.arrivals}
    return make(folder, prompts, policy, folder / "tied.jsonl", Setting(dtype="float64", drafter="ngram"))


@pytest.mark.whole
@pytest.mark.parametrize(("ops", "dtype"), [("triton", "float32"), ("triton", "bfloat16"), ("invariant", "float32")])
def test_kernels_serve_a_clamped_swiglu(clamped: Trace, ops: str, dtype: str) -> None:
    """`precise` has one of these kernels. Clamps that are wrong are planted by the catalogue."""
    agreed(Replay(clamped, Setting(ops, dtype=dtype)).run(until=4))


PAIRS = "pairs.sort(dim=-1, descending=True, stable=True).indices"
LAST_FIRST = f"(pairs.shape[-1] - 1 - {PAIRS.replace('pairs', 'pairs.flip(-1)')})"


@pytest.mark.whole
@pytest.mark.parametrize(("agrees", "wrong"), [(True, LAST_FIRST), (False, PAIRS.replace("pairs.", "(-pairs)."))])
def test_another_of_two_groups_that_tie_is_right(tied: Trace, agrees: bool, wrong: str) -> None:
    """The reference takes the lower number, the subject the higher one. The worst group is no tie."""
    with planted_here(Edit(MLP, PAIRS, wrong)):
        verdict = Replay(tied, Setting("plain")).run(until=6).verdict
    if not agrees:
        assert verdict.exit is Exit.DIVERGED
        return
    ties = [one for one in agreed(verdict).compared if one.check == Experts.name and one.undecided]
    assert ties and {one.place.layer for one in ties} == {2}


def test_a_route_that_takes_another_group_is_ahead_by_half_a_pair() -> None:
    """Rows: experts of the best group, of one worse by 0.2, of both, of the worst, of the best and the worst."""
    scores = torch.tensor([0.9, 0.5, 0.8, 0.4, 0.1, 0.0]).expand(5, 6)
    route = Route(scores, scores.argsort(dim=-1, descending=True), 2, groups=3, best=1)
    chosen = torch.zeros(5, 6, dtype=torch.bool)
    for row, experts in enumerate(((0, 1), (2, 3), (0, 2), (4, 5), (0, 4))):
        chosen[row, list(experts)] = True
    found = route.shortfall(chosen)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.1, torch.inf, 0.65, torch.inf]))
    two = Route(scores, route.ranking, 2, groups=3, best=2)  # of the best two groups: 0.8 is ahead of 0.5
    torch.testing.assert_close(two.shortfall(chosen), torch.tensor([0.3, 0.5, 0.0, 0.8, 0.55]))

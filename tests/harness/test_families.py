"""Each model family agrees under every strategy and in other settings; what it lacks is refused by name.

The second half has what one family alone has, but for `test_nemotron.py` and `test_olmo_hybrid.py`. Leaves out: Qwen's,
which the other traces have, the layers against `transformers` (`tests/reference/test_oracle.py`), and planted faults (a
file of the catalogue for each family).
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as with_fields
from safetensors.torch import load_file, save_file

from instep.campaign.relations.step_changes import States
from instep.checks.experts import Experts
from instep.cli.record import make
from instep.diagnose import diagnose
from instep.oracle.expert_routes import Route
from instep.oracle.state_oracle import StateOracle
from instep.run.build_compared_engines import Plan
from instep.run.replay import Replay
from instep.setting import Setting
from instep.trace.file import Trace, read
from instep.trace.policy import read_policy
from instep.verdict import Exit, Verdict
from instep_optimized.commit import CONV_FORMS, STRATEGIES
from instep_optimized.memory_addresses import Pages
from instep_optimized.ops.op_protocols import Ops
from instep_optimized.ops.plain import PLAIN
from instep_optimized.ops.plain.residual_streams import rows_of
from instep_optimized.ops.triton import TRITON
from instep_optimized.options import Options, check
from instep_optimized.weights import Stored, lightning, per_layer_embedding
from instep_proof.faults.catalogue import TRACES
from instep_proof.faults.catalogue.fault import Edit
from instep_proof.faults.catalogue.kimi_linear import DECAY
from instep_proof.faults.catalogue.nemotron import GDN, MLP
from instep_proof.faults.free_run import POLICY
from instep_reference import mla, short_conv
from instep_reference.attention import AttentionMemory, attend
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.config import ModelConfig
from instep_reference.contract.engine import Admit, Forward, Row
from instep_reference.contract.errors import BadInput, Unsupported
from instep_reference.contract.place_names import Place
from instep_reference.contract.shards import config_of as of_rank
from instep_reference.per_layer_embedding import entries
from instep_reference.weights import fixed_decay
from support.inputs.checkpoints import config_of, write
from support.running.covering import WHOLE, each_pair, few
from support.running.planting import planted_here
from support.running.verdicts import agreed, first_finding, related

FAMILIES = ("qwen4", "kimi", "ling", "olmo", "nemotron", "lfm2", "minimax")
WITHOUT_CONV = ("minimax",)


@cache
def trace_of(name: str) -> Trace:
    return read(TRACES / f"{name}.jsonl")


@pytest.mark.slow
@few(8)
@pytest.mark.parametrize(("name", "ops", "strategy", "conv"), each_pair(
    FAMILIES, ("ledger", "plain"), STRATEGIES, CONV_FORMS,
    refused=lambda name, ops, strategy, conv: name in WITHOUT_CONV and conv != "windows",
))  # fmt: skip
def test_family_agrees_under_every_strategy(name: str, ops: str, strategy: str, conv: str) -> None:
    """Chunks, ragged windows, a plain step, a copy that another request loads, and a request that was preempted."""
    trace = trace_of(name)
    verdict = agreed(Replay(trace, Setting(ops, strategy=strategy, conv=conv)).run())
    assert verdict.elements > 10**6 and verdict.events == len(trace.events)
    drafts = {"extend", "chain.1"} if trace.header.checkpoint.mtp_layers else set()
    assert {one.place.stage for one in verdict.compared} >= {"trunk", *drafts}


@pytest.mark.slow
@pytest.mark.parametrize("name", [
    name if name in ("kimi", "nemotron") else pytest.param(name, marks=WHOLE) for name in FAMILIES if name != "lfm2"
])  # fmt: skip
def test_states_alone_are_judged_in_every_recurrent_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As relations and engines that show no layers need it. A state that a commit leaves undecayed is found."""
    replay = Replay(trace_of(name), Setting("plain"))
    recurrent = {*replay.plan.checkpoint.config.recurrent}

    def judged() -> Verdict:
        def checks(plan: Plan) -> tuple[States]:
            rounds = PLAIN.rounds(torch.float32, torch.float32)
            return (States(StateOracle(plan.checkpoint, rounds, torch.float32, torch.device("cpu"))),)

        return Replay(trace_of(name), Setting("plain"), checks=checks).run().verdict

    verdict = agreed(judged())
    assert {one.place.layer for one in verdict.compared if one.place.component == "state"} == recurrent
    monkeypatch.setattr("instep_optimized.ops.plain.gdn._forget", lambda S, decay: None)
    assert judged().exit is Exit.DIVERGED


GRAPHS, NARROW, KV8 = {"graphs": True}, {"dtype": "bfloat16"}, {"kv_dtype": "float8_e4m3fn"}
OVERLAPPED = GRAPHS | {"overlap": True}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "kimi": [NARROW, KV8, GRAPHS, {"ranks": 2}, {"ops": "ledger", "ranks": 4}, {"ranks": 4, "experts": "whole"},
             {"ops": "triton", "ranks": 2} | NARROW, {"ops": "invariant", "strategy": "snapshot"} | KV8],
    "ling": [NARROW, KV8, {"drafter": "external"}, {"strategy": "lazy_rerun"} | OVERLAPPED],
    "lfm2": [NARROW, OVERLAPPED, {"prompt_graphs": "8,16"} | GRAPHS],
    "minimax": [NARROW, OVERLAPPED],
    "nemotron": [NARROW, KV8, OVERLAPPED, {"strategy": "columns", "prompt_graphs": "16,64"} | GRAPHS, {"stages": 2},
                 {"strategy": "snapshot", "state_dtype": "bfloat16"}],
    "olmo": [NARROW, {"ops": "triton"}, {"ops": "triton"} | NARROW, KV8, GRAPHS, {"ops": "ledger"} | OVERLAPPED,
             {"strategy": "rerun", "ring_dtype": "bfloat16"}],
    "qwen4": [{"prompt_graphs": "16"} | NARROW | OVERLAPPED],
}


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize(("name", "setting"), [(name, one) for name in SETTINGS for one in SETTINGS[name]], ids=str)
def test_family_agrees_in_other_settings(name: str, setting: dict[str, Any]) -> None:
    agreed(Replay(trace_of(name), Setting(**{"ops": "plain"} | setting)).run())


LING = ("trunk", "extend", "chain.1")  # stages that are compared


@pytest.mark.whole
@pytest.mark.parametrize(("name", "ops", "until", "stages", "more"), [
    ("ling", "triton", None, LING, {"strategy": "columns", "conv": "widened"} | OVERLAPPED),
    ("ling", "precise", 11, LING, {"strategy": "lazy_rerun"} | NARROW),
    ("ling", "invariant", 11, LING, {"strategy": "snapshot"} | KV8),
    ("ling", "triton", 11, LING, {"conv": "widened"} | NARROW),
    ("ling-clamped", "triton", 4, ("trunk",), {}), ("ling-clamped", "triton", 4, ("trunk",), NARROW),
    ("ling-clamped", "invariant", 4, ("trunk",), {}),  # `precise` has one of these kernels
], ids=str)
def test_kernels_serve_a_family_under_every_strategy(
    name: str, ops: str, until: int | None, stages: tuple[str, ...], more: dict[str, Any]
) -> None:
    """Some runs have all events. The others end after a plain step, or after one round, for time."""
    verdict = agreed(Replay(trace_of(name), Setting(ops, **more)).run(until=until))
    assert {*stages} <= {one.place.stage for one in verdict.compared}


@pytest.mark.parametrize(("kind", "ops", "lacks", "says"), [
    ("kimi", PLAIN, "attend_latents", "`Ops.attend_latents`.* kimi_linear needs"),
    ("kimi", PLAIN, "sigmoid", "`Ops.sigmoid`.* kimi_linear needs"),
    ("ling", PLAIN, "latent_inputs", "`Ops.latent_inputs`.* bailing_hybrid needs"),
    ("ling", PLAIN, "bounds_decay", "`Ops.bounds_decay`.* bailing_hybrid needs"),
    ("lfm2", TRITON, "", "no op short_conv.*lfm2"), ("lfm2", PLAIN, "multiply", "`Ops.multiply`.*lfm2"),
    ("minimax", TRITON, "", "no recurrence lightning.*minimax"),
    ("minimax", PLAIN, "scaled_add", "`Ops.scaled_add`.*minimax"),
    ("minimax", PLAIN, "lightning_inputs", "`Ops.lightning_inputs`.*minimax"),
    ("nemotron", PLAIN, "mamba2", "no recurrence mamba2"),
    ("nemotron", PLAIN, "selective_inputs", "Ops.biased_conv"),
    ("nemotron", PLAIN, "gated_group_norm", "Ops.biased_conv"),
    ("nemotron", PLAIN, "squared_mlp", "no MLP without a gate"),
    ("qwen4", TRITON, "", "`Ops.embed_streams`.*qwen4_exp"),
    ("qwen4", PLAIN, "add_streams", "`read_streams`.*qwen4_exp"),
    ("qwen4", PLAIN, "ngrams", "`Ops.ngrams`.*qwen4_exp"),
])  # fmt: skip
def test_an_op_set_without_an_op_of_a_family_is_refused_by_name(kind: Any, ops: Ops, lacks: str, says: str) -> None:
    """An op set that lacks a part of `plain` is another one; switches such as `bounds_beta` are off."""
    lacking = {lacks: False if isinstance(getattr(ops, lacks), bool) else None} if lacks else {}
    config, drafted = ModelConfig.from_dict(config_of(kind)), {"ling": 3}.get(kind, 1)
    options = Options(drafter="external") if kind in ("nemotron", "qwen4") else Options()
    check(options, config, drafted, PLAIN)
    with pytest.raises(Unsupported, match=f"the ops of {ops.name} .*{says}"):
        check(options, config, drafted, replace(ops, **lacking))  # type: ignore[arg-type]


def test_fused_ops_are_refused_for_a_model_whose_beta_is_bounded() -> None:
    wide, narrow = (ModelConfig.from_dict(config_of("olmo", linear_allow_neg_eigval=wide)) for wide in (True, False))
    for lacking in ({"bounds_beta": False}, {"fused_gdn": lambda **_: None}):
        ops = replace(PLAIN, name="own", **lacking)  # type: ignore[arg-type]
        with pytest.raises(Unsupported, match=r"the ops of own .*`Ops\.bounds_beta`.* olmo_hybrid needs"):
            check(Options(), wide, 1, ops)
        check(Options(), narrow, 1, ops)


def test_op_sets_that_clamp_no_swiglu_are_refused_for_a_model_with_limits() -> None:
    clamped = ModelConfig.from_dict(config_of("ling", expert_swiglu_limit_list=[0, 0, 0, 4]))
    check(Options(), clamped, 3, TRITON)
    with pytest.raises(Unsupported, match=r"the ops of own clamp no SwiGLU \(`Ops\.clamps`\), which bailing_hybrid"):
        check(Options(), clamped, 3, replace(TRITON, name="own", clamps=False))


@pytest.mark.parametrize(("kind", "ranks", "says"), [
    ("lfm2", 2, "parts of lfm2's tensors are not declared"),
    ("minimax", 2, "parts of minimax's tensors are not declared"),
    ("nemotron", 2, "the parts of nemotron_h"), ("olmo", 2, "parts of olmo_hybrid's tensors are not declared"),
    ("qwen4", 2, "parts of qwen4_exp's tensors are not declared"), ("kimi", 3, "a divisor of the model's 4 key heads"),
])  # fmt: skip
def test_ranks_of_undeclared_parts_are_refused_by_name(kind: Any, ranks: int, says: str) -> None:
    with pytest.raises(BadInput, match=says):
        of_rank(ModelConfig.from_dict(config_of(kind)), ranks)


# -- MiniMax --------------------------------------------------------------------------------------------


def test_both_sides_make_the_same_fixed_decays(tmp_path: Path) -> None:
    """Two writings of one formula; by hand the last of four heads in the first of four layers keeps e^-2^-8.

    In the last layer two numbers near 1 leave 1.3e-5, so that half a unit of them is 1e-11 of it.
    """
    checkpoint = Checkpoint.open(write(tmp_path / "minimax", "minimax"))
    stored = Stored(checkpoint.tensors, torch.float64, torch.device("cpu"))
    for layer in checkpoint.config.recurrent:
        own = lightning(stored, f"model.layers.{layer}", layer, checkpoint.config).log_decay
        torch.testing.assert_close(own, own.new_tensor(fixed_decay(4, layer, 4)), rtol=1e-10, atol=0)
    assert fixed_decay(4, 0, 4)[-1] == pytest.approx(-(2**-8), rel=2e-5)


# -- LFM2 -----------------------------------------------------------------------------------------------


def test_a_model_without_states_leaves_step_changes_inconclusive() -> None:
    held = related("step-changes", Replay(trace_of("lfm2"), Setting("plain")))
    assert held.verdict.exit is Exit.INCONCLUSIVE and "no recurrent states" in held.verdict.skipped[0].reason


def test_prefixes_of_lfm2_hold_windows_alone() -> None:
    """A tracked prefix ends inside a chunk of 7 tokens. A narrow storage of states rounds nothing of it."""
    lfm2 = trace_of("lfm2")
    header = with_fields(lfm2.header, capacity=with_fields(lfm2.header.capacity, track_interval=4, tracked=1))
    events = (lfm2.events[0], Forward((Row("a", "prefill", 7, inner=("x",)),)))
    for setting in (Setting("ledger"), Setting("plain", kept_dtype="int8", chunk_dtype="bfloat16")):
        agreed(Replay(replace(lfm2, header=header, events=events), setting).run())


def test_the_conv_of_a_short_convolution_has_no_silu() -> None:
    """One row by hand: taps 1, 2 and a window of one input."""
    x, weight, window = (torch.tensor([[number]]).double() for number in (3.0, 1.0, 5.0))
    mixed, after = short_conv.causal_conv(x, torch.cat([weight, 2 * weight], 1), window)
    assert (float(mixed), float(after)) == (1 * 5 + 2 * 3, 3)


def test_a_tensor_that_lfm2_lacks_is_named_as_in_its_files(tmp_path: Path) -> None:
    directory = write(tmp_path / "lfm2", "lfm2")
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.feed_forward.w3.weight"]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(BadInput, match=r"tensor model.layers.0.feed_forward.w3.weight: found nothing"):
        Checkpoint.open(directory)


# -- Qwen4-Exp ------------------------------------------------------------------------------------------


def test_both_sides_hash_the_same_n_grams(tmp_path: Path) -> None:
    """Two writings of one hash, over texts that end, and after tokens that a chunk before left."""
    checkpoint = Checkpoint.open(write(tmp_path / "qwen4", "qwen4", ngram_size=4, ple_embed_dim=12))
    stored = Stored(checkpoint.tensors, torch.float32, torch.device("cpu"))
    draw = torch.Generator().manual_seed(1)
    for shape in checkpoint.config.ple:
        hashes = per_layer_embedding(stored, f"model.layers.{shape.layer}", shape.layer, checkpoint.config).hashes
        line = torch.randint(4, 12, (200,), generator=draw)  # the end of a text is token 7
        pieces = (line + 1).unfold(0, shape.ngram, 1)
        right = entries(shape, tuple(line[shape.ngram - 1 :].tolist()), tuple(line[: shape.ngram - 1].tolist()))
        assert torch.equal(rows_of(pieces, hashes), right)
        first = rows_of(torch.tensor([[0] * (shape.ngram - 1) + [6]]), hashes)
        assert torch.equal(first, entries(shape, (5,), (shape.eos,) * (shape.ngram - 1)))


def test_stages_of_residual_streams_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="pipeline stages with residual streams"):
        Replay(trace_of("qwen4"), Setting("plain", stages=2)).run()


def test_positions_and_drafters_that_qwen4_lacks_are_refused_by_name(tmp_path: Path) -> None:
    config = Checkpoint.open(write(tmp_path / "qwen4", "qwen4")).config
    check(Options(drafter="external"), config, 1, PLAIN, positions=4096)
    with pytest.raises(Unsupported, match=r"up to 4097 positions .* of qwen4_exp may read chosen tokens alone"):
        check(Options(drafter="external"), config, 1, PLAIN, positions=4097)
    with pytest.raises(Unsupported, match="not several streams"):
        check(Options(drafter="block"), config, 1, PLAIN)


# -- Kimi-Linear and Ling -------------------------------------------------------------------------------


GROUPS = "ranks.view(rows, weights.groups, -1).sort(dim=-1, descending=True)"


WIDE = "rows, x = mixed.shape[0], wide(mixed{ => %s})"


UPDATES = "Updates(token.k, write.decay, update)"  # of every recurrence: by the row of the table alone


def _kept(decay: str, update: str = "update") -> Edit:
    return Edit(GDN, UPDATES, f"Updates(token.k, {decay}, {update})")


@pytest.mark.whole
@pytest.mark.parametrize(("until", "says", "edit"), [
    (2, "is made with A_log of the head before", Edit.of(GDN, "wide(A_log).to(q.dtype).exp(){ => .roll(1, 0)}")),
    (2, "is read one channel too early in the conv's channels", Edit.of(GDN, WIDE % ".roll(1, 1)")),
    (2, "is read at the segment of k in the conv's channels", Edit.of(GDN, WIDE % ".roll(-key_heads * key_dim, 1)")),
    (2, "is made with the safe gate", Edit(GDN, DECAY, "log_decay = -5 * sigmoid(rate[:, None] * (a + dt_bias))")),
    (2, "have the scale of the configuration twice", Edit.of(MLP, "share * weights.scale{ => ** 2}")),
    (2, "a group is ranked by all of its experts", Edit.of(MLP, f"{GROUPS}.values[..., :{{2 => None}}]")),
    (2, "a group is ranked without the router's bias", Edit(MLP, GROUPS, GROUPS.replace("ranks", "shares"))),
    (14, "decays the channels of each head in the opposite order", _kept("write.decay.flip(-1)")),
    (14, "decays all channels of a head alike, by the mean of their factors",
     _kept("write.decay.mean(-1, keepdim=True).expand_as(write.decay)")),
    (14, "channels of each head as those of the head before", _kept("write.decay.roll(1, 1)")),
    (14, "lacks its beta", _kept("write.decay", "update / write.beta[..., None]")),
    (14, "was run again with the decays of request ", _kept("write.decay.roll(1, 0)")),
], ids=lambda one: one if isinstance(one, str) else "")  # fmt: skip
def test_mistakes_that_the_catalogue_lacks_are_named(until: int, says: str, edit: Edit) -> None:
    with planted_here(edit):
        found = first_finding(diagnose(Replay(trace_of("kimi"), Setting("plain")), until=until))
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
def tied(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The events through a model in which two of four groups tie in one layer: their routers have equal rows."""
    folder = write(tmp_path_factory.mktemp("tied"), "kimi", num_hidden_layers=3, num_expert_group=4, vocab_size=256,
                   linear_attn_config={"kda_layers": [1, 3], "full_attn_layers": [2]})  # fmt: skip
    file, at = folder / "model.safetensors", "model.layers.2.block_sparse_moe.gate"
    tensors = load_file(file)
    for name in ("weight", "e_score_correction_bias"):
        tensors[f"{at}.{name}"][2:4] = tensors[f"{at}.{name}"][0:2]
    save_file(tensors, file, {"format": "pt"})
    said = {event.request: event.prompt for event in trace_of("kimi").events if isinstance(event, Admit)}
    policy = read_policy(TRACES / f"kimi{POLICY}")
    prompts = {arrival.prompt: said[arrival.request] for arrival in policy.arrivals}
    return make(folder, prompts, policy, folder / "tied.jsonl", Setting(dtype="float64", drafter="ngram"))


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

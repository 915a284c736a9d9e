"""The ledger ops on rows, against the algebra of labels in Python integers.

Leaves out: ops with memory (`test_ops_ledger_memory.py`) and whole models (the reference's ledger engine is
compared with the optimized engine elsewhere).
"""

import torch

from instep.kit.cases.guarded_pools import same_bits
from instep_optimized.ops.label_algebra import code, expand, mix, read
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.op_protocols import ExpertWeights, GdnInputs
from instep_reference.contract.place_names import COMPONENTS, Place
from support.independent.integer_labels import BIG, SPREAD, WORD, block, here, ints, mixed, rows, stamp

NONE = torch.empty(0)  # weights are ignored


def test_mix_expand_and_read_match_the_integer_versions() -> None:
    x, y = rows(BIG, 1)[:, 0], rows(BIG[::-1], 1)[:, 0]
    wanted = [mixed(a, b) for a, b in zip(BIG, BIG[::-1], strict=True)]
    assert torch.equal(mix(x, y), rows(wanted, 1)[:, 0])
    assert torch.equal(mix(x, 5), rows([mixed(a, 5) for a in BIG], 1)[:, 0])
    assert torch.equal(expand(x, 3, 4), rows(BIG, 3, 4))
    assert torch.equal(read(rows(BIG, 3, 4)), x)


def test_row_with_misplaced_elements_reads_as_in_the_contract() -> None:
    broken = block(BIG[0], 6)
    broken[[2, 4]] = broken[[4, 2]]
    flat = [int(n) % WORD for n in broken]
    wanted = (flat[0] + sum((n - (flat[0] + j * SPREAD)) * (2 * j + 1) for j, n in enumerate(flat))) % WORD
    assert int(read(broken[None])[0]) % WORD == wanted != BIG[0]


def test_mix_is_order_sensitive_and_zero_is_empty() -> None:
    assert int(mix(ints(3), ints(4))) != int(mix(ints(4), ints(3)))
    assert not expand(ints(0), 5).any()
    assert int(read(torch.zeros(1, 5, dtype=torch.int64))[0]) == 0


def test_the_draft_stages_share_a_family() -> None:
    assert code(Place("trunk", 3, "core")) == stamp("core", 3)
    assert code(Place("extend", 3, "core")) == code(Place("chain.2", 3, "core")) == stamp("core", 3, "draft")


def test_ops_of_one_input_mix_it_with_their_code() -> None:
    x = rows(BIG, 8)
    one = {
        "embedding": LEDGER.embed(tokens=ints(5, 0), table=torch.empty(9, 8), to=here("embedding")),
        "normed": LEDGER.norm(x=x, weight=NONE, eps=0.0, to=here("normed")),
        "z": LEDGER.linear(x=x, weight=NONE, shape=(2, 3), to=here("z")),
        "mlp": LEDGER.mlp(x=x, gate_up=NONE, down=NONE, to=here("mlp")),
    }
    moe = LEDGER.moe(x=x, weights=ExpertWeights(NONE, NONE, NONE, None, None, None), top_k=2, norm_topk=True,
                     to=here("mlp"))
    assert torch.equal(one.pop("embedding"), rows([mixed(t, stamp("embedding")) for t in (5, 0)], 8))
    assert torch.equal(moe, one["mlp"])
    for component, result in one.items():
        assert torch.equal(result, rows([mixed(label, stamp(component)) for label in BIG], *result.shape[1:]))


def test_ops_of_two_inputs_mix_them_in_order() -> None:
    left, right = BIG, BIG[1:] + BIG[:1]
    x, y = rows(left, 2, 4), rows(right, 2, 4)
    flat_x, flat_y = x.view(4, 8), y.view(4, 8)
    gate = rows(right, 2, 2, 4)
    results = {
        "residual": LEDGER.add(x=flat_x, y=flat_y, to=here("residual")),
        "joined": LEDGER.concat(x=flat_x, y=flat_y, to=here("joined")),
        "gated": LEDGER.gated_norm(core=x, z=y, weight=NONE, eps=0.0, gate="silu", to=here("gated")),
        "opened": LEDGER.output_gate(attended=x, projected=gate, to=here("opened")),
    }
    for component, result in results.items():
        labels = [mixed(a, b, stamp(component)) for a, b in zip(left, right, strict=True)]
        assert torch.equal(result, rows(labels, *result.shape[1:]))
    assert results["joined"].shape == (4, 16)
    assert not torch.equal(results["residual"], LEDGER.add(x=flat_y, y=flat_x, to=here("residual")))


def test_gdn_and_attention_inputs_have_the_labels_of_the_contract() -> None:
    m, a, b = BIG[0], BIG[1], BIG[2]
    to = tuple(here(c) for c in ("q", "k", "v", "log_decay", "beta"))
    inputs = LEDGER.gdn_inputs(mixed=rows([m], 28), a=rows([a], 4), b=rows([b], 4), A_log=NONE, dt_bias=NONE,
                               key_heads=2, key_dim=3, to=to)
    shapes = {"q": (2, 3), "k": (2, 3), "v": (4, 4), "log_decay": (4,), "beta": (4,)}
    for name, found in zip(GdnInputs._fields, inputs, strict=True):
        assert torch.equal(found, rows([mixed(m, a, b, stamp(name))], *shapes[name]))
    made = LEDGER.attention_inputs(projected=rows([m, a], 4, 2, 6), key_raw=rows([b, a], 2, 6), positions=ints(11, 0),
                                   q_norm=NONE, k_norm=NONE, eps=0.0, rotary_dim=2, theta=1.0,
                                   to=(here("query"), here("key")))
    assert torch.equal(made.query, rows([mixed(m, 11, stamp("query")), mixed(a, 0, stamp("query"))], 4, 6))
    assert torch.equal(made.key, rows([mixed(b, 11, stamp("key")), mixed(a, 0, stamp("key"))], 2, 6))


def test_the_head_points_at_the_token_that_the_label_names() -> None:
    logits = LEDGER.lm_head(x=rows(BIG, 8), weight=torch.empty(13, 8), to=here("logits"))
    tokens = [(mixed(label, stamp("logits")) >> 1) % 13 for label in BIG]
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.eye(13)[tokens])
    assert LEDGER.pick(logits=logits, to=here("pick")).tolist() == tokens


def test_everything_is_declared_to_be_labels() -> None:
    assert set(LEDGER.types(torch.bfloat16, torch.float32)) == {torch.int64}
    assert set(LEDGER.rounds(torch.bfloat16, torch.float32)) == set(COMPONENTS)
    assert same_bits(LEDGER.select(x=rows(BIG, 4), index=ints(2, -1)), torch.stack([block(BIG[2], 4), block(0, 4)]))

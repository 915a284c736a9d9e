"""The ledger ops with memory: what they fold in, what they leave in the pools, and that a wrong byte shows.

Leaves out: ops on rows alone (`test_ops_ledger.py`).
"""

from dataclasses import replace

import pytest
import torch

from instep.kit.cases import CONV, GDN
from instep.kit.cases.case import Case, serve
from instep.kit.cases.guarded_pools import Pool, guarded
from instep_optimized.memory_addresses import Address, Pages, Part
from instep_optimized.ops.label_algebra import read
from instep_optimized.ops.ledger_label_ops import LEDGER
from instep_optimized.ops.op_protocols import GdnInputs
from instep_optimized.ops.plain import PLAIN
from instep_reference.contract.place_names import Place
from support.independent.integer_labels import BIG, WORD, block, folded, here, ints, labels_of, mixed, rows, stamp

Tensor = torch.Tensor
C, W = 12, 4
HV, K, V = 2, 3, 5


def pool_of(leading: tuple[int, ...], shape: tuple[int, ...], swap: bool = True) -> Pool:
    pool = guarded(leading, shape, torch.int64, swap=swap)
    pool.raw.fill_(-77)
    return pool


def spans(form: str, own: Address, counts: list[int], fresh: list[bool], each: Address | None) -> Part:
    begins = [sum(counts[:j]) for j in range(len(counts))]
    return Part(form, ints(*begins), ints(*counts), max(counts), own, torch.tensor(fresh),  # type: ignore[arg-type]
                store=own, per_row=each)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("form", ["chunk", "window"])
def test_conv_folds_the_taps_and_keeps_the_windows(form: str, swap: bool) -> None:
    pool, aside = pool_of((4,), (C, W - 1), swap), pool_of((2, 5), (C, W - 1), swap)
    old = labels_of(1, W - 1)
    pool.view[3] = rows(old, C).T
    taps = [labels_of(2, 2), labels_of(3, 5)]
    part = spans(form, Address(pool.view, ints(1, 3)), [2, 5], [True, False], Address(aside.view, ints(1, 0)))
    out = LEDGER.conv(x=rows([*taps[0], *taps[1], 9], C), weight=torch.empty(C, W), parts=(part,), to=here("mixed"))
    row = 0
    for request, (unit, before) in enumerate(((1, [0] * (W - 1)), (3, old))):
        line = before + taps[request]
        for t in range(len(taps[request])):
            assert torch.equal(out[row], block(mixed(stamp("mixed"), *line[t : t + W]), C))
            assert torch.equal(aside.view[1 - request, t], rows(line[t + 1 : t + W], C).T)
            row += 1
        assert torch.equal(pool.view[unit], rows(line[-(W - 1) :], C).T)
    assert not out[row].any()


def gdn_row(seed: int, count: int) -> tuple[GdnInputs, list[tuple[int, ...]]]:
    """Inputs of `count` rows, and their five labels (q, k, v, log_decay, beta)."""
    labels = [tuple(labels_of(seed + j, 5)) for j in range(count)]
    q, k, v, g, beta = ([row[i] for row in labels] for i in range(5))
    return GdnInputs(rows(q, 1, K), rows(k, 1, K), rows(v, HV, V), rows(g, HV), rows(beta, HV)), labels


def chain_of(chain: int, labels: list[tuple[int, ...]]) -> list[int]:
    chains = []
    for _, k, v, log_decay, beta in labels:
        _, chain = folded(chain, k, v, log_decay, beta)
        chains.append(chain)
    return chains


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("form", ["chunk", "window"])
def test_gdn_folds_tokens_into_the_chain(form: str, swap: bool) -> None:
    pool, aside = pool_of((5,), (HV, K, V), swap), pool_of((2, 5), (HV, K, V), swap)
    pool.view[4] = block(BIG[0], HV, K, V)
    inputs, labels = gdn_row(10, 7)
    part = spans(form, Address(pool.view, ints(4, 2)), [3, 4], [False, True], Address(aside.view, ints(0, 1)))
    core = LEDGER.gdn(inputs=inputs, parts=(part,), dtype=torch.int64, to=here("core"))
    for request, (unit, chain, mine) in enumerate(((4, BIG[0], labels[:3]), (2, 0, labels[3:]))):
        chains, first = chain_of(chain, mine), 3 * request
        for t, (link, row) in enumerate(zip(chains, mine, strict=True)):
            assert torch.equal(core[first + t], block(mixed(link, row[0], stamp("core")), HV, V))
            assert torch.equal(aside.view[request, t], block(link, HV, K, V))
        assert torch.equal(pool.view[unit], block(chains[-1], HV, K, V))


def decode_core(pool: Pool) -> Tensor:
    """One token for unit 1."""
    own = Address(pool.view, ints(1))
    part = Part("window", ints(0), ints(1), 1, own, torch.tensor([False]))
    return LEDGER.gdn(inputs=gdn_row(30, 1)[0], parts=(part,), dtype=torch.int64, to=here("core"))


def test_one_wrong_element_of_a_state_changes_the_answer() -> None:
    pool = pool_of((2,), (HV, K, V))
    pool.view[1] = block(BIG[0], HV, K, V)
    right = decode_core(pool)
    for at in ((0, 0, 0), (0, 1, 0), (1, 2, 4)):
        kept = pool.view[1][at].clone()
        pool.view[1][at] = kept + 1
        assert not torch.equal(decode_core(pool), right)
        pool.view[1][at] = kept
    assert torch.equal(decode_core(pool), right)


def test_a_transposed_swapped_or_half_stale_state_changes_the_answer() -> None:
    fresh = block(BIG[0], HV, 4, 4)
    wrong = [fresh.transpose(1, 2), fresh.flip(0), torch.cat([fresh[..., :2], block(BIG[1], HV, 4, 4)[..., 2:]], -1)]
    labels = [int(read(x[None])[0]) for x in (fresh, *wrong)]
    assert len(set(labels)) == 4
    assert labels[0] % WORD == BIG[0]


def test_the_order_of_tokens_shows_in_the_chain() -> None:
    _, labels = gdn_row(40, 2)
    assert chain_of(0, labels)[-1] != chain_of(0, labels[::-1])[-1]


def test_attend_sums_what_each_row_sees() -> None:
    size, entry = 4, (2, 6)
    keys, values = pool_of((6, size), entry, False), pool_of((6, size), entry, False)
    tables, before, count = [[3, 1], [5, -1]], [5, 0], [2, 3]
    stored: list[list[int]] = []
    for b in range(2):
        pairs = [(mixed(50 + b, p), mixed(60 + b, p)) for p in range(before[b] + count[b])]
        for p, (key, value) in enumerate(pairs):
            keys.view[tables[b][p // size], p % size] = block(key, *entry)
            values.view[tables[b][p // size], p % size] = block(value, *entry)
        stored.append([mixed(key, value, p) for p, (key, value) in enumerate(pairs)])
    table = torch.tensor([[0, 0], tables[1], tables[0]])
    pages = Pages(keys.view, values.view, table, ints(2, 1), ints(0, 2), ints(*count), ints(*before), 3)
    out = LEDGER.attend(query=rows(labels_of(70, 6), 4, 6), pages=pages, to=here("attended"))
    queries, row = labels_of(70, 6), 0
    for b in range(2):
        for j in range(count[b]):
            total = sum(stored[b][: before[b] + j + 1]) % WORD
            assert torch.equal(out[row], block(mixed(total, queries[row], stamp("attended")), 4, 6))
            row += 1
    assert not out[row].any()


def test_memory_moves_through_the_exact_ops_of_the_plain_set() -> None:
    for name in ("select", "store_rows", "pick", "accept", "move"):
        assert getattr(LEDGER, name) is getattr(PLAIN, name)


@pytest.mark.parametrize("case", [*CONV, *GDN], ids=str)
def test_the_ledger_writes_the_same_units_as_plain(case: Case) -> None:
    """The shared cases with labels in the pools: what changes is what `plain` may change, and no more."""
    call = case.build("cpu")
    pools = {name: relabelled(pool) for name, pool in call.pools.items()}
    before = {name: pool.raw.clone() for name, pool in pools.items()}
    views = {id(call.pools[name].view): pools[name].view for name in pools}
    inputs = {name: labels_for(value, views) for name, value in call.inputs.items()}
    result = getattr(LEDGER, case.op)(**inputs)
    plain = serve(PLAIN, case).results["result"]
    assert result.shape == plain.shape
    assert torch.equal((result != 0).flatten(1).any(1), (plain != 0).flatten(1).any(1))
    for name, pool in pools.items():
        assert torch.equal(pool.raw != before[name], pool.writable)


def relabelled(pool: Pool) -> Pool:
    """The same geometry in int64, filled with a number that no block holds."""
    raw = torch.full(pool.raw.shape, -77, dtype=torch.int64)
    view = raw.as_strided(pool.view.shape, pool.view.stride(), pool.view.storage_offset())
    return Pool(raw, view, pool.numbers, pool.writable)


def labels_for(value: object, views: dict[int, Tensor]) -> object:
    """Inputs as labels: tensors by row, addresses to the int64 pools."""
    if isinstance(value, Address):
        return Address(views[id(value.pool)], value.units, value.column)
    if isinstance(value, Part):
        fields = {name: labels_for(getattr(value, name), views) for name in ("read", "store", "per_row")}
        return replace(value, **fields)  # type: ignore[arg-type]
    if isinstance(value, GdnInputs):
        return GdnInputs(*(labels_for(x, views) for x in value))  # type: ignore[arg-type]
    if isinstance(value, tuple) and not isinstance(value, Place):
        return tuple(labels_for(x, views) for x in value)
    if isinstance(value, Tensor):
        return rows(labels_of(90, value.shape[0]), *value.shape[1:])
    return value

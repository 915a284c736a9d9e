"""Kernels that cannot be interpreted compile for a GPU, spill no tile, and fit into shared memory.

A kernel whose key is in the record of `compiled.py` is not compiled again; `make whole` compiles an eighth of them.
Leaves out: their bits, which their own tests compare on a GPU. Any machine can compile them: no GPU is needed.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from instep_optimized.kernels.products import few_rows
from support.kernels.tensor_core_overlap import made_beside
from support.running.covering import WHOLE

pytestmark = pytest.mark.slow

SHARED = 227 * 1024  # bytes of shared memory that one program may have on Hopper
OF_ALL, RESERVED = 228 * 1024, 1024  # shared memory of a multiprocessor, and the part of it reserved per program
RECORD = Path(__file__).parents[1] / "support" / "kernels" / "compiled.json"
PREPARE = 3  # programs of `prepare_staged` that are to share one (`blocks_staged.PROGRAMS`)


@dataclass(frozen=True)
class Taken:
    """Facts about a compiled kernel: bytes of stack per thread, where spills are; bytes of shared memory; copies in its
    code.

    waits  waits for products of tensor cores beyond those in the kernel's text: if a group of warps lacks a few
           registers, ptxas silently lets every product of the kernel wait for the previous one
    beside powers that are computed while a product of values runs
    over_barriers  values that overlap barriers in shared memory (`instep.kit`)
    sums   layouts of what the kernel of windows sums
    """

    kernel: str
    stack: int
    shared: int
    copies: int
    waits: int
    beside: int
    over_barriers: list[str]
    sums: list[str]


# By kernel: the integers that change from launch to launch. None may make Triton compile another variant. In a tuple
# an integer would: Triton specializes it for 1 and for multiples of 16.
RING, CHANCE = ("ring_size", "ring_u_size"), ("layer", "seed_low", "seed_high")
PARTS = ("most", "skipped", "few", "room", "requests")
INTEGERS = {
    "read_parts": (*PARTS, "tokens"), "read_alone": (*PARTS, "tokens"), "read_parts_staged": PARTS,
    "join_parts": (*PARTS, "rows_of_all"), "read_chunk_staged": ("requests", "rows_of_all"),
    "_conv": ("requests", "look", "ahead"), "conv_walk": ("look", "share"), "conv_walk_words": ("look", "share"),
    "conv_walk_prompt": ("look", "share"), "_carry": ("has_store", "look", *CHANCE),
    "_window": ("has_store", "has_settled", "has_each", *RING, "has_ring", "look", *CHANCE),
    "staged_window": (*RING, "look"), "staged_decode": ("look",), "prepare_staged": ("requests",),
    "carry_staged": ("has_store", "narrow", "look"), "fused_staged": ("has_store", "look", "requests"),
}  # fmt: skip
Printed = Mapping[str, list[dict[str, Any]]]  # lines of the program, by form


@pytest.fixture(scope="module")
def printed() -> Printed:
    return compiled()


@pytest.fixture(scope="module")
def taken(printed: Printed) -> Mapping[str, list[Taken]]:
    return {form: [read(one) for one in lines] for form, lines in printed.items() if form != "integers"}


def compiled(*words: object) -> Printed:
    """The output of `compiled.py`, which runs in another process: kernels are not interpreted there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = ":".join(sys.path)
    command = [sys.executable, "-m", "support.kernels.compiled", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[dict[str, Any]]] = {}
    for line in map(json.loads, done.stdout.splitlines()):
        if "form" in line:
            lines = found[line["form"]] = []
        else:
            lines.append(line)
    return found


def read(line: Mapping[str, Any]) -> Taken:
    stack = int(line["usage"].split("STACK:")[1].split()[0])
    rest = ("shared", "copies", "waits", "beside", "over_barriers", "sums")
    return Taken(line["kernel"], stack, *(line[name] for name in rest))


@WHOLE
def test_integers_of_launches_compile_one_variant_of_a_kernel(printed: Printed) -> None:
    counted: dict[str, dict[str, int]] = {}
    for line in printed["integers"]:
        counted.setdefault(line["kernel"], {}).update(line["variants"])
    assert counted == {kernel: dict.fromkeys(names, 1) for kernel, names in INTEGERS.items()}


@WHOLE
def test_missing_record_entry_is_compiled_under_a_separate_key(printed: Printed, tmp_path: Path) -> None:
    held, dragged = printed["clocks"]
    record = tmp_path / "record.json"
    record.write_text(json.dumps({held["key"]: {**held, "shared": 12345}, "another": {**dragged, "shared": 12345}}))
    found = compiled("clocks", "--record", record)["clocks"]
    assert found == [{**held, "shared": 12345}, dragged] and dragged["shared"] != 12345
    short, enough = ({one["key"] for one in printed[form] if one["kernel"] == "fused_staged"}
                     for form in ("few_registers", "prompts"))  # fmt: skip
    assert short and enough and not short & enough, "they differ in registers alone"


@WHOLE
def test_the_record_has_what_the_compiler_gives(tmp_path: Path) -> None:
    """One kernel in eight is compiled again, other ones after each change of the record. `--keep` compiles all."""
    record = json.loads(RECORD.read_text())
    drawn = random.Random(RECORD.read_text()).sample(sorted(record), len(record) // 8)
    (tmp_path / "rest").write_text(json.dumps({key: line for key, line in record.items() if key not in drawn}))
    lines = [line for lines in compiled("--record", tmp_path / "rest").values() for line in lines]
    anew = {line["key"]: read(line) for line in lines if "key" in line}
    if not anew.keys() & record.keys():
        pytest.skip("the record is of another Triton or Python")
    assert {key: read(line) for key, line in record.items()} == anew, "python -m support.kernels.compiled --keep"


def test_attention_keeps_tiles_in_registers(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["attend"]
    # None of the pools that are not aligned.
    kernels = [*2 * ["read_chunk_staged"], *10 * ["read_parts_staged"]]
    assert [one.kernel for one in told] == kernels
    for one in told:  # some numbers of a whole item are spilled; no tile is
        assert one.stack <= 128 and one.shared <= SHARED, one


def test_single_group_makes_weights_while_means_are_summed(taken: Mapping[str, list[Taken]]) -> None:
    alone, two = (one.beside for one in taken["attend"] if one.kernel == "read_chunk_staged")
    assert alone >= 32 and not two, "of a step a thread has 32 scores; two groups do so for each other"


def test_weights_loaded_after_all_products_do_not_overlap_one() -> None:
    step = {"scores": "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", "weight": "MUFU.EX2 R1, R1 ;",
            "means": "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"}  # fmt: skip
    code = {order: "\n".join(step[what] for what in order.split()) for order in
            ("scores weight means", "scores means weight", "means weight", "scores weight means weight scores weight")}
    assert list(map(made_beside, code.values())) == [1, 0, 0, 2]


def test_prompts_keep_tiles_in_registers(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["prompts"]
    both, all_in_one = ["prepare_staged", "carry_staged"], "fused_staged"
    assert [one.kernel for one in told] == [*both, *both, "clear", *both, all_in_one], "only a long prompt has signals"
    for one in told:  # some numbers of a whole item are spilled; no tile is
        most = 256 if one.kernel == all_in_one else 160  # a warp that copies has 24 registers there
        assert one.stack <= most and one.shared <= SHARED, one


def test_three_programs_that_prepare_blocks_share_a_multiprocessor(taken: Mapping[str, list[Taken]]) -> None:
    found = [one for form in ("prompts", "many_heads") for one in taken[form] if one.kernel == "prepare_staged"]
    assert len(found) == 4 and all(PREPARE * (one.shared + RESERVED) <= OF_ALL for one in found), found
    assert found[-1].stack <= 168, "of more heads some more is spilled"


def test_registers_suffice_so_that_no_product_waits(taken: Mapping[str, list[Taken]]) -> None:
    forms = ("attend", "many_heads", "prompts", "products")
    assert [one for form in forms for one in taken[form] if one.waits] == []
    (short,) = taken["few_registers"]
    assert short.kernel == "fused_staged" and short.waits > 20, short


def test_barrier_memory_is_not_reused(taken: Mapping[str, list[Taken]]) -> None:
    """Racecheck and memcheck do not see it, nor does a run alone: another process's slice of time makes it wrong."""
    assert [one for form, told in taken.items() if form != "forgotten" for one in told if one.over_barriers] == []
    kept, ended, forgotten, used, used_up, unused, exchanged = (one.over_barriers for one in taken["forgotten"])
    assert kept == ended == used == [] and forgotten == ["%full: %numbers", "%full: no group has it"]
    assert used_up == ["%full: tt.reduce"] and unused == ["%full: tt.reduce", "%full: no code waits for it"]
    if tuple(map(int, version("triton").split(".")[:2])) >= (3, 9):  # it lists the cost of layout conversions
        assert exchanged == ["%full: ttg.convert_layout"]


def test_products_of_few_rows_spill_nothing(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["products"]
    forms = {form: "_linear_parts" if form == (128, True) else "_linear_staged" for form in few_rows.STAGED}
    both = [(form, twice) for form, known in few_rows.STAGED.items() for _, shape in known
            for twice in range(1 + (not form[1] and not shape["pair"]))]  # with fp32 results, too
    assert [one.kernel for one in told] == [forms[form] for form, _ in both]
    narrow, wide = (one for one, (form, _) in zip(told, both, strict=True) if form == (128, False))
    assert narrow.shared > wide.shared, "fp32 results are stored as the sums lie, others change their layout first"
    assert all(one.stack == 0 and one.shared <= SHARED for one in told), told


def test_windows_spill_nothing_and_four_programs_share_the_shared_memory(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["windows"]
    assert len(told) == 22
    assert all(one.stack == 0 and one.shared <= OF_ALL // 4 and one.copies for one in told), told


def test_decay_per_channel_keeps_states_in_registers(taken: Mapping[str, list[Taken]]) -> None:
    """With fp32 states, windows without explicit layouts have the order of sums that a decay per head has."""
    told = {name: [one for one in taken["channels"] if one.kernel == name] for name in
            ("staged_window", "staged_decode", "_window", "_prepare_channels", "_carry", "_solve")}  # fmt: skip
    assert [len(one) for one in told.values()] == [12, 5, 2, 2, 4, 2]
    for one in told["staged_window"] + told["staged_decode"]:
        assert one.stack == 0 and one.shared <= OF_ALL // 4 and one.copies, one
    assert told["_window"][0].sums == taken["split_rings"][0].sums != []
    prepare, narrow = told["_prepare_channels"][0], told["_carry"][0]
    # Four programs that prepare share a multiprocessor. Most of what is spilled is where exponents are far apart.
    assert prepare.stack <= 320 and 4 * (prepare.shared + RESERVED) <= OF_ALL, prepare
    for carried in (narrow, *taken["prompt_channels"]):
        assert carried.stack == 0 and carried.shared <= SHARED, carried
    assert [one.kernel for one in taken["prompt_channels"]] == ["carry_staged"]


def test_a_split_ring_sums_as_a_wide_one_and_spills_no_more(taken: Mapping[str, list[Taken]]) -> None:
    wide, split = taken["split_rings"]
    assert wide.kernel == split.kernel == "_window" and split.stack <= wide.stack and split.shared <= SHARED
    assert len(wide.sums) > 1 and split.sums == wide.sums, "the order of its sums decides the bits of a state"


def test_expansion_of_latents_and_sigmoid_routers_fit_a_program(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["latents"] + taken["routers"]
    names = {"_expand", "read_chunk", "read_parts", "join_parts", "_moe_choose", "_moe_up", "_route", "_up", "_down",
             "_silu_mul"}  # fmt: skip
    assert {one.kernel for one in told} == names and all(one.shared <= SHARED and one.stack == 0 for one in told), told


def test_rows_of_turned_latents_and_safe_gates_spill_nothing(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["turned_latents"]
    assert [one.kernel for one in told] == 2 * ["_latent_rows", "_output_gate", "_channel_decays", "_channel_decays"]
    turns = {True: 32, False: 0}  # a sine of a large angle has an array of seven words, as in `_rotary`
    assert all(one.stack == turns[one.kernel == "_latent_rows"] and one.shared <= OF_ALL // 8 for one in told), told


def test_kernels_of_outer_products_spill_no_more_than_those_of_the_delta_rule(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["outer_products"]
    experts = ["_moe_score", "_moe_choose", "_moe_sort", "_moe_up", "_moe_down", "_moe_mix", "_route", "_up", "_down"]
    assert [one.kernel for one in told] == [
        *2 * ["_conv"], "_selective_inputs", *2 * ["_window"], "_add_skip", "_gated_group_norm", "_square", *experts]
    most = {"_window": taken["split_rings"][0].stack}
    assert all(one.stack <= most.get(one.kernel, 0) and one.shared <= SHARED for one in told), told


def test_the_conv_of_prompts_spills_nothing(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["convs"]
    assert told and {one.kernel for one in told} == {"conv_walk_prompt"} and all(one.stack == 0 for one in told), told


def test_clock_of_a_gpu_spills_nothing(taken: Mapping[str, list[Taken]]) -> None:
    told = taken["clocks"]
    assert [one.kernel for one in told] == ["_hold", "_drag"] and all(one.stack == 0 for one in told), told


def test_two_programs_that_spin_fill_a_multiprocessor(printed: Printed) -> None:
    """Each of its 2,048 threads has 32 of the 65,536 registers."""
    (line,) = printed["spins"]
    assert read(line).stack == 0 and int(line["usage"].split("REG:")[1].split()[0]) <= 32, line


def test_the_kernels_of_the_handshake_go_through_the_dispatch_alone(taken: Mapping[str, list[Taken]]) -> None:
    """All go through the compiler's dispatch, none copies anything into shared memory, and one has 1024 bytes there."""
    told = taken["handshake"]
    assert [one.kernel for one in told] == ["halves", "told", "handed"]
    assert all(one.stack == 0 and not one.copies for one in told), told
    assert all(0 < one.shared - own < 256 for one, own in zip(told, (0, 0, 1024), strict=True)), told

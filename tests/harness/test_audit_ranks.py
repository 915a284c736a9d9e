"""Recordings per rank: right ones agree as one engine, and mistakes of a rank are found at their event and rank.

Leaves out: recordings of one rank (`test_audit.py`).
"""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from instep.audit.audit import audit
from instep.audit.write import Recording
from instep.verdict import Exit
from instep_reference.contract.errors import BadInput
from support.inputs.recordings import PROMPTS, TINY, recorded
from support.running.command import Runner
from support.running.covering import WHOLE

SEGMENTS = (2 * 32, 2 * 32, 4 * 64)  # channels of q, k and v in the tiny model


def cut(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """The part of one of two ranks."""
    sizes = SEGMENTS if name.startswith("conv.") else (len(whole),)
    if not name.startswith(("conv.", "state.")):
        return whole
    return torch.cat([part.chunk(2)[rank] for part in whole.split(sizes)])


def split(whole: Path, folder: Path, how: Callable[[str, torch.Tensor, int], torch.Tensor] = cut) -> Path:
    """The recording as two ranks would have made it."""
    for rank in range(2):
        own = folder / f"rank-{rank}"
        shutil.copytree(whole, own)
        change(own, rank=rank, ranks=2, run="monday")
        for file in (own / "tensors").glob("*.safetensors"):
            save_file({name: how(name, x, rank).contiguous() for name, x in load_file(file).items()}, file)
    return folder


def change(own: Path, **fields: Any) -> None:
    stated = json.loads((own / "recording.json").read_text())
    (own / "recording.json").write_text(json.dumps({**stated, **fields}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("whole") / "r", tokens=4, prompts={name: PROMPTS[name] for name in "ab"})


@pytest.fixture
def ranks(whole: Path, tmp_path: Path) -> Path:
    return split(whole, tmp_path / "ranks")


@WHOLE
def test_recordings_of_two_ranks_agree_as_one_engine(ranks: Path, whole: Path, instep: Runner) -> None:
    ran = instep("audit", ranks, "--model", TINY)
    assert ran.code == 0 and "agrees" in ran.out, ran
    one, two = audit(whole, TINY), audit(ranks, TINY)
    assert two.exit is Exit.AGREED and one.replay is not None and two.replay is not None
    assert one.replay.verdict.compared == two.replay.verdict.compared, "the merged states are those of one engine"
    checks = {found.check: found.elements for found in two.verdict.compared}
    assert checks["agreement"] == len(one.trace.events) and checks["replicas"] > 0


def states(ranks: Path, at: int, rank: int, how: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    file = sorted((ranks / f"rank-{rank}" / "tensors").glob("*.safetensors"))[at]
    save_file({name: x.contiguous() for name, x in how(load_file(file)).items()}, file)


@pytest.mark.slow
def test_the_states_of_another_rank_are_named(ranks: Path) -> None:
    """Rank 1 records rank 0's states, and rank 0 its own: one of two ranks looked at the wrong shard."""
    of_0 = load_file(sorted((ranks / "rank-0" / "tensors").glob("*.safetensors"))[2])
    states(ranks, 2, 1, lambda own: {name: of_0[name] if name.startswith("state.") else x for name, x in own.items()})
    found = audit(ranks, TINY)
    assert found.exit is Exit.DIVERGED and found.replay is not None
    first = found.replay.verdict.findings[0]
    index = int(sorted((ranks / "rank-0" / "tensors").glob("*.safetensors"))[2].stem)
    assert (first.event, first.rank, first.place.component) == (index, 1, "state")
    assert "is of rank 1, which has the part of rank 0" in first.diagnosis


@WHOLE
def test_tensors_of_exchanged_ranks_are_named(ranks: Path) -> None:
    files = [ranks / f"rank-{rank}" / "tensors" for rank in range(2)]
    files[0].rename(ranks / "aside")
    files[1].rename(files[0])
    (ranks / "aside").rename(files[1])
    found = audit(ranks, TINY)
    assert found.replay is not None
    first = found.replay.verdict.findings[0]
    assert first.rank == 0 and "is of rank 0, which has the part of rank 1" in first.diagnosis, first.diagnosis


@WHOLE
def test_a_conv_window_cut_as_one_block_is_named(whole: Path, tmp_path: Path) -> None:
    def wrong(name: str, x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.chunk(2)[rank] if name.startswith("conv.") and rank else cut(name, x, rank)

    found = audit(split(whole, tmp_path / "ranks", wrong), TINY)
    assert found.exit is Exit.DIVERGED and found.replay is not None
    first = next(one for one in found.replay.verdict.findings if one.place.component == "conv")
    assert first.rank == 1 and "is of rank 1, which has a part that is cut as one block" in first.diagnosis


def edit(ranks: Path, rank: int, old: bytes, new: bytes) -> int:
    """Change one line of a rank's events -> its number."""
    file = ranks / f"rank-{rank}" / "events.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if old in line)
    lines[at] = lines[at].replace(old, new)
    file.write_bytes(b"".join(lines))
    change(file.parent, events=len(lines), sha256=sha256(b"".join(lines)).hexdigest())
    return at


@pytest.mark.slow
def test_other_decisions_of_a_rank_are_named(ranks: Path, instep: Runner) -> None:
    at = edit(ranks, 1, b'"nodes":[1,2,3]', b'"nodes":[1,2]')
    found = audit(ranks, TINY, level=1)
    first = found.verdict.findings[0]
    assert (first.check, first.event, first.kind, first.rank) == ("agreement", at, "commit", 1)
    assert "accepted of rank 1" in first.diagnosis and "rank 0 has" in first.diagnosis
    out = "--html", ranks / "page.html", "--json", ranks / "r.json"
    ran = instep("audit", ranks, "--model", TINY, "--level", 1, *out)
    assert ran.code == 1 and "rank 1" in ran.out, ran.out
    assert len(found.trace.events) == at, "later events of the two ranks are not those of one engine"


@pytest.mark.slow
def test_rows_that_ranks_have_in_common_must_be_equal(ranks: Path) -> None:
    states(ranks, 1, 1, lambda own: {name: x + (1e-6 if name.startswith("final.") else 0) for name, x in own.items()})
    found = [one for one in audit(ranks, TINY, level=1).verdict.findings]
    assert found and {(one.check, one.rank) for one in found} == {("replicas", 1)}
    assert "final of rank 1 differs from that of rank 0" in found[0].diagnosis
    count, own = 0, ranks / "rank-0"
    for at, file in enumerate(sorted((own / "tensors").glob("*.safetensors"))):
        count += sum(name.startswith("final.") for name in load_file(file))
        states(ranks, at, 0, lambda own: {name: x for name, x in own.items() if not name.startswith("final.")})
    shows = json.loads((own / "recording.json").read_text())["shows"]
    change(own, shows=[one for one in shows if one != "final"])
    one = audit(ranks, TINY, level=1)
    (note,) = (note for note in one.recorded.notes if "not compared" in note)
    assert not one.verdict.findings and count > 2
    assert note.startswith(f"rank 1: not compared: {count} tensors that rank 0 did not record, the first ")


@pytest.mark.parametrize(("change_it", "says"), [
    (lambda ranks: shutil.rmtree(ranks / "rank-1"), "no rank-1/recording.json"),
    (lambda ranks: change(ranks / "rank-1", run="tuesday"), "rank-1/recording.json: run: found tuesday"),
    (lambda ranks: change(ranks / "rank-1", rank=0), "the directories of two ranks are exchanged"),
    (lambda ranks: change(ranks / "rank-1", dtype="bfloat16"), "rank-1/recording.json: dtype"),
    (lambda ranks: change(ranks / "rank-0", ranks=3) or change(ranks / "rank-1", ranks=3), "no rank-2/recording.json"),
    (lambda ranks: change(ranks / "rank-0", ranks=None), "rank-0/recording.json: ranks: found None"),
    (lambda ranks: shutil.copytree(ranks / "rank-1", ranks / "rank-2"), "found rank-2"),
    (lambda ranks: edit(ranks, 1, b'"request":"a"', b'"request":"z"'), "the ranks are of different runs"),
    (lambda ranks: [change(ranks / f"rank-{rank}", shards={"conv": [[2, 64]]}) for rank in range(2)],
     "shards.conv: found 128 entries, expected 384"),
    (lambda ranks: [change(ranks / f"rank-{rank}", shards={"q": [[2, 64]]}) for rank in range(2)], "conv and state"),
    (lambda ranks: states(ranks, 2, 1, lambda own: {k: v for k, v in own.items() if not k.startswith("state.")}),
     "rank-1/tensors/.*: found no state"),
    (lambda ranks: states(ranks, 2, 1, lambda own: {k: torch.cat((v, v)) if k.startswith("conv.") else v
                                                    for k, v in own.items()}), "192 of 384 entries on axis 0"),
], ids=["missing", "run", "swapped", "dtype", "fewer", "no-number", "more", "events", "shards", "unknown", "tensor",
        "shape"])
def test_recordings_of_ranks_that_do_not_fit_are_refused(
    change_it: Callable[[Path], Any], says: str, ranks: Path
) -> None:
    change_it(ranks)
    with pytest.raises(BadInput, match=says):
        audit(ranks, TINY)


def test_a_rank_alone_is_refused(ranks: Path) -> None:
    with pytest.raises(BadInput, match="one of 2 ranks, expected the directory above it"):
        audit(ranks / "rank-0", TINY)


def test_the_writer_names_its_rank(tmp_path: Path) -> None:
    for rank in range(2):
        made = Recording(tmp_path / "r", engine="by hand", rank=rank, ranks=2, run="monday")
        made.admit("a", [82, 101])
        made.close()
    with pytest.raises(ValueError, match="belong together"):
        Recording(tmp_path / "s", engine="by hand", rank=1)
    assert json.loads((tmp_path / "r" / "rank-1" / "recording.json").read_text())["rank"] == 1

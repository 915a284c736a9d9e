"""The reading of a release's source: whether its engine still calls what an entry of `make peers` judges.

Leaves out: running the entries (`test_peers.py`).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from peers import run
from peers.__main__ import entries
from peers.dispatch import Source
from peers.entry import Entry
from peers.environment import TOP
from peers.kernels import LIBRARY, RING

UNPACKED = TOP / ".venv-peers" / "unpacked"
ENGINES = ("sglang", "vllm")  # packages that call their kernels themselves
POOL = """
class Pool:
    def __init__(self, params, enable_ring=False):
        self.fold = bool(enable_ring and params.is_kda)
        self.base = torch.zeros(3) if enable_ring and not self.fold else None
"""
COMMIT = """
from .kernels.fold import fold_every as folds, fold_flagged

def commit(pool, idle):
    if pool is not None and getattr(pool, "fold", False):
        folds(pool, track=None)
        return
    if pool is not None and getattr(pool, "base", None) is not None:
        fold_flagged(pool)
        return
    scatter(pool, 1)
"""
KERNELS = """
def fold_every(pool, track):
    fold_layers(pool)

def fold_flagged(pool):
    pass
"""
GDN, KDA = {"enable_ring": True, "is_kda": False}, {"enable_ring": True, "is_kda": True}
OFF = {"enable_ring": False, "is_kda": False}


def source(folder: Path, facts: Mapping[str, object], **files: str) -> Source:
    for name, text in {"pool": POOL, "commit": COMMIT, "kernels/fold": KERNELS, **files}.items():
        (folder / name).with_suffix(".py").parent.mkdir(parents=True, exist_ok=True)
        (folder / name).with_suffix(".py").write_text(text)
    return Source(folder, facts)


@pytest.mark.parametrize(("facts", "called"), [
    (GDN, {"fold_flagged", "scatter"}), (KDA, {"fold_every", "fold_every(track)", "fold_layers", "scatter"}),
    (OFF, {"scatter"}),
], ids=["gdn", "kda", "off"])  # fmt: skip
def test_calls_follow_the_conditions_around_them(facts: dict[str, object], called: set[str], tmp_path: Path) -> None:
    read = source(tmp_path, facts)
    asked = ("fold_every", "fold_every(track)", "fold_layers", "fold_flagged", "scatter", "fold_every(gone)", "nothing")
    assert {name for name in asked if read.calls(name)} == called


def test_an_open_condition_excludes_nothing(tmp_path: Path) -> None:
    read = source(tmp_path, {})
    assert all(read.calls(name) for name in ("fold_every", "fold_layers", "fold_flagged", "scatter"))
    assert str(read.calls("scatter")[0]) == "commit.py:11 in commit"


@pytest.mark.parametrize("edit", [
    ("        fold_flagged(pool)\n", "        pass\n"),
    ("        fold_flagged(pool)\n", "        return\n        fold_flagged(pool)\n"),
    ('getattr(pool, "base", None) is not None', 'getattr(pool, "fold", True) and pool.base'),
], ids=["removed", "after a return", "under a condition"])  # fmt: skip
def test_a_function_that_is_not_called_any_more_is_reported(edit: tuple[str, str], tmp_path: Path) -> None:
    assert COMMIT.count(edit[0]) == 1
    source(tmp_path / "made-1" / "made", GDN)
    entry = Entry("fold", "made", "1", "op", "", unpacked=("made==1",), modules=("made",), switch="--ring",
                  calls=("fold_flagged",), facts=GDN)  # fmt: skip
    assert run.uncalled(entry, tmp_path) == ""
    source(tmp_path / "made-1" / "made", GDN, commit=COMMIT.replace(*edit))
    assert run.uncalled(entry, tmp_path) == "no call of fold_flagged with --ring"


def test_a_private_caller_counts_if_it_is_called(tmp_path: Path) -> None:
    text = "class Backend:\n    def _verify(self):\n        decode()\n"
    assert not source(tmp_path, {}, backend=text).calls("decode")
    more = text + "    def forward(self):\n        return self._verify()\n"
    assert source(tmp_path, {}, backend=more).calls("decode")


@pytest.mark.parametrize("place", ["test/backend", "bench_backend", "hardware_backend/npu", "kda_backend"])
def test_calls_of_tests_and_other_hardware_do_not_count(place: str, tmp_path: Path) -> None:
    assert not source(tmp_path, {}, **{place: "def forward():\n    decode()\n"}).calls("decode")


@pytest.mark.parametrize(("is_kda", "place"), [(True, "kda_backend"), (False, "gdn_backend")])
def test_calls_of_the_other_layer_do_not_count(is_kda: bool, place: str, tmp_path: Path) -> None:
    files = {place: "def forward():\n    decode()\n"}
    assert source(tmp_path / "own", {"is_kda": is_kda}, **files).calls("decode")
    assert not source(tmp_path / "other", {"is_kda": not is_kda}, **files).calls("decode")


def test_a_dead_function_is_a_row_that_is_not_as_expected(tmp_path: Path) -> None:
    source(tmp_path / "made-1" / "made", GDN)
    about = tmp_path / "made-1" / "made-1.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text("Metadata-Version: 2.1\nName: made\nVersion: 1\n")
    entry = Entry("fold", "made", "1", "op", "python -c pass", unpacked=("made==1",), modules=("made",),
                  switch="--ring", calls=("fold_flagged",), facts=GDN)  # fmt: skip
    where = {"PYTHONPATH": str(tmp_path / "made-1")}
    assert run.served(entry, where, tmp_path)["verdict"] == "agree"
    row = run.served(replace(entry, calls=("fold_flagged", "gone")), where, tmp_path)
    assert (row["verdict"], row["finding"], row["met"]) == ("not called", "no call of gone with --ring", False)


def judged() -> list[Entry]:
    return [one for one in entries() if one.door != "engine" and one.unpacked]


def test_every_entry_of_an_engines_kernel_names_its_switch_and_calls() -> None:
    found = judged()
    assert found and all(one.switch for one in found), [one.title for one in found if not one.switch]
    silent = [one.title for one in found if not one.calls and (one.package in ENGINES or one.switch != LIBRARY)]
    assert not silent


@cache
def read(root: Path, facts: tuple[tuple[str, object], ...]) -> Source:
    return Source(root, dict(facts))


def unpacked(package: str, version: str) -> Path:
    root = UNPACKED / f"{package}-{version}" / package
    if not root.is_dir():
        pytest.skip(f"{package} {version} is not unpacked in {UNPACKED.relative_to(TOP)}: make peers")
    return root


@pytest.mark.whole
@pytest.mark.parametrize("release", sorted({(one.package, one.version) for one in judged() if one.calls}))
def test_a_release_calls_what_its_entries_judge(release: tuple[str, str]) -> None:
    """And it has the option."""
    root = unpacked(*release)
    own = [one for one in judged() if (one.package, one.version) == release]
    texts = read(root, ()).texts.values()
    for one in own:
        calls = read(root, tuple(one.facts.items()))
        assert not [name for name in one.calls if not calls.calls(name)], one.title
        field = one.switch.removeprefix("--").replace("-", "_")
        assert one.switch == "default" or any(field in text for text in texts), one.switch


@pytest.mark.whole
@pytest.mark.parametrize(("version", "name"), [
    ("0.5.23", "commit_gdn_replayssm_fold_all_layers"), ("0.5.20", "commit_gdn_replayssm_fold_all_layers"),
    ("0.5.23", "fused_sigmoid_gating_delta_rule_update(cache_ring)"),
    *((version, "fused_recurrent_gated_delta_rule_update(intermediate_states_buffer)")
      for version in ("0.5.12", "0.5.13", "0.5.23")),
])  # fmt: skip
def test_what_was_judged_before_is_dead(version: str, name: str) -> None:
    """A commit that only KDA reaches since 0.5.20, and a verify that no GDN backend calls since 0.5.10."""
    assert not read(unpacked("sglang", version), tuple(RING.items())).calls(name)

"""The table of names of `instep attach`, read again in the wheels of SGLang as data.

INSTEP_WHEELS is a folder of wheels (`pip download --no-deps sglang==0.5.12`); without it the tests are skipped.
"""

from __future__ import annotations

import ast
import os
import zipfile
from functools import cache
from pathlib import Path

import pytest

from instep.attach import GROUP
from instep.attach.sglang_names import MAMBA_POOL, POOL, REGISTRY, RELEASES, Names

FOLDER = Path(os.environ.get("INSTEP_WHEELS", "no folder"))
WHEELS = {one.name.split("-")[1]: one for one in FOLDER.glob("sglang-*.whl")}
RINGS = ("replayssm_write_pos", "replayssm_spec_write_pos", "replayssm_cache_base")
in_the_wheels = pytest.mark.skipif(not WHEELS, reason="INSTEP_WHEELS names no folder with wheels of SGLang")


@cache
def tree(release: str, module: str) -> ast.Module | None:
    """The syntax of a module in the wheel of a release; None: it has no such module."""
    path = module.replace(".", "/")
    with zipfile.ZipFile(WHEELS[release]) as wheel:
        files = set(wheel.namelist()) & {f"{path}.py", f"{path}/__init__.py"}
        return ast.parse(wheel.read(files.pop())) if files else None


def members(release: str, owner: str) -> set[str]:
    """Names that a module or class binds, attributes of self included. owner: "module" or "module:Class.Inner"."""
    module, _, path = owner.partition(":")
    found = tree(release, module)
    body: list[ast.stmt] = [] if found is None else found.body
    for name in filter(None, path.split(".")):
        body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
    names = set[str]()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        for inner in ast.walk(node):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target] if isinstance(
                inner, ast.AnnAssign) else []  # fmt: skip
            for target in (one for many in targets for one in (many.elts if isinstance(many, ast.Tuple) else [many])):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    names.add(target.attr)
                elif isinstance(target, ast.Name) and inner is node:
                    names.add(target.id)
    return names


def lacking(release: str, names: Names) -> set[str]:
    """List the names of the table that the wheel lacks."""
    found = set[str]()
    for target in names.hooks.values():
        owner, _, function = target.rpartition("." if "." in target.partition(":")[2] else ":")
        if function not in members(release, owner):
            found.add(target)
    for owner, attributes in names.reads.items():
        found |= {f"{owner}.{one}" for one in set(attributes) - members(release, owner)}
    return found


@in_the_wheels
@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_has_every_name_of_its_table(release):
    assert lacking(release, RELEASES[release]) == set()


@in_the_wheels
@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_loads_plugins_in_scheduler_processes(release):
    assert {"register", "apply_hooks"} <= members(release, f"{REGISTRY}:HookRegistry")
    assert "AROUND" in members(release, f"{REGISTRY}:HookType")
    plugins = tree(release, "sglang.srt.plugins")
    assert plugins is not None
    text = ast.unparse(plugins)
    assert repr(GROUP) in text and "envs.SGLANG_PLUGINS" in text and "HookRegistry.apply_hooks()" in text
    scheduler = tree(release, "sglang.srt.managers.scheduler")
    assert scheduler is not None
    run = next(node for node in scheduler.body if getattr(node, "name", "") == "run_scheduler_process")
    assert "load_plugins()" in ast.unparse(run)


@in_the_wheels
@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_has_no_ring_that_the_table_leaves_out(release):
    names, pool = RELEASES[release], members(release, MAMBA_POOL)
    known = {names.decode_ring} | (set() if names.ring is None else {names.ring.position, names.ring.base})
    folds = "replayssm_spec_fold" in pool and names.ring is None  # at every commit, so `temporal` is the state
    assert {one for one in RINGS if one in pool} - known <= ({"replayssm_cache_base"} if folds else set())
    translates = "translate_mamba_indices" in members(release, f"{POOL}:HybridReqToTokenPool")
    assert translates == (names.physical is not None)


@in_the_wheels
def test_a_name_that_a_wheel_lacks_is_seen():
    """The names of 0.5.14 on 0.5.12, and those of 0.5.20 on 0.5.16."""
    commit = "sglang.srt.speculative.spec_utils:commit_mamba_states_after_verify"
    assert lacking("0.5.12", RELEASES["0.5.14"]) == {commit}
    assert f"{MAMBA_POOL}.replayssm_spec_write_pos" in lacking("0.5.16", RELEASES["0.5.20"])


def test_names_differ_only_where_releases_do():
    assert RELEASES["0.5.12"] is RELEASES["0.5.13"] and RELEASES["0.5.15"] is RELEASES["0.5.19"]
    assert len({(one.commit, one.stride, one.ring, one.decode_ring) for one in RELEASES.values()}) == 5

"""The tables of names of `instep attach`, read again in the wheels of SGLang and vLLM as data.

INSTEP_WHEELS is a folder of wheels (`pip download --no-deps sglang==0.5.12`, `vllm==0.33.0`). The tests of a release
without its wheel are skipped.
"""

import ast
import os
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from instep.attach import PLUGINS, vllm_names
from instep.attach.sglang_names import MAMBA_POOL, POOL, REGISTRY, RELEASES, Names

FOLDER = Path(os.environ.get("INSTEP_WHEELS", "no folder"))
WHEELS = {tuple(one.name.split("-")[:2]): one for one in FOLDER.glob("*.whl")}
RINGS = ("replayssm_write_pos", "replayssm_spec_write_pos", "replayssm_cache_base")
VLLM_PLUGINS = "vllm.plugins"


@pytest.fixture(autouse=True)
def wheel_is_there(request: pytest.FixtureRequest) -> None:
    """Skip a test of a release without its wheel."""
    given = getattr(request.node, "callspec", None)
    marked = request.node.get_closest_marker("parametrize")
    if given is not None and marked is not None and "release" in given.params:
        package = "vllm" if given.params["release"] in vllm_names.RELEASES else "sglang"
        if (package, given.params["release"]) not in WHEELS:
            pytest.skip(f"INSTEP_WHEELS has no wheel of {package} {given.params['release']}")


@cache
def tree(release: str, module: str) -> ast.Module | None:
    """The syntax of a module in the wheel of a release; None: it has no such module."""
    path = module.replace(".", "/")
    with zipfile.ZipFile(WHEELS[module.partition(".")[0], release]) as wheel:
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
    """List the names of the table that the wheel of SGLang lacks."""
    found = set[str]()
    for target in names.hooks.values():
        owner, _, function = target.rpartition("." if "." in target.partition(":")[2] else ":")
        if function not in members(release, owner):
            found.add(target)
    return found | unread(release, names.reads)


def unread(release: str, reads: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{owner}.{one}" for owner, wanted in reads.items() for one in set(wanted) - members(release, owner)}


def vllm_lacks(release: str, names: vllm_names.Names) -> set[str]:
    """List the names of the table that the wheel of vLLM lacks."""
    found = unread(release, {**names.reads, vllm_names.WORKER: (vllm_names.STARTED,)})
    for runner in (names.v1, names.v2):
        found |= unread(release, {runner.runner: runner.hooks.values()}) | unread(release, runner.reads)
    return found


@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_has_every_name_of_its_table(release: str) -> None:
    assert lacking(release, RELEASES[release]) == set()


@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_loads_plugins_in_scheduler_processes(release: str) -> None:
    assert {"register", "apply_hooks"} <= members(release, f"{REGISTRY}:HookRegistry")
    assert "AROUND" in members(release, f"{REGISTRY}:HookType")
    plugins = tree(release, "sglang.srt.plugins")
    assert plugins is not None
    text = ast.unparse(plugins)
    assert repr(PLUGINS["sglang"].group) in text
    assert "envs.SGLANG_PLUGINS" in text and "HookRegistry.apply_hooks()" in text
    scheduler = tree(release, "sglang.srt.managers.scheduler")
    assert scheduler is not None
    run = next(node for node in scheduler.body if getattr(node, "name", "") == "run_scheduler_process")
    assert "load_plugins()" in ast.unparse(run)


@pytest.mark.parametrize("release", RELEASES)
def test_a_wheel_has_no_ring_that_the_table_leaves_out(release: str) -> None:
    names, pool = RELEASES[release], members(release, MAMBA_POOL)
    known = {names.decode_ring} | (set() if names.ring is None else {names.ring.position, names.ring.base})
    folds = "replayssm_spec_fold" in pool and names.ring is None  # at every commit, so `temporal` is the state
    assert {one for one in RINGS if one in pool} - known <= ({"replayssm_cache_base"} if folds else set())
    translates = "translate_mamba_indices" in members(release, f"{POOL}:HybridReqToTokenPool")
    assert translates == (names.physical is not None)


@pytest.mark.skipif(not {("sglang", "0.5.12"), ("sglang", "0.5.16")} <= WHEELS.keys(), reason="no such wheels")
def test_a_name_that_a_wheel_lacks_is_seen() -> None:
    """The names of 0.5.14 on 0.5.12, and those of 0.5.20 on 0.5.16."""
    commit = "sglang.srt.speculative.spec_utils:commit_mamba_states_after_verify"
    sizes = "sglang.srt.speculative.adaptive_spec_params:AdaptiveSpeculativeParams._cuda_graph_bs"
    assert lacking("0.5.12", RELEASES["0.5.14"]) == {commit, sizes}
    assert f"{MAMBA_POOL}.replayssm_spec_write_pos" in lacking("0.5.16", RELEASES["0.5.20"])


@pytest.mark.parametrize("release", vllm_names.RELEASES)
def test_a_wheel_of_vllm_has_every_name_of_its_table(release: str) -> None:
    names = vllm_names.RELEASES[release]
    assert vllm_lacks(release, names) == set()
    wrong = replace(names, v1=replace(names.v1, hooks={"run": "execute_batch"}))
    assert vllm_lacks(release, wrong) == {f"{names.v1.runner}.execute_batch"}, "and a wrong one is seen"
    assert names.own not in members(release, names.v1.runner), "it tells the runners apart"


@pytest.mark.parametrize("release", vllm_names.RELEASES)
def test_a_wheel_of_vllm_loads_plugins_in_workers(release: str) -> None:
    worker = tree(release, vllm_names.WORKER.partition(":")[0])
    assert worker is not None and "load_general_plugins()" in ast.unparse(worker)
    plugins = tree(release, VLLM_PLUGINS)
    assert plugins is not None
    assert repr(PLUGINS["vllm"].group) in ast.unparse(plugins) and "envs.VLLM_PLUGINS" in ast.unparse(plugins)


def test_names_differ_only_where_releases_do() -> None:
    assert replace(RELEASES["0.5.12"], captured="_cuda_graph_bs") == RELEASES["0.5.13"]
    assert RELEASES["0.5.15"] is RELEASES["0.5.19"]
    assert len({(one.commit, one.stride, one.ring, one.decode_ring) for one in RELEASES.values()}) == 5

"""Hooks of `instep attach`: they never wait for the device, a thread writes, and their names are those of the wheels.

INSTEP_WHEELS is a folder of wheels (`pip download --no-deps sglang==0.5.12`, `vllm==0.33.0`). The tests of a release
without its wheel are skipped. Leaves out: measured times (`peers.live.cost`), and what is recorded (`test_attach.py`).
"""

import ast
import json
import os
import threading
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from instep.attach import PLUGINS, Options, vllm_names
from instep.attach.device_states import MOST_WAITING, Writer
from instep.attach.sglang import SglangRecorder
from instep.attach.sglang_names import MAMBA_POOL, POOL, REGISTRY, RELEASES, Names, names_of
from instep.audit.write import Recording

WIDTH, PROMPT = 4, 3


@contextmanager
def must_not_wait(device: str) -> Iterator[None]:
    """Make every read of a device's tensor an error. Those of the device "meta" have no values to read."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


class Launches:
    """The calls of one process of SGLang to the hooks, for requests whose tensors are on a device."""

    def __init__(self, folder: Path, device: str, *adapted: str, **options: Any) -> None:
        self.recorder = SglangRecorder(Options(str(folder), **options), "0.5.13", *names_of("0.5.13"))
        self.device, self.rows = device, torch.arange(3, device=device)
        cache = SimpleNamespace(conv=[torch.ones(2, 9, 8, 3, device=device)],
                                temporal=torch.ones(2, 9, 2, 8, 8, device=device))  # fmt: skip
        mapping = torch.arange(9, device=device, dtype=torch.int32)
        self.temporal = cache.temporal
        pool = SimpleNamespace(mamba_map={0: 0, 4: 1}, mamba_pool=SimpleNamespace(mamba_cache=cache),
                               get_mamba_indices=lambda rows: mapping[rows])  # fmt: skip
        self.runner = SimpleNamespace(req_to_token_pool=pool, dtype=torch.bfloat16, is_draft_worker=False,
                                      model_config=SimpleNamespace(model_path=str(folder.parent)))  # fmt: skip
        self.requests = [
            SimpleNamespace(rid=name, origin_input_ids=[1] * PROMPT, output_ids=[], finished=lambda: False,
                            sampling_params=SimpleNamespace(top_k=1), lora_id="theirs" if name in adapted else None)
            for name in "abc"
        ]  # fmt: skip
        self.length = PROMPT

    def batch(self, kind: str, width: int, begin: int) -> tuple[Any, Any]:
        """The scheduler's batch, and that of the forward."""
        def mode(kind: str) -> Any:
            return SimpleNamespace(is_extend=lambda: kind in ("extend", "verify"), is_decode=lambda: kind == "decode",
                                   is_target_verify=lambda: kind == "verify")  # fmt: skip

        count = len(self.requests)
        positions = torch.arange(begin, begin + width).repeat(count)
        forward = SimpleNamespace(
            forward_mode=mode(kind), input_ids=torch.ones(count * width, dtype=torch.long, device=self.device),
            positions=positions.to(self.device), req_pool_indices=self.rows, spec_info=SimpleNamespace(topk=1))
        scheduled = SimpleNamespace(forward_mode=mode("decode" if kind == "verify" else kind), reqs=self.requests,
                                    extend_lens=[width] * count, prefix_lens=[0] * count)  # fmt: skip
        return scheduled, forward

    def launch(self, kind: str) -> tuple[Any, Any]:
        """Run one batch. Its results are those that the scheduler has on the host, when it processes them."""
        width = PROMPT if kind == "extend" else WIDTH
        scheduled, forward = self.batch(kind, width, 0 if kind == "extend" else self.length)
        ones = torch.ones(len(self.requests) * WIDTH, dtype=torch.long)
        result = SimpleNamespace(next_token_ids=ones, accept_lens=ones[:3] * 2, speculative_num_draft_tokens=WIDTH)

        def run(*_: Any) -> Any:
            output = SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None))
            self.recorder.forward(lambda *_: output, self.runner, forward)
            if kind == "verify":
                self.recorder.commit(lambda: None)
            return result

        self.length += 2 * (kind == "verify")
        with must_not_wait(self.device):
            self.recorder.run(run, SimpleNamespace(), scheduled)
        return scheduled, result


@pytest.mark.parametrize("adapted", [(), ("b",)], ids=["all rows", "some rows"])
@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_launch_does_not_wait_for_the_device(tmp_path: Path, device: str, adapted: tuple[str, ...]) -> None:
    served = Launches(tmp_path / "recording", device, *adapted)
    for kind in ("extend", "verify", "verify"):
        served.launch(kind)
    assert served.recorder.stopped == "" and len(served.recorder.flying) == 3
    shapes = {tuple(one.states.state.shape) for one in served.recorder.flying.values()}
    assert shapes == {(2, 3 - len(adapted), 2, 8, 8)}


def test_a_read_in_a_launch_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = SglangRecorder._committed
    monkeypatch.setattr(SglangRecorder, "_committed", lambda self: (committed(self), self.launching.slots.tolist()))
    served = Launches(tmp_path / "recording", "meta")
    for kind in ("extend", "verify"):
        served.launch(kind)
    assert "meta" in served.recorder.stopped


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_states_are_those_after_their_round(tmp_path: Path, device: str) -> None:
    served = Launches(tmp_path / "recording", device, every=1)
    served.temporal.copy_(torch.arange(served.temporal.numel(), device=device).view_as(served.temporal))
    expected = served.temporal[1, 2].clone().cpu()
    launched = served.launch("extend")
    served.temporal.zero_()  # the next round writes the pool before this one's results are processed
    served.recorder.processed(lambda *_: None, None, *launched)
    served.recorder.writer.finish()
    (file,) = (tmp_path / "recording" / "tensors").iterdir()
    found = load_file(file)
    assert torch.equal(found["state.c.4"], expected) and int(found["slot.c"]) == 2 and len(found) == 3 * 5


def test_a_model_without_weights_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # the engine has dummy weights
    served = Launches(tmp_path / "recording", "cpu", digest=True)
    served.recorder.processed(lambda *_: None, None, *served.launch("extend"))
    stated = json.loads((tmp_path / "recording" / "recording.json").read_text())
    assert (served.recorder.stopped, stated["weights"], stated["config"]) == ("", None, None)


def test_no_state_is_copied_if_none_can_be_written(tmp_path: Path) -> None:
    served = Launches(tmp_path / "recording", "cpu", triggers=(), every=0)
    for kind in ("extend", "verify"):
        served.recorder.processed(lambda *_: None, None, *served.launch(kind))
    facts = json.loads((tmp_path / "recording" / "recording.json").read_text())["attached"]
    assert served.recorder.stopped == "" and not facts["missing"] and "no trigger" in facts["no_states"]
    assert served.recorder.with_states == 0 and (tmp_path / "recording" / "events.jsonl").read_text().count("\n") == 8
    assert json.loads((tmp_path / "recording" / "batches.jsonl").read_text().splitlines()[-1])["slots"] == {
        "a": 0, "b": 1, "c": 2}  # fmt: skip


def test_the_engine_does_not_wait_for_a_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release, add = threading.Event(), Recording.add
    monkeypatch.setattr(Recording, "add", lambda *given: (release.wait(10), add(*given)))
    served = Launches(tmp_path / "recording", "cpu", every=1)
    for kind in ("extend", "verify"):
        served.recorder.processed(lambda *_: None, None, *served.launch(kind))
    files = tmp_path / "recording" / "tensors"
    assert not list(files.iterdir()) and served.recorder.written == 2
    release.set()
    for one in served.requests:
        one.finished = lambda: True
    served.recorder.processed(lambda *_: None, None, *served.launch("verify"))
    assert len(list(files.iterdir())) == 3, "the end of the last request waits for all writes"


def test_a_failed_write_stops_the_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Recording, "add", full)
    served = Launches(tmp_path / "recording", "cpu", every=1)
    for kind in ("extend", *["verify"] * MOST_WAITING):
        served.recorder.processed(lambda *_: None, None, *served.launch(kind))
    assert "no space left" in served.recorder.stopped
    assert "no space left" in json.loads((tmp_path / "recording" / "recording.json").read_text())["attached"]["stopped"]


def test_at_most_some_writes_wait() -> None:
    release, writer = threading.Event(), Writer()
    for _ in range(MOST_WAITING):
        writer.submit(release.wait, 10)
    late = threading.Thread(target=writer.submit, args=(lambda: None,))
    late.start()
    late.join(0.2)
    assert late.is_alive(), "it waits for the first write"
    release.set()
    late.join(10)
    writer.finish()
    assert not late.is_alive() and not writer.waiting


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
    found |= unread(release, {vllm_names.SPECULATIVE: (names.table,)} if names.table else {})
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

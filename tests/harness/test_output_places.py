"""Output files: links are followed, devices and pipes are written to, `-` is stdout, traces are kept.

Leaves out: the contents of the files.
"""

import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from instep.atomic_write import writable, write_atomically
from instep.trace.file import Trace, beside, read, replaceable
from instep_reference.contract.errors import BadInput
from support.inputs.traces import policy, recorded, recording
from support.running.command import Runner, complaint
from support.running.processes import start

MEMORY = ("memory", "qwen3.5-9b")  # the command that ends soonest


def device(folder: Path, minor: int) -> Path:
    """A node of our own. A link to the system's only where no fault could harm it."""
    node = folder / "node"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(1, minor))
        with node.open("wb"):
            pass
    except PermissionError:
        node.unlink(missing_ok=True)
        if os.geteuid() == 0:
            pytest.skip("root without the right to make a device node")
        node.symlink_to({3: "/dev/null", 7: "/dev/full"}[minor])
    return node


def test_a_full_device_refuses_and_stays_a_device(instep: Runner, tmp_path: Path) -> None:
    node = device(tmp_path, 7)
    assert "No space left on device" in complaint(instep(*MEMORY, "--json", node))
    assert stat.S_ISCHR(node.stat().st_mode)
    assert [entry.name for entry in tmp_path.iterdir()] == ["node"]


def test_a_device_takes_more_than_one_content(tmp_path: Path) -> None:
    node, file = device(tmp_path, 3), tmp_path / "file"
    writable(node, node)
    write_atomically({node: b"nothing", file: b"something"})
    assert stat.S_ISCHR(node.stat().st_mode) and file.read_bytes() == b"something"


def test_nothing_is_replaced_when_a_device_refuses(tmp_path: Path) -> None:
    node, file = device(tmp_path, 7), tmp_path / "file"
    file.write_bytes(b"before")
    with pytest.raises(BadInput, match="No space left"):
        write_atomically({file: b"after", node: b"x"})
    assert file.read_bytes() == b"before"


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_atomically({pipe: b"content"})
    reader.join(timeout=10)
    assert heard == [b"content"] and pipe.is_fifo()


@pytest.mark.parametrize("target_is_there", [True, False])
def test_a_link_is_followed_and_stays_a_link(tmp_path: Path, target_is_there: bool) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    target, link, middle = folder / "target", tmp_path / "link", tmp_path / "middle"
    if target_is_there:
        target.write_bytes(b"before")
        before = target.stat().st_ino
    middle.symlink_to(Path("elsewhere") / "target")
    link.symlink_to("middle")
    write_atomically({link: b"after"})
    assert link.is_symlink() and middle.is_symlink() and not target.is_symlink() and target.read_bytes() == b"after"
    assert not target_is_there or target.stat().st_ino != before, "the target is replaced in one step"
    assert [entry.name for entry in folder.iterdir()] == ["target"]


def test_circular_and_dangling_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    (tmp_path / "far").symlink_to(Path("no") / "such" / "file")
    for name, said in (("one", "symbolic links"), ("far", "no such folder")):
        for others in ((), (Path(__file__),)):  # alone, and together with an input of the command
            with pytest.raises(BadInput, match=said):
                writable(tmp_path / name, *others)


def test_two_names_of_one_file_are_refused_before_any_work(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to("file")
    for _ in range(2):  # before the file is there, and after
        with pytest.raises(BadInput, match="another file"):
            writable(link, file)
        file.touch()
    with pytest.raises(BadInput, match="another file"):
        writable(Path("-"), Path("/dev/stdout"))


def test_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    secret, new = tmp_path / "secret", tmp_path / "new"
    secret.write_bytes(b"before")
    secret.chmod(0o640)
    usual = os.umask(0o027)
    try:
        write_atomically({secret: b"after", new: b"after"})
    finally:
        os.umask(usual)
    assert stat.S_IMODE(secret.stat().st_mode) == 0o640 and stat.S_IMODE(new.stat().st_mode) == 0o640
    assert secret.read_bytes() == b"after"


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("place", ["file/pictures", "file", "taken"])
def test_unknown_picture_formats_are_refused_before_measuring(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, joins: bool
) -> None:
    kept, out = Path("fixtures/results/bench-native.json"), tmp_path / "out.json"
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "pick.svg").mkdir(parents=True)
    monkeypatch.setattr("instep_speed.bench.run.rates", None)  # any measurement raises
    words = ("--join", kept) if joins else ("--device", "cpu", "--kind", "pick")
    said = complaint(instep("bench", *words, "--plots", tmp_path / place, "--json", out))
    assert str(tmp_path / place) in said and not out.exists()


def test_failing_picture_keeps_the_table_and_the_file(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: Any, folder: Path) -> None:
        raise BadInput(str(folder), found="No space left", expected="a place that can be written")

    monkeypatch.setattr("instep_speed.commands.bench.draw", full)
    files = {name: tmp_path / name for name in ("a.json", "a.html")}
    ran = instep("bench", "--device", "cpu", "--kind", "pick", "--plots", tmp_path / "p", "--json", files["a.json"],
                 "--html", files["a.html"])  # fmt: skip
    assert "No space left" in complaint(ran) and "pick: the argmax" in ran.out
    assert all(file.stat().st_size for file in files.values())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everything")
def test_a_file_that_must_not_be_written_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"before")
    (tmp_path / "kept").chmod(0o444)
    with pytest.raises(BadInput, match="must not be written"):
        writable(tmp_path / "kept")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["-", "/dev/fd/1"])  # nothing could be put in the place of the second
def test_result_on_stdout_is_the_only_output_there(tmp_path: Path, name: str) -> None:
    done = start(*MEMORY, "--json", name, cwd=tmp_path)
    out, err = done.communicate(timeout=120)
    assert done.returncode == 0 and json.loads(out)["widest"] == 4
    assert "lazy_rerun" in err and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_engine_prints_do_not_reach_a_result_on_stdout(tmp_path: Path) -> None:
    made = recorded(tmp_path, policy(deeds=()))
    (tmp_path / "loud.py").write_text(
        "from instep_optimized.ops.plain import PLAIN\nprint('a word of the op set')\nLOUD = PLAIN\n"
    )
    done = start("replay", made.path, "--ops", "loud:LOUD", "--until", "4", "--json", "-", cwd=tmp_path)
    out, err = done.communicate(timeout=120)
    assert json.loads(out)["runs"][0]["ops"] == "loud:LOUD" and "a word of the op set" in err, err


@pytest.mark.slow
def test_a_stdout_that_is_full_is_one_line(tmp_path: Path) -> None:
    with device(tmp_path, 7).open("w") as full:
        for words in (MEMORY, (*MEMORY, "--json", "-")):
            done = start(*words, stdout=full)
            said = done.communicate(timeout=120)[1].splitlines()
            assert done.returncode == 2 and said[-1].startswith("instep: ") and "No space left" in said[-1], said
            assert "Traceback" not in "".join(said)


made = recording(policy(deeds=(), rounds=1))


def test_a_trace_replaces_a_trace_and_nothing_else(made: Trace, tmp_path: Path) -> None:
    text, tensors = made.path.read_bytes(), beside(made.path).read_bytes()
    out = tmp_path / "out.jsonl"
    for mine, theirs, found in (
        (None, None, ""), (b"", b"", ""), (text, tensors, ""), (text.splitlines(True)[0], tensors, ""),
        (text, tensors[:100], ""), (b'{"a line": "of a log"}\n', None, "out.jsonl"), (b"\xff\x00", None, "out.jsonl"),
        (None, b"weights of a model", "out.safetensors"), (b"[]\n", tensors, "out.jsonl"),
    ):  # fmt: skip
        for file, content in ((out, mine), (beside(out), theirs)):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_bytes(content)
        if found:
            with pytest.raises(BadInput, match="not of a trace") as refused:
                replaceable(out)
            assert Path(refused.value.field).name == found
        else:
            replaceable(out)


def test_record_keeps_the_weights_of_a_model_and_the_lines_of_a_log(
    instep: Runner, made: Trace, tmp_path: Path
) -> None:
    model = made.path.parent / "model"
    (tmp_path / "prompts.json").write_text('[{"name": "few", "tokens": [1, 2]}]')
    (tmp_path / "policy.json").write_bytes(msgspec.json.encode(policy(deeds=())))
    words = ("--checkpoint", model, "--prompts", tmp_path / "prompts.json", "--policy", tmp_path / "policy.json")
    weights = (model / "model.safetensors").read_bytes()
    assert "not of a trace" in complaint(instep("record", *words, "--out", model / "model.jsonl"))
    assert (model / "model.safetensors").read_bytes() == weights and not (model / "model.jsonl").exists()
    (tmp_path / "log.jsonl").write_text('{"level": "info"}\n')
    assert "not of a trace" in complaint(instep("record", *words, "--out", tmp_path / "log.jsonl"))
    said = complaint(instep("generate", model, "--prompt", "1", "--trace", tmp_path / "log.jsonl"))
    assert "not of a trace" in said
    assert (tmp_path / "log.jsonl").read_text() == '{"level": "info"}\n'
    for out in ("-", "/dev/null"):
        assert "a trace is two files" in complaint(instep("record", *words, "--out", out))
    assert read(made.path).header.name == "small"

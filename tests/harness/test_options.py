"""Options that are shared: closed lists are shown, completed by the shell, and refused before torch is loaded.

Leaves out: what the values mean (`test_setting` and the engine's own tests).
"""

import inspect
import json
import os
import subprocess
import sys
from types import NoneType
from typing import get_args

import pytest
import typer
from typer.testing import CliRunner

from instep import setting
from instep.cli import app
from instep.cli.subject_options import PANEL, named
from instep.options import CHOICES, OPTIONS, TIERS, USUAL
from instep.verdict import Tier
from instep_optimized.commit import OURS
from instep_optimized.memory_addresses import StateLayout
from instep_optimized.ops import BY_NAME
from support.running.covering import few


def test_closed_lists_match_what_the_engines_accept() -> None:
    assert CHOICES["dtype"] == tuple(setting.WIDTHS) and set(CHOICES["state_dtype"]) == set(setting.STATES)
    assert tuple(tier.value for tier in Tier) == TIERS
    assert set(CHOICES["kv_dtype"]) == set(setting.KVS) and set(CHOICES["kept_dtype"]) == set(setting.KEEPS)
    assert {*CHOICES["chunk_dtype"]} < {*setting.WIDTHS}
    assert CHOICES["layout"] == CHOICES["snapshot_layout"] == get_args(StateLayout)
    assert {*USUAL["ops"]} >= {*BY_NAME} and {*USUAL["strategy"]} == {*OURS["state"]}
    assert {*USUAL["conv"]} == {*OURS["conv"]} and {*CHOICES, *USUAL} <= {*OPTIONS}


def options() -> dict[str, dict[str, tuple[str, str | None]]]:
    """Option -> command -> the kind of its value and what `--help` calls it."""
    found: dict[str, dict[str, tuple[str, str | None]]] = {}
    for made in app.registered_commands:
        for each in inspect.signature(made.callback, eval_str=True).parameters.values():
            if each.annotation is typer.Context:
                continue
            kind, said = get_args(each.annotation)[:2]
            one = next((inner for inner in get_args(kind) if inner is not NoneType), kind)
            one = next(iter(get_args(one)), one)  # of a list
            typed = [word for word in (said.default, *(said.param_decls or ())) if str(word).startswith("--")]
            for name in typed or [f"--{each.name.replace('_', '-')}"]:
                if isinstance(said, typer.models.OptionInfo):
                    found.setdefault(name.partition("/")[0], {})[str(made.name)] = (one.__name__, said.metavar)
    return found


@pytest.mark.parametrize("name", sorted(name for name, where in options().items() if len(where) > 1))
def test_options_have_the_same_type_in_every_command(name: str) -> None:
    """A file, a flag, a number, a word. `--level` is a number of a recording and a word of streams; several may be
    repeated where one run serves several."""
    kinds = {kind for kind, _ in options()[name].values()}
    assert len(kinds) == 1 or name == "--level", (name, kinds)


def test_choices_are_in_the_help_of_every_command() -> None:
    for name, values in CHOICES.items():
        for command, (_, metavar) in options()[f"--{name.replace('_', '-')}"].items():
            assert metavar == named(values) or command == "audit", (command, name)


def test_no_metavar_is_the_name_of_its_option_in_capitals() -> None:
    """typer 0.27.0 loses such an option."""
    shown = {(name, word) for name, by in options().items() for _, word in by.values() if word}
    assert len(shown) > 5 and not [name for name, word in shown if word == name[2:].replace("-", "_").upper()]


def test_both_names_of_the_model_option_are_accepted() -> None:
    assert {*options()["--checkpoint"]} == {*options()["--model"]} > {"gate", "replay"}


REFUSED = [
    ["replay", "--dtype", "int3"], ["fuzz", "--layout", "KVV"], ["relations", "x", "--state-dtype", "float4"],
    ["streams", "x", "--kv-dtype", "bfloat16"], ["generate", "x", "--snapshot-layout", "V"],
    ["replay", "--tiers", "T9"], ["op", "plain", "gdn", "--dtype", "int8"],
]


def test_invalid_values_are_refused_before_torch_is_loaded() -> None:
    program = inspect.cleandoc("""
        import contextlib, io, json, sys
        sys.modules["torch"] = None
        from instep.cli import main
        ended = []
        for words in json.loads(sys.argv[1]):
            sys.argv = ["instep", *words]
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    main()
                except SystemExit as end:
                    ended.append([end.code, said.getvalue()])
        print(json.dumps(ended))
    """)
    done = subprocess.run([sys.executable, "-c", program, json.dumps(REFUSED)], capture_output=True, text=True,
                          check=False, env={**os.environ, "COLUMNS": "200"})  # fmt: skip
    for words, (code, said) in zip(REFUSED, json.loads(done.stdout), strict=True):
        option = next(word for word in words if word.startswith("--"))
        assert code == 2 and said.startswith(f"instep: {option}: found "), (words, said)


@few(2)
@pytest.mark.parametrize(("typed", "offered"), [
    ("instep re", {"record", "relations", "replay"}), ("instep replay --dty", {"--dtype"}),
    ("instep replay --layout ", {"VK", "KV"}), ("instep fuzz --ops pl", {"plain"}),
    ("instep op plain --state-dtype fl", {"float64", "float32", "float16", "float8_e4m3fn"}),
])  # fmt: skip
def test_a_shell_completes_commands_options_and_values(typed: str, offered: set[str]) -> None:
    words = {"_INSTEP_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    program = "import sys; sys.argv = ['instep']; from instep.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False,
                          env={**os.environ, **words})  # fmt: skip
    assert {*done.stdout.split()} == offered, done.stderr


def test_help_has_the_engine_options_in_the_last_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = CliRunner().invoke(app, ["replay", "--help"]).output
    own, engine = said.split(PANEL)
    assert "--until" in own and "--commit" in own and not any(f"{option} " in own for option in ("--ops", "--strategy"))
    assert all(f"--{name.replace('_', '-')} " in engine for name in OPTIONS) and "--until" not in engine
    lines = [line for line in engine.splitlines() if line.startswith("│")]
    assert len(lines) <= 4 * len(OPTIONS), "a table whose texts have room"

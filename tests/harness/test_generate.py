"""`instep generate`: its texts are those of the reference, and no unchecked speed is shown.

Leaves out: the speed itself.
"""

import json
import shutil
from pathlib import Path

import pytest

from instep.generate.decode import Ask, Decoded, Speed, decode, rounds
from instep.generate.tokenizer import Bytes, Numbers, prompts_from, stop_of, words_of
from instep.setting import Setting
from instep_proof.faults.catalogue.fault import Edit
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.engine import Commit, Forward
from instep_reference.contract.errors import BadInput
from support.inputs.checkpoints import write as write_checkpoint
from support.running.command import Runner, complaint
from support.running.covering import WHOLE
from support.running.golden import MEASURED, Golden
from support.running.planting import planted_here

TINY = Path("fixtures/tiny")
SHORT = ("--prompt", "Return the", "--prompt", "class Queue\n", "--prompt", "x", "--tokens", "12", "--batch", "2")


@pytest.fixture(scope="module")
def decoded() -> Decoded:
    prompts = {"a": tuple(b"Return the"), "b": tuple(b"def main(self):"), "c": tuple(b"0, 1, 2, 3")}
    return decode(Ask(
        Checkpoint.open(TINY), Setting(), prompts, 3, adaptive={"candidate_steps": [1, 3], "warmup_batches": 1,
                                                               "update_interval": 1},
        tokens=10, batch=2, chunk=6, stop=0, kept=frozenset("b"),
    ))  # fmt: skip


def test_requests_fill_free_slots_and_prompts_run_in_chunks(decoded: Decoded) -> None:
    forwards = [event for event in decoded.events if isinstance(event, Forward)]
    assert max(len(event.rows) for event in forwards) == 2
    assert max(row.tokens for event in forwards for row in event.rows) == 6
    assert {kind for event in forwards for kind in {row.kind for row in event.rows}} == {"prefill", "verify"}
    assert set(decoded.states) == {"b"} and list(decoded.ended) == ["a", "b", "c"]
    assert all(len(decoded.said(name)) == 10 for name in "abc")


def test_every_token_is_counted_once(decoded: Decoded) -> None:
    played = list(rounds(decoded))
    speed = Speed.of(decoded)
    assert sum(one.tokens for one in played) == speed.tokens == 30
    assert sum(one.seconds for one in played) <= speed.seconds and speed.overall == speed.tokens / speed.seconds
    commits = [event for event in decoded.events if isinstance(event, Commit)]
    accepted = [len(path.nodes) for event in commits for path in event.accepted]
    assert speed.accepted == pytest.approx(sum(accepted) / len(accepted))
    assert sum(speed.steps.values()) == len(commits)


def test_a_text_ends_at_the_stop_token() -> None:
    prompts = prompts_from(TINY / "prompts.json", words_of(TINY, 256))
    prompt = {"codec-end": prompts["codec-end"]}
    ended = decode(Ask(Checkpoint.open(TINY), Setting(), prompt, 3, tokens=40, batch=1, stop=stop_of(TINY)))
    said = ended.said("codec-end")
    assert len(said) < 40 and said[-1] == 0 and 0 not in said[:-1]


@pytest.mark.slow
def test_command_prints_texts_and_a_checked_speed(instep: Runner, tmp_path: Path, golden: Golden) -> None:
    ran = instep("generate", TINY, *SHORT, "--json", tmp_path / "r.json", "--trace", tmp_path / "t.jsonl")
    assert ran.code == 0, ran
    golden("generate", ran.out, MEASURED)
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["speed"]["overall"] > 0 and result["elements"] > 1000 and not result["findings"]
    assert all(len(text["tokens"]) <= 12 for text in result["texts"].values())
    replayed = instep("replay", tmp_path / "t.jsonl", "--ops", "plain", "--until", "4")
    assert replayed.code == 0, replayed


def test_generate_decodes_with_the_bundled_model_by_default(
    instep: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = instep("generate", "--prompt", "x", "--tokens", 2, "--unchecked")
    assert ran.code == 0 and '"prompt 1" 1 + 2 tokens' in ran.out, ran


@pytest.mark.parametrize("words", [
    ("generate", "--prompt", "x", "--tokens"), ("relations", "fixtures/traces/adaptive.jsonl", "--tokens"),
    ("generate", "--prompt", "x", "--num-steps"),
])  # fmt: skip
def test_more_tokens_than_any_model_has_positions_are_refused(instep: Runner, words: tuple[str, ...]) -> None:
    ran = instep(*words, 10**11)
    assert ran.code == 2 and "1048576" in ran.err and "Traceback" not in ran.err, ran


@WHOLE
def test_sampled_tokens_are_checked_with_their_uniforms(instep: Runner, tmp_path: Path) -> None:
    """An engine that takes another temperature, or draws a rejected draft again, is found; a right one is not."""
    told = ("generate", TINY, *SHORT[:4], "--tokens", 4, "--temperature", "0.9", "--top-k", "20")
    files = [tmp_path / f"{name}.json" for name in ("one", "again", "other")]
    for file, seed in zip(files, (1, 1, 2), strict=True):
        checked = ("--unchecked",) if file != files[0] else ("--trace", tmp_path / "t.jsonl")
        ran = instep(*told, "--seed", seed, "--json", file, *checked)
        assert ran.code == 0 and "drawn             temperature 0.9, top_k 20, seed" in ran.out, ran
    one, again, other = (json.loads(file.read_text()) for file in files)
    assert one["texts"] == again["texts"] != other["texts"] and one["elements"] > 1000
    assert 0 < one["accepted"] < 3 and one["sampling"] == {"temperature": 0.9, "top_k": 20, "seed": 1}
    assert instep("replay", tmp_path / "t.jsonl", "--ops", "ledger").code == 0
    for slip in (("torch.where(heat > 0, heat, 1)", "torch.where(heat > 0, 2 * heat, 1)"),
                 ("rest.scatter(1, token, 0.0)", "rest.scatter(1, token, 9.0)")):
        with planted_here(Edit("instep_optimized/ops/plain/top_k_top_p_sampling.py", *slip)):
            ran = instep(*told, "--seed", 1)
        assert ran.code == 1 and "the truth's" in ran.out and "tokens/s" not in ran.out, ran.out


@pytest.mark.parametrize(("words", "says"), [
    (("--top-k", "3"), "--temperature: found 0.0, expected one above 0 with --top-k"),
    (("--temperature", "0.00001"), "--temperature: found 1e-05, expected 0, or 0.001 to 1000.0"),
    (("--temperature", "1", "--top-p", "1.5"), "--top-p: found 1.5, expected at least 1.17"),
    (("--temperature", "1", "--top-p", "1e-46"), "--top-p: found 1e-46, expected at least 1.1754943508222875e-38, and"),
])  # fmt: skip
def test_impossible_sampling_is_refused_in_one_line(instep: Runner, words: tuple[str, ...], says: str) -> None:
    assert says in complaint(instep("generate", TINY, *SHORT, *words))


@pytest.mark.slow
@pytest.mark.parametrize(("ops", "strategy"), [("unmoved", "snapshot"), ("swapped", "rerun"), ("louder", "columns")])
def test_wrong_text_has_no_speed(instep: Runner, tmp_path: Path, ops: str, strategy: str) -> None:
    module = "subjects" if ops == "louder" else "ops"
    ran = instep("generate", TINY, *SHORT[:2], "--tokens", "6", "--ops", f"support.wrong.{module}:{ops.upper()}",
                 "--strategy", strategy, "--json", tmp_path / "r.json")  # fmt: skip
    assert ran.code == 1 and "DIVERGED" in ran.out and "tokens/s" not in ran.out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["speed"] is None and result["findings"] and result["exit"] == 1


def test_unchecked_has_none_either(instep: Runner, tmp_path: Path, golden: Golden) -> None:
    ran = instep("generate", TINY, "--prompt", "x", "--tokens", "3", "--unchecked", "--json", tmp_path / "r.json")
    assert ran.code == 0, ran
    golden("generate-unchecked", ran.out)
    assert json.loads((tmp_path / "r.json").read_text())["speed"] is None


@pytest.mark.slow
def test_text_does_not_depend_on_strategy_or_drafts(instep: Runner, tmp_path: Path) -> None:
    texts = []
    strategies = (("--strategy", strategy, "--conv", "widened") for strategy in ("columns", "lazy_rerun"))
    for number, words in enumerate((("--num-steps", "0"), *strategies)):
        ran = instep("generate", TINY, *SHORT, *words, "--tokens", "8", "--unchecked",
                     "--json", tmp_path / f"{number}.json")  # fmt: skip
        assert ran.code == 0, ran
        texts.append(json.loads((tmp_path / f"{number}.json").read_text())["texts"])
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_without_a_draft_head_and_without_bytes(instep: Runner, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", mtp_num_hidden_layers=0, eos_token_id=[5, 6])
    ran = instep("generate", model, "--prompt", "1 2, 3", "--tokens", "6")
    assert ran.code == 0 and "1 2 3|" in ran.out and "0: " in ran.out
    assert "no draft head" in complaint(instep("generate", model, "--prompt", "1", "--num-steps", "2"))
    assert "prompts.json in the model's folder" in complaint(instep("generate", model))
    assert "token numbers" in complaint(instep("generate", model, "--prompt", "Hello"))
    assert "0 to 63" in complaint(instep("generate", model, "--prompt", "64"))
    assert stop_of(model) == 5


@pytest.mark.parametrize(("text", "said"), [
    ('[{"name": "a", "text": "1"}, {"name": "a", "text": "2"}]', "again"),
    ('[{"name": "a"}]', "neither"),
    ("{}", "expected `array`"),
])  # fmt: skip
def test_prompt_files_are_read_strictly_with_every_tokenizer(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.json").write_text(text)
    for words in (Numbers(), Bytes()):
        with pytest.raises(BadInput, match=said):
            prompts_from(tmp_path / "p.json", words)


def test_a_folder_in_the_place_of_a_file_is_refused(instep: Runner, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    for name, expected in (("model.safetensors", "found a folder, expected a whole safetensors file"),
                           ("tokenizer.json", "expected a tokenizer.json")):  # fmt: skip
        (tmp_path / name).mkdir()
        assert expected in complaint(instep("generate", tmp_path, *SHORT))
        (tmp_path / name).rmdir()
        (tmp_path / name).symlink_to((TINY / name).resolve())


def test_tokenizer_is_read_if_its_package_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None, "decoder": None, "truncation": None, "padding": None,
        "model": {"type": "WordLevel", "vocab": {"one": 0, "two": 1, "?": 2}, "unk_token": "?"},
    }))
    words = words_of(tmp_path, 64)
    assert words.encode("two one three") == (1, 0, 2) and words.decode((0, 1)) == "one two"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer\.json"):
        words_of(tmp_path, 64)
    assert Numbers().encode("3 4") == (3, 4)

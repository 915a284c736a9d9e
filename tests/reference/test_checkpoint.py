"""Reading a model directory: verified tensors, or one line that names the tensor; and unpacked weights.

Leaves out: computing with them (`test_oracle.py`).
"""

import json
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from instep_reference.contract import checkpoint as checkpoint_module
from instep_reference.contract.checkpoint import Checkpoint
from instep_reference.contract.errors import BadInput
from instep_reference.weights import Weights
from support.inputs.checkpoints import Kind, write

Tensors = dict[str, torch.Tensor]
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file(tensors, directory / FILE)


def shard(directory: Path) -> Path:
    """Split the same tensors into two files and an index."""
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    names = sorted(tensors)
    halves = {FIRST: names[::2], SECOND: names[1::2]}
    for file, held in halves.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    weight_map = {name: file for file, held in halves.items() for name in held}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


@pytest.mark.parametrize("kind", ["dense", "next", "moe"])
def test_tensors_come_as_stored(tmp_path: Path, kind: Kind) -> None:
    write(tmp_path, kind, dtype=torch.bfloat16)
    checkpoint = Checkpoint.open(tmp_path)
    stored = load_file(tmp_path / FILE)
    assert set(checkpoint.tensors) == set(stored)
    assert all(torch.equal(checkpoint.tensors[name], stored[name]) for name in stored)
    assert checkpoint.tensors["model.layers.0.linear_attn.A_log"].dtype == torch.float32
    assert checkpoint.tensors["model.layers.0.linear_attn.conv1d.weight"].dtype == torch.bfloat16


def test_the_digest_changes_with_any_byte(tmp_path: Path) -> None:
    digest = Checkpoint.open(write(tmp_path)).digest
    assert Checkpoint.open(write(tmp_path)).digest == digest
    assert Checkpoint.open(write(tmp_path, seed=1)).digest != digest
    assert Checkpoint.open(write(tmp_path, rms_norm_eps=1e-5)).digest != digest


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    whole = Checkpoint.open(write(tmp_path))
    shard(tmp_path)
    parts = Checkpoint.open(tmp_path)
    assert set(parts.tensors) == set(whole.tensors)
    assert all(torch.equal(parts.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_multimodal_names_are_mapped_and_visual_weights_skipped(tmp_path: Path) -> None:
    plain = Checkpoint.open(write(tmp_path))

    def rename(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.weight"] = torch.zeros(3)

    rewrite(tmp_path, rename)
    assert set(Checkpoint.open(tmp_path).tensors) == set(plain.tensors)


def test_fused_and_single_experts_are_the_same_weights(tmp_path: Path) -> None:
    write(tmp_path, "moe", fused=True)
    fused = Weights.of(Checkpoint.open(tmp_path))

    def split(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
            at = name.removesuffix(".gate_up_proj")
            gate, up = tensors.pop(name).chunk(2, dim=1)
            down = tensors.pop(f"{at}.down_proj")
            for expert in range(len(down)):
                tensors[f"{at}.{expert}.gate_proj.weight"] = gate[expert].clone()
                tensors[f"{at}.{expert}.up_proj.weight"] = up[expert].clone()
                tensors[f"{at}.{expert}.down_proj.weight"] = down[expert].clone()

    rewrite(tmp_path, split)
    single = Weights.of(Checkpoint.open(tmp_path))
    for one, other in zip(fused.layers, single.layers, strict=True):
        for a, b in zip(one.mlp.experts, other.mlp.experts, strict=True):
            assert torch.equal(a.gate, b.gate) and torch.equal(a.up, b.up) and torch.equal(a.down, b.down)


def test_packed_projections_are_unpacked_per_key_head(tmp_path: Path) -> None:
    write(tmp_path, "next")
    H, HV, K, V, D = 2, 4, 8, 16, 32
    name = "model.layers.0.linear_attn.in_proj_qkvz.weight"
    # every row has a code: 1000 * (q 0, k 1, v 2, z 3) + row of the unpacked matrix
    q, k = (1000 * part + torch.arange(H * K).view(H, K) for part in (0, 1))
    v, z = (1000 * part + torch.arange(HV * V).view(H, -1) for part in (2, 3))
    packed = torch.cat([q, k, v, z], dim=1).flatten().float()
    rewrite(tmp_path, lambda tensors: tensors.update({name: packed[:, None].repeat(1, D)}))
    mixer = Weights.of(Checkpoint.open(tmp_path)).layers[0].mixer
    rows = torch.cat([q.flatten(), k.flatten(), v.flatten()]).double()
    assert torch.equal(mixer.qkv[:, 0], rows)
    assert torch.equal(mixer.z[:, 0], z.flatten().double())


def unstated(directory: Path, count: int) -> Path:
    """A model with this many MTP layers, of which the config says nothing."""
    config = json.loads((write(directory, "next", mtp_num_hidden_layers=count) / "config.json").read_text())
    del config["mtp_num_hidden_layers"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_mtp_layers_are_counted_when_the_file_does_not_state_them(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(unstated(tmp_path, 2))
    assert checkpoint.config.mtp_layers == 2
    draft = Weights.of(checkpoint).draft
    assert draft is not None and len(draft.layers) == 2


def test_a_model_without_a_draft_head_has_none(tmp_path: Path) -> None:
    assert Weights.of(Checkpoint.open(write(tmp_path, mtp_num_hidden_layers=0))).draft is None


def test_tied_weights_are_one_tensor(tmp_path: Path) -> None:
    weights = Weights.of(Checkpoint.open(write(tmp_path, tie_word_embeddings=True)))
    assert weights.head is weights.embedding


def test_every_file_is_opened_once_to_verify_and_once_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header names every tensor of its file: reading it once per tensor is quadratic, and hours for 512 experts."""
    opened: list[str] = []

    def counting(file: Path, framework: str) -> object:
        opened.append(file.name)
        return safe_open(file, framework=framework)

    shard(write(tmp_path, "moe", fused=False))
    monkeypatch.setattr(checkpoint_module, "safe_open", counting)
    Checkpoint.open(tmp_path)
    assert sorted(opened) == sorted(2 * [file.name for file in tmp_path.glob("*.safetensors")])


def test_missing_draft_layer_number_is_a_missing_layer(tmp_path: Path) -> None:
    unstated(tmp_path, 1)

    def renumber(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
            tensors[name.replace("mtp.layers.0.", "mtp.layers.999999999999.")] = tensors.pop(name)

    rewrite(tmp_path, renumber)
    with pytest.raises(BadInput, match=r"mtp\.layers\.0\..*found nothing"):
        Checkpoint.open(tmp_path)


NORM = "model.layers.1.input_layernorm.weight"
BREAKAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda t: t.pop(NORM), rf"{NORM}: found nothing, expected shape \[32\]"),
    "missing head": (lambda t: t.pop("mtp.fc.weight"), r"mtp\.fc\.weight.*mtp_num_hidden_layers"),
    "superfluous": (lambda t: t.update({"model.extra": torch.zeros(3)}), r"model\.extra: found shape \[3\]"),
    "mis-shaped": (lambda t: t.update({NORM: torch.zeros(31)}), rf"{NORM}: found shape \[31\], expected shape \[32\]"),
    "NaN": (lambda t: t[NORM].fill_(float("nan")), rf"{NORM}: found NaN"),
    "infinite": (lambda t: t[NORM][:1].fill_(float("inf")), rf"{NORM}: found NaN or inf"),
    "whole numbers": (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int32)}), rf"{NORM}: found torch.int32"),
    "bytes": (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.int8)}), rf"{NORM}: found torch.int8"),
    "fp8": (lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}), rf"{NORM}: found torch.float8"),
    "twice": (lambda t: t.update({"model.language_model.norm.weight": torch.zeros(32)}), r"model\.norm\.weight"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_tensor_is_named(tmp_path: Path, breakage: str) -> None:
    change, message = BREAKAGES[breakage]
    write(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(BadInput, match=message):
        Checkpoint.open(tmp_path)


def put(content: bytes) -> Callable[[Path], object]:
    return lambda directory: (directory / FILE).write_bytes(content)


def index_alone(text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / FILE).rename(directory / INDEX).write_text(text)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut to nothing": (put(b""), "safetensors"),
    "cut in its header": (lambda of: put((of / FILE).read_bytes()[:7])(of), "safetensors"),
    "cut in its names": (lambda of: put((of / FILE).read_bytes()[:100])(of), "safetensors"),
    "without its last byte": (lambda of: put((of / FILE).read_bytes()[:-1])(of), "safetensors"),
    "header larger than any file": (put(struct.pack("<Q", 1 << 40) + b"{}"), "whole safetensors"),
    "header nested too deep": (put(struct.pack("<Q", 500_000) + b'{"a":' * 100_000), "whole safetensors"),
    "a pickle inside": (put(pickle.dumps({"a": 1})), "safetensors"),
    "a pickle": (lambda of: (of / FILE).rename(of / "pytorch_model.bin"), r"a pickle \(pytorch_model\.bin\)"),
    "a folder": (lambda of: [change() for change in ((of / FILE).unlink, (of / FILE).mkdir)], "safetensors"),
    "nothing": (lambda of: (of / FILE).unlink(), "found neither"),
    # Other readers take one or the other, so it would be unclear which model was compared.
    "an index, too": (lambda of: (of / INDEX).write_text(json.dumps({"weight_map": {NORM: FILE}})), "both"),
    "no second shard": (lambda of: (shard(of) / SECOND).unlink(), rf"{SECOND}: found no such file"),
    "index of nothing": (index_alone('{"weight_map": {}}'), "index.json: weight_map"),
    "index that leads out": (index_alone('{"weight_map": {"a": "../b.safetensors"}}'), "index.json: weight_map"),
    "index that is no object": (index_alone("[]"), r"index\.json"),
    "index of a number": (index_alone('{"weight_map": {"a": 3}}'), "index.json: weight_map"),
    "index of no file": (index_alone('{"weight_map": {"a": "gone.safetensors"}}'), "no such file"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_bad_files_are_refused(tmp_path: Path, kind: str) -> None:
    change, message = BAD_FILES[kind]
    change(write(tmp_path))
    with pytest.raises(BadInput, match=message):
        Checkpoint.open(tmp_path)


def test_missing_directory_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(BadInput, match=r"config\.json"):
        Checkpoint.open(tmp_path)


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    shard(write(tmp_path))
    first, second = sorted(tmp_path.glob("*.safetensors"))
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: load_file(first)[name]}, second)
    with pytest.raises(BadInput, match="twice"):
        Checkpoint.open(tmp_path)

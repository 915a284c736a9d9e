"""Configurations in the shape of real models, by name. Each shape is a file in this folder.

Leaves out: weights (`random_weights.py` draws them), and the sources of the numbers (`README.md`).
"""

from dataclasses import replace
from pathlib import Path

from instep_reference.contract.config import ModelConfig
from instep_reference.contract.errors import BadInput

FOLDER = Path(__file__).resolve().parent
NAMES = tuple(path.stem for path in sorted(FOLDER.glob("*.json")))


def shape(name: str, *, layers: int | None = None, vocab: int | None = None) -> ModelConfig:
    """The configuration of that name, whole or cut (see `cut`) so that it fits into less memory."""
    if name not in NAMES:
        raise BadInput("shape", found=name, expected=f"one of {', '.join(NAMES)}")
    return cut(ModelConfig.from_file(FOLDER / f"{name}.json"), layers=layers, vocab=vocab)


def cut(config: ModelConfig, *, layers: int | None = None, vocab: int | None = None) -> ModelConfig:
    """The same model with its first `layers` layers and the first `vocab` tokens."""
    for name, asked, most in (("layers", layers, len(config.layers)), ("vocab", vocab, config.vocab)):
        if asked is not None and not 1 <= asked <= most:
            raise BadInput(name, found=asked, expected=f"1 to {most}")
    return replace(config, layers=config.layers[:layers], vocab=vocab or config.vocab)


def sized_like(where: str) -> ModelConfig:
    """The configuration that is named by a shape, a checkpoint directory or a `config.json`."""
    if where in NAMES:
        return shape(where)
    path = Path(where)
    if not path.exists():
        expected = f"a checkpoint directory, a config.json, or {', '.join(NAMES)}"
        raise BadInput(where, found="no such file or shape", expected=expected)
    return ModelConfig.from_file(path / "config.json" if path.is_dir() else path)

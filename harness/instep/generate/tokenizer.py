"""Text to tokens and back: bytes, a `tokenizer.json` where the optional package `tokenizers` is here, or bare numbers.

Leaves out: chat templates.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from instep_reference.contract.config import read_json
from instep_reference.contract.errors import BadInput

from ..run.trace_history import BYTES
from ..trace.policy import read_prompts


class Words(Protocol):
    """How a model spells."""

    def encode(self, text: str) -> tuple[int, ...]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """A vocabulary of 256 is bytes."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


class Numbers:
    """Without a tokenizer tokens are written as numbers."""

    def encode(self, text: str) -> tuple[int, ...]:
        parts = text.replace(",", " ").split()
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise BadInput(
                "prompt", found=f"{text[:30]!r}", expected="token numbers, as 12 7 99",
                hint="the checkpoint has no tokenizer.json, or the package tokenizers is not installed",
            )
        return tuple(map(int, parts))

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))


class Tokenizer:
    """A `tokenizer.json` of the Hugging Face kind."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Read

        try:
            self._read: Any = Read.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise BadInput(str(path), found=error, expected="a tokenizer.json") from None

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._read.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._read.decode(list(tokens), skip_special_tokens=False))


def words_of(directory: Path, vocab: int) -> Words:
    """How the model in this directory spells."""
    file = directory / "tokenizer.json"
    if file.exists() and importlib.util.find_spec("tokenizers") is not None:
        return Tokenizer(file)
    return Bytes() if vocab == BYTES else Numbers()


def stop_of(directory: Path) -> int | None:
    """The token that ends a text, as `config.json` has it; the first one where there are several."""
    data = read_json(directory / "config.json")
    text = data.get("text_config", data)
    stated = text.get("eos_token_id", data.get("eos_token_id"))
    first = stated[0] if isinstance(stated, list) and stated else stated
    return first if isinstance(first, int) else None


def prompts_from(path: Path, words: Words) -> dict[str, tuple[int, ...]]:
    """A file of prompts. Texts for bytes are one character per byte, as everywhere; for a tokenizer they are text."""
    return read_prompts(path) if isinstance(words, Bytes) else read_prompts(path, words.encode)

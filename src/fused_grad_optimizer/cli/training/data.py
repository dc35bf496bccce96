"""Text -> tokens -> batches. A batch depends on (seed, step, micro-step) alone: a resumed run needs nothing saved."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fused_grad_optimizer.cli.training.config import UsageError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
BYTES = 256


@dataclass(frozen=True)
class Tokens:
    """A text as one row of token ids.

    Attributes:
        ids: 1-d integer tensor on the CPU.
        vocabulary: every id is below this.
        name: what made them: "bytes", or the tokenizer's folder.
        sha256: of the text, to notice that a file changed between a run and its resumption.
    """

    ids: torch.Tensor
    vocabulary: int
    name: str
    sha256: str


def built_in_text() -> str:
    """The English text that comes with CPython: the topics of its `help()`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_documents(path: Path) -> Iterator[str]:
    """The documents of a text file (one) or of a .jsonl file (one a line)."""
    if path.is_dir():
        raise UsageError(f"--data {path} is a folder; give a text file or a .jsonl file")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--data {path} is not text in UTF-8 (byte {error.start}); give a text or .jsonl file"
        ) from None
    except OSError as error:
        raise UsageError(f"--data {path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise UsageError(f"--data {path} is a binary file; give a text or .jsonl file")
    if not text.strip():
        raise UsageError(f"--data {path} is empty")
    if path.suffix.lower() != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _document(path, number, line)


def _document(path: Path, number: int, line: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"--data {path}, line {number}: not JSON ({error.msg})") from None
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        raise UsageError(f"--data {path}, line {number}: needs an object with a 'text' field that is a string")
    return row["text"]


def load_tokens(data: str | None, tokenizer: Any | None) -> Tokens:
    """All tokens of --data (or of the built-in text), by a Hugging Face tokenizer or as bytes."""
    documents = [built_in_text()] if data is None else list(read_documents(Path(data)))
    sha256 = hashlib.sha256("\x1e".join(documents).encode()).hexdigest()
    if tokenizer is None:
        raw = bytearray("\n\n".join(documents).encode())
        return Tokens(torch.frombuffer(raw, dtype=torch.uint8), BYTES, "bytes", sha256)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document, add_special_tokens=False)["input_ids"] + end
    vocabulary = max(ids, default=0) + 1
    return Tokens(torch.tensor(ids, dtype=torch.int32), vocabulary, tokenizer.name_or_path, sha256)


def load_tokenizer(model: str | None) -> Any | None:
    """The tokenizer in the model's folder, or None: bytes."""
    if model is None:
        return None
    folder = Path(model) if Path(model).is_dir() else Path(model).parent
    if not any((folder / name).exists() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(f"--model {model}: the tokenizer in {folder} cannot be loaded: {error}") from error
    tokenizer.model_max_length = 10**12  # the text is cut into sequences afterwards
    return tokenizer


def check_length(tokens: Tokens, data: str | None, seq: int) -> None:
    if len(tokens.ids) < seq:
        raise UsageError(
            f"--data {data or '(built in)'} has {len(tokens.ids)} tokens, fewer than one sequence; "
            f"give a longer file or a shorter --seq (now {seq})"
        )


def batch_at(tokens: Tokens, *, seed: int, step: int, micro: int, batch: int, seq: int) -> torch.Tensor:
    """`[batch, seq]` int64 token ids: windows at random places, the same for the same (seed, step, micro)."""
    digest = hashlib.sha256(f"{seed}/{step}/{micro}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    starts = torch.randint(0, len(tokens.ids) - seq + 1, (batch, 1), generator=generator)
    return tokens.ids[starts + torch.arange(seq)].to(torch.int64)

"""``mtp-plugin draft-vocab``: the token ids that are most frequent in a user's own text."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mtp_plugin.config.bounded import read_bounded
from mtp_plugin.errors import CheckpointError, ConfigError, RequestError, describe_error
from mtp_plugin.requests.tokenizer import is_failure, named_failures
from mtp_plugin.tools.terminal.console import OutputConsole, progress_bar
from mtp_plugin.tools.texts import read_texts

TOKENIZER_FILE = "tokenizer.json"
TEXTS_PER_CALL = 256
HELD_OUT = 10
"""Of so many texts, one is held out of the counts."""


@dataclass(frozen=True)
class DraftVocab:
    """A list of ids, and the shares of held-out tokens that it and the lowest ids cover."""

    ids: list[int]
    num_filled: int
    """Ids of the list that are neither special nor in the counted text, but the lowest ones."""
    num_tokens: int
    num_held_out: int
    covered: float
    covered_by_lowest: float

    def show(self, out: OutputConsole) -> None:
        """Print the shares and what the list consists of."""
        size = len(self.ids)
        out.write_line(
            f"{self.num_tokens:,} tokens counted, {self.num_held_out:,} held out; of these are "
            "covered:"
        )
        out.write_line(f"  {self.covered:7.2%} by the {size:,} ids of the list")
        out.write_line(f"  {self.covered_by_lowest:7.2%} by the {size:,} lowest ids")
        if self.num_filled:
            out.write_line(
                f"the text has fewer ids: {self.num_filled:,} of the list are the lowest other ones"
            )


def count_draft_vocab(
    tokenizer_folder: Path,
    files: Sequence[Path],
    size: int,
    on_progress: Callable[[str], None],
) -> DraftVocab:
    """Count the token ids of texts, and select the most frequent ones.

    Added tokens of the tokenizer and end-of-sequence ids are always selected. If the text has too
    few ids, the list is filled with the lowest ones.

    Raises:
        CheckpointError: the folder has no tokenizer that can be read.
        ConfigError: the size does not fit the tokenizer.
        RequestError: a file cannot be read, or the text is too short.
    """
    tokenizer = _read_tokenizer(tokenizer_folder)
    vocab_size = 1 + max(tokenizer.get_vocab().values(), default=-1)
    special = {*tokenizer.get_added_tokens_decoder(), *_stop_ids(tokenizer_folder)}
    if not len(special) <= size <= vocab_size:
        raise ConfigError(
            f"--size: expected {len(special)} (special tokens) to {vocab_size} (vocabulary), "
            f"got {size}"
        )
    counts: tuple[Counter[int], Counter[int]] = (Counter(), Counter())
    for number, ids in enumerate(_encoded(tokenizer, _texts(files, on_progress))):
        counts[number % HELD_OUT == HELD_OUT - 1].update(ids)
    counted, held_out = counts
    if not held_out:
        raise RequestError(
            f"expected at least {HELD_OUT} records or blocks of text, one of which is held out, "
            "got fewer; give more text"
        )
    ids = select_ids(counted, special, size)
    return DraftVocab(
        ids,
        sum(token not in counted and token not in special for token in ids),
        counted.total(),
        held_out.total(),
        _share(held_out, ids),
        _share(held_out, range(size)),
    )


def select_ids(counts: Counter[int], always: set[int], size: int) -> list[int]:
    """Return ``always``, then the most frequent ids, then the lowest ones: ``size`` ids, ascending.

    Of equally frequent ids the lowest come first.
    """
    by_count = sorted(counts, key=lambda token: (-counts[token], token))
    candidates = dict.fromkeys([*sorted(always), *by_count, *range(size)])
    return sorted(islice(candidates, size))


def is_token_map(file: Path) -> bool:
    """Whether a file of this name is for SGLang's ``--speculative-token-map``."""
    return file.suffix == ".pt"


def write_ids(ids: list[int], file: Path) -> None:
    """Write the JSON list that ``draft_vocab`` reads, or the token map of SGLang.

    A file of that name is replaced at the end.

    Raises:
        ConfigError: it cannot be written; a file of that name is unchanged.
    """
    data = _torch_file(ids) if is_token_map(file) else f"{json.dumps(ids)}\n".encode()
    target = Path(os.path.realpath(file))
    partial = target.with_name(f".mtp-plugin-{os.getpid()}.partial")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe
            target.write_bytes(data)
            return
        with open(partial, "wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None


def _torch_file(ids: list[int]) -> bytes:
    import torch  # takes seconds

    file = BytesIO()
    torch.save(ids, file)
    return file.getvalue()


def _share(counts: Counter[int], ids: Iterable[int]) -> float:
    return sum(counts[token] for token in ids) / counts.total()


def _texts(files: Sequence[Path], on_progress: Callable[[str], None]) -> Iterator[str]:
    total = sum(os.path.getsize(file) for file in files if os.path.isfile(file))
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes

    for file in files:
        for text in read_texts(file, count):
            if text:
                yield text
                on_progress(f"{progress_bar(done / max(total, done))} counting {file.name}")


def _encoded(tokenizer: Any, texts: Iterator[str]) -> Iterator[list[int]]:
    while batch := list(islice(texts, TEXTS_PER_CALL)):
        with named_failures(tokenizer, lambda: "cannot encode a text"):
            encoded = tokenizer.encode_batch(batch, add_special_tokens=False)
        yield from (each.ids for each in encoded)


def _read_tokenizer(folder: Path) -> Any:
    file = folder / TOKENIZER_FILE
    if not os.path.isfile(file):  # False, too, without permission
        raise CheckpointError(f"--tokenizer {folder}: expected a folder with {TOKENIZER_FILE}")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except BaseException as error:
        if not is_failure(error):
            raise
        raise CheckpointError(f"{file}: it cannot be loaded: {describe_error(error)}") from error
    # a file may have both: text would be left out, and padding counted
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _stop_ids(folder: Path) -> set[int]:
    """Return the end-of-sequence ids of the checkpoint, if the folder is one."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            given = json.loads(read_bounded(folder / name))["eos_token_id"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            continue
        ids = given if isinstance(given, list) else [given]
        found.update(token for token in ids if type(token) is int and token >= 0)
    return found

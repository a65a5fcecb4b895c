"""Which ids may be drafted: read from an option, and every mistake named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtp_plugin.config.draft_vocab import add_draft_ids, resolve_draft_vocab
from mtp_plugin.errors import ConfigError


@pytest.fixture
def listed(tmp_path: Path) -> Any:
    """Writes a file and gives its path."""

    def write(content: str) -> str:
        path = tmp_path / "ids.json"
        path.write_text(content, encoding="utf-8")
        return str(path)

    return write


def test_default_is_the_whole_vocabulary() -> None:
    assert resolve_draft_vocab(None) is None
    assert resolve_draft_vocab(None, 9) is None


@pytest.mark.parametrize("vocab_size", [None, 4, 9])
def test_a_count_is_of_the_lowest_ids(vocab_size: int | None) -> None:
    assert list(resolve_draft_vocab(4, vocab_size) or ()) == [0, 1, 2, 3]


@given(ids=st.sets(st.integers(0, 40), min_size=1), seed=st.randoms(use_true_random=False))
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_kept_ascending(listed: Any, ids: set[int], seed: Any) -> None:
    """In whatever order; an id at or past the vocabulary is refused once that is known."""
    shuffled = list(ids)
    seed.shuffle(shuffled)
    path = listed(json.dumps(shuffled))
    assert resolve_draft_vocab(path) == resolve_draft_vocab(path, 41) == sorted(ids)
    assert resolve_draft_vocab(path, max(ids) + 1) == sorted(ids)
    with pytest.raises(ConfigError, match=rf"of the vocabulary of {max(ids)}, got {max(ids)}$"):
        resolve_draft_vocab(path, max(ids))


def test_a_byte_order_mark_is_no_part_of_the_list(listed: Any) -> None:
    assert resolve_draft_vocab(listed("\ufeff[3, 1]")) == [1, 3]


def save_npy(path: Path, values: Any) -> None:
    with path.open("wb") as file:
        np.save(file, values)


class Unsafe:
    def __reduce__(self) -> Any:
        return os.mkdir, ("unsafe",)


@pytest.mark.parametrize("save", [save_npy, lambda path, values: torch.save(values, path)])
def test_files_of_numpy_and_torch_are_read_without_pickled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
) -> None:
    """Their names do not matter."""
    monkeypatch.chdir(tmp_path)
    path, make = tmp_path / "ids", np.array if save is save_npy else torch.tensor
    for values in (make([7, 2, 4]), [4, 7, 2]):
        save(path, values)
        assert resolve_draft_vocab(str(path), 9) == [2, 4, 7]
    for values, message in (
        (make([1.0, 2.0]), r"expected integers, got (torch\.)?float"),
        (make([True]), r"expected integers, got (torch\.)?bool"),
        (make([[1]]), r"expected one dimension of at most 16777216 ids, got the shape \(1, 1\)"),
        (make([-1, 2]), "expected integers of at least 0, got -1"),
        (make([9]), "expected ids of the vocabulary of 9, got 9"),
        (np.array([Unsafe()]) if save is save_npy else Unsafe(), "cannot be loaded: "),
    ):
        save(path, values)
        with pytest.raises(ConfigError, match=rf"^mtp\.draft_vocab: {path}: {message}"):
            resolve_draft_vocab(str(path), 9)
    assert not Path("unsafe").exists()
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ConfigError, match="cannot be loaded: "):
        resolve_draft_vocab(str(path))


def test_lines_are_ids_and_ranges(listed: Any) -> None:
    assert resolve_draft_vocab(listed("7\n\n 0-3 \r\n5\n")) == [0, 1, 2, 3, 5, 7]


@pytest.mark.parametrize("ids", [range(4), [0, 2, 3]])
def test_added_ids_are_sorted_in_and_known_ones_change_nothing(ids: Any) -> None:
    assert add_draft_ids(ids, (3, 0, 9, -1), 9) is ids
    assert add_draft_ids(ids, (8, 3, 5), 9) == [*ids, 5, 8]

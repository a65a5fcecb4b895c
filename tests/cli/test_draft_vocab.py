"""``mtp-plugin draft-vocab``: counted ids, held-out shares, and wrong input."""

from __future__ import annotations

import json
import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from mtp_plugin.config.draft_vocab import resolve_draft_vocab
from mtp_plugin.errors import ConfigError, RequestError
from mtp_plugin.tools.draft_vocab import select_ids, write_ids
from mtp_plugin.tools.texts import BLOCK_BYTES, read_conversations, read_texts
from tests.cli.calls import SPECIALS, VOCAB, Run, byte_tokenizer

SPECIAL_IDS = set(range(VOCAB - len(SPECIALS), VOCAB))


def ids_of(text: str) -> set[int]:
    return set(byte_tokenizer().encode(text))


def draft_vocab(run: Run, checkpoint: Path, folder: Path, *more: str) -> tuple[str, list[int]]:
    out = folder / "ids.json"
    result = run("draft-vocab", "--tokenizer", str(checkpoint), "--out", str(out), *more)
    assert result.code == 0, result.err
    return result.out, json.loads(out.read_text())


def test_list_has_counted_ids_and_special_tokens(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(
        "".join(
            json.dumps(record) + "\n"
            for _ in range(10)
            for record in (
                {"prompt": "zzyy"},
                {"text": "zx"},
                {"messages": [{"role": "user", "content": [{"type": "text", "text": "zy"}]}]},
                {"messages": [{"role": "assistant", "content": "xz"}, {"content": None}]},
            )
        )
    )
    shown, ids = draft_vocab(run, checkpoint, tmp_path, "--texts", str(file), "--size", "8")
    assert set(ids) == SPECIAL_IDS | ids_of("xyz\n")
    assert resolve_draft_vocab(str(tmp_path / "ids.json"), VOCAB) == ids
    # 36 texts are counted and 4 are held out; no such letter is among the 8 lowest ids
    assert " 100.00% by the 8 ids" in shown
    assert " 0.00% by the 8 lowest ids" in shown
    assert "fewer ids" not in shown


def test_short_list_is_filled_with_the_lowest_ids(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("zzz\n" * (6 * BLOCK_BYTES // 4))
    files = ("--texts", str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    shown, ids = draft_vocab(run, checkpoint, tmp_path, *files, "--size", "10")
    lowest = set(range(10 - len(SPECIAL_IDS) - 2))
    assert set(ids) == SPECIAL_IDS | ids_of("z\n") | lowest
    assert f"{len(lowest)} of the list are the lowest other ones" in shown
    assert f"{11 * BLOCK_BYTES:,} tokens counted, {BLOCK_BYTES:,} held out" in shown


def test_a_list_named_pt_is_a_token_map_of_sglang(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("zzz\n" * 10 * BLOCK_BYTES)
    given = ("--tokenizer", str(checkpoint), "--texts", str(tmp_path / "a.txt"), "--size", "10")
    written = []
    for name, use in (("ids.json", '"draft_vocab": "'), ("ids.pt", "--speculative-token-map ")):
        result = run("draft-vocab", *given, "--out", str(tmp_path / name))
        assert f"for {use}{tmp_path / name}" in result.out
        written.append(resolve_draft_vocab(str(tmp_path / name), VOCAB))
    assert written[0] == written[1] == torch.load(tmp_path / "ids.pt", weights_only=True)


def test_truncation_and_padding_of_the_tokenizer_change_nothing(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps("x" * n) + "\n" for n in range(1, 21)))
    given = ("--texts", str(file), "--size", "8")
    expected = draft_vocab(run, checkpoint, tmp_path, *given)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert draft_vocab(run, tmp_path, tmp_path, *given) == expected
    assert "180 tokens counted, 30 held out" in expected[0]


def test_stop_ids_of_both_configs_are_in_the_list(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"eos_token_id": 201}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [202, 203]}')
    (tmp_path / "text.txt").write_text("zzz\n" * 10 * BLOCK_BYTES)
    given = ("--texts", str(tmp_path / "text.txt"), "--size", "10")
    assert draft_vocab(run, tmp_path, tmp_path, *given)[1][-7:] == [201, 202, 203, *SPECIAL_IDS]


def test_most_frequent_ids_are_selected_and_sorted() -> None:
    assert select_ids(Counter({9: 5, 4: 1, 3: 2, 5: 1}), {7}, 4) == [3, 4, 7, 9]
    assert select_ids(Counter({9: 5}), {7}, 4) == [0, 1, 7, 9]


def test_blocks_of_a_text_file_join_to_its_text(tmp_path: Path) -> None:
    text = "a line\nzażółć gęślą jaźń " * 400 + "€" * 3 * BLOCK_BYTES
    file = tmp_path / "text.txt"
    file.write_text("\ufeff" + text, encoding="utf-8")
    sizes: list[int] = []
    blocks = list(read_texts(file, sizes.append))
    assert "".join(blocks) == text
    assert len(blocks) > 10
    assert sum(sizes) == file.stat().st_size
    assert blocks[0].endswith("\n")


def test_answers_are_no_part_of_prompts(tmp_path: Path) -> None:
    question, answer = ({"role": role, "content": role} for role in ("user", "assistant"))
    file = tmp_path / "prompts.jsonl"
    lines = [{"messages": [question, answer]}, {"prompt": "text"}, "more", "not read"]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_conversations(file, 3) == [[question], "text", "more"]
    file.write_text('"text"\n""\n')
    with pytest.raises(RequestError, match=r"line 2: the prompt is empty"):
        read_conversations(file, 3)


@pytest.mark.parametrize("messages", ['"hello"', '{"role": "user", "content": "a"}', "false"])
def test_messages_that_are_no_list_are_refused(tmp_path: Path, messages: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a", "messages": {messages}}}\n')
    with pytest.raises(RequestError, match=r'line 1: expected a text, .* as "messages"$'):
        read_conversations(file, 3)


def test_list_is_replaced_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    file, link = tmp_path / "ids.json", tmp_path / "link.json"
    link.symlink_to(file)
    write_ids([1, 2], link)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"link\.json: cannot be written: File too large"):
            write_ids(list(range(10_000)), link)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "[1, 2]\n"
    assert sorted(tmp_path.iterdir()) == [file, link]
    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        write_ids([1], Path("/dev/full"))

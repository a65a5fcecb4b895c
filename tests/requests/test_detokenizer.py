"""Incremental text: characters split over tokens, stop strings, and what a stream shows."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mtp_plugin.errors import ExecutorError
from mtp_plugin.requests import detokenizer as text_module
from mtp_plugin.requests.detokenizer import RequestText, Segment, StopSearch
from mtp_plugin.requests.tokenizer import detokenizer_of, encode, stop_token

BAD = "\ufffd"


class Pieces:
    """A tokenizer whose token i is the i-th byte string."""

    def __init__(self, pieces: Sequence[bytes | str], special: frozenset[int] = frozenset()):
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.special = special

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.special)]
        return b"".join(self.pieces[t] for t in kept).decode("utf-8", errors="replace")


def read(
    pieces: Sequence[bytes | str],
    stop: tuple[str, ...] = (),
    min_tokens: int = 0,
    runs: Sequence[int] | None = None,
    special: frozenset[int] = frozenset(),
) -> tuple[str, list[str], int, bool]:
    """(full text, what each run showed, tokens taken, stopped) of one token per piece."""
    text = RequestText(Pieces(pieces, special), stop, min_tokens)
    shown: list[str] = []
    taken = 0
    for run in runs or [1] * len(pieces):
        for _ in range(run):
            if taken == len(pieces) or text.stopped:
                break
            text.push(taken, from_draft=False)
            taken += 1
        shown.append("".join(s.text for s in text.drain(final=False)))
    shown.append("".join(s.text for s in text.drain(final=True)))
    return text.full_text, shown, taken, text.stopped


class Stop(NamedTuple):
    pieces: list[bytes | str]
    stop: tuple[str, ...]
    text: str
    taken: int
    note: str


STOPS = [
    Stop(["a", "END", "b"], ("END",), "a", 2, "one token is the stop"),
    Stop(["a", "E", "N", "D", "b"], ("END",), "a", 4, "one character per token"),
    Stop(["aE", "ND b"], ("END",), "a", 2, "the stop begins and ends inside tokens"),
    Stop(["x", "EEN", "D"], ("END",), "xE", 3, "a false start before the true one"),
    Stop(["END"], ("END",), "", 1, "nothing but the stop"),
    Stop(["a", "b"], ("END",), "ab", 2, "no stop at all"),
    Stop(["a", "EN"], ("END",), "aEN", 2, "an unfinished stop is text after all"),
    Stop(["xabc"], ("bc", "abc"), "x", 1, "one token completes two: the first start counts"),
    Stop(["xabc"], ("abc", "bc"), "x", 1, "... whatever their order"),
    Stop(["xab", "cd"], ("abcd", "b"), "xa", 1, "the one that completes first ends the text"),
    Stop(["xa", "bcd"], ("abcd", "b"), "x", 2, "both in one token: the longer starts first"),
    Stop(["a", "b", "c"], ("bc", "abcd"), "a", 3, "a longer one that never completes"),
    Stop(["a", "aa", "b"], ("aab",), "a", 3, "overlapping starts"),
    Stop(["ab", "ab", "c"], ("abc",), "ab", 3, "a repeated prefix"),
    Stop(["caf", b"\xc3", b"\xa9!", "z"], ("é",), "caf", 3, "a character split over two tokens"),
    Stop([b"\xf0\x9f", b"\x98", b"\x80", "z"], ("😀",), "", 3, "a character in three tokens"),
    Stop(["a\n\n\xe2\x82".encode("latin-1"), b"\xac"], ("\n\n",), "a", 1, "a stop next to bytes"),
    Stop(["a", b"\xe2\x82", "END"], ("END",), "a" + BAD, 3, "a broken character before the stop"),
]


@pytest.mark.parametrize("case", STOPS, ids=lambda case: case.note)
def test_stop_strings(case: Stop) -> None:
    full, shown, taken, _ = read(case.pieces, case.stop)
    assert (full, taken) == (case.text, case.taken)
    assert "".join(shown) == case.text


@pytest.mark.parametrize("case", STOPS, ids=lambda case: case.note)
@pytest.mark.parametrize("run", [2, 3, 4])
def test_stop_strings_across_accepted_runs(case: Stop, run: int) -> None:
    runs = [run] * len(case.pieces)
    full, shown, taken, _ = read(case.pieces, case.stop, runs=runs)
    assert (full, taken, "".join(shown)) == (case.text, case.taken, case.text)


@given(st.text("ab", min_size=1, max_size=6), st.lists(st.text("ab", max_size=5), max_size=8))
def test_a_search_finds_what_rereading_everything_finds(stop: str, parts: list[str]) -> None:
    search, text = StopSearch(stop), ""
    for part in parts:
        before, text = len(text), text + part
        ends = range(max(before + 1, len(stop)), len(text) + 1)
        found = [end - len(stop) for end in ends if text.startswith(stop, end - len(stop))]
        assert search.read(text, before) == (found[0] if found else None)
        lengths = range(min(len(stop) - 1, len(text)), -1, -1)
        assert search.matched == next(n for n in lengths if text.endswith(stop[:n]))


def test_a_long_stop_string_costs_a_step_no_more_than_a_short_one() -> None:
    """Its characters are looked at as often as the text has some."""

    class Counted(str):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return str.__getitem__(self, place)

    search = StopSearch("a" * 1023 + "b")
    search.stop = Counted(search.stop)
    text = "aab" * 1000
    for place in range(0, len(text), 3):
        search.read(text[: place + 3], place)
    assert Counted.reads <= 3 * len(text)


def test_possible_start_of_a_stop_is_held_back_until_it_is_none() -> None:
    _, shown, _, stopped = read(["ab<", "/", "x", "</"], stop=("</s>",))
    assert shown == ["ab", "", "</x", "", "</"]
    assert not stopped


def test_nothing_waits_without_stop_strings() -> None:
    assert read(["a<", "/s"])[1] == ["a<", "/s", ""]


def test_min_tokens_lets_an_early_stop_pass() -> None:
    pieces = ["a", "STOP", "b", "STOP", "c"]
    assert read(pieces, ("STOP",), min_tokens=2)[::2] == ("aSTOPb", 4)
    assert read(pieces, ("STOP",), min_tokens=1)[::2] == ("a", 2)
    assert read(pieces, ("STOP",), min_tokens=4)[::2] == ("aSTOPbSTOPc", 5)


def test_an_early_stop_is_not_found_later_with_a_longer_one() -> None:
    pieces = ["a", "STOP", "b", "c"]
    assert read(pieces, ("STOP", "a longer one"), min_tokens=2)[::2] == ("aSTOPbc", 4)


def test_stop_that_completes_after_min_tokens_counts_from_its_early_start() -> None:
    full, shown, taken, stopped = read(["a", "ST", "OP", "b"], ("STOP",), min_tokens=2)
    assert (full, taken, stopped) == ("a", 3, True)
    assert shown[:2] == ["a", ""]


def test_characters_appear_whole() -> None:
    full, shown, _, _ = read(["a", b"\xe2", b"\x82", b"\xacb", "c"])
    assert full == "a€bc"
    assert shown == ["a", "", "", "€b", "c", ""]


def test_text_before_an_unfinished_character_does_not_wait() -> None:
    assert read([b"ab\xe2\x82", b"\xac"])[1] == ["ab", "€", ""]


def test_end_inside_a_character_is_shown_as_broken() -> None:
    full, shown, _, _ = read(["a", b"\xe2\x82"])
    assert full == "a" + BAD
    assert "".join(shown) == full


def test_a_replacement_character_of_the_text_is_kept() -> None:
    full, shown, _, _ = read([BAD, "a", BAD])
    assert full == BAD + "a" + BAD
    assert "".join(shown) == full


def test_a_run_of_broken_bytes_is_shown_with_the_next_character() -> None:
    _, shown, _, _ = read(["a", *[b"\x80"] * 4, "b", b"\x80"])
    assert shown == ["a", "", "", "", "", BAD * 4 + "b", "", BAD]


def test_special_tokens_are_no_text() -> None:
    full, shown, _, _ = read(["a", "<eos>", "b", "<eos>"], special=frozenset({1, 3}))
    assert full == "ab"
    assert shown == ["a", "", "b", "", ""]


def test_full_text_of_an_unfinished_request_has_the_unfinished_character() -> None:
    text = RequestText(Pieces(["a", b"\xe2"]))
    text.push(0, from_draft=False)
    text.push(1, from_draft=False)
    assert text.full_text == "a" + BAD
    assert text.drain(final=False) == [Segment("a", 0)]


def test_segments_report_drafts_from_the_targets_own_tokens() -> None:
    text = RequestText(Pieces(["a", "b", "c", "d"]))
    for token, from_draft in enumerate([False, True, True, False]):
        text.push(token, from_draft=from_draft)
    segments = [Segment("a", 0), Segment("b", 1), Segment("c", 2), Segment("d", 0)]
    assert text.drain(final=False) == segments
    assert text.drain(final=True) == []


def test_held_back_text_keeps_its_origin() -> None:
    text = RequestText(Pieces(["x<", "/", "y"]), stop=("</s>",))
    text.push(0, from_draft=True)
    assert text.drain(final=False) == [Segment("x", 1)]
    text.push(1, from_draft=False)
    text.push(2, from_draft=True)
    shown = [Segment("<", 1), Segment("/", 0), Segment("y", 1)]
    assert text.drain(final=False) == shown


# --- work ---


class Counting:
    """Counts the ids that a tokenizer decodes."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.num_ids = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_ids += len(token_ids)
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)


NUM_TOKENS = 5000


class Run(NamedTuple):
    period: list[bytes | str]
    text: str
    note: str
    special: bool = False


RUNS = [
    Run(["<pad>"], "", "special tokens", special=True),
    Run([""], "", "tokens without text"),
    Run([b"\x80"], BAD, "bytes that begin no character"),
    Run([b"\xe2"], BAD, "bytes that begin a character each"),
    Run([b"\xe2", b"\x82"], BAD, "unfinished characters"),
    Run([b"\xf0", b"\x90", b"\x80"], BAD, "longer ones"),
    Run([b"\xe2\x82\xe2"], BAD * 2, "several in one token"),
    Run([b"a\xe2"], "a" + BAD, "letters next to them"),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.note)
def test_long_runs_take_work_in_proportion(run: Run) -> None:
    count = NUM_TOKENS // len(run.period)
    pieces = ["x", *run.period * count, "y"]
    special = frozenset(range(1, len(pieces) - 1)) if run.special else frozenset()
    tokenizer = Counting(Pieces(pieces, special))
    text = RequestText(tokenizer, ("never there",))
    shown = ""
    for token in range(len(pieces)):
        text.push(token, from_draft=False)
        shown += "".join(s.text for s in text.drain(final=False))
    assert tokenizer.num_ids < 100 * NUM_TOKENS
    assert shown == text.full_text == f"x{run.text * count}y"


def test_long_runs_of_tokenizers_of_transformers() -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        letter, broken = tokenizer.encode("é")
        for run in ([broken], [broken, *[letter, broken] * (NUM_TOKENS // 2)]):
            counting = Counting(tokenizer)
            text = RequestText(counting)
            run = (run * NUM_TOKENS)[:NUM_TOKENS]
            for token in run:
                text.push(token, from_draft=False)
            whole = tokenizer.decode(run)
            assert text.full_text == whole
            assert "".join(s.text for s in text.drain(final=True)) == whole
            assert counting.num_ids < 100 * NUM_TOKENS


def test_what_is_shown_costs_no_decoding() -> None:
    """So that nothing but a token's own step can fail with its tokenizer."""
    tokenizer = Counting(Pieces(["a", b"\xe2\x82"]))
    text = RequestText(tokenizer)
    for token in range(2):
        text.push(token, from_draft=False)
    before = tokenizer.num_ids
    assert text.full_text == "a" + BAD
    assert text.drain(final=False) == [Segment("a", 0)]
    assert text.drain(final=True) == [Segment(BAD, 0)]
    assert tokenizer.num_ids == before


# --- properties ---

LETTERS = "ab<é€😀\n"


def sure_text(pieces: Sequence[bytes]) -> str:
    """Whole characters of the bytes so far; right for streams that are cut from valid text."""
    return b"".join(pieces).decode("utf-8", errors="ignore")


def story(pieces: list[bytes], stop: tuple[str, ...], min_tokens: int) -> tuple[str, int]:
    """(text, tokens taken) by reading everything anew at each token."""
    before = ""
    for count in range(1, len(pieces) + 1):
        text = sure_text(pieces[:count])
        starts = [
            at
            for s in stop
            for at in range(len(text))
            if text.startswith(s, at) and at + len(s) > len(before)
        ]
        if starts and count > min_tokens:
            return text[: min(starts)], count
        before = text
    return b"".join(pieces).decode("utf-8", errors="replace"), len(pieces)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[bytes]:
    """A text's bytes cut anywhere, inside characters too; its end may be missing."""
    data = draw(st.text(LETTERS, min_size=1, max_size=24)).encode()
    pieces = []
    while data:
        size = draw(st.integers(1, 5))
        pieces.append(data[:size])
        data = data[size:]
    return pieces[: draw(st.integers(1, len(pieces)))]


stops = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3).map(tuple)
splits = st.lists(st.integers(1, 5), min_size=24, max_size=24)


@given(cut_texts(), stops, st.integers(0, 6), splits)
def test_any_split_into_steps_shows_what_rereading_everything_gives(
    pieces: list[bytes], stop: tuple[str, ...], min_tokens: int, runs: list[int]
) -> None:
    runs = [*runs, *[1] * len(pieces)]
    full, shown, taken, stopped = read(pieces, stop, min_tokens, runs)
    text, count = story(pieces, stop, min_tokens)
    assert (full, taken) == (text, count)
    assert "".join(shown) == full
    assert stopped or full == b"".join(pieces).decode("utf-8", errors="replace")


@given(cut_texts(), stops)
def test_what_could_still_be_a_stop_is_held_back_and_nothing_else(
    pieces: list[bytes], stop: tuple[str, ...]
) -> None:
    text = RequestText(Pieces(pieces), stop)
    shown = ""
    for token in range(len(pieces)):
        text.push(token, from_draft=False)
        shown += "".join(s.text for s in text.drain(final=False))
        if text.stopped:
            assert shown == text.full_text
            return
        known = sure_text(pieces[: token + 1])
        starts = [n for s in stop for n in range(1, len(s)) if known.endswith(s[:n])]
        assert shown == known[: len(known) - max(starts, default=0)]


@given(
    st.lists(st.binary(min_size=0, max_size=4), min_size=1, max_size=20),
    splits,
)
def test_arbitrary_bytes_give_the_decoding_of_all_of_them(
    pieces: list[bytes], runs: list[int]
) -> None:
    runs = [*runs, *[1] * len(pieces)]
    full, shown, _, _ = read(pieces, runs=runs)
    assert full == b"".join(pieces).decode("utf-8", errors="replace")
    assert "".join(shown) == full


TRICKY = [
    b"\x80",
    b"\x82",
    b"\xac",
    b"\x90",
    b"\xc3",
    b"\xe2",
    b"\xf0",
    b"\xff",
    b"\xe2\x82",
    b"a\xe2",
]


def every_state(tokenizer, ids: list[int]) -> list[tuple[str, str]]:
    """(Newly shown, full text) after each token, and at the end."""
    text = RequestText(tokenizer)
    states = []
    for token in ids:
        text.push(token, from_draft=False)
        states.append(("".join(s.text for s in text.drain(final=False)), text.full_text))
    states.append(("".join(s.text for s in text.drain(final=True)), text.full_text))
    return states


def with_the_whole_run_in_view(tokenizer, ids: list[int]) -> list[tuple[str, str]]:
    with patch.object(text_module, "LONG", 10**9):
        return every_state(tokenizer, ids)


@given(st.lists(st.sampled_from([*TRICKY, b"", b"b"]), max_size=150))
def test_what_leaves_the_view_is_not_missed(pieces: list[bytes]) -> None:
    tokenizer, ids = Pieces(pieces), list(range(len(pieces)))
    states = every_state(tokenizer, ids)
    assert states == with_the_whole_run_in_view(tokenizer, ids)
    assert states[-1][1] == b"".join(pieces).decode("utf-8", errors="replace")


# --- real tokenizers ---


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, decoded as GPT-2's, GLM's and DeepSeek's tokenizers do."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Words and single bytes, decoded as Llama's tokenizer does: a broken run is all broken."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("text", ["naïve café", "日本語 text", "😀😃a😄", "a\n\n\té"])
def test_tokenizers_of_transformers(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    request_text = RequestText(tokenizer)
    shown = []
    for token in ids:
        request_text.push(token, from_draft=False)
        new = "".join(s.text for s in request_text.drain(final=False))
        assert BAD not in new
        shown.append(new)
    assert "".join(shown) == text == request_text.full_text
    assert request_text.drain(final=True) == []


class Shouting(PreTrainedTokenizerFast):
    def _decode(self, *args, **options) -> str:
        return super()._decode(*args, **options).upper()


class Whispering(PreTrainedTokenizerFast):
    def decode(self, *args, **options) -> str:
        return super().decode(*args, **options).lower()


def test_the_backend_decodes_where_a_tokenizer_adds_nothing() -> None:
    backend = BYTE_LEVEL.backend_tokenizer
    assert detokenizer_of(BYTE_LEVEL) is backend
    ids = BYTE_LEVEL.encode("naïve 日本語 \n x")
    assert backend.decode(ids, skip_special_tokens=True) == BYTE_LEVEL.decode(
        ids, skip_special_tokens=True
    )


class Narrow(PreTrainedTokenizerFast):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=add_special_tokens)


def test_a_tokenizer_with_an_encoding_of_its_own_needs_nothing_new() -> None:
    options = {"tokenizer_object": BYTE_LEVEL.backend_tokenizer}
    ids = BYTE_LEVEL.encode("a b")
    assert encode(Narrow(**options), "a b") == encode(BYTE_LEVEL, "a b") == ids


def test_a_tokenizer_with_a_decoding_of_its_own_decodes_itself() -> None:
    options = {"tokenizer_object": BYTE_LEVEL.backend_tokenizer}
    patched = PreTrainedTokenizerFast(**options)
    patched.decode = Pieces(["a"]).decode
    cleaning = PreTrainedTokenizerFast(**options, clean_up_tokenization_spaces=True)
    subclasses = [Shouting(**options), Whispering(**options)]
    for own in (*subclasses, cleaning, patched, Pieces(["a"]), None):
        assert detokenizer_of(own) is own


@given(st.lists(st.integers(0, 255), min_size=1, max_size=16))
def test_streamed_text_of_random_bytes_is_the_full_text(ids: list[int]) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        text = RequestText(tokenizer)
        shown = ""
        for token in ids:
            text.push(token, from_draft=False)
            shown += "".join(s.text for s in text.drain(final=False))
        shown += "".join(s.text for s in text.drain(final=True))
        assert shown == text.full_text
        if tokenizer is BYTE_LEVEL:
            assert shown == tokenizer.decode(ids)


@given(st.lists(st.sampled_from(sorted({b for piece in TRICKY for b in piece})), max_size=150))
def test_what_leaves_the_view_of_random_bytes_is_not_missed(data: list[int]) -> None:
    level = [BYTE_LEVEL.convert_tokens_to_ids(BYTE_CHARACTERS[byte]) for byte in data]
    fallback = [BYTE_FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    for tokenizer, ids in ((BYTE_LEVEL, level), (BYTE_FALLBACK, fallback)):
        assert every_state(tokenizer, ids) == with_the_whole_run_in_view(tokenizer, ids)


@pytest.mark.parametrize("count", [1, 3, 11, 40, 100])
def test_the_replacement_character_spelled_in_bytes(count: int) -> None:
    """Llama's decoding of it is broken until its last byte, and then shorter."""
    text = BAD * count + "bab"
    ids = BYTE_FALLBACK.encode(text)
    assert len(ids) == 3 * count + 3
    request_text = RequestText(BYTE_FALLBACK)
    for token in ids:
        request_text.push(token, from_draft=False)
    assert request_text.full_text == text == BYTE_FALLBACK.decode(ids)


@given(st.lists(st.sampled_from([BAD, "b", "ab", "é", "日"]), max_size=120))
def test_random_texts_with_replacement_characters(pieces: list[str]) -> None:
    text = "".join(pieces)
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        request_text = RequestText(tokenizer)
        for token in tokenizer.encode(text):
            request_text.push(token, from_draft=False)
        assert request_text.full_text == text


def byte_characters() -> dict[int, str]:
    """GPT-2's visible character of each byte."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


BYTE_CHARACTERS = byte_characters()
BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()


# --- the stop string in the text ---


@pytest.mark.parametrize("run", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (["ab", "cd", "ef"], ("cd",), "abcd"),
        (["ab", "cd", "ef"], ("bc",), "abc"),
        (["ab", "cd", "ef"], ("d",), "abcd"),
        (["a", "b", "cdef", "g"], ("bcd", "de"), "abcd"),
        (["a", "xyz", "g"], ("xy", "x"), "ax"),
        (["a", "b", "c"], ("z",), "abc"),
        (["a", b"\xe2\x82", b"\xac!", "c"], ("\u20ac",), "a\u20ac"),
    ],
)
def test_a_stop_string_is_left_in_on_request(
    pieces: list[bytes | str], stop: tuple[str, ...], text: str, run: int
) -> None:
    """And nothing waits for it: what is shown as it comes is the full text."""
    written = RequestText(Pieces(pieces), stop, include_stop=True)
    shown = ""
    for first in range(0, len(pieces), run):
        for token in range(first, min(first + run, len(pieces))):
            if not written.stopped:
                written.push(token, from_draft=False)
        shown += "".join(segment.text for segment in written.drain(final=False))
        assert shown == written.full_text.rstrip(BAD)
    shown += "".join(segment.text for segment in written.drain(final=True))
    assert shown == written.full_text == text
    without = read(pieces, stop)
    assert text.startswith(without[0])
    assert without[3] == written.stopped


# --- tokens that are taken back ---


@given(
    pieces=st.lists(st.binary(min_size=0, max_size=3), min_size=1, max_size=12),
    data=st.data(),
)
def test_text_without_what_was_taken_back(pieces: list[bytes], data: st.DataObject) -> None:
    """As if it had never been there, whatever was shown before."""
    stop = data.draw(st.sampled_from([(), ("ab",), ("a", "bb")]))
    shown = data.draw(st.integers(0, len(pieces)))
    kept = data.draw(st.integers(shown, len(pieces)))
    cut, never = (RequestText(Pieces(pieces), stop) for _ in range(2))
    for text, count in ((cut, len(pieces)), (never, kept)):
        for token in range(shown):
            text.push(token, from_draft=token % 2 == 0)
        text.drain(final=False)
        for token in range(shown, count):
            text.push(token, from_draft=token % 2 == 0)
    cut.keep(range(kept))
    assert (cut.full_text, cut.stopped) == (never.full_text, never.stopped)
    assert cut.drain(final=True) == never.drain(final=True)


def test_what_cannot_be_taken_back() -> None:
    text = RequestText(Pieces(["ab", "cd", "ef"]))
    for token in range(3):
        text.push(token, from_draft=False)
    with pytest.raises(ExecutorError, match="expected at most 3 tokens to keep, got 4"):
        text.keep([0, 1, 2, 2])
    text.drain(final=False)
    with pytest.raises(ExecutorError, match="text: 2 tokens have 4 characters, 6 were shown"):
        text.keep([0, 1])
    text.keep([0, 1, 2])
    assert text.full_text == "abcdef"


def test_white_space_that_decodes_to_nothing_is_no_special_token() -> None:
    """As of SentencePiece tokenizers, which strip leading spaces."""
    tokenizer = SimpleNamespace(
        encode=lambda *_, **__: [2], decode=lambda *_, **__: "", all_special_ids=[]
    )
    for skips in (True, False):
        assert stop_token(tokenizer, " ", skip_special_tokens=skips) is None

"""Comparison token for token, with target-only decoding that continues from what was emitted."""

from __future__ import annotations

import pytest
import torch

from integration.random_models import write_random_checkpoint
from mtp_plugin.hosts.embedded.models import LoadedModel, load_model
from mtp_plugin.infer import SamplingRule
from mtp_plugin.requests.options import SamplingParams
from mtp_plugin.tools.parity import (
    Comparison,
    Divergence,
    Oracle,
    TieRule,
    compare_with_continuations,
    measure_gap,
    transformers_attention,
)
from tests.greedy import greedy_decode

TEXT = [10, 11, 12, 13, 14, 15]
PROMPT = [5, 6, 7]


def plain(prefix: list[int]) -> list[int]:
    """Decoding that counts on from whatever is there."""
    following = TEXT[0] if not prefix else prefix[-1] + 1
    return prefix + list(range(following, following + len(TEXT) - len(prefix)))


def tie_above(least: int):
    """A verify to whom expected tokens from ``least`` on are ties."""

    def verify(position: int, token: int, expected: int) -> Divergence:
        return Divergence(position, token, expected, 0.1 if expected >= least else 0.5, 0.2)

    return verify


def never(*_: int) -> Divergence:
    raise ValueError("there are no two tokens to compare")


def test_equal_texts_have_no_difference() -> None:
    assert compare_with_continuations(TEXT, plain, never) == Comparison(6)


def test_a_wrong_token_is_a_difference_with_its_gap() -> None:
    found = compare_with_continuations([10, 11, 99, 100, 101, 102], plain, tie_above(50))
    assert found == Comparison(2, [], Divergence(2, 99, 12, 0.5, 0.2))


def test_after_a_tie_decoding_goes_on_from_what_was_emitted() -> None:
    found = compare_with_continuations([10, 31, 32, 33, 34, 35], plain, tie_above(11))
    assert found == Comparison(6, [Divergence(1, 31, 11, 0.1, 0.2)])


def test_a_difference_after_a_tie_is_found() -> None:
    emitted = [10, 31, 32, 7, 8, 9]
    found = compare_with_continuations(emitted, plain, lambda p, t, e: Divergence(p, t, e, p, 2))
    assert found.ties == [Divergence(1, 31, 11, 1, 2)]
    assert found.difference == Divergence(3, 7, 33, 3, 2)
    assert found.num_equal == 3


@pytest.mark.parametrize(
    ("emitted", "difference"),
    [
        (TEXT[:4], Divergence(4, None, 14)),
        ([*TEXT, 16], Divergence(6, 16, None)),
        ([], Divergence(0, None, 10)),
    ],
)
def test_another_length_is_never_a_tie(emitted: list[int], difference: Divergence) -> None:
    found = compare_with_continuations(emitted, plain, never)
    assert found.difference == difference


# --- with a model ---


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("model")
    write_random_checkpoint(path, "glm4_moe", seed=3, vocab_size=96, residual_scale=0.4)
    return load_model(path, dtype=torch.bfloat16)


@pytest.fixture
def twin(model: LoadedModel) -> tuple[list[int], int]:
    """(A text, a word whose row of the head is that of the text's fifth token)."""
    head = model.lm_head.weight
    truth = greedy_decode(model.target, PROMPT, 10)
    word = next(w for w in range(95, 0, -1) if w not in truth)
    kept = head[word].clone()
    head[word] = head[truth[4]]
    emitted = [*truth[:4], word]
    emitted += greedy_decode(model.target, PROMPT + emitted, 5)
    yield emitted, truth[4]
    head[word] = kept


def compared(model: LoadedModel, emitted: list[int], rule: TieRule) -> Comparison:
    oracle = Oracle(model)
    return compare_with_continuations(
        emitted,
        lambda prefix: (
            prefix + greedy_decode(model.target, PROMPT + prefix, len(emitted) - len(prefix))
        ),
        measure_gap(oracle, rule, SamplingRule(SamplingParams(), PROMPT), emitted),
    )


def test_a_tie_is_excused_and_the_rest_is_still_compared(model, twin) -> None:
    emitted, expected = twin
    found = compared(model, emitted, TieRule(torch.bfloat16))
    assert found.difference is None
    assert found.num_equal == 10
    # the twin may tie again further on; each time the lower id is expected
    tie = found.ties[0]
    assert (tie.position, tie.token, tie.expected, tie.gap) == (4, emitted[4], expected, 0.0)
    wrong = [*emitted[:7], (emitted[7] + 1) % 96, *emitted[8:]]
    found = compared(model, wrong, TieRule(torch.bfloat16))
    assert [tie.position for tie in found.ties] == [4]
    assert found.difference.position == 7
    assert found.difference.gap > found.difference.tolerance > 0


def test_float32_excuses_nothing(model, twin) -> None:
    emitted, expected = twin
    found = compared(model, emitted, TieRule(torch.float32))
    assert found.difference == Divergence(4, emitted[4], expected, 0.0, 0.0)


def test_a_tolerance_of_no_ulps_excuses_nothing(model, twin) -> None:
    emitted, _ = twin
    assert compared(model, emitted, TieRule(torch.bfloat16, 0)).difference.position == 4


def test_teacher_forced_logits_are_those_of_decoding(model) -> None:
    ids = torch.randint(0, 96, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = Oracle(model).logits(ids, 4)
    whole = model.target(input_ids=torch.tensor([ids])).logits[0, -4:].float()
    assert torch.equal(rows, whole)


def test_plain_attention_gives_the_former_one_back(model) -> None:
    model.set_attn_implementation("eager")

    def use() -> None:
        with transformers_attention(model):
            assert model.target.config._attn_implementation == "sdpa"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        use()
    assert model.target.config._attn_implementation == "eager"
    model.set_attn_implementation("sdpa")

"""From measurements to the answer: K by batch size, method, draft vocabulary, or no drafts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_plugin.tools.tune.answer import (
    Measurement,
    Setting,
    find_answer,
    losing_length,
    make_schedule,
    plugin_gain,
    unexplained_gains,
)

OFF = Measurement(Setting(0), step_ms={1: 2.0, 8: 2.2, 64: 4.0})
ACCEPTANCE = (0.8, 0.6, 0.5)


def measured(k: int, *step_ms: float, method: str = "coupled", vocab: object = None) -> Measurement:
    setting = Setting(k, method, vocab)  # type: ignore[arg-type]
    times = dict(zip((1, 8, 64), step_ms, strict=True))
    return Measurement(setting, step_ms=times, acceptance=ACCEPTANCE[:k])


def test_tokens_per_second_follow_from_step_time_and_acceptance() -> None:
    found = measured(3, 2.9, 3.0, 5.8)
    assert found.acceptance_length == pytest.approx(2.9)
    assert found.tokens_per_second(64) == pytest.approx(32000)


def test_answer_is_off_if_drafts_are_hardly_faster() -> None:
    slow = measured(1, 1.79 * 2, 1.79 * 2.2, 1.79 * 4)
    answer = find_answer([slow, OFF])
    assert answer is not None
    assert answer.setting == Setting(0)
    assert answer.options() == {"--additional-config": {"mtp_plugin": {}}}


def test_schedule_has_the_best_k_of_each_batch_size() -> None:
    small, large = measured(1, 2.4, 2.7, 5.0), measured(3, 2.8, 3.0, 20.0)
    answer = find_answer([small, large, OFF])
    assert answer is not None
    assert answer.options()["--speculative-config"] == {
        "method": "mtp",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 22, 3], [23, 64, 1]],
    }


def test_method_and_vocabulary_are_part_of_the_options() -> None:
    found = [
        measured(3, 2.8, 3.0, 5.0),
        replace(measured(3, 2.8, 3.0, 5.0, method="block"), acceptance=(0.9, 0.8, 0.7)),
        replace(measured(3, 2.6, 2.8, 4.8, method="block", vocab=512), acceptance=(0.9, 0.8, 0.7)),
        OFF,
    ]
    answer = find_answer(found)
    assert answer is not None
    assert answer.options() == {
        "--speculative-config": {
            "method": "mtp",
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        },
        "--additional-config": {"mtp_plugin": {"verification": "block", "draft_vocab": 512}},
    }
    # the vocabulary alone gains less than the tolerance
    found[2] = replace(found[2], step_ms={1: 2.78, 8: 2.98, 64: 4.95})
    answer = find_answer(found)
    assert answer is not None
    assert answer.setting.draft_vocab is None


def test_a_draft_length_loses_if_it_is_slower_at_every_batch_size() -> None:
    off, one = measured(0, 1.0, 1.0, 1.0), measured(1, 2.0, 2.0, 4.0)
    # times of K = 1 by acceptance length are 2.67, 2.67 and 5.33
    lost, won = measured(2, 2.8, 2.8, 5.6), measured(2, 2.8, 2.8, 5.4)
    assert losing_length([off, one, lost], Setting(5)) == 2
    assert losing_length([off, one, won], Setting(5)) is None
    assert losing_length([off, one], Setting(5)) is None  # slower than no drafts alone
    assert losing_length([off, one, replace(lost, problem="failed")], Setting(5)) is None
    assert losing_length([off, one, lost], Setting(5, draft_vocab=8)) is None


def test_setting_without_numbers_is_left_out() -> None:
    failed = replace(measured(3, 1.0, 1.0, 1.0), problem="outputs differ")
    answer = find_answer([failed, OFF])
    assert answer is not None
    assert answer.setting == Setting(0)
    assert find_answer([failed, replace(OFF, problem="failed")]) is None


@pytest.mark.parametrize(
    ("share", "rate", "k"), [(0.96, 0.7, 3), (0.9, 0.7, 0), (0.96, 0.0, 0), (0.4, 0.0, 0)]
)
def test_no_gain_exceeds_the_tokens_per_step(share: float, rate: float, k: int) -> None:
    fast = measured(3, *(share * ms for ms in OFF.step_ms.values()))
    fast = replace(fast, acceptance=(rate, rate, rate))
    gains = [1 / share * (1 + 3 * rate)] * 3 if share < 0.95 else []
    assert list(unexplained_gains(fast, OFF).values()) == pytest.approx(gains)
    answer = find_answer([fast, OFF])
    assert answer is not None
    assert answer.setting.num_drafts == k
    assert list(answer.speed_up.values()) == pytest.approx([1 + k * rate] * 3)


def test_vllm_alone_is_no_answer_and_compared_at_the_sizes_of_its_k() -> None:
    best = replace(measured(3, 2.8, 3.0, 20.0, vocab=512), setting=Setting(3, "block", 512))
    alone = replace(best, setting=best.setting.without_plugin(), step_ms={1: 2.0, 8: 6.0, 64: 2.0})
    config = alone.setting.speculative_config()
    assert config == best.setting.speculative_config()
    assert alone.setting.engine == alone.setting
    found = [best, alone, OFF]
    answer = find_answer(found)
    assert answer is not None
    assert (answer.setting, answer.by_batch_size[64]) == (best.setting, Setting(0))
    assert plugin_gain(answer, found) == pytest.approx({1: 2.0 / 2.8, 8: 2.0})
    assert plugin_gain(answer, [best, replace(alone, problem="failed"), OFF]) == {}


def test_schedule_ranges_touch_and_are_merged() -> None:
    assert make_schedule({1: 3, 8: 2, 64: 2, 128: 0}) == [[1, 2, 3], [3, 90, 2], [91, 128, 0]]
    assert make_schedule({4: 3}) == [[1, 4, 3]]


def test_rejection_and_block_share_an_engine() -> None:
    settings = [Setting(3, method, 512) for method in ("coupled", "rejection", "block")]
    assert [setting.engine for setting in settings] == [settings[0], settings[1], settings[1]]

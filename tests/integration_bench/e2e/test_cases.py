"""Which cases a run has, and what options are refused."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from integration.bench.case import BenchmarkError
from integration.bench.e2e.case_config import executor_config
from integration.bench.e2e.cases import E2ECase, E2EOptions, Synthetic, cases_of
from integration.bench.e2e.prompts import make_pieces, make_prompts
from integration.bench.e2e.subject import SHAPES, Subject, make_shape
from mtp_plugin.config import parse_config

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def toy() -> Subject:
    return make_shape("toy", CPU, None, 0, fused=False)


def labels(options: E2EOptions, num_mtp_layers: int = 3) -> list[str]:
    return [case.label for case in cases_of(options, num_mtp_layers)[0]]


def test_each_batch_runs_without_mtp_first() -> None:
    options = E2EOptions(batches=(1, 8), ks=(1, 2), workers=("eagle",))
    assert labels(options) == [
        "off/b1",
        "eagle-k1/b1",
        "eagle-k2/b1",
        "off/b8",
        "eagle-k1/b8",
        "eagle-k2/b8",
    ]


def test_vanilla_without_enough_layers_is_skipped_by_name() -> None:
    cases, skipped = cases_of(E2EOptions(batches=(4,)), 1)
    assert [c.label for c in cases] == ["off/b4", "eagle-k1/b4", "eagle-k3/b4", "vanilla-k1/b4"]
    assert skipped == ["vanilla-k3/b4"]


def test_a_filter_keeps_the_run_to_compare_with() -> None:
    assert labels(E2EOptions(only="vanilla-k3/b1")) == [
        *("off/b1", "vanilla-k3/b1"),
        *("off/b128", "vanilla-k3/b128"),
    ]


def test_a_filter_takes_every_name_that_is_printed() -> None:
    options = E2EOptions(batches=(1, 4), ks=(1,))
    for case in cases_of(options, 3)[0]:
        found = [
            each.label for each in cases_of(dataclasses.replace(options, only=case.label), 3)[0]
        ]
        assert found == list(dict.fromkeys([case.off.label, case.label]))
    assert [c.label for c in cases_of(dataclasses.replace(options, only="off"), 3)[0]] == [
        "off/b1",
        "off/b4",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (E2EOptions(batches=(0,)), r"--batch: expected at least 1, got \[0\]"),
        (E2EOptions(ks=(3, -1)), r"--k: expected at least 1, got \[-1\]"),
        (E2EOptions(ks=(3, 17)), r"--k: expected at most 16, got \[17\]"),
        (E2EOptions(isl=0), r"--isl: expected at least 1"),
        (E2EOptions(osl=0), r"--osl: expected at least 1"),
        (E2EOptions(workers=("medusa",)), r"--worker: expected eagle or vanilla, got \['medusa'\]"),
        (
            E2EOptions(acceptance=(0.5, 0.6)),
            "--acceptance: expected shares from 0 to 1 that do not",
        ),
        (E2EOptions(acceptance=(1.5,)), "--acceptance: expected shares from 0 to 1 that do not"),
        (E2EOptions(only="nothing"), "--filter: no case that can run has 'nothing' in its name"),
        (
            E2EOptions(workers=("vanilla",), ks=(9,)),
            "no case can run: vanilla needs a layer per draft",
        ),
    ],
)
def test_options_that_fit_no_case_are_named(options: E2EOptions, message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        cases_of(options, 3)


def test_acceptance_is_real_where_weights_are_trained_unless_requested() -> None:
    assert E2EOptions().synthetic(is_trained=True) is None
    assert E2EOptions(seed=4).synthetic(is_trained=False) == Synthetic((0.8,), 4)
    assert E2EOptions(acceptance=(0.5,)).synthetic(is_trained=True) == Synthetic((0.5,), 0)


def test_shares_follow_from_one_rate_or_are_given() -> None:
    assert Synthetic((0.5,), 0).shares(3) == (0.5, 0.25, 0.125)
    assert Synthetic((0.9, 0.5, 0.1), 0).shares(2) == (0.9, 0.5)
    with pytest.raises(BenchmarkError, match="or a share for each of 3 drafts, got 2"):
        Synthetic((0.9, 0.5), 0).shares(3)


@pytest.mark.parametrize(
    "case",
    [E2ECase(3), E2ECase(5, "eagle", 4), E2ECase(2, "vanilla", 1)],
    ids=lambda case: case.label,
)
def test_configs_hold_the_whole_batch(toy: Subject, case: E2ECase) -> None:
    options = E2EOptions(isl=40, osl=50)
    config = parse_config(executor_config(toy, case, options, None))
    assert config.max_batch_size == case.batch
    assert config.max_seq_len == 90
    per_request = -(-90 // config.kv_cache_config.tokens_per_block)
    blocks = config.kv_cache_config.max_tokens // config.kv_cache_config.tokens_per_block
    assert blocks == case.batch * per_request
    assert config.cuda_graph_config is None
    assert (config.speculative_config is None) == case.is_off


def test_graphs_also_run_batches_that_shrink() -> None:
    on_device = SimpleNamespace(path="x", name="x", device=torch.device("cuda"))
    config = executor_config(on_device, E2ECase(6), E2EOptions(), None)
    assert config["cuda_graph_config"] == {"enable_padding": True, "capture": "all"}
    eager = executor_config(on_device, E2ECase(6), E2EOptions(graphs=False), None)
    assert "cuda_graph_config" not in eager


def test_options_reach_the_config(toy: Subject) -> None:
    options = E2EOptions(draft_vocab=64)
    config = parse_config(
        executor_config(toy, E2ECase(2, "eagle", 2), options, Synthetic((0.5,), 7))
    )
    mtp = config.speculative_config.mtp
    assert (mtp.verification, mtp.synthetic_acceptance) == ("synthetic", (0.5, 0.25))
    assert (mtp.synthetic_seed, mtp.draft_vocab) == (7, 64)


# --- subjects and prompts ---


def test_the_named_shapes() -> None:
    assert make_shape("toy", CPU, "float32", 0, fused=False).dtype is torch.float32
    big = SHAPES["8gb"]
    assert (big["hidden_size"], big["num_hidden_layers"], big["vocab_size"]) == (4096, 18, 129280)
    assert (big["first_k_dense_replace"], big["n_routed_experts"]) == (17, 8)
    with pytest.raises(BenchmarkError, match="--shape: expected one of 8gb, toy, got '9gb'"):
        make_shape("9gb", CPU, None, 0, fused=False)
    with pytest.raises(BenchmarkError, match="--dtype: expected one of float32"):
        make_shape("toy", CPU, "int8", 0, fused=False)


def test_random_prompts_are_seeded_and_of_one_length(toy: Subject) -> None:
    prompts = make_prompts(toy, 5, 12, 3)
    assert prompts == make_prompts(toy, 5, 12, 3)
    assert prompts[:2] == make_prompts(toy, 2, 12, 3)
    assert prompts != make_prompts(toy, 5, 12, 4)
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({tuple(prompt) for prompt in prompts}) == 5


class Letters:
    """One token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def test_text_prompts_end_where_a_text_does(toy: Subject, tmp_path) -> None:
    (tmp_path / "prompts.json").write_text('["one two", {"prompt": "three"}]')
    reading = dataclasses.replace(toy, path=str(tmp_path / "checkpoint"), tokenizer=Letters())
    prompts = ["".join(map(chr, prompt)) for prompt in make_prompts(reading, 12, 9, 0)]
    assert {len(prompt) for prompt in prompts} == {9}
    assert prompts[0].endswith("one two")
    assert prompts[1].endswith("three")
    assert len(set(prompts)) > 6
    # further ones end inside of a text, so that not all go on alike
    assert any(not prompt.endswith(("two", "three")) for prompt in prompts)
    long = make_prompts(reading, 1, 100, 0)[0]
    assert len(long) == 100


def test_pieces_have_any_length_up_to_the_longest(toy: Subject) -> None:
    lengths = [len(piece) for piece in make_pieces(toy, 40, 6, 1)]
    assert set(lengths) == {1, 2, 3, 4, 5, 6}

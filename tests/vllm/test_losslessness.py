"""A seed gives the same output with any number of drafts, schedule and batch."""

from __future__ import annotations

import pytest

from tests.vllm.engines import BIASED, JOBS, PLAIN

pytest.importorskip("vllm")


def tokens(result, phase="plain"):
    return [output["tokens"] for output in result[phase]["outputs"]]


def acceptance_length(result, phase):
    counters = result[phase]["counters"]
    return 1 + counters["spec_decode_num_accepted_tokens"] / counters["spec_decode_num_drafts"]


@pytest.mark.engines("k0", "k1", "k2", "k3")
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_drafts_do_not_change_the_output(results, name):
    assert results(name)["v2_runner"]
    expected = tokens(results("k0"))
    assert sum(map(len, expected)) == 32 * len(PLAIN["plain"])
    assert tokens(results(name)) == expected


@pytest.mark.engines("k0", "k3")
@pytest.mark.parametrize("phase", BIASED)
def test_min_p_and_logit_bias_give_the_same_output_with_drafts(results, report, phase):
    expected = tokens(results("k0"), phase)
    assert expected != tokens(results("k0"))
    assert tokens(results("k3"), phase) == expected
    plain, changed = (acceptance_length(results("k3"), each) for each in ("plain", phase))
    report(f"acceptance length: {plain:.2f}, with {phase} {changed:.2f}")


@pytest.mark.engines("k0", "dynamic")
def test_draft_lengths_by_batch_size_do_not_change_the_output(results, report):
    for phase in ("plain", *BIASED):
        found, whole = tokens(results("dynamic"), phase), tokens(results("k0"), phase)
        assert list(map(len, found)) == 2 * list(range(4, 36, 4))
        assert found == [each[: len(got)] for got, each in zip(found, whole, strict=True)]
        counters, outputs = (results("dynamic")[phase][name] for name in ("counters", "outputs"))
        steps = counters["spec_decode_num_drafts"]
        drafts = counters["spec_decode_num_draft_tokens"]
        later_steps = sum(len(output["new_tokens"]) - 1 for output in outputs)
        report(f"{phase}: {drafts} drafts in {steps} of {later_steps} request-steps")
        assert steps < drafts < 3 * steps
        assert steps < later_steps
    outputs = results("dynamic")["plain"]["outputs"]
    assert max(max(output["new_tokens"]) for output in outputs) == 4


@pytest.mark.engines("k0", "copies_k0", "tail_k7")
def test_a_tail_of_copied_text_does_not_change_the_output(results, report):
    """Greedy, coupled, and by rejection and block where only one token is possible."""
    tail, plain = results("tail_k7"), tokens(results("k0"))
    assert tokens(tail) == plain
    copies = tokens(results("copies_k0"), "copies")
    assert tokens(tail, "copies") == copies
    assert tokens(tail, "one copy") == [each for each in copies[::2] for _ in range(2)]
    mixed = tokens(tail, "mixed")
    coupled = [n for n in range(len(plain)) if n % 5 not in (1, 3)]
    assert [mixed[n] for n in coupled] == [plain[n] for n in coupled]
    for phase in ("plain", "copies", "one copy"):
        counters = tail[phase]["counters"]
        steps, drafts = (counters[f"spec_decode_num_{name}"] for name in ("drafts", "draft_tokens"))
        report(f"tail: {phase}: {drafts / steps:.2f} drafts, {acceptance_length(tail, phase):.2f}")
        assert 3 <= drafts / steps < 7  # without the columns that have no match


@pytest.mark.engines("tail_k7")
@pytest.mark.parametrize("phase", ["copies", "one copy"])
def test_copied_tokens_are_accepted_after_those_of_the_mtp_layers(results, phase):
    result = results("tail_k7")[phase]
    for method in range(2):  # greedy and sampled; rejection and block
        outputs = result["outputs"][method::2]
        assert max(max(output["new_tokens"]) for output in outputs) == 8
    per_position = result["counters"]["spec_decode_num_accepted_tokens_per_pos"]
    assert min(per_position[3:]) > 5


@pytest.mark.engines("k0", "auto")
def test_measured_draft_lengths_do_not_change_the_output(results, report):
    for phase in ("plain", "both", "random"):
        assert tokens(results("auto"), phase) == tokens(results("k0"), phase)
    counters, outputs = (results("auto")["plain"][name] for name in ("counters", "outputs"))
    later_steps = sum(len(output["new_tokens"]) - 1 for output in outputs)
    steps, drafts = (counters[f"spec_decode_num_{name}"] for name in ("drafts", "draft_tokens"))
    report(f"{drafts} drafts in {steps} of {later_steps} request-steps")
    assert steps < drafts < 3 * steps
    assert steps < later_steps


@pytest.mark.engines("k0", "embedded")
def test_output_equals_the_embedded_executor(results):
    assert tokens(results("embedded")) == tokens(results("k0"))


@pytest.mark.engines("k0", "few_slots")
def test_chunked_prefill_with_few_slots_does_not_change_the_output(results):
    assert tokens(results("few_slots")) == tokens(results("k0"))


@pytest.mark.engines("k0", "few_blocks")
def test_preemption_and_prefix_caching_do_not_change_the_output(results, report):
    result = results("few_blocks")
    assert tokens(result) == tokens(results("k0"))
    assert tokens(result, "long") == tokens(results("k0"), "long")
    preemptions = [result[phase]["counters"]["num_preemptions"] for phase in ("plain", "long")]
    hits = result["long"]["counters"]["prefix_cache_hits"]
    report(f"preemptions {preemptions}, prefix cache hits {hits} tokens")
    assert sum(preemptions) > 0
    assert hits > 0


@pytest.mark.engines("k0", "two_ranks")
def test_tensor_parallelism_does_not_change_the_output(results):
    assert tokens(results("two_ranks"), "few") == tokens(results("k0"), "few")


@pytest.mark.engines("k1", "k2", "k3", "few_slots")
@pytest.mark.parametrize("name", ["k1", "k2", "k3", "few_slots"])
def test_metrics_agree_with_the_outputs(results, name):
    """vLLM counts accepted drafts before it cuts the last step's tokens at ``max_tokens``."""
    phase = results(name)["plain"]
    drafts = JOBS[name]["engine"]["speculative_config"]["num_speculative_tokens"]
    later_steps = [output["new_tokens"][1:] for output in phase["outputs"]]
    assert all(output["new_tokens"][0] == 1 for output in phase["outputs"])
    counters = phase["counters"]
    steps = sum(map(len, later_steps))
    assert counters["spec_decode_num_drafts"] == steps
    assert counters["spec_decode_num_draft_tokens"] == steps * drafts
    per_position = counters["spec_decode_num_accepted_tokens_per_pos"]
    assert counters["spec_decode_num_accepted_tokens"] == sum(per_position)
    for position, counted in enumerate(per_position):
        seen = sum(count > position + 1 for request in later_steps for count in request)
        cut = sum(request[-1] <= position + 1 for request in later_steps)
        assert seen <= counted <= seen + cut


@pytest.mark.engines("k1", "k2", "k3")
@pytest.mark.parametrize(("name", "floor"), [("k1", 1.4), ("k2", 1.7), ("k3", 1.9)])
def test_drafts_are_accepted(results, report, name, floor):
    length = acceptance_length(results(name), "plain")
    report(f"{name}: acceptance length {length:.2f}")
    assert length > floor


@pytest.mark.engines("k0", "k3", "reduced_k3", "counted_k3")
def test_draft_vocabularies_change_no_output(results, report):
    lengths = {}
    for name in ("k3", "reduced_k3", "counted_k3"):
        assert tokens(results(name)) == tokens(results("k0"))
        lengths[name] = acceptance_length(results(name), "plain")
    heads = {name: results(name)["log"] for name in ("reduced_k3", "counted_k3")}
    assert "1 heads of the lowest 512 ids, 0 of them added" in heads["reduced_k3"]
    assert "1 heads of listed 515 ids, 3 of them added" in heads["counted_k3"]
    report(f"acceptance length {lengths}")
    assert 1.8 < lengths["reduced_k3"] < lengths["counted_k3"] < lengths["k3"]


@pytest.mark.engines("k0", "counted_k3")
def test_coupled_requests_next_to_other_methods_with_a_draft_vocabulary(results):
    """Two requests in five are verified by rejection and by block."""
    mixed, expected = tokens(results("counted_k3"), "mixed"), tokens(results("k0"))
    assert [t for n, t in enumerate(mixed) if n % 5 not in (1, 3)] == [
        t for n, t in enumerate(expected) if n % 5 not in (1, 3)
    ]
    assert acceptance_length(results("counted_k3"), "mixed") > 1.8


@pytest.mark.engines("reload_k1")
def test_drafts_of_listed_ids_follow_new_weights(results):
    """With new weights that give equal logits, the acceptance stays."""
    result = results("reload_k1")
    assert tokens(result, "negative") == tokens(result, "plain")
    assert result["negative"]["counters"] == result["plain"]["counters"]
    assert acceptance_length(result, "plain") > 1.5
    assert acceptance_length(result, "few") < 1.2  # the draft model has weights of another target


@pytest.mark.engines("k0", "counted_two_ranks")
def test_tensor_parallelism_splits_the_listed_ids(results):
    result = results("counted_two_ranks")
    assert tokens(result, "few") == tokens(results("k0"), "few")
    assert acceptance_length(result, "few") > 1.8


@pytest.mark.engines("off", "without_package")
def test_package_changes_nothing_while_off(results):
    assert "mtp_plugin on" not in results("off")["log"]
    assert tokens(results("off"), "few") == tokens(results("without_package"), "few")
    off, without = (results(name)["few"]["counters"] for name in ("off", "without_package"))
    assert off == without


@pytest.mark.engines("k3")
def test_log_reports_that_the_plugin_is_on(results):
    assert (
        "mtp_plugin on: verification coupled, 3 drafts per step, torch kernels"
        in (results("k3")["log"])
    )


@pytest.mark.engines("without_package", "without_package_k0")
def test_sampled_output_of_vllm_alone_depends_on_drafts(results):
    """Negative control of the tests above."""
    with_drafts, alone = (
        tokens(results(n), "few") for n in ("without_package", "without_package_k0")
    )
    assert with_drafts[::2] == alone[::2]
    assert with_drafts[1::2] != alone[1::2]

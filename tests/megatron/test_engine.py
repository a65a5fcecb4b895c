"""Megatron's own dynamic engine with its functions and with ours."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtp_plugin.errors import HostError
from mtp_plugin.hosts import megatron
from tests.megatron import engine
from tests.megatron.engine import Run

LATE = (0, 0, 3, 5)
SETTINGS = {
    "greedy": {"top_k": 1},
    "temperature": {"temperature": 0.8},
    "top-p": {"temperature": 1.2, "top_p": 0.9},
    "top-k": {"top_k": 8},
}
pytestmark = pytest.mark.usefixtures("uninstalled")


@pytest.fixture
def run(model_and_config: tuple[Any, Any]) -> Callable[..., Run]:
    def run(num_drafts: int, setting: str, arrivals: Any = LATE, **options: Any) -> Run:
        from megatron.core.inference.sampling_params import SamplingParams

        params = SamplingParams(num_tokens_to_generate=40, **SETTINGS[setting])
        built = engine.make_engine(*model_and_config, num_drafts, **options)
        return engine.generate(built, params, arrivals=arrivals)

    return run


@pytest.fixture
def greedy_without_drafts(run: Callable[..., Run]) -> list[list[int]]:
    return run(0, "greedy").tokens


@pytest.mark.parametrize("num_drafts", range(4))
@pytest.mark.parametrize("kernels", ["reference", "triton"])
@pytest.mark.parametrize("setting", ["greedy", "temperature"])
def test_functions_give_megatrons_tokens(
    run: Callable[..., Run], num_drafts: int, kernels: str, setting: str
) -> None:
    theirs = run(num_drafts, setting)
    megatron.install(kernels=kernels)
    ours = run(num_drafts, setting)
    assert ours.tokens == theirs.tokens
    assert (ours.steps, ours.proposed, ours.accepted) == (
        theirs.steps,
        theirs.proposed,
        theirs.accepted,
    )


@pytest.mark.parametrize("num_drafts", range(4))
def test_greedy_output_does_not_depend_on_drafts(
    run: Callable[..., Run], num_drafts: int, greedy_without_drafts: list[list[int]]
) -> None:
    megatron.install(sampling=True)
    assert run(num_drafts, "greedy").tokens == greedy_without_drafts


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_output_depends_on_neither_drafts_nor_batch(
    run: Callable[..., Run], setting: str
) -> None:
    megatron.install(sampling=True)
    expected = run(0, setting, arrivals=(0, 0, 0, 0))
    assert len({tuple(tokens) for tokens in expected.tokens}) == len(engine.PROMPTS)
    for num_drafts in (1, 2, 3):
        found = run(num_drafts, setting)
        assert found.tokens == expected.tokens
        assert all(0 < count < found.proposed[0] for count in found.accepted)


@pytest.mark.parametrize("setting", ["temperature", "top-p"])
def test_drafts_share_the_noise_of_their_target_token(
    run: Callable[..., Run], setting: str
) -> None:
    """Acceptance is higher than with independent random numbers, or those of another index."""
    theirs = run(3, setting)
    megatron.install(sampling=True)
    ours = run(3, setting)
    rates = [sum(each.accepted) / each.proposed[0] for each in (theirs, ours)]
    assert rates[1] > 1.5 * rates[0]


def test_triton_sampling_gives_the_reference_tokens(run: Callable[..., Run]) -> None:
    runs = []
    for kernels in ("reference", "triton"):
        megatron.install(sampling=True, kernels=kernels)
        runs.append(run(3, "top-p").tokens)
        megatron.uninstall()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_both_sampling_backends_give_the_same_tokens(
    run: Callable[..., Run], num_drafts: int
) -> None:
    megatron.install(sampling=True)
    tokens = run(num_drafts, "top-p").tokens
    assert run(num_drafts, "top-p", sampling_backend="flashinfer").tokens == tokens


def test_default_parameters_sample(model_and_config: tuple[Any, Any]) -> None:
    from megatron.core.inference.sampling_params import SamplingParams

    megatron.install(sampling=True)
    outputs = []
    for params in (SamplingParams(), SamplingParams(top_k=1)):
        params.num_tokens_to_generate = 20
        built = engine.make_engine(*model_and_config, 2)
        outputs.append(engine.generate(built, params, [[5], [5], [5]]).tokens)
    sampled, greedy = outputs
    assert len({tuple(tokens) for tokens in sampled}) == 3
    assert len({tuple(tokens) for tokens in greedy}) == 1


def test_kv_rewinds_cross_a_block_boundary(
    run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, greedy_without_drafts: Any
) -> None:
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    megatron.install()
    released = []
    rewind = text_generation_controller.rewind_kv_cache

    @functools.wraps(rewind)
    def counted(*args: Any, **named: Any) -> Any:
        rewound = rewind(*args, **named)
        released.append(int(rewound.remove_mask.sum()))
        return rewound

    with monkeypatch.context() as patch:
        patch.setattr(text_generation_controller, "rewind_kv_cache", counted)
        assert run(3, "greedy").tokens == greedy_without_drafts
    assert sum(released) > 3


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_asynchronous_scheduling_gives_megatrons_tokens(
    run: Callable[..., Run], num_drafts: int, greedy_without_drafts: list[list[int]]
) -> None:
    megatron.install()
    assert run(num_drafts, "greedy", async_sched_mode="async").tokens == greedy_without_drafts


def test_asynchronous_scheduling_is_refused_with_sampling(run: Callable[..., Run]) -> None:
    megatron.install(sampling=True)
    with pytest.raises(HostError, match=r"expected InferenceConfig\.async_sched_mode 'legacy'"):
        run(2, "greedy", async_sched_mode="async")


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_prefix_caching_and_chunked_prefill_give_megatrons_tokens(
    model_and_config: tuple[Any, Any], num_drafts: int
) -> None:
    from megatron.core.inference.sampling_params import SamplingParams

    shared = [7, 8, 9, 10] * 20
    prompts = [[*shared, 1], [*shared, 2, 3], [*shared, 4, 5, 6], [1, 2]]
    params = SamplingParams(num_tokens_to_generate=30, top_k=1)
    options = {"enable_prefix_caching": True, "enable_chunked_prefill": True, "max_tokens": 64}

    def tokens() -> list[list[int]]:
        built = engine.make_engine(*model_and_config, num_drafts, **options)
        return engine.generate(built, params, prompts, arrivals=(0, 2, 4, 4)).tokens

    theirs = tokens()
    megatron.install(sampling=True)
    assert tokens() == theirs


@pytest.mark.parametrize("setting", ["greedy", "temperature"])
def test_paused_and_evicted_requests_give_the_same_tokens(
    model_and_config: tuple[Any, Any], setting: str
) -> None:
    from megatron.core.inference.sampling_params import SamplingParams

    params = SamplingParams(num_tokens_to_generate=60, **SETTINGS[setting])
    tokens, evicted = [], []
    megatron.install(sampling=True)
    for num_drafts, buffer_size_gb in ((0, 0.05), (0, 0.00008), (3, 0.00008)):
        built = engine.make_engine(*model_and_config, num_drafts, buffer_size_gb=buffer_size_gb)
        update = built.context.update_requests

        def counted(*args: Any, update: Callable[..., Any] = update, **named: Any) -> Any:
            result = update(*args, **named) or {}
            ids = result.get("evict_request_ids")
            evicted.append(0 if ids is None else len(ids))
            return result

        evicted.clear()
        built.context.update_requests = counted
        tokens.append(engine.generate(built, params).tokens)
        assert (sum(evicted) > 0) == (buffer_size_gb < 0.01)
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize("skip_prompt", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_log_probs_are_those_of_megatron(
    model_and_config: tuple[Any, Any], num_drafts: int, skip_prompt: bool
) -> None:
    from megatron.core.inference.sampling_params import SamplingParams

    params = SamplingParams(
        num_tokens_to_generate=20,
        top_k=1,
        return_log_probs=True,
        skip_prompt_log_probs=skip_prompt,
        top_n_logprobs=3,
    )
    # prompt log-probabilities need all logits, of which rows are gathered for sampling
    options = {"materialize_only_last_token_logits": skip_prompt}
    runs = []
    for is_installed in (False, True):
        if is_installed:
            megatron.install(sampling=True)
        built = engine.make_engine(*model_and_config, num_drafts, **options)
        runs.append(engine.generate(built, params, arrivals=LATE))
    assert runs[0].tokens == runs[1].tokens
    for theirs, ours in zip(runs[0].requests, runs[1].requests, strict=True):
        assert ours.prompt_log_probs == theirs.prompt_log_probs
        assert ours.generated_log_probs == theirs.generated_log_probs
        assert ours.generated_top_n_logprobs == theirs.generated_top_n_logprobs


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_rewind_of_made_up_mamba_states(
    model_and_config: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """The controller's rewind with states that no Mamba model made: those need mamba-ssm."""
    built = engine.make_engine(*model_and_config, 3)
    controller, context = built.controller, built.context
    layers, slots, requests = 2, 5, 3
    rng = torch.Generator().manual_seed(0)
    shapes = {"conv": (4, 6), "ssm": (2, 3, 5)}
    accepted = torch.tensor([0, 3, 1])
    slot_of = torch.tensor([4, 0, 2], dtype=torch.int32)
    context.total_request_count = requests
    context.request_in_prefill_status_tensor[:requests] = torch.tensor([0, 0, 1])
    context.request_last_kv_block_offset[:requests] = 9
    monkeypatch.setattr(context, "is_hybrid_model", True)
    context.num_mamba_layers = layers
    context.mamba_metadata = SimpleNamespace(request_to_mamba_state_idx=slot_of)
    context.gpu_view = SimpleNamespace(
        request_in_prefill_status=torch.tensor([0, 0, 1], dtype=torch.int32)
    )
    controller._accepted_token_counts_per_request[:requests] = accepted
    intermediate, current = {}, {}
    for name, shape in shapes.items():
        intermediate[name] = torch.randn(layers, slots, 4, *shape, generator=rng)
        current[name] = torch.randn(layers, slots, *shape, generator=rng)

    def rewound() -> dict[str, torch.Tensor]:
        for name in shapes:
            setattr(context, f"mamba_intermediate_{name}_states", intermediate[name])
            setattr(context, f"mamba_{name}_states", current[name].clone())
        controller._rewind_kv_cache()
        return {name: getattr(context, f"mamba_{name}_states") for name in shapes}

    theirs = rewound()
    megatron.install(kernels=kernels)
    ours = rewound()
    for name in shapes:
        assert torch.equal(ours[name], theirs[name])
        assert torch.equal(ours[name][:, 0], intermediate[name][:, 0, 3])
        assert torch.equal(ours[name][:, 2], current[name][:, 2])


def test_example_of_the_page_runs(
    model_and_config: tuple[Any, Any],  # noqa: ARG001
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = Path(megatron.__file__).with_name("README.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], {})
    assert capsys.readouterr().out.startswith("mtp_plugin is installed in Megatron-Core 0.19.2")
    assert not megatron.status().installed


def test_uninstall_restores_megatrons_names(model_and_config: tuple[Any, Any]) -> None:  # noqa: ARG001
    from megatron.core.inference.text_generation_controllers import text_generation_controller

    before = dict(vars(text_generation_controller))
    status = megatron.install(sampling=True)
    changed = {
        name
        for name, value in vars(text_generation_controller).items()
        if value is not before[name]
    }
    assert changed == set(status.replaced)
    # in a Git repository Megatron-Core appends "+" and its commit
    assert status.version.partition("+")[0] == "0.19.2"
    assert status.sampling
    megatron.uninstall()
    assert vars(text_generation_controller) == before
    assert not megatron.status().installed

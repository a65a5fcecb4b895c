"""Which backend a config gets, what is refused, and the whole executor over each."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from mtp_plugin.errors import ConfigError
from mtp_plugin.hosts.embedded import LLM, SamplingParams
from mtp_plugin.hosts.embedded.attention import (
    TRITON_BACKEND,
    HeadShape,
    backend,
    find_backend,
    select_backend,
)
from tests.hosts.embedded.conftest import Harness, assert_drained

HEADS = HeadShape(8, 2, 64, 64)
LATENT = HeadShape(8, 1, 512, 64, latent=True)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@pytest.mark.parametrize(
    ("heads", "device", "name"),
    [
        (HEADS, "cuda", "triton"),
        (HEADS, "cpu", "sdpa"),
        (LATENT, "cuda", "sdpa"),
        (HeadShape(8, 2, 512, 512), "cuda", "sdpa"),
        (HeadShape(8, 2, 192, 128), "cuda", "sdpa"),
    ],
)
def test_auto(heads: HeadShape, device: str, name: str) -> None:
    assert select_backend("auto", heads, device).name == name


def test_names_and_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"^attn_backend: expected one of auto, sdpa, triton, got 'flash'$"
    ):
        find_backend("flash")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert select_backend("auto", HEADS, "cuda").name == "sdpa"
    with pytest.raises(ConfigError, match="but the package triton is not installed"):
        select_backend("triton", HEADS, "cuda")


def test_auto_with_a_triton_that_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> backend.AttentionBackend:
        raise ImportError("libcuda.so is missing")

    monkeypatch.setitem(backend.BACKENDS, "triton", broken)
    assert select_backend("auto", HEADS, "cuda").name == "sdpa"


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (LATENT, r"its cache holds latents \(key width 512, value width 64\)"),
        (HeadShape(8, 2, 192, 128), "of one width, got key width 192, value width 128"),
        (HeadShape(8, 2, 257, 257), "expected heads up to 256 wide, got 257"),
        (HeadShape(8, 3, 64, 64), "whole groups per key head, got 8 over 3"),
    ],
)
def test_triton_refuses_heads(heads: HeadShape, message: str) -> None:
    with pytest.raises(
        ConfigError, match=f"^attn_backend: 'triton' cannot serve this model: .*{message}"
    ):
        select_backend("triton", heads, "cuda")
    assert select_backend("sdpa", heads, "cuda").name == "sdpa"


@pytest.mark.parametrize(("held", "serves"), [(99, False), (163, True), (227, True)])
def test_wide_heads_need_a_large_shared_memory(
    monkeypatch: pytest.MonkeyPatch, held: int, serves: bool
) -> None:
    properties = SimpleNamespace(shared_memory_per_block_optin=held * 1024)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    wide = HeadShape(8, 2, 256, 256)
    assert select_backend("auto", wide, "cuda").name == ("triton" if serves else "sdpa")
    assert select_backend("triton", HEADS, "cuda").name == "triton"
    if not serves:
        with pytest.raises(ConfigError, match="heads of 256 need 136 KiB of shared memory"):
            select_backend("triton", wide, "cuda")


def test_triton_refuses_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="it needs a CUDA device, got cpu"):
        select_backend("triton", HEADS, "cpu")


def test_heads_of_configs() -> None:
    assert HeadShape.of(
        SimpleNamespace(num_attention_heads=8, num_key_value_heads=2, head_dim=80, hidden_size=512)
    ) == HeadShape(8, 2, 80, 80)
    plain = SimpleNamespace(num_attention_heads=8, hidden_size=512)
    assert HeadShape.of(plain) == HeadShape(8, 8, 64, 64)
    latent = SimpleNamespace(num_attention_heads=8, kv_lora_rank=512, qk_rope_head_dim=64)
    assert HeadShape.of(latent) == LATENT


def test_the_package_imports_without_triton() -> None:
    """Without the package; in a separate process."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from mtp_plugin.hosts.embedded.attention import select_backend, HeadShape\n"
        "assert select_backend('auto', HeadShape(2, 1, 16, 16), 'cuda').name == 'sdpa'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@on_cpu
def test_a_config_of_latent_attention_cannot_ask_for_triton(mla_harness: Harness) -> None:
    with pytest.raises(ConfigError, match=r"cannot serve .*\(key width 32, value width 8\)"):
        mla_harness.llm(attn_backend="triton")
    with mla_harness.llm() as llm:
        assert llm.attn_backend.name == "sdpa"


NUM_TOKENS = 12


def generate(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert_drained(llm)
    return [output.token_ids for output in outputs]


@on_cpu
def test_lossless_over_triton(harness: Harness, target, prompts) -> None:
    """Chunked prompts with generations, padded pages, NaN in every unwritten row; the eagle worker
    runs so in `test_prompt_graphs`."""
    chosen = [prompts[0], prompts[1], prompts[5], prompts[6]]
    with harness.llm(
        k=2, vanilla=True, attn_backend="triton", max_num_tokens=24, kv_fill=float("nan")
    ) as llm:
        assert llm.attn_backend.name == "triton"
        assert harness.model.target.config._attn_implementation == TRITON_BACKEND
        got = generate(llm, chosen, NUM_TOKENS)
    assert got == [target.greedy(prompt, NUM_TOKENS) for prompt in chosen]


@on_cpu
def test_executors_of_one_model_keep_their_backends(harness: Harness, target) -> None:
    """The last one names the model's attention function; each runs its own."""
    first = harness.llm(k=0, attn_backend="triton")
    second = harness.llm(k=0)
    want = [target.greedy([1, 2, 3], 3)]
    assert second.attn_backend.name == "sdpa"
    assert generate(first, [[1, 2, 3]], 3) == want
    third = harness.llm(k=0, attn_backend="triton")
    assert generate(second, [[1, 2, 3]], 3) == want
    assert generate(third, [[1, 2, 3]], 3) == want

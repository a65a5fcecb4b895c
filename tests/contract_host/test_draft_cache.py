"""A host whose draft layers have a KV cache of their own, or a view of the target's."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.contract_host.host import make_host
from tests.contract_host.test_loop import ask, texts


@pytest.mark.parametrize("line", ["1.3b"])
@pytest.mark.parametrize("vanilla", [False, True], ids=["eagle", "vanilla"])
@pytest.mark.parametrize("yields", [False, True], ids=["in place", "another object"])
def test_the_draft_loop_runs_with_its_own(
    line, vanilla, yields, tiny_model, prompts, decoded, monkeypatch
):
    """The loop alone, and with the metadata that the host's context gives.

    Newer hosts find a view of the target's cache without ``use_separate_draft_kv_cache``.
    """
    host = make_host(line, tiny_model, vanilla=vanilla, overlap=False, warms_up=False)
    worker = host.engine.pieces.worker
    own, entered, drafted = worker.mtp_plugin_worker, [], []

    @contextmanager
    def context(_: Any, attn_metadata: Any, draft_kv_cache_manager: Any) -> Iterator[Any]:
        entered.append(draft_kv_cache_manager)
        yield copy.copy(attn_metadata) if yields else None
        entered.append("left")

    draft = own._draft

    def noting(step: Any, *arguments: Any) -> None:
        drafted.append((step.attn_metadata is host.engine.attn_metadata, entered[-1]))
        draft(step, *arguments)

    monkeypatch.setattr(type(worker), "get_draft_kv_cache_manager", lambda *_: "the drafts'")
    monkeypatch.setattr(type(worker), "draft_kv_cache_context", context)
    monkeypatch.setattr(own, "_draft", noting)
    assert host.generate(ask(prompts, [6, 6])) == texts(decoded, prompts, [6, 6])
    assert set(drafted) == {(not yields, "the drafts'")}
    assert entered == ["the drafts'", "left"] * len(drafted)


@pytest.mark.parametrize("line", ["1.3b"])
def test_a_host_that_cannot_switch_caches_drafts_in_the_targets(
    line, tiny_model, prompts, decoded, monkeypatch
):
    host = make_host(line, tiny_model, vanilla=False, overlap=False, warms_up=False)
    worker = type(host.engine.pieces.worker)
    monkeypatch.setattr(worker, "get_draft_kv_cache_manager", lambda *_: "the drafts'")
    for base in worker.__mro__:
        if "draft_kv_cache_context" in vars(base):
            monkeypatch.delattr(base, "draft_kv_cache_context")
    assert host.generate(ask(prompts, [6, 6])) == texts(decoded, prompts, [6, 6])

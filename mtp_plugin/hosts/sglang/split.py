"""Prefill in one engine, decode in another: the mark that travels with the first token.

The engine that prefills samples the first token and the first draft. Words of the token's row in
SGLang's ``MetadataBuffers`` that SGLang does not use carry what the engine that decodes needs: the
seed, and whether both engines and both requests have the same options.
"""

from __future__ import annotations

import hashlib
from importlib import import_module
from typing import Any

import torch

from mtp_plugin.errors import HostError
from mtp_plugin.hosts.sglang import VARIABLE
from mtp_plugin.hosts.sglang.engine_checks import fingerprint
from mtp_plugin.hosts.sglang.requests import admitted, signed, take_seed
from mtp_plugin.ops.step import STATUS_NO_FINITE_LOGIT, STATUS_OK
from mtp_plugin.requests.seeds import seed_words
from mtp_plugin.speculative.append_tokens import NO_FINITE_LOGITS
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import PREFIX

WORDS = slice(8, 14)
"""Columns of ``MetadataBuffers.output_ids`` [buffers, 16] int32: `_MAGIC`, hash of the engine's
options, seed (low, high), status of the first token, hash of the request's options."""
_MAGIC = 0x4D545031
_MASK = 2**32 - 1
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Fields of ``SamplingParams`` that must be equal in both engines, as penalties."""


def expect_free_words(buffers: Any) -> None:
    """Check the fresh ``MetadataBuffers`` of an engine.

    Raises:
        HostError: SGLang uses the words of the mark, or they are missing.
    """
    rows = buffers.output_ids
    if rows.dtype != torch.int32 or rows.shape[1] < WORDS.stop or rows[:, WORDS].any():
        raise HostError(
            "mtp_plugin: SGLang uses words 8 to 13 of MetadataBuffers.output_ids, in which the "
            f"plugin sends seeds: leave out --disaggregation-mode, or unset {VARIABLE}"
        )


def write_mark(row: torch.Tensor, req: Any, settings: EngineSettings) -> None:
    """Write the mark of a prefilled ``Req`` into a row [16] int32 of ``output_ids``."""
    low, high = seed_words(admitted(req).seed, 0)
    failure = getattr(req.to_finish, "message", None)
    status = STATUS_NO_FINITE_LOGIT if failure == NO_FINITE_LOGITS else STATUS_OK
    words = _MAGIC, _engine_word(settings), low, high, status, _request_word(req)
    row[WORDS] = torch.tensor([signed(word, 32) for word in words], dtype=torch.int32)


def take_mark(row: torch.Tensor, req: Any, settings: EngineSettings) -> str | None:
    """Give a ``Req`` that another engine prefilled the seed of that engine, if it has none itself.

    Args:
        row: [16] int32, of the request in ``output_ids``.

    Returns:
        Why it must end with an error; None: its first token is right.
    """
    magic, engine, low, high, status, own = (word & _MASK for word in row[WORDS].tolist())
    if magic != _MAGIC:
        return (
            "the engine that prefilled this request runs without mtp_plugin: install the package "
            f"and set {VARIABLE} there, too"
        )
    if engine != _engine_word(settings):
        return (
            "the engine that prefilled this request has another version or other options of "
            f"mtp_plugin, or another number of drafts: give {VARIABLE} and the options "
            "--speculative-... the same values on both sides"
        )
    seed, has_seed = low | high << 32, req.sampling_params.sampling_seed is not None
    if own != _request_word(req) or (has_seed and admitted(req).seed % 2**64 != seed):
        return (
            "the engine that prefilled this request got other sampling options for it: send the "
            "same body to both sides, and give both the same --preferred-sampling-params"
        )
    if status != STATUS_OK:
        return NO_FINITE_LOGITS
    take_seed(req, seed)
    return None


def is_fake(req: Any, backend: str) -> bool:
    """Whether nothing is transferred for a ``Req``: SGLang's warm-up or a probe of it."""
    host = import_module("sglang.srt.disaggregation.utils").FAKE_BOOTSTRAP_HOST
    return bool(req.bootstrap_host == host or (req.bootstrap_host is None and backend == "fake"))


def own_parameters(req: Any) -> dict[str, Any]:
    """Return sampling parameters that another prefill of a ``Req`` needs, which SGLang leaves
    out."""
    kept, given = admitted(req), req.sampling_params.custom_params or {}
    custom = {key: given[key] for key in given if key.startswith(PREFIX)}
    if not kept.options.speculate:  # a custom logit processor may be why
        custom[f"{PREFIX}speculate"] = False
    return {**_penalties(req), "sampling_seed": signed(kept.seed, 64), "custom_params": custom}


def _penalties(req: Any) -> dict[str, float]:
    """Return the penalties of a ``Req`` that count tokens."""
    penalties = admitted(req).penalties
    return {name: penalties[name] for name in sorted(penalties) if name != "min_new_tokens"}


def _engine_word(settings: EngineSettings) -> int:
    return int(fingerprint(settings, 0)[:8], 16)  # seeds of the engines may differ


def _request_word(req: Any) -> int:
    values = [float(getattr(req.sampling_params, name)) for name in _SAMPLING]
    text = f"{admitted(req).options!r} {_penalties(req)} {values}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)

"""Requests of SGLang: their options, keys ``mtp_...`` of ``custom_params``, and their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from mtp_plugin.errors import RequestError
from mtp_plugin.hosts.sglang.versions import installed
from mtp_plugin.requests.columns import TopPMass
from mtp_plugin.requests.options import INT32_MAX
from mtp_plugin.requests.seeds import sample_seed, seed_words
from mtp_plugin.requests.stopping import MAX_STOP_IDS, StopRule
from mtp_plugin.speculative.host import RequestFacts
from mtp_plugin.speculative.rows.options import EngineSettings
from mtp_plugin.speculative.rows.request_options import RequestOptions, read_request
from mtp_plugin.speculative.rows.request_slots import row_facts

_ADMITTED = "_mtp_plugin"
"""Attribute of a ``Req``."""
_HEALTH_CHECK = "HEALTH_CHECK"
"""With which SGLang begins the ``rid`` of a probe: when it probes must change no other request."""
_ALL = 1 << 30
"""SGLang's top_k of the whole vocabulary."""
_MASK = 2**32 - 1
_NEUTRAL = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
}
"""SGLang's penalties that the plugin applies in its place, and their values without effect."""
_MINIMUM = "min_new_tokens"
_MOST_PARENTS = 4096


@dataclass(frozen=True, eq=False)
class Admitted:
    """What a request has as long as it lives, through retractions; only its own is equal to it."""

    options: RequestOptions
    seed: int
    penalties: Mapping[str, float] = field(default_factory=dict)
    """Those of `_NEUTRAL` that have an effect."""

    @property
    def is_counted(self) -> bool:
        """Whether a penalty reads how often a token is in the output."""
        return bool(self.penalties.keys() - {_MINIMUM})


class Admission:
    """Checks requests of a scheduler process and gives them seeds, alike on all its ranks.

    Args:
        seed: from which requests without a seed get theirs, in the order of admission.
        rank: of data parallelism, each of which admits requests of its own, of ``num_ranks``.
    """

    def __init__(
        self, settings: EngineSettings, seed: int, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._rank, self._num_ranks = rank, num_ranks
        self._num_requests = 0

    def admit(self, req: Any) -> str | None:
        """Keep options, seed and penalties in a ``Req``, once; returns why it is refused, or
        None."""
        if hasattr(req, _ADMITTED):  # it was retracted
            return None
        problem, options = None, RequestOptions()
        if req.to_finish is None:  # SGLang has not refused it
            problem = request_problem(req, self._settings)
            if problem is None:
                options = read_request(req.sampling_params.custom_params, self._settings)
                if req.custom_logit_processor:  # which reads the output before the row
                    options = replace(options, speculate=False)
        setattr(req, _ADMITTED, Admitted(options, self._seed_of(req), _take_penalties(req)))
        return problem

    def _seed_of(self, req: Any) -> int:
        number = self._num_requests * self._num_ranks + self._rank
        self._num_requests += not req.rid.startswith(_HEALTH_CHECK)
        seed = req.sampling_params.sampling_seed
        if seed is None:
            low, high = seed_words(None, number & 0x7FFFFFFF, self._seed)
            return (low & _MASK) | (high & _MASK) << 32
        return int(seed) % 2**64


class OutputSeeds:
    """Gives each of the n outputs of a request its seed, where the front end sends them one by one:
    schedulers see neither their order nor, with data parallelism, all of them."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[Any, int]] = {}
        """id of the ``SamplingParams`` that the outputs of a request share -> these, and how many
        were sent."""

    def separate(self, request: Any) -> None:
        """Give SGLang's ``TokenizedGenerateReqInput`` parameters of its own, of one output."""
        params = getattr(request, "sampling_params", None)
        # one without tokens comes first, which fills the prefix cache
        if params is None or params.n <= 1 or params.max_new_tokens == 0:
            return
        _, index = self._sent.pop(id(params), (params, 0))
        if index + 1 < params.n:
            self._sent[id(params)] = params, index + 1
            if len(self._sent) > _MOST_PARENTS:  # their other outputs were aborted
                del self._sent[next(iter(self._sent))]
        request.sampling_params = own = copy(params)
        own.n = 1
        seed = own.sampling_seed
        if seed is not None and index:
            own.sampling_seed = signed(sample_seed(seed % 2**64, index) or 0, 64)


def _take_penalties(req: Any) -> dict[str, float]:
    """Return the penalties of a ``Req`` and make them neutral, so that SGLang applies none."""
    given = {name: getattr(req.sampling_params, name) for name in _NEUTRAL}
    given = {name: value for name, value in given.items() if value != _NEUTRAL[name]}
    if given:
        req.sampling_params = copy(req.sampling_params)
        for name in given:
            setattr(req.sampling_params, name, _NEUTRAL[name])
    return given


def _early_ids(req: Any) -> tuple[int, ...]:
    """Return the ids that must not come before ``min_new_tokens``: all of SGLang 0.5.23, which
    0.5.17 masks without ``eos_token_ids``."""
    ids = {*(req.sampling_params.stop_token_ids or ()), *(req.eos_token_ids or ())}
    if req.tokenizer is not None:
        ids |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())}
    return tuple(sorted(ids - {None}))


def request_problem(request: Any, settings: EngineSettings) -> str | None:
    """Return why a request is refused; lists every reason. None: it is served.

    Args:
        request: SGLang's ``TokenizedGenerateReqInput`` or ``Req``; other requests have no options.
    """
    if not hasattr(request, "custom_logit_processor"):
        return None
    problems = []
    try:
        read_request(request.sampling_params.custom_params, settings)
    except RequestError as error:
        problems.append(f"custom_params: {error}")
    is_scheduled = hasattr(request, "eos_token_ids")  # a Req
    params = request.sampling_params
    if params.n > 1 and request.bootstrap_room is not None:
        problems.append(
            f"n: expected 1 with prefill and decode in different engines (bootstrap_room), got "
            f"{params.n}: send {params.n} requests"
        )
    elif is_scheduled and params.n > 1 and params.max_new_tokens > 0:  # see `OutputSeeds`
        problems.append(
            f"n: expected 1 from a front end without the plugin, got {params.n}: send {params.n} "
            "requests with seeds of their own, or leave out --tokenizer-worker-num"
        )
    if params.min_new_tokens and is_scheduled:
        count = len(_early_ids(request))
        if count > MAX_STOP_IDS:
            problems.append(
                f"min_new_tokens: expected at most {MAX_STOP_IDS} ids that end the output, those "
                f"of the model included, got {count}: leave it out, or stop_token_ids"
            )
    if request.return_sampling_mask:
        problems.append("return_sampling_mask: not supported: leave it out")
    if (getattr(request.sampling_params, "beam_width", 1) or 1) > 1:
        problems.append("beam_width: expected 1: beam search does not sample token by token")
    return "; ".join(problems) or None


def admitted(req: Any) -> Admitted:
    """Return what `Admission.admit` kept in a ``Req``."""
    found: Admitted = getattr(req, _ADMITTED)
    return found


def take_seed(req: Any, seed: int) -> None:
    """Give an admitted ``Req`` the seed that another engine gave it."""
    setattr(req, _ADMITTED, replace(admitted(req), seed=seed))


def signed(value: int, bits: int) -> int:
    """Return the last bits of an integer as SGLang holds them, in two's complement."""
    half = 1 << bits - 1
    return (value + half) % (2 * half) - half


def slot_of(req: Any) -> Any:
    """Return the slot of a ``Req``; None: it has none."""
    return attrgetter(installed().slot)(req)


def row_owner(req: Any) -> tuple[Admitted | None, int]:
    """Return whose row a ``Req`` needs: another one after each retraction."""
    return getattr(req, _ADMITTED, None), req.retraction_count


def draft_limit(req: Any) -> int | None:
    """Return the most drafts of a step that a ``Req`` may accept; None: K."""
    found: Admitted | None = getattr(req, _ADMITTED, None)
    return None if found is None else found.options.draft_limit


def facts_of(req: Any) -> RequestFacts:
    """Return what the modes read of an admitted ``Req``; SGLang stops and masks requests by
    itself."""
    params = req.sampling_params
    is_greedy = params.top_k <= 1
    kept = admitted(req)
    penalties = dict(kept.penalties)
    minimum = int(penalties.pop(_MINIMUM, 0))
    return row_facts(
        kept.options,
        StopRule(
            max_length=INT32_MAX,
            prompt_len=len(req.origin_input_ids),
            min_tokens=minimum,
            end_ids=_early_ids(req) if minimum else (),
        ),
        TopPMass.ALL,
        min_tokens=minimum,
        **penalties,
        temperature=0.0 if is_greedy else params.temperature,
        top_k=0 if is_greedy or params.top_k >= _ALL else params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )


def slot_tokens(req: Any) -> Sequence[int]:
    """Return the ids of a request's next prefill, with its output if it was retracted."""
    return [*req.origin_input_ids, *req.output_ids]

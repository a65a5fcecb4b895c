"""Read a host engine's request: its options once, its state in every step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from typing_extensions import Self

from mtp_plugin.errors import RequestError
from mtp_plugin.ops.step import SamplingKind
from mtp_plugin.requests.admission import host_values
from mtp_plugin.requests.columns import Number, TopPMass
from mtp_plugin.requests.logprobs import Logprob, TokenLogprobs
from mtp_plugin.requests.options import OPTIONS, SamplingParams, is_greedy
from mtp_plugin.requests.seeds import ENGINE_SEED, seed_words
from mtp_plugin.requests.stopping import StopRule, TextWatch, stop_words

_NO_ATTRIBUTE: Any = object()
UNBOUNDED = sys.maxsize
"""Maximum length of a request without a limit."""


class StepStats(Protocol):
    """Counters of a request's generation steps."""

    def record(self, num_emitted: int, num_drafted: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """The properties of a request that do not change while it has a slot."""

    request_id: int
    stop: StopRule
    full_length: int = UNBOUNDED
    """Sequence length from which on the request has no drafts."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Requested options by their names in `OPTIONS`; missing ones have their defaults."""
    stats: StepStats | None = None
    """Records every generation step."""
    is_dummy: bool = False
    """A dummy request, whose output is discarded."""
    refused: str | None = None
    """Why the request cannot run: incompatible options; None: it can."""
    top_p_mass: TopPMass = TopPMass.TOP_K
    """What top-p is a share of, in the host's own sampler."""

    @classmethod
    def of(
        cls,
        request_id: int,
        params: SamplingParams,
        *,
        prompt_len: int,
        max_seq_len: int,
        end_ids: Iterable[int] = (),
        watch: TextWatch | None = None,
        stats: StepStats | None = None,
    ) -> Self:
        """Build from request options; arguments as for `StopRule.of`.

        Raises:
            RequestError: the options are incompatible.
        """
        stop = StopRule.of(
            params, prompt_len=prompt_len, max_seq_len=max_seq_len, end_ids=end_ids, watch=watch
        )
        return cls(request_id, stop, stop.max_length, params.requested_options(), stats)

    @property
    def sampling_kind(self) -> SamplingKind:
        """The sampling kind that a step needs to serve this request."""
        if any(OPTIONS[name].edits_logits for name in self.options):
            return SamplingKind.PROCESSED
        if any(OPTIONS[name].beyond_first_choice for name in self.options):
            return SamplingKind.SAMPLED
        return SamplingKind.GREEDY

    @property
    def num_logprobs(self) -> int | None:
        """Number of top-k logprobs per output token; None: logprobs are not requested."""
        count = self.options.get("logprobs")
        return None if count is None else int(count)

    def without(self, names: Iterable[str]) -> Self:
        """Return a copy without these options."""
        left_out = frozenset(names)
        kept = {name: value for name, value in self.options.items() if name not in left_out}
        return self if len(kept) == len(self.options) else replace(self, options=kept)

    @property
    def number(self) -> int:
        """31-bit request number, in submission order; determines the seed if none is set."""
        return self.request_id & 0x7FFFFFFF

    def columns(self, engine_seed: int = ENGINE_SEED) -> dict[str, Number | Sequence[Number]]:
        """Return the values of this request's `REQUEST_COLUMNS`.

        Args:
            engine_seed: seed of requests without one.
        """
        values: dict[str, Number | Sequence[Number]] = {
            name: value for name, value in self.options.items() if OPTIONS[name].column is not None
        }
        values["number"] = self.number
        if not is_greedy(self.options):
            values.setdefault("temperature", 1.0)
            values["seed"] = seed_words(
                self.options.get("seed"), self.number, engine_seed=engine_seed
            )
        values["prompt_len"] = self.stop.prompt_len
        values["stop_ids"] = self.stop.slot_ids or ()
        if self.top_p_mass:
            values["top_p_mass"] = self.top_p_mass
        return values


def own_facts(request: Any) -> RequestFacts | None:
    """Return the request's own ``facts``; None if TensorRT-LLM's fields have to be read."""
    own = getattr(request, "facts", None)
    return own if isinstance(own, RequestFacts) else None


def facts_of(request: Any, max_seq_len: int, *, reads_prompt: bool) -> RequestFacts:
    """Return the facts of a request, cached on it.

    Args:
        max_seq_len: as for `read_request`.
        reads_prompt: the prompt is being processed, so read the fields (again).
    """
    own = own_facts(request)
    if own is not None:
        return own
    kept: RequestFacts | None = getattr(request, "py_mtp_facts", None)
    # host engines copy all attributes of a request for its further samples
    if kept is None or reads_prompt or kept.request_id != request.request_id:
        kept = request.py_mtp_facts = read_request(request, max_seq_len)
    return kept


def needs_sampling(request: Any) -> bool:
    """Return whether a request needs more than the argmax of its logits; cached on the request
    unless it has ``facts``."""
    cached: bool | None = getattr(request, "py_mtp_needs_sampling", None)
    if cached is not None:
        return cached
    own = own_facts(request)
    if own is not None:
        return own.sampling_kind is not SamplingKind.GREEDY
    is_needed = any(OPTIONS[name].beyond_first_choice for name in host_values(request))
    request.py_mtp_needs_sampling = is_needed
    return is_needed


def read_request(request: Any, max_seq_len: int = UNBOUNDED) -> RequestFacts:
    """Return the facts of a request: its own ``facts``, else read from TensorRT-LLM's fields.

    EOS ids are ``py_end_id``, ``end_id`` and ``py_stop_ids``; negative ones are ignored. The prompt
    length is ``py_orig_prompt_len``, else the current number of tokens.

    Args:
        max_seq_len: maximum number of tokens of any request.
    """
    own = own_facts(request)
    if own is not None:
        return own
    prompt_len = getattr(request, "py_orig_prompt_len", None)
    if prompt_len is None:
        prompt_len = len(request.get_tokens(0))
    new_tokens = getattr(request, "py_max_new_tokens", None)
    longest = max_seq_len if new_tokens is None else min(max_seq_len, prompt_len + new_tokens)
    listed: list[Any] = [getattr(request, "py_end_id", None), getattr(request, "end_id", None)]
    listed += getattr(request, "py_stop_ids", None) or ()
    ends = [int(token) for token in listed if token is not None and token >= 0]
    options = host_values(request)
    rule = partial(
        StopRule,
        max_length=longest,
        prompt_len=prompt_len,
        end_ids=tuple(dict.fromkeys(ends)),
        words=tuple(map(tuple, _stop_words_of(request))),
        trtllm_words=True,
    )
    refused = None
    try:
        stop = rule(min_tokens=options.get("min_tokens", 0))
    except RequestError as error:
        # reported later: the caller cannot refuse a single request of its batch
        stop, refused = rule(), str(error)
        options.pop("min_tokens")
    return RequestFacts(
        request_id=request.request_id,
        stop=stop,
        full_length=getattr(request, "max_length", max_seq_len),
        options=options,
        stats=getattr(request, "py_acceptance", None),
        is_dummy=any(
            getattr(request, name, False) for name in ("is_dummy", "is_attention_dp_dummy")
        ),
        refused=refused,
        top_p_mass=TopPMass.MIN_P,
    )


def _stop_words_of(request: Any) -> list[list[int]]:
    """Return the stop words of a request as token ids.

    If the request has ``stop_words_list``, that is TensorRT-LLM's pair of lists; if that is None,
    ``py_stop_words_list`` is a plain list of words.
    """
    listed = getattr(request, "py_stop_words_list", None)
    pair = getattr(request, "stop_words_list", listed)
    return stop_words(listed if pair is None else pair, are_plain=pair is None)


def refuse(request: Any, why: str) -> None:
    """Mark a request to be finished by the sampler with this error, after its prompt."""
    request.py_mtp_refused = why


def refusal_of(request: Any) -> str | None:
    """Return the error set by `refuse`; None if the request was not refused."""
    reason: str | None = getattr(request, "py_mtp_refused", None)
    return reason


def slot_of(request: Any) -> int | None:
    """Return the sequence slot, ``py_seq_slot`` or the older ``seq_slot``; None without one."""
    slot: int | None = getattr(request, "py_seq_slot", _NO_ATTRIBUTE)
    return getattr(request, "seq_slot", None) if slot is _NO_ATTRIBUTE else slot


def epoch_of(request: Any) -> int:
    """Return the number of preemptions, 0 if the host engine does not count them."""
    return int(getattr(request, "py_epoch", 0))


def phase_of(request: Any) -> str:
    """Return the name of a request's state, of any host engine's enum; "" if it has no state."""
    state = getattr(request, "state", None)
    return "" if state is None else str(getattr(state, "name", state))


def ends_prompt(request: Any) -> bool | None:
    """Return whether the scheduled chunk ends the prompt; None if unknown."""
    is_last: bool | None = getattr(request, "is_last_context_chunk", None)
    return is_last


def token_after_chunk(request: Any) -> int:
    """Return the prompt token after the scheduled chunk, which must not be the last; 0 if the end
    of the chunk is unknown."""
    begin = getattr(request, "context_current_position", None)
    size = getattr(request, "context_chunk_size", None)
    if begin is None or size is None:
        return 0
    get_token = getattr(request, "get_token", None)  # get_tokens copies the list
    end = begin + size
    return int(request.get_tokens(0)[end] if get_token is None else get_token(0, end))


def num_listed_chunks(batch: Any) -> int:
    """Return the number of leading contexts whose chunks do not end their prompts, if the host
    engine lists them separately."""
    return len(getattr(batch, "context_requests_chunking", None) or ())


def num_drafted_of(request: Any) -> int:
    """Return the number of drafts that the current step verifies for a request."""
    given = getattr(request, "py_num_drafted", None)
    if given is not None:
        return int(given)
    count = len(request.py_draft_tokens or ())
    # the effective length excludes drafts that only pad the rows of a graph
    effective = getattr(request, "py_draft_tokens_effective_len", None)
    return count if effective is None else min(count, int(effective))


def set_num_verified(request: Any, count: int) -> None:
    """Write the number of verified drafts of a step to the request, if it has the field."""
    if hasattr(request, "py_num_draft_tokens_verified"):
        request.py_num_draft_tokens_verified = count


def append_logprobs(
    request: Any, logprobs: Iterable[TokenLogprobs], logprob_class: Callable[..., Any] = Logprob
) -> None:
    """Append logprobs of output tokens to TensorRT-LLM's ``py_result``, if the request has one.

    With ``py_logprobs_simple_format`` and no top-k logprobs, one number per token is appended.

    Args:
        logprob_class: the host engine's class, with ``logprob`` and ``rank``.
    """
    append = getattr(getattr(request, "py_result", None), "append_log_probs", None)
    if append is None:
        return
    is_simple = getattr(request, "py_logprobs_simple_format", False)
    is_simple = is_simple and not getattr(request, "py_num_logprobs", None)
    for of_token in logprobs:
        theirs: Any = of_token
        if is_simple:
            theirs = next(iter(of_token.values())).logprob
        elif logprob_class is not Logprob:
            theirs = {
                token: logprob_class(logprob=one.logprob, rank=one.rank)
                for token, one in of_token.items()
            }
        append([[theirs]])


def has_finished(request: Any) -> bool:
    """Return whether the host engine has marked the request as finished."""
    return bool(getattr(request, "is_finished", False))


def may_speculate(request: Any) -> bool:
    """Return whether drafts of the request are used."""
    return not getattr(request, "py_disable_speculative_decoding", False)


def take_back_tokens(request: Any, count: int) -> bool:
    """Remove the last tokens of a request; return False if the host engine cannot."""
    take_back = getattr(request, "take_back_tokens", None)
    if take_back is None:
        return False
    take_back(count)
    return True

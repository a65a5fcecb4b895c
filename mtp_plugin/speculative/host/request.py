"""What is read of a host's request: its facts when it gets its slot, its state at every step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from typing_extensions import Self

from mtp_plugin.errors import RequestError
from mtp_plugin.requests.admission import host_values
from mtp_plugin.requests.columns import Number
from mtp_plugin.requests.logprobs import Logprob, TokenLogprobs
from mtp_plugin.requests.options import OPTIONS, SamplingParams, is_greedy
from mtp_plugin.requests.seeds import ENGINE_SEED, seed_words
from mtp_plugin.requests.stopping import StopRule, TextWatch, stop_words
from mtp_plugin.speculative.step import SamplingKind

_NO_ATTRIBUTE: Any = object()
UNBOUNDED = sys.maxsize
"""A length that no request reaches."""


class StepStats(Protocol):
    """Counts what steps gave a request."""

    def record(self, num_emitted: int, num_drafted: int) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What does not change about a request while it has its slot."""

    request_id: int
    stop: StopRule
    full_length: int = UNBOUNDED
    """Tokens behind which its drafts are absent."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What it asks for, by the names of `OPTIONS`; the others change nothing."""
    stats: StepStats | None = None
    """Takes the counts of its steps."""
    is_dummy: bool = False
    """Nobody reads what it emits."""
    refused: str | None = None
    """Why it gets no token: options that do not go together."""

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
        """The facts of a request with these options; arguments as `StopRule.of`.

        Raises:
            RequestError: options that do not go together.
        """
        stop = StopRule.of(
            params, prompt_len=prompt_len, max_seq_len=max_seq_len, end_ids=end_ids, watch=watch
        )
        return cls(request_id, stop, stop.max_length, params.requested_options(), stats)

    @property
    def sampling_kind(self) -> SamplingKind:
        """What steps with this request need at least."""
        if any(OPTIONS[name].edits_logits for name in self.options):
            return SamplingKind.PROCESSED
        if any(OPTIONS[name].beyond_first_choice for name in self.options):
            return SamplingKind.SAMPLED
        return SamplingKind.GREEDY

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to tell beside each that is emitted; None: nothing is told."""
        asked = self.options.get("logprobs")
        return None if asked is None else int(asked)

    def without(self, names: Iterable[str]) -> Self:
        """The facts of a request that does not ask for these options."""
        left_out = frozenset(names)
        kept = {name: value for name, value in self.options.items() if name not in left_out}
        return self if len(kept) == len(self.options) else replace(self, options=kept)

    @property
    def number(self) -> int:
        """Tells it from other requests: 31 bits, in the order of handing in."""
        return self.request_id & 0x7FFFFFFF

    def columns(self, engine_seed: int = ENGINE_SEED) -> dict[str, Number | Sequence[Number]]:
        """What `REQUEST_COLUMNS` have of it.

        Args:
            engine_seed: that requests without a seed draw with.
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
        return values


def own_facts(request: Any) -> RequestFacts | None:
    """The facts that a request brings along; None: TensorRT-LLM's fields say them."""
    own = getattr(request, "facts", None)
    return own if isinstance(own, RequestFacts) else None


def facts_of(request: Any, max_seq_len: int, *, reads_prompt: bool) -> RequestFacts:
    """The facts of a request, which keeps them once they were read.

    Args:
        max_seq_len: as `read_request`. reads_prompt: its prompt is read, maybe again: so are they.
    """
    own = own_facts(request)
    if own is not None:
        return own
    kept: RequestFacts | None = getattr(request, "py_mtp_facts", None)
    # hosts copy the attributes of a request for its further samples
    if kept is None or reads_prompt or kept.request_id != request.request_id:
        kept = request.py_mtp_facts = read_request(request, max_seq_len)
    return kept


def needs_sampling(request: Any) -> bool:
    """Whether a request asks for more than the first choice of the logits; kept in a request that
    brings no facts."""
    told: bool | None = getattr(request, "py_mtp_needs_sampling", None)
    if told is not None:
        return told
    own = own_facts(request)
    if own is not None:
        return own.sampling_kind is not SamplingKind.GREEDY
    asked = host_values(request)
    told = request.py_mtp_needs_sampling = any(OPTIONS[name].beyond_first_choice for name in asked)
    return told


def read_request(request: Any, max_seq_len: int = UNBOUNDED) -> RequestFacts:
    """The facts of a request: its own ``facts``, or what TensorRT-LLM's fields say.

    End ids are ``py_end_id``, ``end_id`` and ``py_stop_ids``, those below 0 left out. The prompt
    has ``py_orig_prompt_len`` tokens, else as many as the request has now.

    Args:
        max_seq_len: tokens that any request can hold.
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
    )
    refused = None
    try:
        stop = rule(min_tokens=options.get("min_tokens", 0))
    except RequestError as error:
        # whoever runs the batch has no way to refuse one of its requests
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
    )


def _stop_words_of(request: Any) -> list[list[int]]:
    """The stop words of a request, as ids.

    A host whose requests have them as a tensor too, ``stop_words_list``, has the pair there; where
    that is None the list is one of words.
    """
    listed = getattr(request, "py_stop_words_list", None)
    pair = getattr(request, "stop_words_list", listed)
    return stop_words(listed if pair is None else pair, are_plain=pair is None)


def refuse(request: Any, why: str) -> None:
    """Have the sampler end a request with this error, when its prompt has been read."""
    request.py_mtp_refused = why


def refusal_of(request: Any) -> str | None:
    """Why the sampler is to end a request; None: it is not."""
    told: str | None = getattr(request, "py_mtp_refused", None)
    return told


def slot_of(request: Any) -> int | None:
    """The request's sequence slot, ``py_seq_slot`` or the older ``seq_slot``; None: it has none."""
    slot: int | None = getattr(request, "py_seq_slot", _NO_ATTRIBUTE)
    return getattr(request, "seq_slot", None) if slot is _NO_ATTRIBUTE else slot


def epoch_of(request: Any) -> int:
    """Grows with every preemption, where the host counts them."""
    return int(getattr(request, "py_epoch", 0))


def phase_of(request: Any) -> str:
    """Return the name of a request's state, of any host engine's enum; "" if it has no state."""
    state = getattr(request, "state", None)
    return "" if state is None else str(getattr(state, "name", state))


def ends_prompt(request: Any) -> bool | None:
    """Whether the scheduled chunk ends the prompt; None: the host does not say."""
    told: bool | None = getattr(request, "is_last_context_chunk", None)
    return told


def token_after_chunk(request: Any) -> int:
    """The prompt's token behind the scheduled chunk, which does not end it; 0 where the host does
    not say where the chunk ends."""
    begin = getattr(request, "context_current_position", None)
    size = getattr(request, "context_chunk_size", None)
    if begin is None or size is None:
        return 0
    tell = getattr(request, "get_token", None)  # a list of all of them is a copy
    return int(request.get_tokens(0)[begin + size] if tell is None else tell(0, begin + size))


def num_listed_chunks(batch: Any) -> int:
    """Contexts of a batch, first among them, whose chunks do not end their prompts, where the host
    lists them by themselves."""
    return len(getattr(batch, "context_requests_chunking", None) or ())


def num_drafted_of(request: Any) -> int:
    """Drafts that the step at hand verifies for a request."""
    told = getattr(request, "py_num_drafted", None)
    if told is not None:
        return int(told)
    count = len(request.py_draft_tokens or ())
    # drafts that only fill a graph's rows are not among those
    effective = getattr(request, "py_draft_tokens_effective_len", None)
    return count if effective is None else min(count, int(effective))


def set_num_verified(request: Any, count: int) -> None:
    """Tell how many drafts of a request its step verified, where a host counts them."""
    if hasattr(request, "py_num_draft_tokens_verified"):
        request.py_num_draft_tokens_verified = count


def append_logprobs(
    request: Any, logprobs: Iterable[TokenLogprobs], logprob_class: Callable[..., Any] = Logprob
) -> None:
    """Append what is told of emitted tokens to TensorRT-LLM's ``py_result``, where a request has
    one that takes it: a number a token where it asks for the ``py_logprobs_simple_format`` and for
    no others beside it.

    Args:
        logprob_class: the host's own, of ``logprob`` and ``rank``.
    """
    append = getattr(getattr(request, "py_result", None), "append_log_probs", None)
    if append is None:
        return
    is_simple = getattr(request, "py_logprobs_simple_format", False)
    is_simple = is_simple and not getattr(request, "py_num_logprobs", None)
    for told in logprobs:
        theirs: Any = told
        if is_simple:
            theirs = next(iter(told.values())).logprob
        elif logprob_class is not Logprob:
            theirs = {
                token: logprob_class(logprob=one.logprob, rank=one.rank)
                for token, one in told.items()
            }
        append([[theirs]])


def has_finished(request: Any) -> bool:
    """Whether no further token will come, as far as the host says."""
    return bool(getattr(request, "is_finished", False))


def may_speculate(request: Any) -> bool:
    """Whether a request's drafts count at all."""
    return not getattr(request, "py_disable_speculative_decoding", False)


def take_back_tokens(request: Any, count: int) -> bool:
    """Take the last tokens of a request back; False: the host's requests cannot."""
    take_back = getattr(request, "take_back_tokens", None)
    if take_back is None:
        return False
    take_back(count)
    return True

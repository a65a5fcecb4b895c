"""Verification methods from outside the package: their interface, registry and mode."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override

from mtp_plugin.errors import (
    PluginError,
    TensorContractError,
    describe_error,
    expect,
    format_value,
)
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.checks import INTEGERS, expect_tensor
from mtp_plugin.ops.logit_rows import process_logits
from mtp_plugin.ops.step import Accepted, SamplingKind
from mtp_plugin.speculative.host import DecodingOptions
from mtp_plugin.speculative.metrics.acceptance import Label
from mtp_plugin.speculative.verification.mode import VerificationInputs, VerificationMode
from mtp_plugin.verifications import (
    ENTRY_POINT_GROUP,
    METHODS,
    add_custom,
    custom_codes,
    is_custom,
    offered_methods,
    remove_custom,
)

_logger = logging.getLogger(__name__)


class CustomVerification(ABC):
    """A verification method from outside the package."""

    description: str = ""
    """Description for users; required."""
    keeps_output: bool = False
    """Whether sampled output equals decoding without drafts."""

    @abstractmethod
    def num_accepted(
        self, logits: torch.Tensor, draft_tokens: torch.Tensor, target_tokens: torch.Tensor
    ) -> torch.Tensor:
        """Return how many leading drafts of each request are accepted.

        Called once per step with all generations, also those of requests with other methods, whose
        results are ignored. It may be captured in a CUDA graph: torch ops only, no host
        synchronization, no Python branch on a device value. It must not change its arguments.

        Drafts that are absent or that their row masks are rejected whatever this returns. If it
        raises, or returns something else, the requests with this method end with an error.

        Args:
            logits: [G, K+1, V] of the target, any float dtype, after bias, masks and penalties,
                before temperature and truncation. Masked tokens are -inf, or NaN in raw logits.
            draft_tokens: [G, K] int64, ids of the vocabulary; 0 in place of absent drafts.
            target_tokens: [G, K+1] int64: the argmax of each row, or the sampled token of a request
                with a temperature; 0 in place of that of a row without finite logit, where every
                draft is masked.

        Returns:
            [G] integer, clamped to 0..K.
        """


_registered: dict[str, CustomVerification] = {}


def register_verification(name: str, method: CustomVerification) -> None:
    """Register a verification method in this process; the entry-point group
    ``mtp_plugin.verifications`` registers one in every process.

    Configs and requests then select it with ``verification: name``.

    Raises:
        PluginError: the name is taken or empty, or the object is not a `CustomVerification`.
    """
    expect(
        isinstance(name, str) and name.strip() != "",
        PluginError,
        f"register_verification: expected a name, got {format_value(name)}",
    )
    _expect_method(method, f"register_verification({name!r})")
    if _registered.get(name) is method:
        return
    if name in METHODS:
        taken_by = "a method of mtp_plugin"
    elif name in _registered:
        taken_by = type(_registered[name]).__name__
    elif name in offered_methods():
        taken_by = f"entry point {offered_methods()[name][0].value}"
    else:
        _registered[name] = method
        add_custom(name)
        return
    raise PluginError(f"verification method {name!r} is already registered: {taken_by}")


def unregister_verification(name: str) -> None:
    """Remove a registered method: new configs cannot name it. Engines that use it keep it.

    Raises:
        PluginError: no method was registered under this name.
    """
    if _registered.pop(name, None) is None:
        raise PluginError(f"verification method {name!r} was not registered")
    remove_custom(name)


def custom_verifications() -> Mapping[str, CustomVerification]:
    """Return the methods from outside the package: registered, or offered by entry points.

    An entry point is imported when its method is first looked up.
    """
    return _CustomVerifications()


class _CustomVerifications(Mapping[str, CustomVerification]):
    @override
    def __getitem__(self, name: str) -> CustomVerification:
        """Return the method of a name.

        Raises:
            KeyError: there is none.
            PluginError: its entry point cannot be loaded, or several have this name.
        """
        if name not in _registered:
            if not is_custom(name):
                raise KeyError(name)
            _registered[name] = _load(name)
        return _registered[name]

    @override
    def __contains__(self, name: object) -> bool:
        return is_custom(name)

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(custom_codes())

    @override
    def __len__(self) -> int:
        return len(custom_codes())


def _load(name: str) -> CustomVerification:
    """Import the method of an entry point."""
    point, *others = offered_methods()[name]
    source = f"entry point {name!r} of {ENTRY_POINT_GROUP} ({point.value})"
    if others:
        values = ", ".join(other.value for other in others)
        raise PluginError(f"{source}: another entry point has the same name ({values})")
    try:
        loaded = point.load()
        method = loaded() if isinstance(loaded, type) else loaded
    except (Exception, SystemExit) as error:  # an import may call sys.exit
        raise PluginError(f"{source} cannot be loaded: {describe_error(error)}") from error
    _expect_method(method, source)
    checked: CustomVerification = method
    return checked


def _expect_method(method: object, source: str) -> None:
    """Check that an object is a `CustomVerification` with valid attributes.

    Raises:
        PluginError: it is not.
    """
    try:
        problem = _problem_of(method)
    except Exception as error:  # of a property
        problem = f"raised {describe_error(error)} for description or keeps_output"
    expect(
        problem is None,
        PluginError,
        f"{source}: expected a CustomVerification object, but {format_value(method)} {problem}",
    )


def _problem_of(method: Any) -> str | None:
    if isinstance(method, type):
        return "is a class; create an object of it"
    if not isinstance(method, CustomVerification):
        return "does not derive from that class"
    description: Any = method.description
    keeps_output: Any = method.keeps_output
    if not isinstance(description, str) or not description:
        return f"has description {format_value(description)}, expected text"
    if not isinstance(keeps_output, bool):
        return f"has keeps_output {format_value(keeps_output)}, expected True or False"
    return None


def count_accepted(
    name: str,
    method: CustomVerification,
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    target_tokens: torch.Tensor,
) -> torch.Tensor:
    """Call ``num_accepted`` of a method, check its result and clamp it to 0..K, [G] int32.

    Args:
        draft_tokens: [G, K] integer; outside the vocabulary: absent.
        target_tokens: [G, K+1] integer; -1: no finite logit.

    Raises:
        PluginError, TensorContractError: as `call_custom`.
    """
    num_requests, draft_len = draft_tokens.shape
    # every id is valid as an index of gather, which raises otherwise, on CUDA for all requests
    is_token = (draft_tokens >= 0) & (draft_tokens < logits.shape[-1])
    drafts = torch.where(is_token, draft_tokens, 0).to(torch.int64)
    targets = target_tokens.clamp_min(0).to(torch.int64)
    counts = call_custom(
        f"verification method {name!r}",
        "num_accepted",
        method.num_accepted,
        (logits, drafts, targets),
        dtype=INTEGERS,
        shape=(num_requests,),
    )
    return counts.clamp(0, draft_len).to(torch.int32)


def call_custom(
    owner: str, name: str, method: Callable[..., object], args: tuple[Any, ...], **expected: Any
) -> torch.Tensor:
    """Call a method from outside the package and check its result.

    Args:
        owner, name: of the method, for messages.
        args: of the method; the result must be on the device of the first.
        expected: dtype and shape, as `expect_tensor`.

    Raises:
        PluginError: the method raised an error or exits the process.
        TensorContractError: the result has another type, dtype, shape or device.
    """
    device = args[0].device
    try:
        result = method(*args)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{owner}: {name} raised {describe_error(error)}") from error
    what = f"{owner}: result of {name}"
    # a subclass decides itself what an op on it does
    if type(result) is not torch.Tensor:
        given = format_value(result)
        raise TensorContractError(f"{what}: expected a torch.Tensor, no subclass, got {given}")
    return expect_tensor(what, result, device=device, **expected)


_failures: dict[int, str] = {}
"""Code of a method or drafter -> its last error."""


def record_failure(code: int, message: str) -> None:
    """Set the last error of the method or drafter with this code."""
    _failures[code] = message


def failure_of(code: int) -> str:
    """Return the last error of the method or drafter with this code."""
    return _failures.get(code, f"the worker returned status {code} for the request: unknown")


class CustomVerificationMode(VerificationMode):
    """Verifies the requests that select a method from outside the package.

    In PROCESSED steps the methods read a float32 copy of the logits; else the step's own rows.
    """

    name = "custom"
    reads_method = True

    def __init__(self, options: DecodingOptions, device: torch.device) -> None:
        super().__init__(options, device)
        codes = custom_codes()
        self._methods = {name: (codes[name], method) for name, method in _enabled(options).items()}
        """Method name -> its code in the slot column ``verification``, and the method."""
        self._failed: list[int] = []  # codes of the methods that failed in this step

    @cached_property
    @override
    def methods(self) -> frozenset[str]:
        return frozenset(self._methods)

    @classmethod
    @override
    def is_enabled(cls, options: DecodingOptions) -> bool:
        return any(is_custom(name) for name in options.mtp.verifications)

    @classmethod
    @override
    def check(cls, options: DecodingOptions) -> None:
        """Check the mode's options, and load the methods.

        Raises:
            PluginError: a method cannot be loaded.
        """
        _enabled(options)

    @classmethod
    @override
    def label(cls, options: DecodingOptions) -> Label | None:
        changing = {n: m for n, m in _enabled(options).items() if not m.keeps_output}
        if not changing:
            return None
        note = "; ".join(method.description for method in changing.values())
        return Label(
            name=cls.name, settings=", ".join(changing), note=f"{note}; may change the output"
        )

    @classmethod
    @override
    def changes_text(cls, options: DecodingOptions, requested: Mapping[str, Any]) -> bool:
        return _changes_text(_enabled(options), options, requested)

    @override
    def changes_output(self, options: DecodingOptions, requested: Mapping[str, Any]) -> bool:
        methods = {name: method for name, (_, method) in self._methods.items()}
        return _changes_text(methods, options, requested)

    @override
    def verify(
        self, inputs: VerificationInputs, rules: AcceptanceRules, *, backend: Backend
    ) -> AcceptanceRules:
        layout = inputs.layout
        if layout.draft_len == 0 or layout.num_generations == 0:
            return rules
        generations = slice(layout.num_contexts, layout.num_requests)
        code = inputs.expect_slots().read("verification", generations)
        logits = inputs.of_generations(self._processed_logits(inputs))
        targets, drafts = inputs.target_tokens(rules), inputs.drafts()
        matches = rules.forced_matches
        if matches is None:
            matches = torch.full_like(code, -1, dtype=torch.int32)
        self._failed = []
        for name, (own_code, method) in self._methods.items():
            if inputs.methods is not None and name not in inputs.methods:
                continue
            try:
                counts = count_accepted(name, method, logits, drafts, targets)
            except (PluginError, TensorContractError) as error:
                if logits.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise  # the capture itself may have failed
                if own_code not in _failures:
                    _logger.exception(
                        "verification method %r failed; its requests end with an error, or in vLLM "
                        "go on without drafts",
                        name,
                    )
                record_failure(own_code, str(error))
                self._failed.append(own_code)
                counts = torch.zeros_like(matches)
            matches = torch.where(code == own_code, counts, matches)
        return replace(rules, forced_matches=matches)

    @override
    def mark_failed(self, inputs: VerificationInputs, accepted: Accepted) -> None:
        failed, self._failed = self._failed, []
        layout = inputs.layout
        generations = slice(layout.num_contexts, layout.num_requests)
        for own_code in failed:
            code = inputs.expect_slots().read("verification", generations)
            accepted.status[generations].masked_fill_(code == own_code, own_code)

    def _processed_logits(self, inputs: VerificationInputs) -> torch.Tensor:
        if inputs.sampling_kind is not SamplingKind.PROCESSED:
            return inputs.logits
        return process_logits(inputs.logits, inputs.expect_rows(), inputs.expect_slots())


def _enabled(options: DecodingOptions) -> dict[str, CustomVerification]:
    """Return the methods from outside the package that a config enables."""
    known = custom_verifications()
    return {name: known[name] for name in options.mtp.verifications if name in known}


def _changes_text(
    methods: Mapping[str, CustomVerification],
    options: DecodingOptions,
    requested: Mapping[str, Any],
) -> bool:
    """Return whether the method of a request is one of ``methods`` and may change its output."""
    method = methods.get(requested.get("verification") or options.mtp.verifications[0])
    return method is not None and not method.keeps_output

"""Verification methods from outside the package: the registry, and what a step accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
import torch
from typing_extensions import override

from mtp_plugin import verifications
from mtp_plugin.config import MTPDecodingConfig, MTPPluginOptions
from mtp_plugin.errors import ConfigError, PluginError, TensorContractError
from mtp_plugin.ops.acceptance import AcceptanceRules
from mtp_plugin.ops.backend import Backend
from mtp_plugin.ops.sampling import DRAFT_COLUMNS
from mtp_plugin.ops.step import SamplingKind, StepLayout
from mtp_plugin.plugin import (
    CustomVerification,
    custom_verifications,
    register_verification,
    unregister_verification,
)
from mtp_plugin.speculative.drafting import make_verification_inputs
from mtp_plugin.speculative.host import DecodingOptions, HostStep
from mtp_plugin.speculative.verification import (
    CustomVerificationMode,
    VerificationInputs,
    Verifier,
    check_modes,
    count_accepted,
    failure_of,
    make_modes,
)
from tests.ops.on_device import DEVICE
from tests.ops.slots import slot_rows

K, VOCAB = 3, 8


class Constant(CustomVerification):
    """Returns the same counts in every step, and records its arguments."""

    description = "accept a constant number"

    def __init__(self, counts: Any = 99) -> None:
        self.counts = counts
        self.calls: list[tuple[torch.Tensor, ...]] = []

    @override
    def num_accepted(
        self, logits: torch.Tensor, draft_tokens: torch.Tensor, target_tokens: torch.Tensor
    ) -> torch.Tensor:
        self.calls.append((logits, draft_tokens, target_tokens))
        counts = self.counts
        if isinstance(counts, int):
            return torch.full((len(logits),), counts, dtype=torch.int64, device=DEVICE)
        return counts


@pytest.fixture
def method() -> Iterator[Constant]:
    """Registered as "constant"."""
    made = Constant()
    register_verification("constant", made)
    yield made
    unregister_verification("constant")


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets the entry points of the group, and forgets what was loaded from them."""

    def set_points(*points: tuple[str, str]) -> None:
        made = [EntryPoint(n, v, verifications.ENTRY_POINT_GROUP) for n, v in points]
        monkeypatch.setattr(verifications, "entry_points", lambda group: made)  # noqa: ARG005
        verifications.offered_methods.cache_clear()

    monkeypatch.setattr(verifications, "_custom_codes", dict(verifications._custom_codes))
    monkeypatch.setattr("mtp_plugin.speculative.verification.custom._registered", {})
    yield set_points
    verifications.offered_methods.cache_clear()


def options(*methods: str) -> DecodingOptions:
    config = MTPDecodingConfig(max_draft_len=K, mtp={"verification": list(methods)})
    return DecodingOptions.read(config)


def step(
    methods: list[str], kind: SamplingKind, values_of_all: Any = (), **changed: Any
) -> VerificationInputs:
    """A request per method, after a context; the argmax of each row is its column plus 1, and the
    drafts are 1, 7, 3."""
    number = len(methods)
    known = {**verifications.codes(), **verifications.custom_codes()}
    values: list[dict[str, Any]] = [
        {
            "verification": known[name],
            "draft_sampling": 0,
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "logprobs": -1,
            "seed": (1, 1),
            **dict(values_of_all),
        }
        for name in ["coupled", *methods]
    ]
    slots = slot_rows(values, DRAFT_COLUMNS)
    layout = StepLayout(
        (1,),
        number,
        K,
        torch.ones(1, dtype=torch.int32, device=DEVICE),
        torch.arange(1 + number * (K + 1), device=DEVICE),
    )
    logits = torch.zeros(1 + number * (K + 1), VOCAB, device=DEVICE)
    logits[1:].view(number, K + 1, VOCAB)[:, range(K + 1), range(1, K + 2)] = 1.0
    drafts = torch.tensor([1, 7, 3] * number, dtype=torch.int32, device=DEVICE)
    host = HostStep(
        layout,
        drafts,
        slots=slots,
        slot_ids=slots.slot_ids,
        manager=object(),
        sampling_kind=kind,
    )
    return make_verification_inputs(replace(host, **changed), logits)


def accept(methods: tuple[str, ...], inputs: VerificationInputs, backend: Backend) -> list[Any]:
    """The number of output tokens of each generation."""
    verifier = Verifier(make_modes(options(*methods), torch.device(DEVICE)))
    accepted = verifier.verify(inputs, backend=backend)
    return accepted.num_accepted[1:].tolist()


KINDS = [SamplingKind.GREEDY, SamplingKind.SAMPLED]


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("kind", KINDS)
def test_method_decides_for_its_requests_alone(
    method: Constant, kind: SamplingKind, backend: Backend
) -> None:
    inputs = step(["constant", "coupled", "constant"], kind)
    assert accept(("coupled", "constant"), inputs, backend) == [4, 2, 4]
    ((logits, drafts, targets),) = method.calls
    assert logits.shape == (3, K + 1, VOCAB)
    assert logits.data_ptr() == inputs.logits[1:].data_ptr()
    assert drafts.tolist() == [[1, 7, 3]] * 3
    assert targets.tolist() == [[1, 2, 3, 4]] * 3
    assert drafts.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize(("count", "tokens"), [(-5, 1), (0, 1), (1, 2), (3, 4), (10**6, 4)])
def test_counts_are_clamped(method: Constant, count: int, tokens: int, backend: Backend) -> None:
    """A negative count is 0, not a decision of the other rules."""
    method.counts = count
    inputs = step(["constant"], SamplingKind.GREEDY)
    assert accept(("constant",), inputs, backend) == [tokens]


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
@pytest.mark.usefixtures("method")
def test_masked_draft_is_never_accepted(value: float, kind: SamplingKind, backend: Backend) -> None:
    inputs = step(["constant"] * 2, kind)
    inputs.logits[1 + 1, 7] = value  # of the second draft of the first request
    assert accept(("constant",), inputs, backend) == [2, 4]


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("token", [-1, -7, VOCAB, 10**6])
def test_draft_outside_the_vocabulary_is_absent(
    method: Constant, token: int, backend: Backend
) -> None:
    inputs = step(["constant"], SamplingKind.GREEDY)
    inputs.draft_tokens[2] = token
    assert accept(("constant",), inputs, backend) == [3]
    ((_, drafts, _),) = method.calls
    assert drafts.tolist() == [[1, 7, 0]]


@pytest.mark.parametrize("backend", Backend)
def test_absent_drafts_are_not_accepted(method: Constant, backend: Backend) -> None:
    lens = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    inputs = step(["constant"] * 2, SamplingKind.GREEDY, draft_lens=lens)
    assert accept(("constant",), inputs, backend) == [1, 3]
    ((_, drafts, _),) = method.calls
    assert drafts.tolist() == [[0, 0, 0], [1, 7, 0]]


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("kind", KINDS)
def test_method_may_gather_the_probability_of_drafts_and_targets(
    method: Constant, monkeypatch: pytest.MonkeyPatch, kind: SamplingKind, backend: Backend
) -> None:
    """Also next to a request without drafts and a row without finite logit, where id 0, which takes
    the place of both, is accepted by no count."""

    def is_close(logits: torch.Tensor, drafts: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        probabilities = logits[:, :-1].softmax(-1)
        values = probabilities.gather(-1, drafts.unsqueeze(-1))
        best = probabilities.gather(-1, targets[:, :-1].unsqueeze(-1))
        return (best - values < 0.3).squeeze(-1).int().cumprod(dim=1).sum(dim=1)

    lens = torch.tensor([3, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    inputs = step(["constant"] * 4, kind, draft_lens=lens)
    last = inputs.logits[1:].view(4, K + 1, VOCAB)[3]
    last[1] = -torch.inf
    inputs.draft_tokens.view(4, K)[3, 1] = 0
    monkeypatch.setattr(method, "num_accepted", is_close)
    assert accept(("constant",), inputs, backend) == [4, 1, 2, 1]
    monkeypatch.undo()  # accepts everything
    assert accept(("constant",), inputs, backend) == [4, 1, 2, 1]


@pytest.mark.parametrize("backend", Backend)
def test_methods_read_processed_logits(method: Constant, backend: Backend) -> None:
    """Token 7 is a stop id before ``min_tokens``: a masked draft, which is not accepted."""
    held_back = {"prompt_len": 1, "min_tokens": 10**6, "stop_ids": [7]}
    inputs = step(["constant"] * 2, SamplingKind.PROCESSED, held_back)
    before = inputs.logits.clone()
    assert accept(("constant",), inputs, backend) == [2, 2]
    ((logits, _, _),) = method.calls
    assert logits[:, 1, 7].tolist() == [-torch.inf] * 2
    assert torch.equal(inputs.logits, before)


def test_rows_without_a_finite_logit_have_target_token_0(method: Constant) -> None:
    inputs = step(["constant"], SamplingKind.GREEDY)
    inputs.logits[1, 0] = torch.nan
    inputs.logits[2] = -torch.inf
    accept(("constant",), inputs, Backend.TORCH)
    ((_, _, targets),) = method.calls
    assert targets.tolist() == [[1, 0, 3, 4]]


def test_decisions_of_other_modes_stay(method: Constant) -> None:
    mode = CustomVerificationMode(options("constant"), torch.device(DEVICE))
    method.counts = 1
    inputs = step(["rejection", "constant", "coupled"], SamplingKind.GREEDY)
    others = torch.tensor([2, -1, -1], dtype=torch.int32, device=DEVICE)
    rules = AcceptanceRules(forced_matches=others)
    assert mode.verify(inputs, rules, backend=Backend.TORCH).forced_matches.tolist() == [
        2,
        1,
        -1,
    ]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, r"'constant': result of num_accepted: expected a torch\.Tensor, no subclass, got 3"),
        (torch.ones(2, dtype=torch.int64), r"\[1\]"),
        (torch.ones(1), "got .*float32"),
    ],
)
def test_result_of_another_kind_is_refused(
    method: Constant, monkeypatch: pytest.MonkeyPatch, result: Any, message: str
) -> None:
    monkeypatch.setattr(method, "num_accepted", lambda *_: result)
    inputs = step(["constant"], SamplingKind.GREEDY)
    with pytest.raises(TensorContractError, match=message):
        count_accepted(
            "constant",
            method,
            inputs.logits[1:].view(1, K + 1, VOCAB),
            inputs.draft_tokens.view(1, K),
            torch.zeros(1, K + 1, dtype=torch.int32, device=DEVICE),
        )


@pytest.mark.parametrize("backend", Backend)
@pytest.mark.parametrize("kind", [*KINDS, SamplingKind.PROCESSED])
def test_failed_method_is_the_status_of_its_requests(
    method: Constant, kind: SamplingKind, backend: Backend
) -> None:
    method.counts = 3.5
    inputs = step(["constant", "coupled", "constant"], kind)
    verifier = Verifier(make_modes(options("coupled", "constant"), torch.device(DEVICE)))
    accepted = verifier.verify(inputs, backend=backend)
    code = verifications.custom_codes()["constant"]
    assert accepted.status.tolist() == [0, code, 0, code]
    assert accepted.num_accepted.tolist() == [1, 1, 2, 1]
    assert "num_accepted" in failure_of(code)
    method.counts = 99
    accepted = verifier.verify(inputs, backend=backend)
    assert accepted.status.tolist() == [0] * 4


class WithoutDescription(Constant):
    description = ""


class Raising(Constant):
    @property
    def description(self) -> str:  # type: ignore[override]
        raise OSError("no\nfile")


class WithWrongFlag(Constant):
    keeps_output = "yes"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", Constant(), "expected a name, got ''"),
        (7, Constant(), "expected a name, got 7"),
        ("coupled", Constant(), "'coupled' is already registered: a method of mtp_plugin"),
        ("synthetic", Constant(), "'synthetic' is already registered"),
        ("constant", Constant(), "'constant' is already registered: Constant"),
        ("other", Constant, "is a class; create an object of it"),
        ("other", object(), "does not derive from that class"),
        ("other", WithoutDescription(), "has description '', expected text"),
        ("other", Raising(), "raised OSError: no file for description or keeps_output"),
        ("other", WithWrongFlag(), "has keeps_output 'yes', expected True or False"),
    ],
)
def test_invalid_registration(method: Constant, name: Any, value: Any, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        register_verification(name, value)
    register_verification("constant", method)  # the same object again
    assert dict(custom_verifications()) == {"constant": method}


def test_unregistered_method() -> None:
    with pytest.raises(PluginError, match="'constant' was not registered"):
        unregister_verification("constant")
    register_verification("constant", Constant())
    made, code = options("constant"), verifications.custom_codes()["constant"]
    unregister_verification("constant")
    with pytest.raises(ConfigError, match="got 'constant', which is not registered"):
        check_modes(made)
    with pytest.raises(KeyError):
        custom_verifications()["constant"]
    register_verification("constant", Constant())
    assert verifications.custom_codes()["constant"] > code
    unregister_verification("constant")


@pytest.mark.parametrize(
    ("mtp", "message"),
    [
        (
            {"verification": "unknown"},
            "verification: expected one of 'coupled', 'rejection', 'block', 'synthetic', "
            "'constant', got 'unknown'",
        ),
        ({"verification": ["constant", "constant"]}, "'constant' twice"),
        (
            {"verification": "constant", "draft_sampling": "plain"},
            "'plain' cannot be verified by 'constant' verification; expected one of coupled, "
            "greedy",
        ),
    ],
)
@pytest.mark.usefixtures("method")
def test_config_errors(mtp: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        MTPPluginOptions(**mtp)
    assert message in str(raised.value)


@pytest.mark.usefixtures("method")
def test_config_is_written_with_the_name() -> None:
    for value in ("constant", ("coupled", "constant")):
        written = MTPPluginOptions(verification=value).model_dump()["verification"]
        assert written == value


def test_entry_point_is_found_by_name(offer: Any) -> None:
    offer(("offered", f"{__name__}:Constant"), ("broken", "no.such.module:thing"))
    assert list(custom_verifications()) == ["broken", "offered"]
    modes = make_modes(options("coupled", "offered"), torch.device("cpu"))
    assert [mode.name for mode in modes] == ["strict", "custom"]
    method = custom_verifications()["offered"]
    assert isinstance(method, Constant)
    assert custom_verifications()["offered"] is method


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            [("broken", "no.such.module:thing")],
            r"entry point 'broken' of mtp_plugin.verifications \(no.such.module:thing\) cannot be "
            "loaded: ModuleNotFoundError",
        ),
        ([("broken", f"{__name__}:VOCAB")], "but 8 does not derive from that class"),
        ([("broken", "sys:exit")], "expected a CustomVerification object"),
        ([("broken", "a:b"), ("broken", "c:d")], r"another entry point has the same name \(c:d\)"),
    ],
)
def test_entry_point_errors(offer: Any, points: list[tuple[str, str]], message: str) -> None:
    offer(*points)
    with pytest.raises(PluginError, match=message):
        check_modes(options("broken"))


def test_name_of_an_entry_point_is_taken(offer: Any) -> None:
    offer(("offered", "package:method"))
    with pytest.raises(PluginError, match=r"'offered' is already .*: entry point package:method"):
        register_verification("offered", Constant())

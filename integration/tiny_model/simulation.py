"""Speculative decoding without a cache: replayed on greedy texts, or run while sampling.

Greedy verification never changes the text, so the target's tokens and states are computed once
and each way of drafting is replayed on them; a sampled run computes the target at every step.
A draft layer's keys and values at a row depend only on the token and state that were fed there,
so a simulation keeps those pairs per row, as last written, and recomputes attention from them.
It needs no cache and yet sees stale or missing rows as an engine would.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from integration.tiny_model.model import TinyMtpModel

Choose = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Drafting:
    """A way of drafting: `eagle` reuses layer 1; `vanilla` has a chain rule and a row window."""

    name: str
    reuse_first_layer: bool = False
    target_shift: bool = False
    short_window: bool = False


EAGLE = Drafting("eagle", reuse_first_layer=True)
VANILLA = Drafting("vanilla, chain: output, draft_window: exact")
DRAFTINGS = (
    EAGLE,
    VANILLA,
    Drafting("vanilla, chain: target_shift, draft_window: exact", target_shift=True),
    Drafting("vanilla, chain: output, draft_window: trtllm", short_window=True),
    Drafting(
        "vanilla, chain: target_shift, draft_window: trtllm", target_shift=True, short_window=True
    ),
)


@dataclass(frozen=True)
class Continuation:
    """Greedy continuations of the target.

    Attributes:
        tokens: prompt and continuation `[B, T]`.
        states: the target's state after its final norm of every token `[B, T, H]`.
        prompt_length: tokens of each prompt.
        ends: the length at which each text is over `[B]`: by EOS or by the limit.
        changed: how many tokens one forward over the whole text predicts differently.
    """

    tokens: Tensor
    states: Tensor
    prompt_length: int
    ends: Tensor
    changed: int = 0


@dataclass(frozen=True)
class Tally:
    """Counts per text: steps and output tokens `[B]`, drafts reached and accepted `[B, K]`."""

    steps: Tensor
    emitted: Tensor
    reached: Tensor
    accepted: Tensor

    def acceptance_length(self) -> float:
        """Output tokens per target step."""
        return (self.emitted.sum() / self.steps.sum()).item()

    def acceptance(self) -> list[float]:
        """Share of a position's drafts that is accepted, over all steps."""
        return (self.accepted.sum(0) / self.steps.sum()).tolist()

    def conditional_acceptance(self) -> list[float]:
        """The same, over the steps whose earlier drafts were accepted."""
        return (self.accepted.sum(0) / self.reached.sum(0)).tolist()


def join_tallies(tallies: list[Tally]) -> Tally:
    """Merge the tallies of several batches."""
    return Tally(
        torch.cat([tally.steps for tally in tallies]),
        torch.cat([tally.emitted for tally in tallies]),
        torch.cat([tally.reached for tally in tallies]),
        torch.cat([tally.accepted for tally in tallies]),
    )


@torch.no_grad()
def continue_greedily(
    model: TinyMtpModel, prompts: Tensor, new_tokens: int, spare: int, eos: int
) -> Continuation:
    """Let the target continue `prompts` `[B, P]`, by full recomputation.

    `spare` tokens beyond `new_tokens` are generated for the last step's drafts to be checked.
    """
    tokens = prompts
    for _ in range(new_tokens + spare):
        states = model.states(tokens)
        chosen = model.lm_head(states[:, -1:]).argmax(-1)
        tokens = torch.cat([tokens, chosen], dim=1)
    states = model.states(tokens)
    start = prompts.shape[1]
    again = model.lm_head(states[:, start - 1 : -1]).argmax(-1)
    generated = tokens[:, start : start + new_tokens]
    is_end = torch.cat([generated == eos, torch.ones_like(generated[:, :1], dtype=torch.bool)], 1)
    ends = start + (is_end.int().argmax(1) + 1).clamp(max=new_tokens)
    changed = int((again != tokens[:, start:]).sum())
    return Continuation(tokens, states, start, ends, changed)


class _Rows:
    """The latest input pairs (token, hidden state) of one draft layer, per row."""

    def __init__(self, tokens: Tensor, states: Tensor) -> None:
        self.tokens = torch.zeros_like(tokens)
        self.states = torch.zeros_like(states)
        self.written = torch.zeros_like(tokens, dtype=torch.bool)

    def write(self, rows: Tensor, tokens: Tensor, states: Tensor) -> None:
        """Store the pairs of the marked `rows` `[B, T]`."""
        self.tokens = torch.where(rows, tokens, self.tokens)
        self.states = torch.where(rows.unsqueeze(-1), states, self.states)
        self.written = self.written | rows

    def outputs(self, model: TinyMtpModel, depth: int) -> Tensor:
        """Return the outputs `[B, T, H]` of layer `depth`, attending to earlier written rows."""
        length = self.tokens.shape[1]
        index = torch.arange(length, device=self.tokens.device)
        causal = index.unsqueeze(0) <= index.unsqueeze(1)
        own = index.unsqueeze(0) == index.unsqueeze(1)
        # an unused row attends to itself, which keeps its result finite
        mask = (causal & self.written.unsqueeze(1)) | own
        rotary = model.rotary(length)
        out: Tensor
        out, _ = model.mtp[depth](model.embed(self.tokens), self.states, rotary, mask.unsqueeze(1))
        return out


class Drafter:
    """Draft step by step along growing texts; stores the inputs of the draft layers."""

    def __init__(self, model: TinyMtpModel, drafting: Drafting, num_drafts: int) -> None:
        self.model = model
        self.drafting = drafting
        self.num_drafts = num_drafts
        self.memory: list[_Rows] = []

    def draft(self, text: Continuation, last: Tensor, choose: Choose) -> tuple[Tensor, Tensor]:
        """Draft after the bonus token at row `last + 1`: tokens `[B, K]`, logits `[B, K, V]`."""
        if not self.memory:
            layers = 1 if self.drafting.reuse_first_layer else self.num_drafts
            self.memory = [_Rows(text.tokens, text.states) for _ in range(layers)]
            fed = last + 1
        else:
            short = self.drafting.short_window
            fed = torch.full_like(last, self.num_drafts if short else self.num_drafts + 1)
        if self.drafting.reuse_first_layer:
            return _draft_reused(self.model, text, self.memory, last, choose, self.num_drafts)
        return _draft_chained(
            self.model, text, self.drafting, self.memory, last, fed, choose, self.num_drafts
        )


class Counter:
    """Accumulate a `Tally` step by step."""

    def __init__(self, batch: int, num_drafts: int, device: torch.device) -> None:
        self.counts = torch.zeros(batch, 2 + 2 * num_drafts, dtype=torch.long, device=device)
        self.num_drafts = num_drafts

    def add(self, hits: Tensor, active: Tensor) -> Tensor:
        """Count one step of the `active` texts `[B]`; returns the tokens each text gains `[B]`."""
        leading = hits.long().cumprod(1)
        gained = leading.sum(1) + 1
        reached = functional.pad(leading[:, :-1], (1, 0), value=1)
        columns = [torch.ones_like(gained).unsqueeze(1), gained.unsqueeze(1), reached, leading]
        self.counts += torch.cat(columns, dim=1) * active.long().unsqueeze(1)
        return gained * active.long()

    def tally(self) -> Tally:
        """Return the current counts."""
        counts = self.counts.cpu()
        reached, accepted = counts[:, 2:].split(self.num_drafts, dim=1)
        return Tally(counts[:, 0], counts[:, 1], reached, accepted)


@torch.no_grad()
def replay(model: TinyMtpModel, text: Continuation, drafting: Drafting, num_drafts: int) -> Tally:
    """Draft and verify step by step along the texts, all rows of the batch at once."""
    tokens, device = text.tokens, text.tokens.device
    ahead = torch.arange(2, num_drafts + 2, device=device)
    drafter = Drafter(model, drafting, num_drafts)
    counter = Counter(len(tokens), num_drafts, device)
    last = torch.full((len(tokens),), text.prompt_length - 1, device=device)
    while bool((active := last + 1 < text.ends).any()):
        drafts, _ = drafter.draft(text, last, _most_likely)
        hits = drafts == tokens.gather(1, last.unsqueeze(1) + ahead)
        # finished outputs stop advancing before an index leaves its range
        last = (last + counter.add(hits, active)).clamp(max=tokens.shape[1] - num_drafts - 2)
    return counter.tally()


@torch.no_grad()
def run_sampled(
    model: TinyMtpModel,
    prompts: Tensor,
    drafting: Drafting,
    num_drafts: int,
    new_tokens: int,
    generator: torch.Generator,
) -> tuple[Continuation, Tally]:
    """Speculative sampling at temperature 1: drafts are sampled and verified by rejection.

    EOS does not end a text here; it only separates documents.
    """
    device = prompts.device
    batch, start = prompts.shape
    tokens = functional.pad(prompts, (0, new_tokens + num_drafts + 2))
    drafter = Drafter(model, drafting, num_drafts)
    counter = Counter(batch, num_drafts, device)
    ahead = torch.arange(2, num_drafts + 2, device=device)
    last = torch.full((batch,), start - 1, device=device)
    ends = torch.full_like(last, start + new_tokens)

    def choose(logits: Tensor) -> Tensor:
        return _draw(logits.softmax(-1), generator)

    states = model.states(tokens)
    tokens[:, start] = choose(model.lm_head(states[:, start - 1]))
    # the states of the first bonus token and of the drafts come with the first verification
    while bool((active := last + 1 < ends).any()):
        text = Continuation(tokens, states, start, ends)
        drafts, logits = drafter.draft(text, last, choose)
        tokens = tokens.scatter(1, last.unsqueeze(1) + ahead, drafts)
        states = model.states(tokens)
        rows = last.unsqueeze(1) + torch.arange(1, num_drafts + 2, device=device)
        target = model.lm_head(states.take_along_dim(rows.unsqueeze(-1), 1)).softmax(-1)
        hits, bonus = _verify(target, logits.softmax(-1), drafts, generator)
        gained = counter.add(hits, active)
        moved = (last + gained).clamp(max=tokens.shape[1] - num_drafts - 2)
        place = (moved + 1).unsqueeze(1)
        kept = torch.where(active.unsqueeze(1), bonus.unsqueeze(1), tokens.gather(1, place))
        tokens, last = tokens.scatter(1, place, kept), moved
    return Continuation(tokens, states, start, ends), counter.tally()


def _verify(
    target: Tensor, draft: Tensor, drafts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return which drafts pass min(1, p / q) `[B, K]`, and the token after the accepted `[B]`."""
    p = target[:, :-1].gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    q = draft.gather(2, drafts.unsqueeze(-1)).squeeze(-1)
    hits = torch.rand(p.shape, generator=generator).to(p.device) * q < p
    accepted = hits.long().cumprod(1).sum(1)
    # after the last draft there is nothing to subtract
    residual = (target - functional.pad(draft, (0, 0, 0, 1))).clamp(min=0)
    return hits, _draw(_pick(residual, accepted), generator)


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One sample per row of unnormalised probabilities `[B, V] -> [B]`."""
    sampled = torch.multinomial(weights.cpu(), 1, generator=generator)
    return sampled.squeeze(1).to(weights.device)


def _most_likely(logits: Tensor) -> Tensor:
    return logits.argmax(-1)


def _draft_reused(
    model: TinyMtpModel,
    text: Continuation,
    memory: list[_Rows],
    last: Tensor,
    choose: Choose,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """Layer 1 on every verified row, then on one row per further draft."""
    rows = memory[0]
    index = torch.arange(text.tokens.shape[1], device=last.device)
    following = text.tokens.roll(-1, dims=1)
    rows.write(index <= last.unsqueeze(1), following, text.states)
    drafts, logits = [], []
    for depth in range(num_drafts):
        at = last + depth
        state = _pick(rows.outputs(model, 0), at)
        logits.append(model.lm_head(state))
        drafts.append(choose(logits[-1]))
        # the next row: this draft as its token, this output as its state
        here = index == at.unsqueeze(1) + 1
        rows.write(here, drafts[-1].unsqueeze(1), state.unsqueeze(1))
    return torch.stack(drafts, dim=1), torch.stack(logits, dim=1)


def _draft_chained(
    model: TinyMtpModel,
    text: Continuation,
    drafting: Drafting,
    memory: list[_Rows],
    last: Tensor,
    fed: Tensor,
    choose: Choose,
    num_drafts: int,
) -> tuple[Tensor, Tensor]:
    """One layer per depth on the last `fed` rows up to `last`."""
    length = text.tokens.shape[1]
    index = torch.arange(length, device=last.device)
    rows = (index <= last.unsqueeze(1)) & (index > (last - fed).unsqueeze(1))
    known = text.tokens
    shifted_states = text.states
    states = text.states
    drafts, logits = [], []
    for depth in range(num_drafts):
        memory[depth].write(rows, known.roll(-depth - 1, dims=1), states)
        out = memory[depth].outputs(model, depth)
        state = _pick(out, last)
        logits.append(model.lm_head(state))
        drafts.append(choose(logits[-1]))
        # the tokens after the bonus token are drafts
        guess = index == last.unsqueeze(1) + 2 + depth
        known = torch.where(guess, drafts[-1].unsqueeze(1), known)
        guess = (index == last.unsqueeze(1) + 1 + depth).unsqueeze(-1)
        shifted_states = torch.where(guess, state.unsqueeze(1), shifted_states)
        states = shifted_states.roll(-depth - 1, dims=1) if drafting.target_shift else out
    return torch.stack(drafts, dim=1), torch.stack(logits, dim=1)


def _pick(x: Tensor, row: Tensor) -> Tensor:
    """`[B, T, H]` at one row each: `[B, H]`."""
    return x[torch.arange(len(x), device=x.device), row]

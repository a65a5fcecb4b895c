"""Greedy speculative decoding replayed on the target's own greedy text.

Greedy verification never changes the text, so the target's tokens and states are computed once
and each way of drafting is replayed on them. A draft layer's keys and values at a row depend only
on the token and state that were fed there, so the replay keeps those pairs per row, as last
written, and recomputes attention from them. It needs no cache and yet sees stale or missing rows
as an engine would.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .model import MtpLayer, TinyMtpModel


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
    """What the target says greedily after each prompt.

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
    changed: int


@dataclass(frozen=True)
class Tally:
    """Counts per text: steps and emitted tokens `[B]`, drafts reached and accepted `[B, K]`."""

    steps: Tensor
    emitted: Tensor
    reached: Tensor
    accepted: Tensor

    def of(self, texts: Tensor) -> "Tally":
        """The counts of the marked texts `[B]` alone."""
        return Tally(
            self.steps[texts], self.emitted[texts], self.reached[texts], self.accepted[texts]
        )

    def acceptance_length(self) -> float:
        """Emitted tokens per target step."""
        return (self.emitted.sum() / self.steps.sum()).item()

    def acceptance(self) -> list[float]:
        """Share of a position's drafts that is accepted, over all steps."""
        return (self.accepted.sum(0) / self.steps.sum()).tolist()

    def conditional_acceptance(self) -> list[float]:
        """The same, over the steps whose earlier drafts were accepted."""
        return (self.accepted.sum(0) / self.reached.sum(0)).tolist()


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
    """The (token, state) pairs that one draft layer was fed, per row, as last written."""

    def __init__(self, tokens: Tensor, states: Tensor) -> None:
        self.tokens = torch.zeros_like(tokens)
        self.states = torch.zeros_like(states)
        self.written = torch.zeros_like(tokens, dtype=torch.bool)

    def write(self, rows: Tensor, tokens: Tensor, states: Tensor) -> None:
        """Store the pairs of the marked `rows` `[B, T]`."""
        self.tokens = torch.where(rows, tokens, self.tokens)
        self.states = torch.where(rows.unsqueeze(-1), states, self.states)
        self.written = self.written | rows

    def outputs(self, model: TinyMtpModel, layer: MtpLayer) -> Tensor:
        """The layer's output at every row, attending to the written rows up to it `[B, T, H]`."""
        length = self.tokens.shape[1]
        index = torch.arange(length, device=self.tokens.device)
        causal = index.unsqueeze(0) <= index.unsqueeze(1)
        own = index.unsqueeze(0) == index.unsqueeze(1)
        # a row that nobody wrote attends to itself only to keep its unused result finite
        mask = (causal & self.written.unsqueeze(1)) | own
        rotary = model.rotary(length)
        out, _ = layer(model.embed(self.tokens), self.states, rotary, mask.unsqueeze(1))
        return out


@torch.no_grad()
def replay(model: TinyMtpModel, text: Continuation, drafting: Drafting, num_drafts: int) -> Tally:
    """Draft and verify step by step along the texts, all rows of the batch at once."""
    tokens, device = text.tokens, text.tokens.device
    depths = torch.arange(1, num_drafts + 1, device=device)
    layers = 1 if drafting.reuse_first_layer else num_drafts
    memory = [_Rows(tokens, text.states) for _ in range(layers)]
    last = torch.full((len(tokens),), text.prompt_length - 1, device=device)
    fed = last + 1
    reached = torch.zeros(len(tokens), num_drafts, dtype=torch.long, device=device)
    accepted = torch.zeros_like(reached)
    steps, emitted = torch.zeros_like(last), torch.zeros_like(last)
    while bool((active := last + 1 < text.ends).any()):
        draft = _draft_reused if drafting.reuse_first_layer else _draft_chained
        drafts = draft(model, text, drafting, memory, last, fed, num_drafts)
        hits = drafts == tokens.gather(1, last.unsqueeze(1) + 1 + depths)
        leading = hits.long().cumprod(1)
        gained = leading.sum(1) + 1
        running = active.long()
        steps += running
        emitted += gained * running
        accepted += leading * running.unsqueeze(1)
        reached += functional.pad(leading[:, :-1], (1, 0), value=1) * running.unsqueeze(1)
        # finished texts stand still, so that no index runs off the end
        last = torch.where(active, last + gained, last).clamp(max=tokens.shape[1] - num_drafts - 2)
        window = num_drafts if drafting.short_window else num_drafts + 1
        fed = torch.full_like(last, window)
    return Tally(steps.cpu(), emitted.cpu(), reached.cpu(), accepted.cpu())


def _draft_reused(
    model: TinyMtpModel,
    text: Continuation,
    drafting: Drafting,  # noqa: ARG001
    memory: list[_Rows],
    last: Tensor,
    fed: Tensor,  # noqa: ARG001
    num_drafts: int,
) -> Tensor:
    """Layer 1 on every verified row, then on one row per further draft: `[B, num_drafts]`."""
    rows = memory[0]
    index = torch.arange(text.tokens.shape[1], device=last.device)
    following = text.tokens.roll(-1, dims=1)
    rows.write(index <= last.unsqueeze(1), following, text.states)
    drafts = []
    for depth in range(num_drafts):
        at = last + depth
        state = _pick(rows.outputs(model, model.mtp[0]), at)
        drafts.append(model.lm_head(state).argmax(-1))
        # the row behind: this draft as its token, this output as its state
        here = index == at.unsqueeze(1) + 1
        rows.write(here, drafts[-1].unsqueeze(1), state.unsqueeze(1))
    return torch.stack(drafts, dim=1)


def _draft_chained(
    model: TinyMtpModel,
    text: Continuation,
    drafting: Drafting,
    memory: list[_Rows],
    last: Tensor,
    fed: Tensor,
    num_drafts: int,
) -> Tensor:
    """One layer per depth on the last `fed` rows up to `last`: `[B, num_drafts]`."""
    length = text.tokens.shape[1]
    index = torch.arange(length, device=last.device)
    rows = (index <= last.unsqueeze(1)) & (index > (last - fed).unsqueeze(1))
    known = text.tokens
    shifted_states = text.states
    states = text.states
    drafts = []
    for depth in range(num_drafts):
        memory[depth].write(rows, known.roll(-depth - 1, dims=1), states)
        out = memory[depth].outputs(model, model.mtp[depth])
        state = _pick(out, last)
        drafts.append(model.lm_head(state).argmax(-1))
        # what lies behind the bonus token is guessed
        guess = index == last.unsqueeze(1) + 2 + depth
        known = torch.where(guess, drafts[-1].unsqueeze(1), known)
        guess = (index == last.unsqueeze(1) + 1 + depth).unsqueeze(-1)
        shifted_states = torch.where(guess, state.unsqueeze(1), shifted_states)
        states = shifted_states.roll(-depth - 1, dims=1) if drafting.target_shift else out
    return torch.stack(drafts, dim=1)


def _pick(x: Tensor, row: Tensor) -> Tensor:
    """`[B, T, H]` at one row each: `[B, H]`."""
    return x[torch.arange(len(x), device=x.device), row]

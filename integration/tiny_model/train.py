"""Train the tiny model on a standard library and export it.

    python -m integration.tiny_model.train --out DIR [--corpus DIR] [--minutes M] [--steps N]

The loss is DeepSeek-V3's, over the three chained layers, plus the same for layer 1 reused as
depths 2 and 3, plus an optional distillation term (`--distill`):

    L = L_main + lambda / D * (sum_k L_k + sum_{k>=2} L'_k)
    L_k = CE(token i+k+1) + distill * CE(the target's own distribution there, detached)
"""

import argparse
import json
import logging
import math
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from integration.tiny_model.corpus import default_corpus, read_manifest, read_texts
from integration.tiny_model.drafting import block_masks, dense_masks, draft_states
from integration.tiny_model.export import save_checkpoint
from integration.tiny_model.model import ModelShape, TinyMtpModel
from integration.tiny_model.tokenizer import encode_documents, load_tokenizer

HERE = Path(__file__).parent
LOG = logging.getLogger("train")


@dataclass(frozen=True)
class Recipe:
    """How to train; the schedule ends at `steps` or after `minutes`, whichever comes first."""

    steps: int = 4500
    minutes: float = 6.0
    batch_size: int = 32
    rows: int = 2048
    peak_lr: float = 3e-3
    final_lr_share: float = 0.01
    warmup_steps: int = 200
    weight_decay: float = 0.1
    dropout: float = 0.1
    clip: float = 1.0
    mtp_weight: float = 0.3
    late_mtp_weight: float = 0.1
    late_share: float = 0.3
    distill: float = 1.0
    balance_rate: float = 1e-3
    seed: int = 0


def load_stream(corpus: Path, manifest_path: Path, tokenizer_folder: Path, seed: int) -> Tensor:
    """The training files as one row of token ids, in seeded random order."""
    manifest = read_manifest(manifest_path)
    tokenizer = load_tokenizer(tokenizer_folder)
    generator = torch.Generator().manual_seed(seed)
    documents = encode_documents(tokenizer, read_texts(corpus, manifest.of_split("train")))
    order = torch.randperm(len(documents), generator=generator).tolist()
    return torch.tensor([token for index in order for token in documents[index]])


def windows(
    stream: Tensor, length: int, stride: int, batch_size: int, seed: int
) -> Iterator[Tensor]:
    """Endless batches `[batch_size, length]`; every pass shifts the cuts and reorders them."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(length, device=stream.device)
    while True:
        phase = int(torch.randint(stride, (), generator=generator))
        starts = torch.arange(phase, len(stream) - length, stride)
        starts = starts[torch.randperm(len(starts), generator=generator)]
        for batch in starts.split(batch_size):
            if len(batch) == batch_size:
                yield stream[batch.to(stream.device).unsqueeze(1) + offsets]


def main_loss(states: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the main model, and its distributions for the MTP layers to follow."""
    log_p = functional.linear(states, head).float().log_softmax(-1)
    loss = -log_p.gather(-1, labels.unsqueeze(-1)).mean()
    return loss, log_p.detach().exp().to(torch.bfloat16)


def draft_loss(
    states: Tensor, head: Tensor, labels: Tensor, target: Tensor, known: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one depth to the text and, on the `known` rows, to the target."""
    log_q = functional.linear(states, head).float().log_softmax(-1)
    to_text = -log_q.gather(-1, labels.unsqueeze(-1)).mean()
    to_target = -((target.float() * log_q).sum(-1) * known).sum() / (known.sum() * len(states))
    return to_text, to_target


class Trainer:
    """A training run."""

    def __init__(self, recipe: Recipe, stream: Tensor, device: torch.device) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe = recipe
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.stream = stream.to(device)
        self.model = TinyMtpModel(ModelShape(), recipe.dropout).to(device)
        self.depths = len(self.model.mtp)
        self.optimizer = self._optimizer()
        self.main_loss = main_loss
        self.draft_loss = draft_loss
        masks = block_masks if self.on_gpu else dense_masks
        self.masks: Sequence[BlockMask | Tensor] = masks(recipe.rows, self.depths, device)
        if self.on_gpu:
            self._compile()
        self.progress = 0.0
        self.expert_shares: list[Tensor] = []

    def _optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.recipe.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups, lr=self.recipe.peak_lr, betas=(0.9, 0.95), fused=self.on_gpu
        )

    def _compile(self) -> None:
        torch.set_float32_matmul_precision("high")
        for layer in [*self.model.layers, *self.model.mtp]:
            layer.compile(dynamic=False)
        self.main_loss = torch.compile(main_loss, dynamic=False)
        self.draft_loss = torch.compile(draft_loss, dynamic=False)

    def train(self, save: Path, tokenizer_folder: Path) -> dict[str, Any]:
        """Run the schedule, export to `save` and return what to report."""
        recipe = self.recipe
        length = recipe.rows + self.depths + 1
        batches = windows(self.stream, length, recipe.rows, recipe.batch_size, recipe.seed)
        self.model.train()
        began = time.monotonic()
        self._step(next(batches), step=0)
        compiled = time.monotonic()
        step = 1
        while self.progress < 1.0:
            elapsed = time.monotonic() - compiled
            self.progress = max(step / recipe.steps, elapsed / 60 / recipe.minutes)
            losses = self._step(next(batches), step)
            step += 1
            if step % 100 == 0:
                shown = " ".join(f"{loss:.3f}" for loss in losses.tolist())
                rate = step * recipe.batch_size * recipe.rows / (time.monotonic() - compiled) / 1e6
                LOG.info("%5d %3.0f%% %s  %.2f Mtok/s", step, 100 * self.progress, shown, rate)
        save_checkpoint(self.model, save, tokenizer_folder)
        tokens = step * recipe.batch_size * recipe.rows
        return {
            "steps": step,
            "tokens": tokens,
            "epochs": round(tokens / len(self.stream), 1),
            "seconds": round(time.monotonic() - began, 1),
            "seconds_compiling": round(compiled - began, 1),
            "expert_shares_of_last_step": [
                [round(share, 3) for share in shares.tolist()] for shares in self.expert_shares
            ],
        }

    def _step(self, window: Tensor, step: int) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            main, drafts = self._losses(window)
        # [0] cross-entropy to the text, [1] to the target
        drafts_loss = (drafts[:, 0] + self.recipe.distill * drafts[:, 1]).sum() / self.depths
        (main + self._mtp_weight() * drafts_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        rate = self.recipe.balance_rate * (1 - self.progress)
        self.expert_shares = [block.balance(rate) for block in self.model.expert_blocks()]
        return torch.cat([main.detach().unsqueeze(0), drafts[:, 0].detach()])

    def _losses(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """The main loss and `[2 D - 1, 2]` draft losses: chained depths, then reused from 2."""
        model, rows = self.model, self.recipe.rows
        head = model.lm_head.weight
        states = model.states(window[:, :rows])
        main, target = self.main_loss(states, head, window[:, 1 : rows + 1].contiguous())
        drafts = draft_states(model, window, states, self.masks)
        losses = []
        for depths in (list(enumerate(drafts.chained)), list(enumerate(drafts.reused))[1:]):
            for index, draft in depths:
                ahead = index + 1
                labels = window[:, ahead + 1 : ahead + 1 + rows].contiguous()
                known = (torch.arange(rows, device=self.device) < rows - ahead).float()
                aligned = target.roll(-ahead, dims=1)
                losses.append(torch.stack(self.draft_loss(draft, head, labels, aligned, known)))
        return main, torch.stack(losses)

    def _learning_rate(self, step: int) -> float:
        warm = min(1.0, (step + 1) / self.recipe.warmup_steps)
        floor = self.recipe.final_lr_share
        decay = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(self.progress, 1.0)))
        return self.recipe.peak_lr * warm * decay

    def _mtp_weight(self) -> float:
        late = self.progress > 1 - self.recipe.late_share
        return self.recipe.late_mtp_weight if late else self.recipe.mtp_weight


def training_report(recipe: Recipe, device: torch.device, result: dict[str, Any]) -> dict[str, Any]:
    """Return the training section of `report.json`."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "none"
    return {
        **result,
        "recipe": dict(vars(recipe)),
        "gpu": gpu,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def main() -> None:
    """Command line: every field of `Recipe` is an option."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=default_corpus())
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.json")
    parser.add_argument("--tokenizer", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    for name, default in vars(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")

    recipe = Recipe(**{name: getattr(args, name) for name in vars(Recipe())})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stream = load_stream(args.corpus, args.manifest, args.tokenizer, recipe.seed)
    LOG.info("tokens: %d", len(stream))
    trainer = Trainer(recipe, stream, device)
    checkpoint = args.out / "checkpoint"
    result = trainer.train(checkpoint, args.tokenizer)
    report = {"training": training_report(recipe, device, result)}
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

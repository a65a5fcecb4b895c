"""Train the thinking model on synthetic problems and write its checkpoint.

    python -m integration.thinking_model.train --out DIR [--seconds S]

The learning rate follows the share of `--seconds` that has passed, so that a slower device trains
fewer steps of the same schedule. The loss counts the tokens after the prompt only:

    L = L_main + lambda / K * sum_k (CE(token i+k+1) + CE(the target's own distribution, detached))

where depth k is the one MTP layer, reused k times with the attention that an engine gives it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from integration.bench.machine import describe_machine
from integration.thinking_model.problems import BEGIN, problems
from integration.thinking_model.tokenizer import VOCAB_SIZE, save_tokenizer, train_tokenizer
from integration.tiny_model.drafting import block_masks, dense_masks, draft_states
from integration.tiny_model.export import save_checkpoint
from integration.tiny_model.model import ModelShape, TinyMtpModel

HERE = Path(__file__).parent
LOG = logging.getLogger("train")
TOKENIZER_TEXTS = 5000
TRAINING_SEED = 1
"""The seeds of the training problems are this and the following ones."""


@dataclass(frozen=True)
class Recipe:
    """How to train."""

    seconds: float = 220.0
    """Of the whole run, including the generation of problems and compilation."""
    steps: int = 1_000_000
    """At most."""
    problems: int = 800_000
    batch_size: int = 256
    rows: int = 128
    """Longer texts are left out."""
    depths: int = 3
    """Reuses of the MTP layer: K."""
    layers: int = 8
    hidden_size: int = 256
    intermediate_size: int = 640
    peak_lr: float = 2e-3
    warmup_share: float = 0.03
    final_lr_share: float = 0.01
    weight_decay: float = 0.1
    clip: float = 1.0
    mtp_weight: float = 0.3
    distill: float = 1.0
    balance_rate: float = 1e-3
    seed: int = 0

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return ModelShape(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_nextn_predict_layers=1,
            max_position_embeddings=512,
        )


# --- problems as token ids ---


def make_tokenizer() -> Tokenizer:
    """Train the tokenizer on problems of its own seed."""
    texts = [each.text for each in islice(problems(0, held_out=False), TOKENIZER_TEXTS)]
    return train_tokenizer(texts)


def encode_problems(
    tokenizer_json: str, seed: int, count: int, length: int
) -> tuple[NDArray[np.int16], int]:
    """Return `[n, length]` token ids with negative prompts and padding, and the number left out.

    An id that is no label is stored as -1 - id: those of prompts, and the padding (id 0).
    """
    tokenizer = Tokenizer.from_str(tokenizer_json)
    begin = tokenizer.token_to_id(BEGIN)
    texts = [each.text for each in islice(problems(seed, held_out=False), count)]
    encoded = [each.ids for each in tokenizer.encode_batch(texts)]
    short = [ids for ids in encoded if len(ids) <= length]
    rows = []
    for ids in short:
        labels_from = ids.index(begin) + 1
        prompt = [-1 - token for token in ids[:labels_from]]
        rows.append([*prompt, *ids[labels_from:], *([-1] * (length - len(ids)))])
    return np.array(rows, dtype=np.int16), count - len(short)


def make_table(recipe: Recipe, tokenizer: Tokenizer, processes: int) -> Tensor:
    """Encode all problems of a recipe, in several processes if there are many."""
    chunk = 10_000
    counts = [chunk] * (recipe.problems // chunk)
    counts += [recipe.problems % chunk] if recipe.problems % chunk else []
    tasks = [
        (tokenizer.to_str(), TRAINING_SEED + number, count, recipe.rows + 1)
        for number, count in enumerate(counts)
    ]
    if processes == 1 or len(tasks) == 1:
        parts = [encode_problems(*task) for task in tasks]
    else:
        # forked before the device is in use: a spawned process would import torch again
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with ProcessPoolExecutor(processes, get_context("fork")) as pool:
            parts = list(pool.map(encode_problems, *zip(*tasks, strict=True)))
    if left_out := sum(number for _, number in parts):
        LOG.info("%d problems are longer than %d tokens", left_out, recipe.rows + 1)
    return torch.from_numpy(np.concatenate([table for table, _ in parts]))


def batches(table: Tensor, batch_size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches in another order at every pass."""
    generator = torch.Generator(table.device).manual_seed(seed)
    while True:
        order = torch.randperm(len(table), generator=generator, device=table.device)
        for rows in order.split(batch_size):
            if len(rows) == batch_size:
                yield table[rows].long()


# --- training ---


def main_loss(states: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the main model, and its distributions for the MTP layer to follow.

    Args:
        labels: `[B, S]`; negative: not counted.
    """
    log_p = functional.linear(states, head).float().log_softmax(-1)
    return _mean(-_picked(log_p, labels), labels >= 0), log_p.detach().exp().to(torch.bfloat16)


def draft_loss(
    states: Tensor, head: Tensor, labels: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of one depth to the text and to the target's distribution."""
    log_q = functional.linear(states, head).float().log_softmax(-1)
    counted = labels >= 0
    to_target = -(target.float() * log_q).sum(-1)
    return _mean(-_picked(log_q, labels), counted), _mean(to_target, counted)


def _picked(log_p: Tensor, labels: Tensor) -> Tensor:
    return log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def _mean(x: Tensor, counted: Tensor) -> Tensor:
    return (x * counted).sum() / counted.sum().clamp(min=1)


class Trainer:
    """A training run that ends `recipe.seconds` after `began`."""

    def __init__(
        self, recipe: Recipe, table: Tensor, device: torch.device, began: float, *, eager: bool
    ) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.on_gpu = device.type == "cuda"
        self.table = table.to(device)
        self.model = TinyMtpModel(recipe.shape).to(device)
        self.model.train()
        self.deadline = began + recipe.seconds
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self.model.parameters() if p.dim() >= 2]},
                {
                    "params": [p for p in self.model.parameters() if p.dim() < 2],
                    "weight_decay": 0.0,
                },
            ],
            lr=recipe.peak_lr,
            betas=(0.9, 0.98),
            weight_decay=recipe.weight_decay,
            fused=self.on_gpu,
        )
        self.main_loss, self.draft_loss = main_loss, draft_loss
        compiled = self.on_gpu and not eager
        masks = block_masks if compiled else dense_masks
        self.masks = masks(recipe.rows, recipe.depths, device)
        if compiled:
            torch.set_float32_matmul_precision("high")
            for layer in [*self.model.layers, *self.model.mtp]:
                layer.compile(dynamic=False)
            self.main_loss = torch.compile(main_loss, dynamic=False)
            self.draft_loss = torch.compile(draft_loss, dynamic=False)

    def train(self) -> dict[str, Any]:
        """Run the schedule; returns what to report."""
        recipe = self.recipe
        data = batches(self.table, recipe.batch_size, recipe.seed)
        began = time.monotonic()
        losses = self._step(next(data), 0.0)
        self._wait()
        compiled = time.monotonic()
        step, progress, history = 1, 0.0, []
        while progress < 1.0:
            if step % 20 == 0:
                self._wait()  # the clock must not run ahead of the device
            now = time.monotonic()
            elapsed = (now - compiled) / max(self.deadline - compiled, 1.0)
            progress = min(1.0, max(elapsed, (step + 1) / recipe.steps))
            losses = self._step(next(data), progress)
            step += 1
            if progress >= len(history) / 20:
                rate = step * recipe.batch_size / (time.monotonic() - compiled)
                main, *drafts = (round(loss, 4) for loss in losses.tolist())
                history.append({"step": step, "main_loss": main, "draft_losses": drafts})
                LOG.info("%5d %3.0f%% %s %s %.0f texts/s", step, 100 * progress, main, drafts, rate)
        return {
            "steps": step,
            "texts": step * recipe.batch_size,
            "passes": round(step * recipe.batch_size / len(self.table), 2),
            "seconds_compiling": round(compiled - began, 1),
            "seconds_training": round(time.monotonic() - compiled, 1),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "history": history,
        }

    def _step(self, batch: Tensor, progress: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(progress)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu):
            main, drafts = self._losses(batch)
        drafts_loss = (drafts[:, 0] + self.recipe.distill * drafts[:, 1]).sum() / len(drafts)
        (main + self.recipe.mtp_weight * drafts_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for block in self.model.expert_blocks():
            block.balance(self.recipe.balance_rate * (1 - progress))
        return torch.cat([main.detach().unsqueeze(0), drafts[:, 0].detach()])

    def _losses(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """The main loss and `[K, 2]` draft losses."""
        model, rows, depths = self.model, self.recipe.rows, self.recipe.depths
        batch = functional.pad(batch, (0, depths), value=-1)
        ids = torch.where(batch < 0, -1 - batch, batch)
        head = model.lm_head.weight
        states = model.states(ids[:, :rows])
        main, target = self.main_loss(states, head, batch[:, 1 : rows + 1].contiguous())
        losses = []
        for ahead, draft in enumerate(draft_states(model, ids, states, self.masks).reused, 1):
            labels = batch[:, ahead + 1 : ahead + 1 + rows].contiguous()
            # a label in the last rows is padding or the end of a text of full length
            losses.append(
                torch.stack(self.draft_loss(draft, head, labels, target.roll(-ahead, dims=1)))
            )
        return main, torch.stack(losses)

    def _learning_rate(self, progress: float) -> float:
        recipe = self.recipe
        warm = min(1.0, (progress + 1e-3) / recipe.warmup_share)
        decay = 0.5 * (1 + math.cos(math.pi * progress))
        floor = recipe.final_lr_share
        return recipe.peak_lr * warm * (floor + (1 - floor) * decay)

    def _wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()


def train(recipe: Recipe, out: Path, *, processes: int = 1, eager: bool = False) -> dict[str, Any]:
    """Train, write `out/checkpoint` and `out/training.json`, and return the report."""
    began = time.monotonic()
    tokenizer = make_tokenizer()
    checkpoint = out / "checkpoint"
    save_tokenizer(tokenizer, checkpoint, recipe.shape.max_position_embeddings)
    table = make_table(recipe, tokenizer, processes)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    LOG.info("%d texts after %.0f s", len(table), time.monotonic() - began)
    trainer = Trainer(recipe, table, device, began, eager=eager)
    found = trainer.train()
    save_checkpoint(trainer.model, checkpoint, checkpoint)
    report = {
        "machine": describe_machine(device),
        "recipe": asdict(recipe),
        "counted_tokens": int((table >= 0).sum()),
        **found,
        "seconds": round(time.monotonic() - began, 1),
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def main() -> None:
    """Command line: every field of `Recipe` is an option."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    for name, default in asdict(Recipe()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    recipe = Recipe(**{name: getattr(args, name) for name in asdict(Recipe())})
    train(recipe, args.out, processes=args.processes, eager=args.eager)


if __name__ == "__main__":
    main()

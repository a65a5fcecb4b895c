"""Measure a checkpoint on the held-out files; writes `report.json` and `report.md`.

python -m integration.tiny_model.evaluate [--corpus DIR] [--out DIR] [--prompts N] [--windows N]

Everything is computed in float32 from the checkpoint's bfloat16 weights. Small values of
`--prompts` and `--windows` make it a matter of a minute on a CPU.
"""

import argparse
import json
import logging
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from integration.tiny_model.corpus import default_corpus, read_manifest, read_texts
from integration.tiny_model.drafting import dense_masks, draft_states
from integration.tiny_model.export import load_checkpoint
from integration.tiny_model.model import TinyMtpModel
from integration.tiny_model.simulation import (
    DRAFTINGS,
    EAGLE,
    VANILLA,
    Continuation,
    Tally,
    continue_greedily,
    join_tallies,
    replay,
    run_sampled,
)
from integration.tiny_model.tokenizer import encode_documents, load_tokenizer

HERE = Path(__file__).parent
LOG = logging.getLogger("evaluate")

NUM_DRAFTS = 3
REPEAT_LENGTH = 8
SECTIONS = ("teacher_forced", "free_running", "free_running_sampled")
DRAFTS_TEACHER_FORCED = ("vanilla (chain: output)", "eagle (layer 1 reused)")


@torch.no_grad()
def teacher_forced(
    model: TinyMtpModel, stream: Tensor, rows: int, num_windows: int, batch_size: int = 16
) -> dict[str, Any]:
    """Losses, agreement with the target and overlap min(p, q) per depth, on known text.

    Depth k at row i is compared with the target at row i+k: both know the tokens up to i+k.
    """
    depths = len(model.mtp)
    length = rows + depths + 1
    cut = stream.unfold(0, length, length)
    cut = cut[torch.linspace(0, len(cut) - 1, min(num_windows, len(cut))).long().to(cut.device)]
    masks = dense_masks(rows, depths, stream.device)
    main = torch.zeros(2, dtype=torch.double)
    drafts = torch.zeros(2, depths, 3, dtype=torch.double)
    # expected tokens per step: greedy, and at temperature 1
    expected = torch.ones(2, 2, dtype=torch.double)
    for window in cut.split(batch_size):
        # the target also runs on the last rows that the depths are compared with
        states = model.states(window[:, : rows + depths])
        log_p = model.lm_head(states).log_softmax(-1)
        part = len(window) / len(cut)
        main += part * torch.stack(_loss_and_hits(log_p[:, :rows], window[:, 1 : rows + 1]))
        outputs = draft_states(model, window, states[:, :rows], masks)
        for way, way_outputs in enumerate((outputs.chained, outputs.reused)):
            all_so_far = torch.ones((2, 1, 1), dtype=torch.double, device=window.device)
            for index, output in enumerate(way_outputs):
                target = log_p[:, index + 1 : index + 1 + rows]
                labels = window[:, index + 2 : index + 2 + rows]
                log_q = model.lm_head(output).log_softmax(-1)
                loss, _ = _loss_and_hits(log_q, labels)
                agreement = (log_q.argmax(-1) == target.argmax(-1)).double()
                overlap = torch.minimum(log_q.exp(), target.exp()).sum(-1).double()
                all_so_far = all_so_far * torch.stack([agreement, overlap])
                expected[way] += part * all_so_far.mean((1, 2)).cpu()
                figures = (loss, agreement.mean().cpu(), overlap.mean().cpu())
                drafts[way, index] += part * torch.stack(figures)
    columns = ("loss", "top1_agreement", "overlap_at_temperature_1")
    return {
        "rows_per_window": rows,
        "windows": len(cut),
        "main": {"loss": _round(main[0]), "next_token_accuracy": _round(main[1])},
        **{
            name: {
                **{
                    column: [_round(x) for x in drafts[way, :, place]]
                    for place, column in enumerate(columns)
                },
                "expected_tokens_per_step": {
                    "greedy": _round(expected[way, 0]),
                    "at_temperature_1": _round(expected[way, 1]),
                },
            }
            for way, name in enumerate(DRAFTS_TEACHER_FORCED)
        },
    }


def _loss_and_hits(log_p: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = -log_p.gather(-1, labels.unsqueeze(-1)).double().mean()
    return loss.cpu(), (log_p.argmax(-1) == labels).double().mean().cpu()


def sample_prompts(documents: list[list[int]], count: int, length: int, seed: int) -> Tensor:
    """Snippets `[count, length]` at random places of the documents, by their share of tokens."""
    long_enough = [document for document in documents if len(document) > 2 * length]
    chooser = random.Random(seed)
    chosen = chooser.choices(long_enough, weights=list(map(len, long_enough)), k=count)
    starts = [chooser.randrange(len(document) - length) for document in chosen]
    rows = [doc[start : start + length] for doc, start in zip(chosen, starts, strict=True)]
    return torch.tensor(rows)


def repeated_share(text: Continuation) -> Tensor:
    """Per text, the share of generated 8-grams that occurred before in it `[B]`."""
    shares = []
    for tokens, end in zip(text.tokens.tolist(), text.ends.tolist(), strict=True):
        seen, repeated, total = set(), 0, 0
        for start in range(end - REPEAT_LENGTH + 1):
            gram = tuple(tokens[start : start + REPEAT_LENGTH])
            if start >= text.prompt_length:
                total += 1
                repeated += gram in seen
            seen.add(gram)
        shares.append(repeated / max(total, 1))
    return torch.tensor(shares)


def free_running(
    model: TinyMtpModel, prompts: Tensor, new_tokens: int, batch_size: int = 256
) -> dict[str, Any]:
    """Acceptance of greedy drafts, K = 3, along the target's greedy continuations."""
    texts = [
        continue_greedily(model, batch, new_tokens, spare=NUM_DRAFTS + 1, eos=0)
        for batch in prompts.split(batch_size)
    ]
    ways = {}
    for drafting in DRAFTINGS:
        tally = join_tallies([replay(model, text, drafting, NUM_DRAFTS) for text in texts])
        ways[drafting.name] = _acceptance(tally)
        LOG.info("greedy, %s: %s", drafting.name, ways[drafting.name])
    return {
        **_setting(prompts, new_tokens),
        "texts_ended_by_eos": sum(
            int((text.ends < text.prompt_length + new_tokens).sum()) for text in texts
        ),
        "tokens_changed_by_one_forward": sum(text.changed for text in texts),
        "share_of_repeated_8_grams": _round(torch.cat([repeated_share(t) for t in texts]).mean()),
        "drafting": ways,
    }


def free_running_sampled(
    model: TinyMtpModel, prompts: Tensor, new_tokens: int, seed: int
) -> dict[str, Any]:
    """Acceptance of sampled drafts, K = 3, in speculative sampling at temperature 1."""
    ways = {}
    for drafting in (EAGLE, VANILLA):
        generator = torch.Generator().manual_seed(seed)
        text, tally = run_sampled(model, prompts, drafting, NUM_DRAFTS, new_tokens, generator)
        repeats = _round(repeated_share(text).mean())
        ways[drafting.name] = {**_acceptance(tally), "share_of_repeated_8_grams": repeats}
        LOG.info("sampled, %s: %s", drafting.name, ways[drafting.name])
    return {**_setting(prompts, new_tokens), "drafting": ways}


def _setting(prompts: Tensor, new_tokens: int) -> dict[str, int]:
    count, length = prompts.shape
    return {
        "prompts": count,
        "prompt_tokens": length,
        "new_tokens": new_tokens,
        "num_drafts": NUM_DRAFTS,
    }


def _acceptance(tally: Tally) -> dict[str, Any]:
    return {
        "acceptance_length": _round(tally.acceptance_length()),
        "acceptance_per_position": [_round(x) for x in tally.acceptance()],
        "conditional_acceptance": [_round(x) for x in tally.conditional_acceptance()],
        "steps": int(tally.steps.sum()),
    }


def _round(value: float | Tensor) -> float:
    return round(float(value), 4)


def to_markdown(report: dict[str, Any]) -> str:
    """`report.md`: the same figures to read."""
    figures = report["evaluation"]
    lines = [
        "# The tiny model on held-out files",
        "",
        "Float32 from the bfloat16 weights.",
        *_teacher_forced_lines(figures.get("teacher_forced")),
        *_free_running_lines(figures.get("free_running")),
        *_sampled_lines(figures.get("free_running_sampled")),
        *_training_lines(report.get("training")),
    ]
    return "\n".join(lines) + "\n"


def _teacher_forced_lines(forced: dict[str, Any] | None) -> list[str]:
    if forced is None:
        return []
    lines = [
        "",
        "## Teacher forced",
        "",
        f"{forced['windows']} windows of {forced['rows_per_window']} tokens, on "
        f"{forced['device']}. Main model: loss {forced['main']['loss']:.3f}, next-token accuracy "
        f"{forced['main']['next_token_accuracy']:.3f}. Agreement is with the target's top token; "
        "overlap is the sum of min(p, q), the expected acceptance at temperature 1. Tokens per "
        "step are expected from the depths of a row together, on this text, which has no loops.",
        "",
        "| drafting | depth | loss | top-1 agreement | overlap | tokens per step, greedy "
        "| at temperature 1 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in DRAFTS_TEACHER_FORCED:
        *columns, expected = forced[name].values()
        for depth, (loss, agreement, overlap) in enumerate(zip(*columns, strict=True), start=1):
            is_last = depth == len(columns[0])
            tokens = [f"{value:.3f}" if is_last else "" for value in expected.values()]
            lines.append(
                f"| {name} | {depth} | {loss:.3f} | {agreement:.3f} | {overlap:.3f} "
                f"| {tokens[0]} | {tokens[1]} |"
            )
    return lines


def _free_running_lines(free: dict[str, Any] | None) -> list[str]:
    if free is None:
        return []
    return [
        "",
        "## Free running, greedy",
        "",
        f"{_describe(free)} Acceptance length is emitted tokens per target step, the bonus token "
        "included.",
        "",
        *_acceptance_table(free),
        "",
        f"Loops flatter these figures: {free['share_of_repeated_8_grams']:.1%} of the generated "
        "8-grams occurred before in the same text. Read them together with the other two sections. "
        "`draft_window: trtllm` never writes the row of the last accepted token of a fully "
        "accepted step; here such rows are masked out of attention, where an engine would read "
        "whatever lies there.",
    ]


def _sampled_lines(sampled: dict[str, Any] | None) -> list[str]:
    if sampled is None:
        return []
    repeats = " and ".join(
        f"{way['share_of_repeated_8_grams']:.1%}" for way in sampled["drafting"].values()
    )
    return [
        "",
        "## Free running, sampled at temperature 1",
        "",
        f"{_describe(sampled)} Drafts are sampled too and verified by rejection. Repeated "
        f"8-grams: {repeats}.",
        "",
        *_acceptance_table(sampled),
    ]


def _describe(section: dict[str, Any]) -> str:
    return (
        f"{section['prompts']} snippets of {section['prompt_tokens']} tokens at random places of "
        f"the held-out files, {section['new_tokens']} new tokens each, K = "
        f"{section['num_drafts']}, on {section['device']}."
    )


def _acceptance_table(section: dict[str, Any]) -> list[str]:
    return [
        "| drafting | acceptance length | accepted, per position | given the earlier ones |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {way['acceptance_length']:.3f} | {_join(way['acceptance_per_position'])} "
            f"| {_join(way['conditional_acceptance'])} |"
            for name, way in section["drafting"].items()
        ),
    ]


def _training_lines(training: dict[str, Any] | None) -> list[str]:
    if training is None:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in training["versions"].items())
    recipe = ", ".join(f"{name} {value}" for name, value in training["recipe"].items())
    return [
        "",
        "## Training",
        "",
        f"{training['tokens'] / 1e6:.0f} M tokens ({training['epochs']} epochs, "
        f"{training['steps']} steps) in {training['seconds']:.0f} s, of which "
        f"{training['seconds_compiling']:.0f} s compiling, on {training['gpu']}; {versions}.",
        "",
        f"Recipe: {recipe}.",
        "",
        "Largest logit difference to transformers in float32 (main model, depths 1-3): "
        + ", ".join(f"{x:.1e}" for x in training["logit_difference_to_transformers"])
        + ".",
    ]


def _join(values: list[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Evaluate the sections that `args` selects, for one checkpoint."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    manifest = read_manifest(args.manifest)
    tokenizer = load_tokenizer(args.checkpoint)
    texts = read_texts(args.corpus, manifest.of_split("held_out"))
    documents = encode_documents(tokenizer, texts)
    stream = torch.tensor([token for document in documents for token in document], device=device)
    model = load_checkpoint(args.checkpoint).to(device)
    prompts = sample_prompts(documents, args.prompts, args.prompt_tokens, args.seed).to(device)
    measures = {
        "teacher_forced": lambda: teacher_forced(model, stream, args.rows, args.windows),
        "free_running": lambda: free_running(model, prompts, args.new_tokens),
        "free_running_sampled": lambda: free_running_sampled(
            model, prompts, args.new_tokens, args.seed
        ),
    }
    setting = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": str(torch.__version__),
        "seed": args.seed,
        "held_out_files": len(documents),
        "held_out_tokens": len(stream),
    }
    return {name: {**setting, **measures[name]()} for name in args.sections}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=default_corpus())
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.json")
    parser.add_argument("--checkpoint", type=Path, default=HERE / "checkpoint")
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--windows", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    path = args.out / "report.json"
    report = json.loads(path.read_text()) if path.is_file() else {}
    report["evaluation"] = {**report.get("evaluation", {}), **evaluate(args)}
    path.write_text(json.dumps(report, indent=1) + "\n")
    (args.out / "report.md").write_text(to_markdown(report))


if __name__ == "__main__":
    main()

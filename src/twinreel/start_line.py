"""What will happen, said before it happens: the start line, and what is odd about the rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from twinreel.data.captions import collection_captions
from twinreel.evaluation import rows_in_common
from twinreel.parts import Parts
from twinreel.recipe import Recipe
from twinreel.tasks import ActionRecognition, Contrastive, VideoTextMatching
from twinreel.wordpiece import WordPiece

__all__ = ["FEW_NEGATIVES", "collection_notes", "compared_clips", "num_negatives", "start_line", "unknown_pieces"]

FEW_NEGATIVES = 32
READ_CAPTIONS = 1000  # of a collection, to see whether a vocabulary fits
LARGEST_UNKNOWN_SHARE = 0.2


def compared_clips(recipe: Recipe, parts: Parts) -> int:
    """Clips that one loss sees: of the micro-batch in all processes, or of the global batch if negatives are cached."""
    if recipe.train.cached_negatives:
        return recipe.train.global_batch_size
    return min(sum(map(len, everyone)) for everyone in parts.shares.positions)


def num_negatives(recipe: Recipe, parts: Parts) -> int | None:
    """Wrong captions a clip is compared with; None where none are."""
    if parts.negatives is not None:
        return parts.negatives.num_negatives
    if not isinstance(parts.task, Contrastive):
        return None
    there = recipe.task.num_candidates * (compared_clips(recipe, parts) - recipe.data.repeated_augmentation)
    drawn = parts.task.drawn_negatives
    return there if drawn is None else min(there, drawn)


def start_line(recipe: Recipe, parts: Parts, step: int) -> str:
    """What will happen, before it happens."""
    train = recipe.train
    prep: Any = parts.model.preprocessing
    shares = parts.shares
    whole = "global batch (cached)" if train.cached_negatives else "micro-batch across processes"
    if shares.num_micro_batches == 1:
        whole = "global batch"
    compared = f"{num_negatives(recipe, parts)} negative captions a clip (of the {whole})"
    if isinstance(parts.task, ActionRecognition):
        compared = _classes_fact(parts.task)
    if isinstance(parts.task, VideoTextMatching):
        compared = _matching_fact(recipe, parts)
    base = max(group["base_learning_rate"] for group in parts.optimizer.param_groups)
    rates = [base * factor for factor in (parts.schedule.factor(0), parts.schedule.highest)]
    rates.append(base * parts.schedule.factor(parts.total_steps - 1))
    landmarks = parts.schedule.landmarks()
    own = "".join(f", {name} at {rate:g}" for name, rate in recipe.optim.learning_rates.items())
    trained = sum(p.numel() for p in parts.parameters)
    frozen = sum(p.numel() for p in parts.model.parameters() if not p.requires_grad)
    left_out = len(parts.rows) % parts.plan.rows_per_batch
    repeated = recipe.data.repeated_augmentation
    views = f" ({repeated} views of each row)" if repeated > 1 else ""
    sizes = sorted({len(own) for everyone in shares.positions for own in everyone}, reverse=True)
    lines = [
        f"rows {len(parts.rows)} (evaluated on {len(parts.eval_rows)}), missing files {len(parts.missing)}, "
        f"{parts.plan.steps_per_epoch} steps an epoch ({left_out} rows wait for a later epoch, others each time), "
        f"{parts.total_steps} steps in all",
        f"global batch {train.global_batch_size} = {_counted(shares.num_processes, 'process')} x "
        f"{_counted(shares.num_micro_batches, 'micro-batch')} x {' or '.join(map(str, sizes))} clips{views} on "
        f"{parts.device}, {compared}, precision {train.precision}, {train.memory_format.replace('_', ' ')} layout, "
        f"batch norm {train.batch_norm}, seed {train.seed}",
        f"a clip is {prep.clip_words(recipe.data.clip_start)}, {prep.crop_size} x {prep.crop_size} pixels"
        + f"; {recipe.data.num_clips} clips a video" * (recipe.data.num_clips > 1),
        f"learning rate first {rates[0]:.3g}, highest {rates[1]:.3g}, last {rates[2]:.3g} ({recipe.optim.name}{own}, "
        f"warm-up {parts.schedule.warmup_steps:g} steps); it belongs to the global batch and is never scaled",
        "its curve: " + ", ".join(f"step {at + 1} {base * parts.schedule.factor(at):.3g}" for at in landmarks),
        f"parameters {trained:,} trained, {frozen:,} frozen"
        + (f", weights averaged (EMA {train.ema_decay:g})" if train.ema_decay is not None else "")
        + (f"; going on from step {step}" if step else "; from step 0"),
    ]
    return "\n".join(lines)


def _classes_fact(task: ActionRecognition) -> str:
    names = ", ".join(task.classes.names[:5]) + (", ..." if len(task.classes) > 5 else "")
    loss = getattr(task.loss, "__name__", "the loss")
    return f"{len(task.classes)} classes ({names}), {loss}" + ", mixed with neighbors" * task.mixing.mixes


def _matching_fact(recipe: Recipe, parts: Parts) -> str:
    """What each video is compared with."""
    assert isinstance(parts.task, VideoTextMatching)
    task, pooled = parts.task, f"clips pooled by {parts.task.pooling}" * (recipe.data.num_clips > 1)
    said = {
        "retrieval": f"{_counted(task.num_negatives, 'wrong caption')} a video "
        f"({'of the global batch' if recipe.task.negatives == 'in_batch' else 'of any other video'})",
        "multiple_choice": f"{len(parts.rows[0].options)} options a video",
        "question_answering": f"{len(task.answers)} answers",
    }[task.goal]
    return ", ".join(filter(None, [said, pooled]))


def collection_notes(parts: Parts) -> list[str]:
    """What is odd about the rows of a run: classes without a row, clips that are trained on and judged by."""
    notes = []
    if isinstance(parts.task, ActionRecognition):
        absent = parts.task.classes.without_rows(parts.rows)
        if absent:
            first = "; do the labels begin at 1?" if absent[0] == "0" and len(absent) == 1 else ""
            notes.append(
                f"{len(absent)} of {len(parts.task.classes)} classes have no training row "
                f"({', '.join(absent[:5])}{', ...' if len(absent) > 5 else ''}){first}"
            )
    if isinstance(parts.task, VideoTextMatching) and parts.task.goal == "question_answering":
        known = parts.task.answer_places
        lost = sum(not any(str(label) in known for label in row.labels) for row in parts.rows)
        if lost:
            notes.append(
                f"{lost} of {len(parts.rows)} training rows have an answer that is none of the {len(known)} outputs "
                "(model.num_classes): nothing is learned from them"
            )
    vocabulary = getattr(parts.model, "vocabulary", None)
    if isinstance(vocabulary, WordPiece):
        share = unknown_pieces(vocabulary, list(islice(collection_captions(parts.rows, []), READ_CAPTIONS)))
        if share > LARGEST_UNKNOWN_SHARE:
            notes.append(
                f"{share:.0%} of the pieces of the captions are unknown to the vocabulary: is model.vocabulary the one "
                "of these weights, and of this language?"
            )
    shared = rows_in_common(parts.rows, parts.eval_rows)
    if shared:
        notes.append(
            f"{shared} of the {len(parts.eval_rows)} rows to judge by are training rows too: scores will flatter"
        )
    return notes


def unknown_pieces(vocabulary: WordPiece, texts: Sequence[str]) -> float:
    """The share of the pieces of texts that a vocabulary does not have; 0 for no texts."""
    pieces = [piece for text in texts for piece in vocabulary.encode(text)]
    return pieces.count(vocabulary.unk_id) / len(pieces) if pieces else 0.0


def _counted(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith(("s", "h")) else "s")
    return f"{number} {noun if number == 1 else plural}"

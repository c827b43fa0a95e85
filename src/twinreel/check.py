"""Look before you train: recipe, files, what the model sees, one batch forward and backward."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from twinreel.agreement import find_disagreement
from twinreel.assembly import pick_device, training_notes
from twinreel.data.captions import collection_captions
from twinreel.data.clip import Batch
from twinreel.errors import ConfigError, DataError
from twinreel.evaluation import build_gallery, view_rules
from twinreel.gradients import GradientStep
from twinreel.models.preprocessing import Preprocessing
from twinreel.parts import Parts, build_parts, for_device, read_batches
from twinreel.recipe import Recipe
from twinreel.start_line import collection_notes, unknown_pieces
from twinreel.tasks import ActionRecognition, VideoTextMatching
from twinreel.trial import try_steps

__all__ = ["CheckResult", "check_recipe", "draw_contact_sheet"]

SHEET_ROWS = 8
SHEET_FRAMES = 8
EVALUATION_ROWS = 8  # that are opened
MOST_CAPTIONS = 100_000  # looked at for unknown words


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """What was found, as name -> value, and what to look at."""

    facts: dict[str, Any]
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return {"facts": self.facts, "warnings": self.warnings, "problems": self.problems}

    def to_table(self) -> str:
        """A line a fact, then the warnings, then what must be mended."""
        lines = [f"{name.replace('_', ' '):20} {value}" for name, value in self.facts.items()]
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join([*lines, *(f"problem: {text}" for text in self.problems)])


def check_recipe(recipe: Recipe, sheet: Path, *, steps: int = 0) -> CheckResult:
    """Read one batch as training would, draw it, and run it forward and backward.

    With `steps` also train so long on one batch, where the loss must fall smoothly, and see whether two processes
    agree with one; what is wrong is among the `problems`.

    Args:
        recipe: what to check.
        sheet: where the picture goes (PNG).
        steps: of the trial; 0 = none.

    Raises:
        ConfigError, DataError: what training would stop at.
    """
    device = pick_device(recipe.train.device)
    recipe = for_device(recipe, device)
    parts = build_parts(recipe, device)
    parts.train_mode()
    model = parts.model
    captions = _captions(parts)
    began = time.perf_counter()
    batch = read_batches(recipe, parts, most=1)[0]
    read_seconds = time.perf_counter() - began
    if not bool(batch.valid.any()):
        raise DataError(f"no sample of the first batch can be read; first: {batch.faults[0].reason}")
    preprocessing: Any = model.preprocessing
    video = GradientStep(parts, recipe, [batch], 0).video(batch)
    draw_contact_sheet(batch, video, preprocessing, sheet)
    began = time.perf_counter()
    texts = batch if parts.negatives is None else parts.negatives.add(batch, 0)
    loss, count = parts.task.compute_loss(model, video, texts)
    torch.autograd.backward(loss)
    compute_seconds = time.perf_counter() - began
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    facts = {
        "rows": len(parts.rows),
        "missing_files": len(parts.missing),
        "evaluation": _evaluation_fact(recipe, parts),
        **_wording_facts(parts, captions),
        "steps": f"{parts.plan.steps_per_epoch} an epoch, {parts.total_steps} in all",
        "clip": preprocessing.clip_words(recipe.data.clip_start),
        **_covered(parts, batch),
        "network_input": "x".join(map(str, video.shape)),
        "value_range": f"{video.min():.3f} to {video.max():.3f}",
        "unreadable": f"{len(batch.faults)} of the first {len(batch.ids)} samples",
        "repeated_frames": batch.repeated_frames,
        "loss": f"{loss.item():.3f} over {count} rows",
        "read_seconds": f"{read_seconds:.2f} (1 process)",
        "compute_seconds": f"{compute_seconds:.2f} forward and backward",
        "contact_sheet": str(sheet),
    }
    faults = [*parts.caption_faults, *batch.faults]
    warnings = [*training_notes(recipe), *collection_notes(parts)]
    warnings += dict.fromkeys(fault.reason for fault in faults[:5])
    warnings += [f"to judge by: {reason}" for reason in _unreadable_evaluation(recipe, parts)]
    if batch.repeated_frames:
        share = batch.repeated_frames / batch.pts_seconds.numel()
        warnings.append(
            f"{share:.0%} of the frames repeat the last one: clips are longer than some of these videos; lower "
            "num_frames, or raise frame_rate (lower frame_stride), of model.preprocessing"
        )
    if without:
        warnings.append(f"no gradient reaches {', '.join(without[:5])} ({len(without)} parameters)")
    if not math.isfinite(loss.item()):
        warnings.append("the loss is not finite")
    problems = _try(recipe, steps, facts) if steps else []
    return CheckResult(facts=facts, warnings=warnings, problems=problems)


def _try(recipe: Recipe, steps: int, facts: dict[str, Any]) -> list[str]:
    """The trial and the comparison of processes; adds facts, returns problems."""
    trial = try_steps(recipe, steps)
    facts["trial"] = trial.fact()
    clips, difference = find_disagreement(recipe)
    facts["processes"] = f"2 processes {'differ from' if difference else 'agree with'} one on {clips} clips"
    return [problem for problem in (trial.problem, difference) if problem is not None]


def _covered(parts: Parts, batch: Batch) -> dict[str, str]:
    """The seconds from the first frame of a clip to its last, as the files have it."""
    preprocessing: Any = parts.model.preprocessing
    times = batch.pts_seconds[batch.valid].view(-1, preprocessing.num_frames)  # a clip a line
    spans = (times[:, -1] - times[:, 0]).sort().values.tolist()
    middle = spans[len(spans) // 2]
    shown = f"{spans[0]:.2f} to {spans[-1]:.2f}" if spans[-1] - spans[0] > 0.01 else f"{middle:.2f}"
    return {"seconds_covered": f"{shown} from first to last frame, in the first batch"}


def _captions(parts: Parts) -> list[str]:
    if isinstance(parts.task, ActionRecognition):
        return []
    return list(islice(collection_captions(parts.rows, []), MOST_CAPTIONS))


def _evaluation_fact(recipe: Recipe, parts: Parts) -> str:
    if not parts.eval_rows:
        return "none (set eval.split, eval.manifest or eval.source)"
    choices = isinstance(parts.task, VideoTextMatching) and parts.task.goal != "retrieval"
    if choices or isinstance(parts.task, ActionRecognition):
        return f"{len(parts.eval_rows)} rows"
    gallery = build_gallery(parts.eval_rows, merge_equal_captions=recipe.eval.merge_equal_captions)
    return f"{len(gallery.queries)} queries, {len(gallery.candidates)} videos"


def _unreadable_evaluation(recipe: Recipe, parts: Parts) -> list[str]:
    """Why some of the first rows to judge by cannot be read; they would stop a run at its first judgment."""
    if not parts.eval_rows:
        return []
    preprocessing: Any = parts.model.preprocessing
    rules = view_rules(preprocessing, recipe.eval.model_copy(update={"num_clips": 1, "num_crops": 1}))
    samples = (rules(row, 0) for row in parts.eval_rows[:EVALUATION_ROWS])
    return [sample.fault.reason for sample in samples if sample.fault is not None]


def _wording_facts(parts: Parts, captions: Sequence[str]) -> dict[str, Any]:
    """Classes and how often each occurs; or captions and what of them the vocabulary knows."""
    if isinstance(parts.task, ActionRecognition):
        table = parts.task.classes
        counts = Counter(table.names[place] for row in parts.rows for place in table.places(row.labels))
        most = ", ".join(f"{name} ({count})" for name, count in counts.most_common(8))
        absent = [name for name in table.names if name not in counts]
        return {
            "classes": f"{len(table)}: {most}" + (", ..." if len(counts) > 8 else ""),
            "classes_without_a_row": f"{len(absent)}" + (f" ({', '.join(absent[:5])})" if absent else ""),
        }
    counted = f"the first {MOST_CAPTIONS}" if len(captions) == MOST_CAPTIONS else len(captions)
    facts: dict[str, Any] = {"captions": counted}
    vocabulary: Any = getattr(parts.model, "vocabulary", None)
    if vocabulary is None:
        return facts
    if isinstance(parts.task, VideoTextMatching):
        most_pieces: int = parts.model.max_text_tokens - 2  # type: ignore[operator, assignment]
        cut = sum(len(vocabulary.encode(text)) > most_pieces for text in captions)
        unknown_share = unknown_pieces(vocabulary, captions)
        words = f"{len(vocabulary)} pieces, {unknown_share:.1%} of the captions' are unknown"
        return facts | {"vocabulary": f"{words}; {cut} captions are cut at {most_pieces} of them"}
    unknown: Counter[str] = vocabulary.unknown_words(captions)
    silent = sum(not vocabulary.encode(text) for text in captions)
    most = ", ".join(f"{word} ({count})" for word, count in unknown.most_common(5))
    return facts | {
        "vocabulary": f"{len(vocabulary)} words; {len(unknown)} unknown{': ' + most if most else ''}",
        "masked_captions": f"{silent} captions without a known word",
    }


def draw_contact_sheet(batch: Batch, video: Tensor, preprocessing: Preprocessing, path: Path) -> None:
    """What the model sees: a row a sample (at most 8), its frames in time, its captions or labels beneath.

    Args:
        batch: ids, captions or labels, and times.
        video: network input (B, 3, T, S, S), as the model gets it, mirrored and normalized.
        preprocessing: undoes the normalizing, for the picture only.
        path: PNG.

    Raises:
        ConfigError: it cannot be written there.
    """
    pixels = preprocessing.to_pixels(video[:SHEET_ROWS].float().cpu())
    chosen = torch.linspace(0, pixels.shape[1] - 1, min(SHEET_FRAMES, pixels.shape[1])).long().tolist()
    side = max(pixels.shape[2], 112)
    height = side + 34
    sheet = Image.new("RGB", (side * len(chosen), height * len(pixels)), "white")
    pen = ImageDraw.Draw(sheet)
    for row in range(len(pixels)):
        for column, frame in enumerate(chosen):
            picture = Image.fromarray(pixels[row, frame].numpy()).resize((side, side))
            sheet.paste(picture, (column * side, row * height))
            seconds = float(batch.pts_seconds[row, frame])
            pen.text(
                (column * side + 3, row * height + 2),
                f"{seconds:.2f}s",
                fill="white",
                stroke_width=1,
                stroke_fill="black",
            )
        note = "" if bool(batch.valid[row]) else "UNREADABLE "
        note += "mirrored " if bool(batch.flip[row]) else ""
        captions = " | ".join(
            text for text, real in zip(batch.captions[row], batch.caption_mask[row].tolist(), strict=True) if real
        )
        captions = captions or ", ".join(map(str, batch.labels[row]))
        letters = side * len(chosen) // 6 - 2
        pen.text((3, row * height + side + 2), f"{note}{batch.ids[row]}"[:letters], fill="black")
        pen.text((3, row * height + side + 17), captions[:letters], fill="black")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError) as error:  # ValueError: a suffix that Pillow does not know
        raise ConfigError(f"{path}: the contact sheet cannot be written: {error}; choose another --out") from error

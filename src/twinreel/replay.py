"""A step of a run once more, on one process: its very batch, and what each clip adds to the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from twinreel.assembly import pick_device, refuse_idle_overrides
from twinreel.audit import NON_FINITE
from twinreel.checkpoint import find_checkpoint, list_checkpoints, load_training_state
from twinreel.data.clip import Batch
from twinreel.data.plan import Shares
from twinreel.errors import CheckpointError, ConfigError
from twinreel.gradients import Compared, GradientStep, StepResult, clip_gradient, finish
from twinreel.guards import repeatable_kernels
from twinreel.log import read_metrics
from twinreel.parts import Parts, build_parts, for_device, read_batches
from twinreel.recipe import EvalSection, Recipe, load_recipe
from twinreel.tasks import Contrastive, PairFacts

__all__ = ["Replay", "Term", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """What one clip of the global batch adds to the loss; `loss` is None for one that takes no part.

    `video_norm` is the length of its embedding, or of its logits; a classifier has labels in the place of captions.
    """

    position: int
    id: str
    video: str
    loss: float | None
    video_norm: float
    text_norms: list[float]
    captions: list[str]
    masked: list[bool]
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step, replayed. `weights_of_step` is `step - 1` if the run kept just those weights."""

    step: int
    weights_of_step: int
    loss: float
    gradient_norm: float
    terms: list[Term]
    bad_gradients: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`; numbers that are not finite as text."""
        return {name: _jsonable(value) for name, value in asdict(self).items()}

    def to_table(self) -> str:
        """A line a clip, the worst first."""
        lines = [
            f"step {self.step}, weights of step {self.weights_of_step}: loss {self.loss:.6g}, "
            f"gradient norm {self.gradient_norm:.6g}",
            *(f"note: {note}" for note in self.notes),
            f"{'at':>5} {'loss term':>11} {'|video|':>9} {'|text|':>9}  clip, captions or labels",
        ]
        for term in sorted(self.terms, key=_badness):
            loss = "masked" if term.loss is None else f"{term.loss:.6g}"
            text = max(term.text_norms, key=lambda norm: math.inf if math.isnan(norm) else norm, default=None)
            length = "" if text is None else f"{text:.3g}"
            said = " | ".join(caption for caption, hidden in zip(term.captions, term.masked, strict=True) if not hidden)
            lines.append(
                f"{term.position:5} {loss:>11} {term.video_norm:9.3g} {length:>9}  {term.id}: {term.fault or said[:80]}"
            )
        if self.bad_gradients:
            lines.append(f"gradients that are not finite: {', '.join(self.bad_gradients[:8])}")
        return "\n".join(lines)


def replay(run: str | Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Rebuild the global batch of a step in one process, forward and backward, and take its loss apart.

    The batch is cut into the pieces that the run's processes had, each with its dropout, so the numbers are those of
    the run (to rounding, where it had several processes). Weights are those before the step where a checkpoint or a
    non-finite stop kept them, else those of the nearest checkpoint before, which is said.

    Args:
        run: a run folder.
        step: from 1, as the log counts.
        overrides: `data.root=...` and others that do not change what is computed.

    Raises:
        ConfigError, CheckpointError: no such step, no weights before it.
    """
    folder = Path(run)
    if not (folder / "recipe.yaml").is_file():
        raise CheckpointError(f"{folder}: not a run folder (no recipe.yaml); give what `twinreel train --out` wrote")
    refuse_idle_overrides(folder, overrides)
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    device = pick_device(recipe.train.device)
    recipe = for_device(recipe, device)
    weights_of, checkpoint = _weights_before(folder, step)
    shares = _shares_at(folder, recipe, step)
    train = recipe.train.model_copy(update={"micro_batch_size": None})
    alone = recipe.model_copy(update={"train": train, "eval": EvalSection.model_validate({})})
    parts = build_parts(alone, device, checkpoint)
    if checkpoint is not None:
        parts.scaler.load_state_dict(load_training_state(checkpoint)["scaler"])
    if not 1 <= step <= parts.total_steps:
        raise ConfigError(f"--step {step}: the run has steps 1 to {parts.total_steps}")
    parts.shares = Shares(positions=[[own] for everyone in shares.positions for own in everyone])
    batches = read_batches(recipe, parts, step - 1)
    with repeatable_kernels(recipe, parts.device):
        result = _gradient(recipe, parts, shares, batches, step - 1)
    norm = clip_gradient(parts, recipe)
    gradients = {n: p.grad for n, p in parts.whole.named_parameters() if p.grad is not None}
    return Replay(
        step=step,
        weights_of_step=weights_of,
        loss=result.mean_loss if result.mean_loss is not None else math.nan,
        gradient_norm=norm,
        terms=_terms(parts, result, batches),
        bad_gradients=[name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())],
        notes=_notes(folder, recipe, step, weights_of, shares, result),
    )


def _weights_before(folder: Path, step: int) -> tuple[int, Path | None]:
    """The step whose weights are taken, and their checkpoint; none for a run's own start."""
    for place in (folder / NON_FINITE, folder):
        exact = place / "checkpoints" / f"step_{step - 1:07d}"
        if exact.is_dir():
            return step - 1, find_checkpoint(place, exact.name)[0]
    before = [int(item.name.removeprefix("step_")) for item in list_checkpoints(folder)]
    usable = [number for number in before if number < step]
    if not usable:
        return 0, None  # the seed gives the start weights again
    return usable[-1], find_checkpoint(folder, f"step_{usable[-1]}")[0]


def _shares_at(folder: Path, recipe: Recipe, step: int) -> Shares:
    """How the run shared a batch out at a step."""
    starts = [line for line in read_metrics(folder) if line["kind"] == "start" and line["step"] < step]
    processes, pieces = (int(starts[-1][name]) for name in ("processes", "micro_batches")) if starts else (1, 1)
    size = recipe.train.global_batch_size
    micro = None if pieces == 1 else size // (processes * pieces)
    return Shares.cut(size, processes, micro, recipe.clips_together)


def _gradient(recipe: Recipe, parts: Parts, shares: Shares, batches: Sequence[Batch], step: int) -> StepResult:
    """As the run's processes did it, a piece at a time; each group of pieces shares its negatives."""
    parts.train_mode()
    parts.optimizer.zero_grad(set_to_none=True)
    processes = shares.num_processes
    groups = [shares.positions[i : i + 1] for i in range(shares.num_micro_batches)]
    if recipe.train.cached_negatives:
        groups = [shares.positions]
    seen: list[Compared] = []
    for number, group in enumerate(groups):
        pieces = [own for everyone in group for own in everyone]
        parts.shares = Shares(positions=[[own] for own in pieces])
        first = number * processes
        some = batches[first : first + len(pieces)]
        work = GradientStep(parts, recipe, some, step, group=number, first_piece=first)
        # Pieces of classifiers have nothing to do with each other; those of two towers are each other's negatives.
        seen += work.cached() if isinstance(parts.task, Contrastive) else work.plain()
    return finish(parts, recipe, seen)


def _terms(parts: Parts, result: StepResult, batches: Sequence[Batch]) -> list[Term]:
    at = 0
    described: dict[int, tuple[str, list[str], str | None]] = {}
    for batch in batches:
        faults = {fault.id: fault.reason for fault in batch.faults}
        for sample, captions, labels in zip(batch.ids, batch.captions, batch.labels, strict=True):
            described[at] = (sample, captions or [str(label) for label in labels], faults.get(sample))
            at += 1
    videos = {row.id: row.video for row in parts.rows}
    terms = []
    for seen in result.compared:
        for index, position in enumerate(seen.positions):
            sample, captions, fault = described[position]
            video, *texts = (part.reshape(len(seen.positions), -1, part.shape[-1])[index] for part in seen.outputs)
            mask = seen.facts.mask[index].tolist() if isinstance(seen.facts, PairFacts) else [True] * len(captions)
            terms.append(
                Term(
                    position=position,
                    id=sample,
                    video=videos[sample],
                    loss=_term(parts, seen, index),
                    video_norm=video.norm().item(),
                    text_norms=texts[0].norm(dim=1).tolist() if texts else [],
                    captions=captions,
                    masked=[not real for real in mask],
                    fault=fault,
                )
            )
    return terms


@torch.no_grad()
def _term(parts: Parts, seen: Compared, index: int) -> float | None:
    """A clip's own term; None if it has none, or the loss is a user's that cannot be taken apart."""
    task: Any = parts.task
    if not bool(seen.facts.usable[index]) or "own" not in task.takes:
        return None
    share = task.share(
        seen.outputs,
        seen.facts,
        own=torch.tensor([index]),
        log_scale=task.log_scale,
        negative_seed=seen.negative_seed,
    )
    return float(share) * seen.usable


def _notes(folder: Path, recipe: Recipe, step: int, weights_of: int, shares: Shares, result: StepResult) -> list[str]:
    notes = []
    if weights_of != step - 1:
        notes.append(
            f"the batch is that of step {step}, but the run kept no weights of step {step - 1}: these are of step "
            f"{weights_of}"
        )
    if shares.num_processes > 1:
        notes.append(f"the run had {shares.num_processes} processes: equal to rounding, not bit for bit")
    if recipe.train.batch_norm == "sync":
        notes.append("train.batch_norm=sync: here each piece is normalized by itself, so the numbers are others")
    notes += [
        f"metrics.jsonl has a mean loss of {line['loss']} in the line of this step"
        for line in read_metrics(folder)
        if line["kind"] == "train" and line["step"] == step
    ]
    if not result.rows:
        notes.append("no clip of this batch can be used")
    return notes


def _badness(term: Term) -> tuple[bool, float]:
    if term.loss is None:
        return True, 0.0
    return False, -term.loss if math.isfinite(term.loss) else -math.inf


def _jsonable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    return [_jsonable(item) for item in value] if isinstance(value, list) else value

"""Model + rows -> embeddings, each row once -> retrieval metrics in both directions, with their protocol.

The same code judges a run during training and in `twinreel eval`. Nothing is substituted: what could not be read is
named, and scores over fewer videos are given only on request.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.assembly import Run, evaluation_rows, load_run, pick_device
from twinreel.data.captions import row_captions
from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ClipDataset, ViewRules
from twinreel.data.device_feed import feed_device
from twinreel.data.loader import WorkerStart, load_batches, readers_watched
from twinreel.data.read_ahead import ReadAhead, clip_bytes, plan_ahead
from twinreel.data.transforms import network_input
from twinreel.distributed import alike, gather_objects, on_main, process_group, together, world
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection, Recipe
from twinreel.tasks import Contrastive

__all__ = ["Gallery", "Report", "build_gallery", "embed_videos", "evaluate", "evaluate_retrieval", "view_rules"]

_log = logging.getLogger(__name__)

DIRECTIONS = ("text_to_video", "video_to_text")
SENTENCES_AT_ONCE = 256
QUERIES_AT_ONCE = 256  # of a similarity that is not a dot product
T = TypeVar("T")
Window = tuple[str, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Scores and how they were made. Fractions in `metrics`; per cent in the table."""

    metrics: dict[str, float]
    protocol: dict[str, Any]
    faults: list[Fault] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return {
            "metrics": self.metrics,
            "protocol": self.protocol,
            "faults": [asdict(fault) for fault in self.faults],
        }

    def placed(self, recipe: Recipe, section: EvalSection, checkpoint: str, *, averaged: bool) -> Report:
        """The same with what was judged, and on what, in the protocol."""
        checkpoint += " (averaged weights)" if averaged else ""
        source = section.manifest or section.source or recipe.data.manifest or recipe.data.source
        named = ", ".join(source) if isinstance(source, tuple) else source
        head = {"source": named, "split": section.split or "all"}
        return replace(self, protocol=head | self.protocol | {"checkpoint": checkpoint})

    def headline(self) -> str:
        """One line: both directions and the loss."""
        parts = [
            f"{direction.replace('_', ' ')} R@1 {100 * self.metrics[f'{direction}/recall_at_1']:.1f} "
            f"(chance {100 * self.metrics[f'chance/{direction}/recall_at_1']:.1f}), "
            f"median rank {self.metrics[f'{direction}/median_rank']:g}"
            for direction in DIRECTIONS
        ]
        return f"{'; '.join(parts)}; loss {self.metrics['loss']:.3f}; {self.protocol['evaluated']}"

    def to_table(self) -> str:
        """For people: one row a direction, chance beneath, the protocol last."""
        columns = ("recall_at_1", "recall_at_5", "recall_at_10", "median_rank", "mean_rank")
        lines = [f"{'':22}{'R@1':>8}{'R@5':>8}{'R@10':>8}{'MedR':>9}{'MeanR':>9}"]
        for label in [*DIRECTIONS, *(f"chance/{direction}" for direction in DIRECTIONS)]:
            values = [self.metrics.get(f"{label}/{column}") for column in columns]
            cells = [
                " " * width if value is None else f"{100 * value:{width}.1f}" if width == 8 else f"{value:{width}.1f}"
                for value, width in zip(values, (8, 8, 8, 9, 9), strict=True)
            ]
            lines.append(f"{label.replace('_', ' ').replace('/', ', '):22}" + "".join(cells))
        lines += ["", *(f"{name.replace('_', ' ')}: {value}" for name, value in self.protocol.items())]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gallery:
    """What is asked and what can be found. Rows with the same video and window are one candidate."""

    candidates: list[Clip]
    queries: list[str]
    positives: list[list[int]]


def build_gallery(rows: Sequence[Clip], *, merge_equal_captions: bool) -> Gallery:
    """Candidates and queries of rows; each caption is a query whose right answer is its own video.

    Args:
        rows: with `captions` or a `caption_file`.
        merge_equal_captions: equal captions of several videos become one query with several right answers; else
            each is a query of its own and only its own video is right.

    Raises:
        DataError: a row has no caption.
    """
    candidates: dict[Window, int] = {}
    kept: list[Clip] = []
    queries: list[str] = []
    positives: list[list[int]] = []
    seen: dict[str | tuple[str, int], int] = {}
    for row in rows:
        window = (row.video, row.start_seconds, row.end_seconds)
        if window not in candidates:
            candidates[window] = len(kept)
            kept.append(row)
        index = candidates[window]
        texts = dict.fromkeys(caption.text for caption in row_captions(row) if caption.text.strip())
        if not texts:
            raise DataError(f"{row.id}: no caption; retrieval needs a caption for every row (or eval.caption_template)")
        for text in texts:
            key = text if merge_equal_captions else (text, index)
            if key not in seen:
                seen[key] = len(queries)
                queries.append(text)
                positives.append([])
            if index not in positives[seen[key]]:
                positives[seen[key]].append(index)
    return Gallery(candidates=kept, queries=queries, positives=positives)


class Embedded(NamedTuple):
    """Embeddings (N, D) float32 on the CPU; which rows could be read (N,) bool; why the others could not; how many
    frames repeat the last one of a video that is shorter than a clip.
    """

    embeddings: Tensor
    valid: Tensor
    faults: list[Fault]
    repeated_frames: int


@torch.no_grad()
def embed_videos(
    model: nn.Module,
    task: Contrastive,
    rows: Sequence[Clip],
    rules: ViewRules,
    *,
    device: torch.device,
    batch_size: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Embedded:
    """Embeddings of rows, each row once, in order; in every process those of all processes.

    Processes take whole batches in turn, so that a batch, and hence every bit of an embedding, does not depend on
    their number.

    Args:
        model: in eval mode, on the device.
        task: says how embeddings are compared and views combined.
        rows: what to embed.
        rules: which views.
        device: where the model is.
        batch_size: clips at once (rows x views).
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
        report: called with (rows done, rows in all).
    """
    rows_at_once = _rows_at_once(rules, batch_size)
    blocks = [range(first, min(first + rows_at_once, len(rows))) for first in range(0, len(rows), rows_at_once)]
    rank, size = world()
    keys = [[(0, index) for index in block] for block in blocks[rank::size]]
    done: list[tuple[int, Embedded]] = []
    with together():
        ahead = evaluation_ahead(rules, batch_size, num_workers)
    if short := ahead.warning():
        _log.warning(short)
    loader = load_batches(
        ClipDataset(rows, rules), keys, num_workers=num_workers, worker_start=worker_start, ahead=ahead.batches,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    with readers_watched(), closing(feed_device(loader, device)) as batches:
        for batch in batches:
            batch = batch if transform is None else transform(batch)
            num_rows, num_clips = batch.frames.shape[:2]
            batch.frames = batch.frames.flatten(0, 1)
            clips = task.encode_video(model, network_input(batch, rules.preprocessing, device))
            embeddings = task.combine_views(clips.view(num_rows, num_clips, *clips.shape[1:])).cpu()
            done.append(
                (rank + size * len(done), Embedded(embeddings, batch.valid, batch.faults, batch.repeated_frames))
            )
            if report is not None:
                report(min(len(done) * rows_at_once * size, len(rows)), len(rows))
    parts = _in_order(done)
    return Embedded(
        torch.cat([part.embeddings for part in parts]),
        torch.cat([part.valid for part in parts]),
        [fault for part in parts for fault in part.faults],
        sum(part.repeated_frames for part in parts),
    )


def _rows_at_once(rules: ViewRules, batch_size: int) -> int:
    return max(1, batch_size // rules.clips_a_row)


def evaluation_ahead(rules: ViewRules, batch_size: int, num_workers: int) -> ReadAhead:
    """How far readers run ahead in evaluation; ConfigError if not even one batch can be handed over."""
    clips = _rows_at_once(rules, batch_size) * rules.clips_a_row
    return plan_ahead(clip_bytes(rules.preprocessing), clips, num_workers=num_workers, held=2)


def _in_order(done: list[tuple[int, T]]) -> list[T]:
    """What all processes did, numbered, in the order of the numbers."""
    everything = [pair for own in gather_objects(done) for pair in own]
    return [result for _, result in sorted(everything, key=lambda pair: pair[0])]


@torch.no_grad()
def embed_sentences(model: nn.Module, task: Contrastive, sentences: Sequence[str], max_words: int) -> Tensor:
    """(N, D) float32 on the CPU; in every process those of all, as `embed_videos` does."""
    rank, size = world()
    firsts = list(enumerate(range(0, len(sentences), SENTENCES_AT_ONCE)))
    blocks = [
        (number, task.encode_text(model, sentences[first : first + SENTENCES_AT_ONCE], max_words).cpu())
        for number, first in firsts[rank::size]
    ]
    return torch.cat(_in_order(blocks))


def evaluate_retrieval(
    model: nn.Module,
    task: Contrastive,
    rows: Sequence[Clip],
    section: EvalSection,
    *,
    device: torch.device,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    loss_batch_size: int = 32,
    transform: Callable[[Batch], Batch] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """Retrieval in both directions over all captions and all videos of the rows.

    Raises:
        DataError: a video could not be read (unless `section.allow_missing`), or no row is left.
    """
    was_training = model.training
    model.eval()
    preprocessing: Any = model.preprocessing
    rules = view_rules(preprocessing, section)
    with together():
        gallery = build_gallery(rows, merge_equal_captions=section.merge_equal_captions)
    with alike():
        _refuse_other_rows(gallery)
    videos, valid, faults, repeated = embed_videos(
        model, task, gallery.candidates, rules, device=device, batch_size=section.batch_size,
        num_workers=num_workers, worker_start=worker_start, transform=transform, report=report,
    )  # fmt: skip
    expected = len(gallery.candidates)
    if faults:
        with together():
            gallery, videos = _without_missing(gallery, videos, valid, faults, section)
    texts = embed_sentences(model, task, gallery.queries, section.max_words)
    model.train(was_training)

    def score() -> dict[str, float]:
        loss = _validation_loss(task, gallery, texts, videos, loss_batch_size)
        return _scores(task, gallery, texts, videos) | {"loss": loss}

    scores = on_main(score)
    protocol = {
        "queries": len(gallery.queries),
        "candidates": len(gallery.candidates),
        "evaluated": f"{len(gallery.candidates)}/{expected} videos",
        "windows": f"{rules.windows_a_row} a video, {section.windows}, embeddings averaged",
        "frames": _frames_fact(preprocessing, section.windows),
        "repeated_frames": f"{repeated} of {expected * rules.windows_a_row * preprocessing.num_frames}"
        " (the last one of a video shorter than a clip)",
        "crop": rules.framing,
        "similarity": ("cosine" if task.normalize else "dot product") + (" of segments, pooled" * task.segments),
        "ties": "count against the model",
        "equal_captions": "one query, several right videos" if section.merge_equal_captions else "separate queries",
    }
    return Report(metrics=scores, protocol=protocol, faults=faults)


def view_rules(preprocessing: Preprocessing, section: EvalSection) -> ViewRules:
    """How this section looks at a row for this model.

    Raises:
        ConfigError: they do not go together.
    """
    return ViewRules(
        preprocessing=preprocessing,
        num_clips=section.num_clips,
        windows=section.windows,
        num_crops=section.num_crops,
    )


def _frames_fact(preprocessing: Preprocessing, windows: str) -> str:
    if preprocessing.frame_rate is None or windows == "whole":
        # eval.windows=uniform spreads clips; data.clip_start=uniform spreads the frames of one
        return preprocessing.clip_words("" if windows == "uniform" else windows)
    return f"{preprocessing.num_frames} at {preprocessing.frame_rate:g} a second ({preprocessing.clip_seconds:g} s)"


def _refuse_other_rows(gallery: Gallery) -> None:
    """All processes must judge on the same videos and sentences."""
    said = repr(([row.id for row in gallery.candidates], gallery.queries, gallery.positives))
    everyone = gather_objects(hashlib.blake2b(said.encode(), digest_size=8).hexdigest())
    others = [str(rank) for rank, digest in enumerate(everyone) if digest != everyone[0]]
    if others:
        raise DataError(
            f"processes {', '.join(others[:8])} would be judged on other rows than process 0: give every machine the "
            "same manifest and captions to evaluate on"
        )


def _without_missing(
    gallery: Gallery, videos: Tensor, valid: Tensor, faults: Sequence[Fault], section: EvalSection
) -> tuple[Gallery, Tensor]:
    expected = len(gallery.candidates)
    if not section.allow_missing or not bool(valid.any()):
        first = "\n".join(f"  {fault.reason}" for fault in faults[:5])
        raise DataError(
            f"{len(faults)} of {expected} videos could not be read; scores would be over {expected - len(faults)}. "
            f"First:\n{first}\nMend the files or pass eval.allow_missing=true."
        )
    new_index = {old: new for new, old in enumerate(torch.nonzero(valid).flatten().tolist())}
    kept = [
        (query, [new_index[i] for i in right if i in new_index])
        for query, right in zip(gallery.queries, gallery.positives, strict=True)
    ]
    kept = [(query, right) for query, right in kept if right]
    smaller = Gallery(
        candidates=[row for row, ok in zip(gallery.candidates, valid.tolist(), strict=True) if ok],
        queries=[query for query, _ in kept],
        positives=[right for _, right in kept],
    )
    return smaller, videos[valid]


def _scores(task: Contrastive, gallery: Gallery, texts: Tensor, videos: Tensor) -> dict[str, float]:
    captions_of: list[list[int]] = [[] for _ in gallery.candidates]
    for query, right in enumerate(gallery.positives):
        for candidate in right:
            captions_of[candidate].append(query)
    video_ids = [row.id for row in gallery.candidates]
    scores: dict[str, float] = {}
    sides = {
        "text_to_video": (texts, videos, gallery.positives, gallery.queries, video_ids),
        "video_to_text": (videos, texts, captions_of, video_ids, gallery.queries),
    }
    for direction, (queries, candidates, positives, query_ids, candidate_ids) in sides.items():
        if task.segments:
            ranks = _pooled_ranks(task, direction, texts, videos, positives, query_ids, candidate_ids)
        else:
            ranks = metrics.embedding_ranks(
                queries, candidates, positives, query_ids=query_ids, candidate_ids=candidate_ids
            )
        values = metrics.retrieval_metrics(ranks, num_candidates=len(candidates))
        scores |= {f"{direction}/{name}": value for name, value in values.items()}
        chance = metrics.chance_retrieval(positives, len(candidates))
        scores |= {f"chance/{direction}/{name}": value for name, value in chance.items()}
    return scores


def _pooled_ranks(
    task: Contrastive,
    direction: str,
    texts: Tensor,
    videos: Tensor,
    positives: Sequence[Sequence[int]],
    query_ids: Sequence[str],
    candidate_ids: Sequence[str],
) -> Tensor:
    """Ranks under a similarity that is not a dot product, some queries at a time."""
    texts, videos = texts.double(), videos.double()
    ranks = []
    for first in range(0, len(positives), QUERIES_AT_ONCE):
        some = slice(first, first + QUERIES_AT_ONCE)
        forward = direction == "text_to_video"
        scores = task.similarity(videos, texts[some]).T if forward else task.similarity(videos[some], texts)
        ranks.append(
            metrics.retrieval_ranks(scores, positives[some], query_ids=query_ids[some], candidate_ids=candidate_ids)
        )
    return torch.cat(ranks)


@torch.no_grad()
def _validation_loss(task: Contrastive, gallery: Gallery, texts: Tensor, videos: Tensor, batch_size: int) -> float:
    """The task's loss with one caption a video, in blocks of the training batch size."""
    caption_of: dict[int, int] = {}
    for query, right in enumerate(gallery.positives):
        for candidate in right:
            caption_of.setdefault(candidate, query)
    total, count = 0.0, 0
    order = list(caption_of.items())
    for first in range(0, len(order), batch_size):
        block = order[first : first + batch_size]
        video = videos[[candidate for candidate, _ in block]]
        text = texts[[query for _, query in block]]
        sentences = [[gallery.queries[query]] for _, query in block]
        total += float(task.pair_loss(video, text, sentences)) * len(block)
        count += len(block)
    return total / count


def evaluate(
    run: str | Path | Run,
    *,
    checkpoint: str | None = None,
    manifest: str | Sequence[str] | None = None,
    source: str | None = None,
    split: str | None = None,
    root: str | None = None,
    overrides: Sequence[str] = (),
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """Judge a trained run on a manifest or a source; by default on what its recipe names under `eval`.

    Under torchrun the processes share the videos; each gets the same report as one process alone.

    Args:
        run: a run folder, or a loaded run.
        checkpoint: `last`, `best`, `step_N`; None = best if there is one, else last.
        manifest: CSV or JSONL to judge on.
        source: or a name of SOURCES.
        split: the split of it; None = all rows that have no split.
        root: the folder that its paths are relative to.
        overrides: `eval.num_clips=10` and the like.
        report: called with (videos done, videos in all).

    Raises:
        ConfigError, DataError, CheckpointError: with what to do.
    """
    loaded = run if isinstance(run, Run) else load_run(run, checkpoint, overrides)
    asked = {override.partition("=")[0] for override in overrides}
    split = loaded.recipe.eval.split if split is None and "eval.split" in asked else split
    root = loaded.recipe.eval.root if root is None and "eval.root" in asked else root
    section = _section(loaded.recipe, manifest, source, split, root)
    rows = evaluation_rows(loaded.recipe, section, own_root=manifest is not None or source is not None)
    device = pick_device(loaded.recipe.train.device)
    with process_group(device):
        chosen = on_main(lambda: loaded.checkpoint.name)
        with together():
            if chosen != loaded.checkpoint.name:  # a run that still trains has moved `best` in between
                loaded = load_run(loaded.folder, chosen, overrides)
        result = evaluate_retrieval(
            loaded.model.to(device), loaded.task, rows, section, device=device,
            num_workers=loaded.recipe.data.num_workers, worker_start=loaded.recipe.data.worker_start,
            loss_batch_size=loaded.recipe.train.global_batch_size,
            report=report,
        )  # fmt: skip
    return result.placed(
        loaded.recipe, section, f"{loaded.folder.name}/{loaded.checkpoint.name}", averaged=loaded.averaged
    )


def _section(
    recipe: Recipe, manifest: str | Sequence[str] | None, source: str | None, split: str | None, root: str | None
) -> EvalSection:
    if manifest is not None and source is not None:
        raise ConfigError("give a manifest (--input) or a source (--source), not both")
    if manifest is None and source is None:
        if split is None and recipe.eval.split is None and recipe.eval.source is None and recipe.eval.manifest is None:
            raise ConfigError(
                "what shall be evaluated? The recipe names nothing under eval: give --input MANIFEST, "
                "--source NAME --root DIR, or --split of the training collection"
            )
        return recipe.eval.model_copy(
            update={name: value for name, value in (("split", split), ("root", root)) if value is not None}
        )
    kept = {name: getattr(recipe.eval, name) for name in EvalSection.model_fields}
    names = tuple([manifest] if isinstance(manifest, str) else manifest) if manifest is not None else None
    return EvalSection(**(kept | {"manifest": names, "source": source, "split": split, "root": root}))

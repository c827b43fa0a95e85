"""Two towers on rows with captions: embeddings, each row once -> retrieval metrics in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.data.captions import row_captions
from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ViewRules
from twinreel.data.loader import WorkerStart
from twinreel.distributed import alike, on_main, together, world
from twinreel.errors import DataError
from twinreel.evaluation.report import Report
from twinreel.evaluation.views import (
    Viewed,
    frames_fact,
    in_order,
    refuse_missing,
    refuse_other_rows,
    view_rows,
    view_rules,
)
from twinreel.recipe import EvalSection
from twinreel.tasks import Contrastive

__all__ = ["Gallery", "build_gallery", "embed_sentences", "embed_videos", "evaluate_retrieval"]

SENTENCES_AT_ONCE = 256
QUERIES_AT_ONCE = 256  # of a similarity that is not a dot product
Window = tuple[str, float | None, float | None]


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
) -> Viewed:
    """Embeddings (N, D) float32 of rows, each row once, in order; in every process those of all processes.

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
    return view_rows(
        rows, rules, lambda video: task.encode_video(model, video), task.combine_views, device=device,
        batch_size=batch_size, num_workers=num_workers, worker_start=worker_start, transform=transform, report=report,
    )  # fmt: skip


@torch.no_grad()
def embed_sentences(model: nn.Module, task: Contrastive, sentences: Sequence[str], max_words: int) -> Tensor:
    """(N, D) float32 on the CPU; in every process those of all, as `embed_videos` does."""
    rank, size = world()
    firsts = list(enumerate(range(0, len(sentences), SENTENCES_AT_ONCE)))
    blocks = [
        (number, task.encode_text(model, sentences[first : first + SENTENCES_AT_ONCE], max_words).cpu())
        for number, first in firsts[rank::size]
    ]
    return torch.cat(in_order(blocks))


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
    own_preprocessing: Any = model.preprocessing
    rules = view_rules(own_preprocessing, section)
    preprocessing = rules.preprocessing
    with together():
        gallery = build_gallery(rows, merge_equal_captions=section.merge_equal_captions)
    with alike():
        refuse_other_rows(
            ([row.id for row in gallery.candidates], gallery.queries, gallery.positives), "manifest and captions"
        )
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
        "frames": frames_fact(preprocessing, section.windows),
        "repeated_frames": f"{repeated} of {expected * rules.windows_a_row * preprocessing.num_frames}"
        " (the last one of a video shorter than a clip)",
        "crop": rules.framing,
        "similarity": ("cosine" if task.normalize else "dot product") + (" of segments, pooled" * task.segments),
        "ties": "count against the model",
        "equal_captions": "one query, several right videos" if section.merge_equal_captions else "separate queries",
    }
    return Report(metrics=scores, protocol=protocol, faults=faults)


def _without_missing(
    gallery: Gallery, videos: Tensor, valid: Tensor, faults: Sequence[Fault], section: EvalSection
) -> tuple[Gallery, Tensor]:
    refuse_missing(faults, valid, section)
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

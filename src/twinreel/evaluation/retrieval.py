"""Two towers on rows with captions: embeddings, each row once -> retrieval metrics in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.data.clip import Batch, Clip
from twinreel.data.dataset import ViewRules
from twinreel.data.loader import WorkerStart
from twinreel.distributed import alike, on_main, together, world
from twinreel.evaluation.gallery import Gallery, Side, build_gallery, without_missing
from twinreel.evaluation.report import Report
from twinreel.evaluation.views import Viewed, frames_fact, in_order, refuse_other_rows, view_rows, view_rules
from twinreel.recipe import EvalSection
from twinreel.tasks import Contrastive

if TYPE_CHECKING:
    from twinreel.evaluation.rerank import SecondStage

__all__ = ["Gallery", "build_gallery", "embed_sentences", "embed_videos", "evaluate_retrieval", "retrieval_scores"]

SENTENCES_AT_ONCE = 256
QUERIES_AT_ONCE = 256  # of a similarity that is not a dot product


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
    second: SecondStage | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """Retrieval in both directions over all captions and all videos of the rows.

    With a second stage the scores are those after re-ranking; those of the towers alone are `first_stage/...`.

    Raises:
        DataError: a video could not be read (unless `section.allow_missing`), or no row is left.
    """
    was_training = model.training
    model.eval()
    own_preprocessing: Any = model.preprocessing
    rules = view_rules(own_preprocessing, section)
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
            gallery, videos = without_missing(gallery, videos, valid, faults, section)
    texts = embed_sentences(model, task, gallery.queries, section.max_words)
    model.train(was_training)

    def score() -> dict[str, float]:
        loss = _validation_loss(task, gallery, texts, videos, loss_batch_size)
        return _scores(task, gallery, texts, videos) | {"loss": loss}

    scores = on_main(score)
    protocol = _protocol(task, gallery, section, rules, expected, repeated)
    if second is not None:
        again = second.rerank(
            task, gallery, texts, videos, device=device, num_workers=num_workers, worker_start=worker_start,
            report=report,
        )  # fmt: skip
        scores = again.beside(scores)
        protocol |= again.protocol
    return Report(metrics=scores, protocol=protocol, faults=faults)


def _protocol(
    task: Contrastive, gallery: Gallery, section: EvalSection, rules: ViewRules, expected: int, repeated: int
) -> dict[str, Any]:
    """How the scores were made, in words."""
    frames = expected * rules.windows_a_row * rules.preprocessing.num_frames
    return {
        "queries": len(gallery.queries),
        "candidates": len(gallery.candidates),
        "evaluated": f"{len(gallery.candidates)}/{expected} videos",
        "windows": f"{rules.windows_a_row} a video, {section.windows}, embeddings averaged",
        "frames": frames_fact(rules.preprocessing, section.windows),
        "repeated_frames": f"{repeated} of {frames} (the last one of a video shorter than a clip)",
        "crop": rules.framing,
        "similarity": ("cosine" if task.normalize else "dot product") + (" of segments, pooled" * task.segments),
        "ties": "count against the model",
        "equal_captions": "one query, several right videos" if section.merge_equal_captions else "separate queries",
    }


def retrieval_scores(direction: str, ranks: Tensor, side: Side) -> dict[str, float]:
    """The scores of one direction, `text_to_video/recall_at_1` and so on, and beside them those of chance."""
    num_candidates = len(side.candidate_ids)
    values = metrics.retrieval_metrics(ranks, num_candidates=num_candidates)
    chance = metrics.chance_retrieval(side.positives, num_candidates)
    return {f"{direction}/{name}": value for name, value in values.items()} | {
        f"chance/{direction}/{name}": value for name, value in chance.items()
    }


def _scores(task: Contrastive, gallery: Gallery, texts: Tensor, videos: Tensor) -> dict[str, float]:
    scores: dict[str, float] = {}
    for direction, side in gallery.sides.items():
        if task.segments:
            ranks = _pooled_ranks(task, direction, texts, videos, side)
        else:
            queries, candidates = (texts, videos) if direction == "text_to_video" else (videos, texts)
            ranks = metrics.embedding_ranks(
                queries, candidates, side.positives, query_ids=side.query_ids, candidate_ids=side.candidate_ids
            )
        scores |= retrieval_scores(direction, ranks, side)
    return scores


def _pooled_ranks(task: Contrastive, direction: str, texts: Tensor, videos: Tensor, side: Side) -> Tensor:
    """Ranks under a similarity that is not a dot product, some queries at a time."""
    texts, videos = texts.double(), videos.double()
    positives, query_ids, candidate_ids = side
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

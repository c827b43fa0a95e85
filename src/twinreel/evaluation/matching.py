"""A cross-modal model judged: captions found for videos and videos for captions, or answers chosen, or answers given.

Retrieval compares every video with every text: ranks come from unrounded log-odds, which do not saturate as
probabilities do; ties count against the model; a video has as many right captions as it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from twinreel import metrics
from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ViewRules
from twinreel.data.loader import WorkerStart
from twinreel.data.manifest import missing_videos
from twinreel.data.plan import keyed_rng
from twinreel.distributed import alike, on_main, together
from twinreel.errors import DataError
from twinreel.evaluation.answers import judge_answers
from twinreel.evaluation.choices import judge_choices
from twinreel.evaluation.gallery import Gallery, Side, build_gallery, without_missing
from twinreel.evaluation.pairs import Compared, PairScores, TextTable, compare_pairs, log_odds, score_pairs, views_facts
from twinreel.evaluation.report import Report
from twinreel.evaluation.retrieval import retrieval_scores
from twinreel.evaluation.views import refuse_missing, refuse_other_rows, view_rules
from twinreel.recipe import EvalSection
from twinreel.tasks import MatchFacts, VideoTextMatching

__all__ = ["PairScores", "evaluate_matching", "score_pairs"]

BLOCK_SCORES = 1 << 20  # scores of a matrix that are ranked together
TRIES = 100  # to draw a wrong caption that the video has not itself

Judge = Callable[
    [nn.Module, VideoTextMatching, Sequence[Clip], EvalSection, ViewRules, Mapping[str, Any]],
    Report,
]


def evaluate_matching(
    model: nn.Module,
    task: VideoTextMatching,
    rows: Sequence[Clip],
    section: EvalSection,
    *,
    device: torch.device,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Report:
    """What the task is for: retrieval in both directions, or how many answers are right.

    Rows with options are choices, for a run of retrieval too: each option is scored as a caption (MSRVTT-MC). A run of
    question answering is asked the caption of each row. Else all videos are compared with all captions.

    Args:
        model: a `models.matcher.Matcher` on the device; it is left in the mode it is in.
        task: of the model.
        rows: what to judge on.
        section: how.
        device: where the model is.
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
        report: called with (pairs done, pairs in all).

    Raises:
        DataError: a row does not go with the task, a video could not be read (unless `section.allow_missing`), no row
            is left, or a score is not finite.
    """
    was_training = model.training
    model.eval()
    own_preprocessing: Any = model.preprocessing
    rules = view_rules(own_preprocessing, section)
    with together():
        judge = _judge_of(task, rows)
        _refuse_absent(rows, section)
    how = {
        "device": device, "batch_size": section.batch_size, "num_workers": num_workers, "worker_start": worker_start,
        "transform": transform, "allow_missing": section.allow_missing, "report": report,
    }  # fmt: skip
    found = judge(model, task, rows, section, rules, how)
    model.train(was_training)
    return found


def _refuse_absent(rows: Sequence[Clip], section: EvalSection) -> None:
    """Say at once that files are missing: else it would be said after hours of comparing in vain.

    Raises:
        DataError: some are, and `section.allow_missing` is not set.
    """
    if section.allow_missing:
        return
    absent = dict.fromkeys(row.video for row in missing_videos(rows))
    faults = [Fault(id=video, video=video, reason=f"{video}: no such file") for video in absent]
    refuse_missing(faults, torch.tensor([video not in absent for video in {row.video for row in rows}]), section)


def _judge_of(task: VideoTextMatching, rows: Sequence[Clip]) -> Judge:
    """How rows are judged, by what they ask.

    Raises:
        DataError: they do not go with the task or with each other.
    """
    if not rows:
        raise DataError("there is no row to evaluate on; look at eval.split and the manifest")
    with_options = [row.id for row in rows if row.options]
    if task.goal == "question_answering":
        if with_options:
            raise DataError(
                f"{with_options[0]} has options to choose from, and this run answers out of its own table "
                "(task.goal=question_answering): leave the options out and give the answer itself"
            )
        task.check(rows, "evaluation")
        return judge_answers
    task.check(rows, "evaluation")
    if not with_options:
        return judge_retrieval
    if len(with_options) < len(rows):
        without = next(row.id for row in rows if not row.options)
        raise DataError(
            f"{len(with_options)} of {len(rows)} rows have options (first without: {without}): choices and retrieval "
            "are different tests; give each rows of its own"
        )
    return judge_choices


def judge_retrieval(
    model: nn.Module,
    task: VideoTextMatching,
    rows: Sequence[Clip],
    section: EvalSection,
    rules: ViewRules,
    how: Mapping[str, Any],
) -> Report:
    """Ranks of all captions and all videos, each pair compared once; `how` is passed on to `compare_pairs`."""
    with together():
        gallery = build_gallery(rows, merge_equal_captions=section.merge_equal_captions)
    with alike():
        refuse_other_rows(
            ([row.id for row in gallery.candidates], gallery.queries, gallery.positives), "manifest and captions"
        )
    table = TextTable.of(model, gallery.queries)
    scores = torch.full((len(gallery.candidates), len(table.tokens)), torch.nan)
    compared = compare_pairs(
        model, gallery.candidates, rules, table.tokens, partial(log_odds, task), scores.unbind(), **how
    )
    if compared.faults:
        with together():
            gallery, scores = without_missing(gallery, scores, compared.valid, compared.faults, section)
    columns = torch.tensor(table.places(gallery.queries))

    def judge() -> tuple[dict[str, float], str]:
        values: dict[str, float] = {}
        for direction, side in gallery.sides.items():
            values |= retrieval_scores(direction, _ranks(scores, columns, direction, side), side)
        loss = _validation_loss(task, gallery, scores, columns)
        if loss is None:
            return values, f"left out: too few videos for task.num_negatives={task.num_negatives}"
        return values | {"loss": loss}, f"of every caption beside {task.num_negatives} wrong, drawn once for all"

    values, loss_fact = on_main(judge)
    protocol = _protocol(task, section, gallery, table, compared) | views_facts(task, section, rules, compared)
    return Report(metrics=values, protocol=protocol | {"loss": loss_fact}, faults=compared.faults)


def _ranks(scores: Tensor, columns: Tensor, direction: str, side: Side) -> Tensor:
    """Ranks of one direction from log-odds (videos, distinct texts), some queries at a time.

    `columns` (Q,) says which text a caption is.
    """
    at_once, ranks = max(1, BLOCK_SCORES // len(side.candidate_ids)), []
    for first in range(0, len(side.positives), at_once):
        some = slice(first, first + at_once)
        block = scores[:, columns[some]].T if direction == "text_to_video" else scores[some][:, columns]
        ranks.append(
            metrics.retrieval_ranks(
                block, side.positives[some], query_ids=side.query_ids[some], candidate_ids=side.candidate_ids
            )
        )
    return torch.cat(ranks)


@torch.no_grad()
def _validation_loss(task: VideoTextMatching, gallery: Gallery, scores: Tensor, columns: Tensor) -> float | None:
    """The task's loss of each caption of each video beside wrong captions; None where there are not enough of them.

    A loss sees logits pooled over clips only by their difference (of two outputs) or as they are (of one), so that one
    clip with logits (0, log-odds) stands for all. Wrong captions are drawn as in training, uniformly over the other
    videos (a file is one, whatever windows of it are candidates), but keyed by video and caption alone: every
    evaluation has the same ones, so that losses can be compared.
    """
    wrong_of = _WrongCaptions(gallery, columns, task.num_negatives)
    videos, texts = [], []
    for query, right in enumerate(gallery.positives):
        for video in right:
            wrong = wrong_of(video, query)
            if wrong is None:
                return None
            videos.append(video)
            texts.append([query, *wrong])
    odds = scores[torch.tensor(videos)[:, None], columns[torch.tensor(texts)]]
    logits = torch.stack([torch.zeros_like(odds), odds], dim=2) if task.num_outputs == 2 else odds[..., None]
    everyone, targets = torch.ones(len(videos), dtype=torch.bool), torch.zeros(odds.shape)
    targets[:, 0] = 1.0
    return float(task.share((logits[:, None],), MatchFacts(everyone, everyone, targets)))


class _WrongCaptions:
    """Draws queries that are captions of other video files, and that the model can tell from all of its own file.

    `columns` (Q,) says as which text the model reads a query. None is read as another is, unless there are no others.
    """

    def __init__(self, gallery: Gallery, columns: Tensor, number: int) -> None:
        self.gallery = gallery
        self.columns: list[int] = columns.tolist()
        self.number = number
        files: dict[str, list[int]] = {}
        for row, captions in zip(gallery.candidates, gallery.sides["video_to_text"].positives, strict=True):
            files.setdefault(row.video, []).extend(captions)
        self.captions_of = list(files.values())
        self.texts_of = [{self.columns[caption] for caption in captions} for captions in self.captions_of]
        self.place = {name: place for place, name in enumerate(files)}

    def __call__(self, video: int, query: int) -> list[int] | None:
        """So many for a caption of a candidate; None if there are too few videos, or none is found."""
        row = self.gallery.candidates[video]
        place = self.place[row.video]
        rng = keyed_rng("validation negatives", row.id, self.gallery.queries[query])
        found: dict[int, int] = {}
        again: list[int] = []
        for other in _others(rng, len(self.captions_of), place, self.number):
            captions = self.captions_of[other]
            caption = captions[int(rng.integers(len(captions)))]
            text = self.columns[caption]
            if text in found:
                again.append(caption)
            elif text not in self.texts_of[place]:
                found[text] = caption
            if len(found) == self.number:
                break
        if not found or len(self.captions_of) <= self.number:
            return None
        return list(islice(chain(found.values(), again, cycle(found.values())), self.number))


def _others(rng: np.random.Generator, num_videos: int, video: int, number: int) -> list[int]:
    """Other videos than this one, in drawn order, each once; of many not all."""
    few = min(num_videos, number + TRIES)
    return [other for other in rng.choice(num_videos, few, replace=False).tolist() if other != video]


def _protocol(
    task: VideoTextMatching, section: EvalSection, gallery: Gallery, table: TextTable, compared: Compared
) -> dict[str, Any]:
    expected, readable = len(compared.valid), int(compared.valid.sum())
    same = len(set(table.place)) - len(table.tokens)
    pairs = f"{compared.num_pairs} = {readable} videos x {len(table.tokens)} texts, each once"
    trained = {} if task.one_video is None else {"trained": task.one_video}
    return {
        "queries": len(gallery.queries),
        "candidates": len(gallery.candidates),
        "pairs": pairs + (f" ({same} texts are to the model the same as another)" if same else ""),
        "evaluated": f"{readable}/{expected} videos",
        "similarity": f"{task.score_words}, not rounded",
        "ties": "count against the model",
        "equal_captions": "one query, several right videos" if section.merge_equal_captions else "separate queries",
    } | trained

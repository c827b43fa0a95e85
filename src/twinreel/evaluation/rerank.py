"""Two towers find candidates, a matching model judges the first k of them again: O(queries x k) pairs, not all.

The towers are cheap, a pair costs a pass of the matching model's transformer. Both stages look at the same rows, each
with its own preprocessing and windows. Every process gets the same results; they share the videos of the second stage.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinreel import metrics
from twinreel.assembly import Run, load_run
from twinreel.data.clip import Clip
from twinreel.data.dataset import ViewRules
from twinreel.data.loader import WorkerStart
from twinreel.distributed import on_main, together
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.evaluation.gallery import Gallery, Side
from twinreel.evaluation.pairs import PairScores, score_pairs
from twinreel.evaluation.report import spoken
from twinreel.evaluation.retrieval import retrieval_scores
from twinreel.evaluation.views import frames_fact, view_rules
from twinreel.metrics import FirstStage
from twinreel.recipe import EvalSection
from twinreel.recipe.sections import RerankSection
from twinreel.tasks import Contrastive, VideoTextMatching

__all__ = ["Reranked", "SecondStage", "load_second_stage", "rerank"]

QUERIES_AT_ONCE = 256
DIRECTIONS = {"text_to_video": ("text_to_video",), "both": ("text_to_video", "video_to_text")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reranked:
    """What became of two stages: scores after the second one by name, and how they were made."""

    metrics: dict[str, float]
    protocol: dict[str, Any]

    def beside(self, first: Mapping[str, float]) -> dict[str, float]:
        """All scores: after re-ranking, of the first stage as `first_stage/...`, of chance."""
        chance = {name: value for name, value in first.items() if name.startswith("chance/")}
        own = {f"first_stage/{name}": value for name, value in first.items() if name not in chance}
        return self.metrics | own | chance


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondStage:
    """A trained matching model, and which pairs it judges: the first k candidates of each query.

    `section` is the run's own `eval`, with the number of windows that is asked for; `say` gets the progress in words.
    """

    run: Run
    k: int
    directions: tuple[str, ...]
    section: EvalSection
    say: Callable[[str, bool], None] | None = None

    @property
    def name(self) -> str:
        """The run and its checkpoint, for people."""
        return f"{self.run.folder.name}/{self.run.checkpoint.name}"

    @property
    def task(self) -> VideoTextMatching:
        """The task of the run, which matches captions and videos."""
        assert isinstance(self.run.task, VideoTextMatching)
        return self.run.task

    @property
    def rules(self) -> ViewRules:
        """Which views of a row the matching model sees."""
        preprocessing: Any = self.run.model.preprocessing
        return view_rules(preprocessing, self.section)

    def agreed(self) -> SecondStage:
        """The same with the checkpoint that the main process has: a run that still trains may move `best` meanwhile."""
        chosen = on_main(lambda: self.run.checkpoint.name)
        with together():
            if chosen != self.run.checkpoint.name:
                return replace(self, run=load_run(self.run.folder, chosen))
        return self

    def score(
        self,
        rows: Sequence[Clip],
        texts: Sequence[str],
        wanted: Mapping[str, Sequence[int]] | None = None,
        *,
        device: torch.device,
        num_workers: int = 0,
        worker_start: WorkerStart = "auto",
        report: Callable[[int, int], None] | None = None,
    ) -> PairScores:
        """Scores of pairs of rows and texts, as `score_pairs` gives them.

        Raises:
            DataError: a row cannot be read.
        """
        self.run.model.to(device)
        found = score_pairs(
            self.run.model, self.task, rows, texts, self.rules, wanted=wanted, device=device,
            batch_size=self.section.batch_size, num_workers=num_workers, worker_start=worker_start,
            allow_missing=False, report=report,
        )  # fmt: skip
        with together():
            if found.faults:
                raise DataError(
                    f"{len(found.faults)} of {len(rows)} videos cannot be read by the second stage, {self.name}; "
                    f"nothing takes the place of its scores. First: {found.faults[0].reason}"
                )
        return found

    def rerank(
        self,
        task: Contrastive,
        gallery: Gallery,
        texts: Tensor,
        videos: Tensor,
        *,
        device: torch.device,
        num_workers: int = 0,
        worker_start: WorkerStart = "auto",
        report: Callable[[int, int], None] | None = None,
    ) -> Reranked:
        """The scores of a gallery after the second stage.

        Args:
            task: of the towers.
            gallery: what is asked and what can be found.
            texts: embeddings of its queries.
            videos: embeddings of its candidates.
            device: where the matching model computes.
            num_workers: reader processes.
            worker_start: how they are started.
            report: called with (pairs done, pairs in all), unless `say` is.

        Raises:
            DataError: a video that the towers could read cannot be read here, or a score is not finite.
        """
        sides = {name: gallery.sides[name] for name in self.directions}
        first = on_main(
            lambda: {name: first_stage(task, name, side, texts, videos, self.k) for name, side in sides.items()}
        )
        pairs = _pairs(first, len(gallery.queries))
        wanted = _wanted(gallery, pairs)
        found = self.score(
            gallery.candidates, gallery.queries, wanted, device=device, num_workers=num_workers,
            worker_start=worker_start, report=report if self.say is None else spoken(self.task, self.say),
        )  # fmt: skip
        ranks = on_main(lambda: _ranks(first, sides, pairs, torch.cat(found.scores), len(gallery.queries)))
        values: dict[str, float] = {}
        for name, side in sides.items():
            values |= retrieval_scores(name, ranks[name], side)
        protocol = self._protocol(gallery, first, found, len(wanted))
        return Reranked(metrics={name: v for name, v in values.items() if "chance/" not in name}, protocol=protocol)

    def _protocol(
        self, gallery: Gallery, first: Mapping[str, FirstStage], found: PairScores, num_videos: int
    ) -> dict[str, Any]:
        rules, within = self.rules, []
        judged: dict[int, list[str]] = {}
        for name, stage in first.items():
            direction, k = name.replace("_", " "), stage.candidates.shape[1]
            share = float((stage.ranks <= k).double().mean())
            within.append(f"{direction} among the first {k} for {100 * share:.1f} % of the queries")
            judged.setdefault(k, []).append(direction)
        each = [str(k) if len(judged) == 1 else f"{k} ({', '.join(names)})" for k, names in judged.items()]
        values = {
            "": f"the first {' and '.join(each)} again by {self.name}, {self.task.score_words}; the others stay behind "
            "them in their order",
            "within_reach": "the right answer is, " + "; ".join(within),
            "pairs": f"{found.num_pairs} of {len(gallery.queries) * len(gallery.candidates)}",
            "seconds": f"{found.seconds:.1f}",
            "cnn": f"{found.num_clips} clips of {num_videos} of {len(gallery.candidates)} videos, each once",
            "windows": f"{rules.windows_a_row} a video, {self.section.windows}, logits pooled by {self.task.pooling}",
            "frames": frames_fact(rules.preprocessing, self.section.windows),
            "repeated_frames": f"{found.repeated_frames} of {found.num_clips * rules.preprocessing.num_frames}",
            "crop": rules.framing,
        }
        if self.task.one_video is not None:
            values["trained"] = self.task.one_video
        return {f"second_stage_{name}".rstrip("_"): value for name, value in values.items()}


def load_second_stage(section: RerankSection, towers: Run) -> SecondStage | None:
    """The matching model that a recipe names for re-ranking; None if it names none.

    Args:
        section: `rerank` of the recipe.
        towers: the run of the first stage.

    Raises:
        ConfigError: the first run has no towers, or the second does not match captions and videos.
        CheckpointError: there is no such run or checkpoint.
    """
    if section.run is None:
        return None
    if not isinstance(towers.task, Contrastive):
        raise ConfigError(
            f"rerank.run={section.run}: {towers.folder} was trained with task.name={towers.task.name}; what is "
            "re-ranked are the answers of two towers, task.name=contrastive; leave rerank.run out"
        )
    run = _matching_run(Path(section.run), section.checkpoint)
    judged = run.recipe.eval
    if section.num_clips is not None:
        judged = judged.model_copy(update={"num_clips": section.num_clips})
    return SecondStage(run=run, k=section.k, directions=DIRECTIONS[section.direction], section=judged)


def _matching_run(folder: Path, checkpoint: str | None) -> Run:
    if not folder.is_dir():
        raise CheckpointError(f"rerank.run={folder}: no such folder; give a run of task.name=video_text_matching")
    run = load_run(folder, checkpoint)
    what = f"rerank.run={folder} was trained with task.name={run.task.name}"
    if not isinstance(run.task, VideoTextMatching):
        kind = "two towers" if isinstance(run.task, Contrastive) else "a classifier"
        raise ConfigError(f"{what}, {kind}; the second stage is a run of task.name=video_text_matching")
    if run.task.goal != "retrieval":
        raise ConfigError(
            f"{what} and task.goal={run.task.goal}: its scores compare answers to a question about one video, not "
            "videos; the second stage is a run of task.goal=retrieval"
        )
    return run


def first_stage(task: Contrastive, direction: str, side: Side, texts: Tensor, videos: Tensor, k: int) -> FirstStage:
    """The first k candidates of each query by the towers, and the ranks of the right ones.

    Scores are float64; those that the rounding of the product leaves in doubt tie, as in `metrics.embedding_ranks`.
    """
    texts, videos = texts.double(), videos.double()
    forward = direction == "text_to_video"
    queries, candidates = (texts, videos) if forward else (videos, texts)
    stages = []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        scores = task.similarity(videos, queries[some]).T if forward else task.similarity(queries[some], texts)
        errors = None if task.segments else _rounding(queries[some], candidates)
        names = {"query_ids": side.query_ids[some], "candidate_ids": side.candidate_ids}
        stages.append(metrics.first_candidates(scores, side.positives[some], k, errors=errors, **names))
    return FirstStage(
        candidates=torch.cat([stage.candidates for stage in stages]), ranks=torch.cat([stage.ranks for stage in stages])
    )


def _rounding(queries: Tensor, candidates: Tensor) -> Tensor:
    """How far float64 dot products (Q, C) may be from the true ones, whatever the order of summation."""
    slack: Tensor = torch.linalg.vector_norm(queries, dim=1) * (queries.shape[1] * torch.finfo(torch.float64).eps)
    norms: Tensor = torch.linalg.vector_norm(candidates, dim=1)
    return slack[:, None] * norms


def rerank(first: FirstStage, scores: Tensor, side: Side) -> Tensor:
    """Ranks float64 (Q,) after the first k of each query were put in the order of scores (Q, k)."""
    return metrics.reranked_ranks(
        first, scores, side.positives, query_ids=side.query_ids, candidate_ids=side.candidate_ids
    )


def _pairs(first: Mapping[str, FirstStage], num_texts: int) -> Tensor:
    """The pairs that are judged in any direction, each once: video * num_texts + text, int64 (P,), rising."""
    numbers = torch.cat([_numbers(name, stage, num_texts).flatten() for name, stage in first.items()])
    pairs: Tensor = torch.unique(numbers)
    return pairs


def _numbers(direction: str, first: FirstStage, num_texts: int) -> Tensor:
    """The number of the pair of each query and its first candidates, int64 (Q, k), as `_pairs` counts."""
    queries = torch.arange(len(first.candidates))[:, None].expand_as(first.candidates)
    videos, texts = (first.candidates, queries) if direction == "text_to_video" else (queries, first.candidates)
    return videos * num_texts + texts


def _wanted(gallery: Gallery, pairs: Tensor) -> dict[str, Sequence[int]]:
    """By candidate id, the positions of the queries that it is compared with, rising."""
    num_texts = len(gallery.queries)
    videos, counts = torch.unique_consecutive(pairs // num_texts, return_counts=True)
    texts = torch.split(pairs % num_texts, counts.tolist())
    return {
        gallery.candidates[video].id: array("q", own.tolist())
        for video, own in zip(videos.tolist(), texts, strict=True)
    }


def _ranks(
    first: Mapping[str, FirstStage], sides: Mapping[str, Side], pairs: Tensor, scores: Tensor, num_texts: int
) -> dict[str, Tensor]:
    """Ranks of each direction, from the scores (P,) of `pairs`."""
    found = {}
    for name, stage in first.items():
        places = torch.searchsorted(pairs, _numbers(name, stage, num_texts))
        found[name] = rerank(stage, scores[places], sides[name])
    return found

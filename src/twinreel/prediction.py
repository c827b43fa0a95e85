"""What is said of a video: sentences ranked for it, by two towers or by a matching model, or a question answered.

The windows cover the whole video. A score is that of all windows together, combined as the run was trained to do it;
beside it stands the window that alone scores highest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinreel.assembly import Run, load_run, pick_device
from twinreel.data.clip import Clip, Fault
from twinreel.data.windows import Window, check_stride, see_windows
from twinreel.errors import ConfigError, DataError
from twinreel.losses import answer_binary_cross_entropy
from twinreel.search import WINDOWS_AT_ONCE, embed_known
from twinreel.tasks import VideoTextMatching

__all__ = ["Answer", "Prediction", "answer", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A sentence for a video: its score, and the window [start, end), seconds, where it fits best.

    The score is the similarity of two towers, or the log-odds (of a choice: the logit) of a matching model.
    """

    video: str
    sentence: str
    score: float
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a question about a video: its probability, and the window [start, end), seconds, that shows it best.

    The probabilities of all answers add up to 1, unless the model was trained to give each its own.
    """

    video: str
    question: str
    answer: str
    score: float
    start_seconds: float
    end_seconds: float


def predict(
    run: str | Path | Run,
    videos: Sequence[str | Path],
    sentences: Sequence[str],
    *,
    question: str | None = None,
    checkpoint: str | None = None,
    stride_seconds: float | None = None,
) -> list[list[Prediction]]:
    """Rank sentences for each video, best first, with the window where each fits best.

    Args:
        run: a run folder, or a loaded run: of two towers, or of task.name=video_text_matching.
        videos: files.
        sentences: what may be said of them; of a run with task.goal=multiple_choice, the options.
        question: of such a run, what is asked.
        checkpoint: `last`, `best`, `step_N`.
        stride_seconds: from window to window; None = a window's length.

    Raises:
        ConfigError: no sentence, or one without a known word, or the run does not rank sentences.
        DataError: a video cannot be read, or a score is not finite.
    """
    if isinstance(videos, str | Path) or isinstance(sentences, str):
        raise ConfigError("predict takes lists: videos=[...], sentences=[...]")
    check_stride(stride_seconds)
    if not sentences:
        raise ConfigError("no sentence to choose from: give --sentence TEXT (repeatable) or --sentences FILE")
    loaded = run if isinstance(run, Run) else load_run(run, checkpoint)
    task = loaded.task
    if isinstance(task, VideoTextMatching) and task.goal == "question_answering":
        raise ConfigError(f"{loaded.folder} answers questions with answers of its own; ask one: --question TEXT")
    chooses = isinstance(task, VideoTextMatching) and task.goal == "multiple_choice"
    if question is not None and not chooses:
        raise ConfigError(
            f"{loaded.folder} ranks sentences and answers no question; leave --question out, or give a run of "
            "task.goal=question_answering or multiple_choice"
        )
    loaded.model.to(pick_device(loaded.recipe.train.device))
    matches = isinstance(task, VideoTextMatching)
    rank = _Matching(loaded, sentences, question) if matches else _Towers(loaded, sentences)
    results = []
    for video in map(str, videos):
        windows, whole, by_window = rank(video, stride_seconds)
        results.append([
            Prediction(video=video, sentence=sentences[place], score=score, start_seconds=start, end_seconds=end)
            for place, score, start, end in _ranked(video, windows, whole, by_window)
        ])  # fmt: skip
    return results


def answer(
    run: str | Path | Run,
    videos: Sequence[str | Path],
    question: str,
    *,
    top: int = 5,
    checkpoint: str | None = None,
    stride_seconds: float | None = None,
) -> list[list[Answer]]:
    """The best answers to a question about each video, best first.

    Args:
        run: a run folder, or a loaded run, of task.goal=question_answering.
        videos: files.
        question: what is asked.
        top: how many answers.
        checkpoint: `last`, `best`, `step_N`.
        stride_seconds: from window to window; None = a window's length.

    Raises:
        ConfigError: the run answers no questions, or no word of the question is known.
        DataError: a video cannot be read, or a score is not finite.
    """
    if isinstance(videos, str | Path):
        raise ConfigError("answer takes a list: videos=[...]")
    check_stride(stride_seconds)
    loaded = run if isinstance(run, Run) else load_run(run, checkpoint)
    task = loaded.task
    if not isinstance(task, VideoTextMatching) or task.goal != "question_answering":
        chooses = isinstance(task, VideoTextMatching) and task.goal == "multiple_choice"
        raise ConfigError(
            f"{loaded.folder} was not trained with task.goal=question_answering; it has no answers of its own"
            + (", but chooses among options: give them with --sentence" if chooses else "")
        )
    loaded.model.to(pick_device(loaded.recipe.train.device))
    look = _Matching(loaded, [question], None)
    results = []
    for video in map(str, videos):
        windows, logits = look.logits(video, stride_seconds)
        whole, by_window = task.answer_scores(logits), task.answer_scores(logits[:, None])
        found = _ranked(video, windows, whole, by_window)[:top]
        several = task.loss is answer_binary_cross_entropy
        sure = whole.sigmoid() if several else whole.softmax(0)
        results.append([
            Answer(video=video, question=question, answer=task.answers[place], score=float(sure[place]),
                   start_seconds=start, end_seconds=end)
            for place, _, start, end in found
        ])  # fmt: skip
    return results


def _ranked(
    video: str, windows: Sequence[Window], whole: Tensor, by_window: Tensor
) -> list[tuple[int, float, float, float]]:
    """(place, score, start, end of the best window) from scores (R,) and (windows, R), best first.

    Raises:
        DataError: a score is not finite.
    """
    if not bool(whole.isfinite().all() & by_window.isfinite().all()):
        raise DataError(f"{video}: scores that are not finite; look at the weights")
    best = by_window.argmax(0).tolist()
    return [
        (place, float(whole[place]), windows[best[place]].start_seconds, windows[best[place]].end_seconds)
        for place in torch.argsort(whole, descending=True, stable=True).tolist()
    ]


class _Towers:
    """Similarities of sentences and the windows of a video."""

    def __init__(self, run: Run, sentences: Sequence[str]) -> None:
        self.run = run
        self.texts = embed_known(run, sentences)

    def __call__(self, video: str, stride_seconds: float | None) -> tuple[list[Window], Tensor, Tensor]:
        """Windows, scores (R,) of the whole video, scores (windows, R)."""
        towers = self.run.towers
        windows, seen = _see(self.run, video, lambda clips: towers.encode_video(self.run.model, clips), stride_seconds)
        whole = towers.similarity(towers.combine_views(seen[None]), self.texts)[0]
        return windows, whole, towers.similarity(seen, self.texts)


class _Matching:
    """Log-odds of texts and the windows of a video: each window is looked at once, whatever the number of texts."""

    def __init__(self, run: Run, sentences: Sequence[str], question: str | None) -> None:
        assert isinstance(run.task, VideoTextMatching)
        self.run, self.task = run, run.task
        vocabulary = getattr(run.model, "vocabulary", None)
        for text in [*sentences, *([] if question is None else [question])]:
            if not text.strip() or (vocabulary is not None and set(vocabulary.encode(text)) <= {vocabulary.unk_id}):
                raise ConfigError(f"{text!r}: no part of it is in the model's vocabulary")
        matcher: Any = run.model
        self.tokens: Tensor = matcher.tokenize(self.task.choice_texts(question or "", sentences))

    def __call__(self, video: str, stride_seconds: float | None) -> tuple[list[Window], Tensor, Tensor]:
        """Windows, scores (R,) of the whole video, scores (windows, R)."""
        windows, logits = self.logits(video, stride_seconds)
        return windows, self.task.scores(logits), self.task.scores(logits[:, None])

    def logits(self, video: str, stride_seconds: float | None) -> tuple[list[Window], Tensor]:
        """Windows, and logits (windows, R, outputs)."""
        matcher: Any = self.run.model

        def look(clips: Tensor) -> Tensor:
            grid = matcher.encode_grid(clips)
            at_once = max(1, self.run.recipe.eval.batch_size // len(clips))
            parts = torch.split(self.tokens, at_once)
            return torch.cat([matcher.match(grid, some.expand(len(clips), -1, -1)) for some in parts], dim=1)

        return _see(self.run, video, look, stride_seconds)


def _see(run: Run, video: str, look: Any, stride_seconds: float | None) -> tuple[list[Window], Tensor]:
    """The windows of a video and what a model makes of each, (windows, ...).

    Raises:
        DataError: it cannot be read.
    """
    preprocessing: Any = run.model.preprocessing
    data, faults = run.recipe.data, list[Fault]()
    seen = list(
        see_windows(
            [Clip(id=video, video=video)],
            preprocessing,
            look,
            faults,
            stride_seconds=stride_seconds,
            device=pick_device(run.recipe.train.device),
            at_once=min(WINDOWS_AT_ONCE, run.recipe.eval.batch_size),
            num_workers=data.num_workers,
            worker_start=data.worker_start,
        )
    )
    if faults:
        raise DataError(faults[0].reason)
    return seen[0].windows, seen[0].values.float()

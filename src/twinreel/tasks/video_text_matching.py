"""The task of judging whether a text fits a video, which of several does, or which answer a question has.

One cross-modal model looks at both together (ClipBERT, arXiv:2102.06183). Batch -> model -> loss, and what its logits
mean as scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from twinreel.data.clip import Batch, Clip
from twinreel.errors import ConfigError, DataError
from twinreel.losses import answer_cross_entropy, choice_cross_entropy, match_cross_entropy, pool_clips
from twinreel.tasks.whole import WholeModel, logits_share

__all__ = ["Goal", "MatchFacts", "VideoTextMatching"]

Goal: TypeAlias = Literal["retrieval", "multiple_choice", "question_answering"]


class MatchFacts(NamedTuple):
    """What the loss must know of each video beside its logits; as one float64 matrix it travels between processes.

    `valid` bool (B,); `known` bool (B,): there is something to learn from it (a caption; an answer that the model can
    give); `targets` float32 (B, X): of R texts which are right, or of A answers.
    """

    valid: Tensor
    known: Tensor
    targets: Tensor

    @property
    def usable(self) -> Tensor:
        """Bool (B,): which videos count."""
        return self.valid & self.known

    @property
    def num_captions(self) -> int:
        """Texts of the videos that could be read."""
        return int(self.valid.sum())

    @property
    def num_masked(self) -> int:
        """Those without anything to learn from."""
        return int((self.valid & ~self.known).sum())

    def pack(self) -> Tensor:
        """Float64 (B, 2 + X)."""
        flags = torch.stack([self.valid, self.known], dim=1)
        return torch.cat([flags.double(), self.targets.double()], dim=1)


class VideoTextMatching(nn.Module):
    """Logits of videos and texts under a loss of matching, of choices or of answers.

    Args:
        loss: called as `loss(logits (B, C, R, outputs), targets, valid=(B,), **loss_options)`, see `losses.matching`.
            One that takes `own` (positions of the videos of one process) returns their share; the shares of all
            processes add up to the loss.
        goal: what is learned.
        num_negatives: of retrieval, wrong captions a video.
        answers: of question answering, what the outputs mean.
        loss_options: keyword options of the loss.
    """

    name: ClassVar[str] = "video_text_matching"
    output_names: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(
        self,
        *,
        loss: Callable[..., Tensor],
        goal: Goal = "retrieval",
        num_negatives: int = 1,
        answers: Sequence[str] = (),
        loss_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.loss = loss
        self.goal = goal
        self.num_negatives = num_negatives
        self.answers = tuple(answers)
        self.answer_places = {answer: place for place, answer in enumerate(self.answers)}
        self.loss_options = dict(loss_options or {})
        self.takes = frozenset(inspect.signature(loss).parameters)
        self.log_scale: nn.Parameter | None = None  # nothing is learned beside the model

    @property
    def num_outputs(self) -> int:
        """Outputs of the model's head: an answer each, or no match and match, or one score.

        A user's own loss gets one score, or what its attribute `num_outputs` says.
        """
        if self.goal == "question_answering":
            return len(self.answers)
        return 2 if self.loss is match_cross_entropy else getattr(self.loss, "num_outputs", 1)

    @property
    def score_words(self) -> str:
        """What `scores` gives, for people."""
        return "log-odds of a match" if self.num_outputs == 2 else "logit of a match"

    @property
    def one_video(self) -> str | None:
        """What the loss leaves open between videos, for people; None if nothing.

        Adding a number to all scores of a video does not change a loss that compares the texts of one video only.
        """
        if self.loss is not choice_cross_entropy:
            return None
        return "to compare texts of one video: scores of different videos have no common zero"

    @property
    def pooling(self) -> Literal["lse", "mean", "max"]:
        """How the logits of the clips of a video become one: as the loss does it."""
        if "pooling" in self.loss_options:
            pooling: Any = self.loss_options["pooling"]
        else:
            parameter = inspect.signature(self.loss).parameters.get("pooling")
            pooling = "mean" if parameter is None else parameter.default
        return pooling  # type: ignore[no-any-return]

    def after_step(self) -> None:
        """Nothing is kept in bounds."""

    def check(self, rows: Sequence[Clip], where: str) -> None:
        """Refuse rows that this task cannot learn from or be judged by.

        Args:
            rows: of a run.
            where: what they are for, for the message.

        Raises:
            DataError: naming the first.
        """
        for row in rows:
            problem = self._problem(row, where)
            if problem is not None:
                raise DataError(f"{row.id} ({where}, {row.video}): {problem}")
        counts = {len(row.options) for row in rows}
        if self.goal == "multiple_choice" and where == "training" and len(counts) > 1:
            raise DataError(f"{where} rows have {' and '.join(map(str, sorted(counts)))} options; give all as many")

    def _problem(self, row: Clip, where: str) -> str | None:
        captions = bool(row.captions or row.caption_file)
        if self.goal == "question_answering":
            if row.options:
                return "it has options, and task.goal=question_answering takes open questions; set multiple_choice"
            if not captions:
                return "no question; task.goal=question_answering needs a column question (or caption)"
            if where == "training" and len(row.labels) > 1 and self.loss is answer_cross_entropy:
                return (
                    f"{len(row.labels)} answers, and task.loss=answer_cross_entropy wants one; give one, or set "
                    "task.loss=answer_binary_cross_entropy"
                )
            return None if row.labels else "no answer; task.goal=question_answering needs a column answer"
        if self.goal == "multiple_choice" or row.options:
            place = row.labels[0] if len(row.labels) == 1 else None
            if len(row.options) < 2:
                return "no options; task.goal=multiple_choice needs a column options with two or more"
            if type(place) is not int or not 0 <= place < len(row.options):
                return (
                    f"the answer is {', '.join(map(repr, row.labels)) or 'missing'}; it must be the place of the right "
                    f"option, from 0 to {len(row.options) - 1}"
                )
            if self.goal == "multiple_choice" or where != "training":
                return None
        return None if captions else "no caption; task.goal=retrieval needs a caption, captions or caption_file"

    def inputs(self, model: nn.Module, batch: Batch) -> tuple[Tensor, MatchFacts]:
        """Word ids int64 (B, R, L) of the texts of each video, and what the loss must know."""
        matcher: Any = model
        texts = self.texts(batch)
        tokens: Tensor = matcher.tokenize([*(text for own in texts for text in own), ""])
        nothing, tokens = tokens[-1], tokens[:-1].view(len(texts), -1, tokens.shape[-1])
        facts = self._facts(batch, len(texts[0]))
        if self.goal == "retrieval":  # a caption without a word says nothing of its video
            facts = facts._replace(known=facts.known & (tokens[:, 0] != nothing).any(-1).cpu())
        return tokens, facts

    @staticmethod
    def reading(model: nn.Module, text: str) -> bytes:
        """A text as a model reads it, equal for texts that it cannot tell apart."""
        matcher: Any = model
        read: bytes = matcher.tokenize([text])[0].cpu().numpy().tobytes()
        return read

    def texts(self, batch: Batch) -> list[list[str]]:
        """The R texts that each video is compared with: its caption and wrong ones, options, or the question."""
        if self.goal == "retrieval":
            return batch.captions
        questions = [own[0] if own else "" for own in batch.captions]
        if self.goal == "question_answering":
            return [[question] for question in questions]
        return [self.choice_texts(*pair) for pair in zip(questions, batch.options, strict=True)]

    @staticmethod
    def choice_texts(question: str, options: Sequence[str]) -> list[str]:
        """Question and option, a text each; the option alone where nothing is asked."""
        return [f"{question} {option}" if question else option for option in options]

    def _facts(self, batch: Batch, num_texts: int) -> MatchFacts:
        known = torch.ones(len(batch.ids), dtype=torch.bool)
        targets = torch.zeros(len(batch.ids), len(self.answers) or num_texts)
        if self.goal == "retrieval":
            targets[:, 0] = 1.0
            known = batch.caption_mask[:, 0]
        elif self.goal == "multiple_choice":
            for row, labels in enumerate(batch.labels):
                targets[row, int(labels[0])] = 1.0
        else:
            for row, labels in enumerate(batch.labels):
                for label in labels:
                    if (place := self.answer_places.get(str(label))) is not None:
                        targets[row, place] = 1.0
            known = targets.any(1)
        return MatchFacts(batch.valid, known, targets)

    def outputs(self, model: nn.Module, video: Tensor, text: Tensor) -> tuple[Tensor, ...]:
        """Logits (B, C, R, outputs) of C clips a video.

        Args:
            model: a `models.matcher.Matcher`.
            video: network input (B, 3, C * T, H, W), clip after clip.
            text: word ids int64 (B, R, L).

        Raises:
            ConfigError: the model returns another number of outputs.
        """
        matcher: Any = model
        num_frames = matcher.preprocessing.num_frames
        num_clips = video.shape[2] // num_frames
        clips = video.reshape(len(video), 3, num_clips, num_frames, *video.shape[3:]).transpose(1, 2)
        grid: Tensor = matcher.encode_grid(clips.flatten(0, 1))
        logits: Tensor = matcher.match(grid, text.repeat_interleave(num_clips, dim=0))
        logits = logits.view(len(video), num_clips, *logits.shape[1:])
        wanted = (len(video), num_clips, text.shape[1], self.num_outputs)
        if logits.shape != wanted:
            raise ConfigError(
                f"{type(model).__name__} returns logits {tuple(logits.shape)}; (videos, clips, texts, outputs) = "
                f"{wanted} is needed: let its builder take num_outputs"
            )
        return (logits,)

    @staticmethod
    def unpack(packed: Tensor) -> MatchFacts:
        """What `MatchFacts.pack` made, of one process or of several below each other."""
        return MatchFacts(packed[:, 0].bool(), packed[:, 1].bool(), packed[:, 2:].float())

    def share(
        self,
        outputs: Sequence[Tensor],
        facts: MatchFacts,
        *,
        own: Tensor | None = None,
        log_scale: Tensor | None = None,
        negative_seed: int = 0,
        num_processes: int = 1,
    ) -> Tensor:
        """One process's share of the mean loss over the usable videos of all processes.

        Args:
            outputs: logits (B, C, R, outputs) of all processes.
            facts: of all processes.
            own: positions of this process's videos; None = all, that is the whole loss.
            log_scale: not used.
            negative_seed: not used; wrong captions are among the texts already.
            num_processes: among how many a loss that knows no `own` is divided.

        Returns:
            A scalar, float32 whatever the precision of the model (float64 stays).
        """
        (logits,) = outputs
        return logits_share(
            self.loss, logits, facts.targets, facts.usable, self.loss_options, own=own, num_processes=num_processes
        )

    def compute_loss(self, model: nn.Module, video: Tensor, batch: Batch) -> tuple[Tensor, int]:
        """The mean loss of a batch in one process, and over how many videos it is the mean.

        Args:
            model: in train mode.
            video: network input (B, 3, C * T, H, W).
            batch: the texts that belong to it, wrong captions included.
        """
        tokens, facts = self.inputs(model, batch)
        return self.share(WholeModel(model, self)(video, tokens), facts), int(facts.usable.sum())

    @torch.no_grad()
    def chance_loss(self, num_clips: int, num_texts: int = 2) -> float:
        """What a model scores that gives everything the same logit, on so many videos with one clip and R texts."""
        num_texts = {"retrieval": 1 + self.num_negatives, "question_answering": 1}.get(self.goal, num_texts)
        targets = torch.zeros(num_clips, len(self.answers) or num_texts)
        targets[:, 0] = 1.0
        everyone = torch.ones(num_clips).bool()
        logits = torch.zeros(num_clips, 1, num_texts, self.num_outputs)
        return float(self.share((logits,), MatchFacts(everyone, everyone, targets)))

    @torch.no_grad()
    def statistics(self, outputs: Sequence[Tensor], facts: MatchFacts) -> dict[str, float]:
        """How a training batch was answered: `train_accuracy`, the share of videos whose right text or answer is best.

        A tie counts against the model.
        """
        usable = facts.usable.cpu()
        if not bool(usable.any()):
            return {}
        logits = outputs[0].detach().float().cpu()[usable]
        scores = self.answer_scores(logits) if self.goal == "question_answering" else self.scores(logits)
        right = facts.targets.cpu()[usable] > 0
        best = scores.masked_fill(~right, -torch.inf).amax(1)
        return {"train_accuracy": float((best > scores.masked_fill(right, -torch.inf).amax(1)).float().mean())}

    def scores(self, logits: Tensor) -> Tensor:
        """How well texts fit: logits (..., C, R, outputs) of C clips -> float32 (..., R), unrounded log-odds.

        Of two outputs, no match and match, the difference of the pooled logits; of one output it itself.
        """
        pooled = pool_clips(logits.float(), self.pooling, dim=-3)
        return pooled[..., 1] - pooled[..., 0] if pooled.shape[-1] == 2 else pooled[..., 0]

    def answer_scores(self, logits: Tensor) -> Tensor:
        """How well answers fit a question: logits (..., C, 1, A) of C clips -> float32 (..., A)."""
        return pool_clips(logits.float(), self.pooling, dim=-3)[..., 0, :]

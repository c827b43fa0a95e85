"""Wrong captions for a video: from any other video, all videos alike, or from those of the same batch.

Which ones is a pure function of (seed, epoch, row id), or of (seed, step, row id) where they come from the batch; so
they are the same for every number of processes and after every restart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain

import numpy as np
import torch

from twinreel.data.captions import row_captions
from twinreel.data.clip import Batch, Clip
from twinreel.data.plan import Plan, keyed_rng
from twinreel.data.training_sample import TrainingRules, draw_captions
from twinreel.errors import DataError

__all__ = ["NegativeCaptions"]

KEPT_ROWS = 4096  # rows whose captions are remembered


class NegativeCaptions:
    """Adds so many captions of other videos to each sample of a batch.

    A caption that the row's own video has too is no wrong one and is passed over. With `in_batch` they are captions of
    the same global batch, as they were drawn there; where it has too few, the rest come from all videos.

    Args:
        rows: of the run.
        plan: which of them a step has.
        rules: how a row's own caption is drawn.
        num_negatives: n captions a sample.
        in_batch: take those of the batch first.

    Raises:
        DataError: there are no more than `num_negatives` videos.
    """

    def __init__(
        self, rows: Sequence[Clip], plan: Plan, rules: TrainingRules, *, num_negatives: int, in_batch: bool = False
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.rules = rules
        self.num_negatives = num_negatives
        self.in_batch = in_batch
        self.place = {row.id: place for place, row in enumerate(rows)}
        self.videos: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            self.videos.setdefault(row.video, []).append(place)
        self.names = list(self.videos)
        if len(self.names) <= num_negatives:
            raise DataError(
                f"task.num_negatives={num_negatives} wrong captions a video come from other videos, and there are only "
                f"{len(self.names)} in all; lower it, or give more videos"
            )
        self.texts = lru_cache(maxsize=KEPT_ROWS)(self._texts)

    def add(self, batch: Batch, step: int) -> Batch:
        """The batch of a step with `num_negatives` more captions a sample; its own ones stay the first."""
        wrong = [self.of(id, step) for id in batch.ids]
        captions = [own + more for own, more in zip(batch.captions, wrong, strict=True)]
        real = torch.ones(len(wrong), self.num_negatives, dtype=torch.bool)
        return replace(batch, captions=captions, caption_mask=torch.cat([batch.caption_mask, real], dim=1))

    def of(self, id: str, step: int) -> list[str]:
        """The wrong captions of a row at a step.

        Raises:
            DataError: there are not so many captions that are wrong for it.
        """
        row = self.rows[self.place[id]]
        own = {text for place in self.videos[row.video] for text in self.texts(place)}
        epoch = step // self.plan.steps_per_epoch
        drawn = self._of_all(row, epoch)
        found: list[str] = []
        for text in chain(self._of_batch(row, step), drawn) if self.in_batch else drawn:
            if text not in own:
                found.append(text)
            if len(found) == self.num_negatives:
                return found
        raise DataError(
            f"{id}: only {len(found)} of the other {len(self.names) - 1} videos have a caption that this one has not; "
            f"task.num_negatives={self.num_negatives} needs more: lower it"
        )

    def _of_all(self, row: Clip, epoch: int) -> Iterator[str]:
        """A caption each of other videos, in drawn order; each video comes up once."""
        rng = keyed_rng(self.rules.seed, epoch, row.id, "negatives")
        few = min(len(self.names), 4 * self.num_negatives + 16)  # of millions not all are shuffled
        first = rng.choice(len(self.names), few, replace=False).tolist()
        rest = (int(i) for i in _later(rng, len(self.names), set(first)))
        for number in chain(first, rest):
            if self.names[number] == row.video:
                continue
            texts = [text for place in self.videos[self.names[number]] for text in self.texts(place)]
            if texts:
                yield texts[int(rng.integers(len(texts)))]

    def _of_batch(self, row: Clip, step: int) -> Iterator[str]:
        """The captions of the other videos of a global batch, in drawn order."""
        keys = dict.fromkeys(self.plan.batch(step))
        others = [(epoch, self.rows[place]) for epoch, place in keys if self.rows[place].video != row.video]
        for i in keyed_rng(self.rules.seed, step, row.id, "negatives of the batch").permutation(len(others)):
            epoch, other = others[int(i)]
            texts, mask, _ = draw_captions(other, self.rules, keyed_rng(self.rules.seed, epoch, other.id, "caption"))
            if mask[0]:
                yield texts[0]

    def _texts(self, place: int) -> list[str]:
        return [caption.text for caption in row_captions(self.rows[place]) if caption.text.strip()]


def _later(rng: np.random.Generator, count: int, before: set[int]) -> Iterator[int]:
    """All other numbers below `count`, shuffled once they are asked for."""
    yield from (int(i) for i in rng.permutation(count) if int(i) not in before)

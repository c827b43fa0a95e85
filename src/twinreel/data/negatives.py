"""Wrong captions for a video: from any other video, all videos alike, or from those of the same batch.

Which ones is a pure function of (seed, epoch, row id), or of (seed, step, row id) where they come from the batch; so
they are the same for every number of processes and after every restart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, cycle, islice

import numpy as np
import torch

from twinreel.data.captions import row_captions
from twinreel.data.clip import Batch, Clip
from twinreel.data.plan import Plan, keyed_rng
from twinreel.data.training_sample import TrainingRules, draw_captions
from twinreel.errors import DataError

__all__ = ["NegativeCaptions"]

KEPT_ROWS = 4096  # rows whose captions are remembered
KEPT_TEXTS = 1 << 17  # texts whose reading is


class NegativeCaptions:
    """Adds so many captions of other videos to each sample of a batch.

    A caption that the model cannot tell from one of the row's own video is no wrong one and is passed over, as is one
    that says nothing to it. None is given twice, unless there are no others. With `in_batch` they are captions of the
    same global batch, as they were drawn there; where it has too few, the rest come from all videos. Captions that
    cannot be read are no wrong ones; the sample that they belong to is a fault of its own.

    Args:
        rows: of the run.
        plan: which of them a step has.
        rules: how a row's own caption is drawn.
        num_negatives: n captions a sample.
        in_batch: take those of the batch first.
        reads: a text as the model reads it; texts with one reading are one text.

    Raises:
        DataError: there are no more than `num_negatives` videos, or no wrong caption for one of them.
    """

    def __init__(
        self,
        rows: Sequence[Clip],
        plan: Plan,
        rules: TrainingRules,
        *,
        num_negatives: int,
        in_batch: bool = False,
        reads: Callable[[str], Hashable] = str.strip,
    ) -> None:
        self.rows = rows
        self.plan = plan
        self.rules = rules
        self.num_negatives = num_negatives
        self.in_batch = in_batch
        self.reads = lru_cache(maxsize=KEPT_TEXTS)(reads)
        self.place = {row.id: place for place, row in enumerate(rows)}
        self.videos: dict[str, list[int]] = {}
        for place, row in enumerate(rows):
            self.videos.setdefault(row.video, []).append(place)
        self.names = list(self.videos)
        self.texts = lru_cache(maxsize=KEPT_ROWS)(self._texts)
        self._check()

    def _check(self) -> None:
        if len(self.names) <= self.num_negatives:
            lower = "lower it, or " * (len(self.names) > 1)
            raise DataError(
                f"task.num_negatives={self.num_negatives} wrong captions a video come from other videos, and there are "
                f"only {len(self.names)} in all; {lower}give more videos"
            )
        if any(row.caption_file is not None for row in self.rows):
            return  # they are not all read before the first step
        said = {name: {text for place in places for text in self._texts(place)} for name, places in self.videos.items()}
        everything = set().union(*said.values())
        alike = next((name for name, own in said.items() if own >= everything), None)
        if alike is not None:
            raise DataError(
                f"{alike}: no other video has a caption that this one has not, so there is no wrong caption for it; "
                "give captions that tell the videos apart"
            )

    def add(self, batch: Batch, step: int) -> Batch:
        """The batch of a step with `num_negatives` more captions a sample; its own ones stay the first.

        A sample that could not be read gets empty ones, which take no part.
        """
        count = self.num_negatives
        wrong = [
            self.of(id, step) if valid else [""] * count
            for id, valid in zip(batch.ids, batch.valid.tolist(), strict=True)
        ]
        captions = [own + more for own, more in zip(batch.captions, wrong, strict=True)]
        real = batch.valid[:, None].expand(-1, count)
        return replace(batch, captions=captions, caption_mask=torch.cat([batch.caption_mask, real], dim=1))

    def of(self, id: str, step: int) -> list[str]:
        """The wrong captions of a row at a step.

        Raises:
            DataError: there is none.
        """
        row = self.rows[self.place[id]]
        own = {self.reads(text) for place in self.videos[row.video] for text in self.texts(place)}
        drawn = self._of_all(row, step // self.plan.steps_per_epoch)
        found: dict[Hashable, str] = {}
        again: list[str] = []
        for text in chain(self._of_batch(row, step), drawn) if self.in_batch else drawn:
            key = self.reads(text)
            if key in found:
                again.append(text)
            elif key not in own and key != self.reads(""):
                found[key] = text
            if len(found) == self.num_negatives:
                break
        if not found:
            raise DataError(
                f"{id}: no other video has a caption that the model can tell from this one's, so there is no wrong "
                "caption for it; give captions that tell the videos apart (or a larger model.max_text_tokens)"
            )
        repeated = chain(found.values(), again, cycle(found.values()))
        return list(islice(repeated, self.num_negatives))

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
            try:
                texts, mask, _ = draw_captions(
                    other, self.rules, keyed_rng(self.rules.seed, epoch, other.id, "caption")
                )
            except DataError:
                continue  # a fault of that sample
            if mask[0]:
                yield texts[0]

    def _texts(self, place: int) -> list[str]:
        try:
            captions = row_captions(self.rows[place])
        except DataError:
            return []  # a fault of that sample
        return [caption.text for caption in captions if caption.text.strip()]


def _later(rng: np.random.Generator, count: int, before: set[int]) -> Iterator[int]:
    """All other numbers below `count`, shuffled once they are asked for."""
    yield from (int(i) for i in rng.permutation(count) if int(i) not in before)

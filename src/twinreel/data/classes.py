"""Which classes there are: labels of rows -> places in a model's output, and targets of a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from twinreel.data.clip import Clip
from twinreel.data.tables import did_you_mean
from twinreel.errors import ConfigError, DataError

__all__ = ["ClassTable"]

Labels: TypeAlias = tuple[str | int, ...]
LISTED = 5


@dataclass(frozen=True, slots=True)
class ClassTable:
    """The classes of a model, by place: `names[i]` is what output i means.

    A label that is a number is a place; a label that is a text is a name.

    Args:
        names: of the classes, in the order of the outputs; no two alike.
        multi_label: a clip may have any number of classes, none too; else it has exactly one.

    Raises:
        ConfigError: no name, or one twice.
    """

    names: tuple[str, ...]
    multi_label: bool = False
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        twice = sorted(name for name, count in Counter(self.names).items() if count > 1)
        if not self.names or twice:
            raise ConfigError(f"classes: {f'{twice[0]!r} is named twice' if twice else 'there are none'}")
        object.__setattr__(self, "_places", {name: place for place, name in enumerate(self.names)})

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    def from_rows(
        cls, rows: Sequence[Clip], *, multi_label: bool = False, num_classes: int | None = None
    ) -> ClassTable:
        """The classes that the labels of rows name: texts sorted by name, or numbers from 0 to the largest.

        Args:
            rows: what is trained on.
            multi_label: see the class.
            num_classes: more than the rows name, for labels that are numbers; None = as many as they name.

        Raises:
            DataError: no labels; numbers and texts mixed; a negative number.
            ConfigError: `num_classes` is not what text labels name.
        """
        labels = {label for row in rows for label in row.labels}
        if not labels:
            raise DataError(
                "no row has a label: task.name=action_recognition needs a column label (a name or a number from 0)"
            )
        texts = sorted(label for label in labels if isinstance(label, str))
        numbers = sorted(label for label in labels if isinstance(label, int))
        if texts and numbers:
            raise DataError(
                f"labels are names ({texts[0]!r}) and numbers ({numbers[0]}) in one collection; make them one kind"
            )
        if texts:
            if num_classes not in (None, len(texts)):
                raise ConfigError(
                    f"model.num_classes={num_classes}, but the training rows name {len(texts)} classes "
                    f"({', '.join(texts[:LISTED])}, ...); leave it out, or name all of them in data.class_names"
                )
            table = cls(tuple(texts), multi_label)
            table._refuse_alone("training rows")
            table.check(rows, "training")
            return table
        count = numbers[-1] + 1 if num_classes is None else num_classes
        table = cls(tuple(map(str, range(count))), multi_label)
        table.check(rows, "training")
        table._refuse_alone("training rows")
        return table

    def _refuse_alone(self, where: str) -> None:
        if len(self.names) == 1 and not self.multi_label:
            name = self.names[0]
            raise DataError(f"{where}: there is one class, {name!r}, nothing to tell it from; add clips of others")

    def without_rows(self, rows: Sequence[Clip]) -> list[str]:
        """The names of classes that no row has."""
        seen = {place for row in rows for place in self.places(row.labels)}
        return [name for place, name in enumerate(self.names) if place not in seen]

    def place(self, label: str | int) -> int | None:
        """The output of a label; None if it is no class."""
        if isinstance(label, int):
            return label if 0 <= label < len(self.names) else None
        return self._places.get(label)

    def places(self, labels: Labels) -> list[int]:
        """The outputs of a clip's labels, which `check` has seen, each once, in order."""
        found = [self.place(label) for label in labels]
        return sorted({place for place in found if place is not None})

    def targets(self, labels: Iterable[Labels]) -> Tensor:
        """Float32 (B, C), 1 where a clip has a class."""
        rows = [self.places(own) for own in labels]
        targets = torch.zeros(len(rows), len(self.names))
        for row, places in enumerate(rows):
            targets[row, places] = 1.0
        return targets

    def check(self, rows: Sequence[Clip], which: str) -> None:
        """Look at all labels before anything is computed.

        Args:
            rows: whose labels.
            which: `training` or `evaluation`, for the message.

        Raises:
            DataError: labels that are no class; rows without a label or with several, where a clip has exactly one.
        """
        wrong = [(row, label) for row in rows for label in row.labels if self.place(label) is None]
        if wrong:
            raise DataError(self._wrong(wrong, rows, which))
        if self.multi_label:
            return
        none = [row.id for row in rows if not row.labels]
        several = [row.id for row in rows if len(self.places(row.labels)) > 1]
        if none or several:
            said = [
                f"{len(ids)} {what} (first: {ids[0]})"
                for ids, what in ((none, "have none"), (several, "several"))
                if ids
            ]
            cure = ", or set task.multi_label=true" if which == "training" else ""
            raise DataError(
                f"{which} rows: a clip has exactly one class, but of {len(rows)} rows {' and '.join(said)}; mend the "
                f"labels{cure}"
            )

    def _wrong(self, wrong: list[tuple[Clip, str | int]], rows: Sequence[Clip], which: str) -> str:
        row, label = wrong[0]
        bad = len({row.id for row, _ in wrong})
        numbers = sorted(label for row in rows for label in row.labels if isinstance(label, int))
        if isinstance(label, int):
            off = " (do they count from 1?)" if numbers[0] == 1 and numbers[-1] == len(self.names) else ""
            return (
                f"{which} rows: {bad} of {len(rows)} have a label outside 0 to {len(self.names) - 1} (first: {label} "
                f"of {row.id}; labels go from {numbers[0]} to {numbers[-1]}, classes are {len(self.names)}){off}. "
                "Mend the labels or set model.num_classes"
            )
        return (
            f"{which} rows: {bad} of {len(rows)} have a label that is none of the {len(self.names)} classes (first: "
            f"{label!r} of {row.id}{did_you_mean(str(label), self.names)})"
        )

"""What of a damaged file is lost, and the sentences that say so. For `decode.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinreel.errors import DataError

__all__ = ["DamagedError", "Lost", "damage_error", "loss_text"]

_LISTED = 5  # stretches that a sentence names


@dataclass(frozen=True, slots=True)
class Lost:
    """A stretch whose frames can't be read: seconds `[start, end)`, to the end of the video if `end` is None."""

    start_seconds: float
    end_seconds: float | None
    reason: str

    def covers(self, seconds: float) -> bool:
        """Whether the frame on show then is lost."""
        return self.start_seconds <= seconds and (self.end_seconds is None or seconds < self.end_seconds)


class DamagedError(DataError):
    """A wanted frame is in a stretch that is lost."""

    lost: Lost


def damage_error(path: str, asked: str, losses: Sequence[Lost]) -> DamagedError:
    """The error that refuses what was asked for, naming the seconds that are readable. `losses` are ascending."""
    readable = f"readable up to {losses[0].start_seconds:.3f} s"
    stretches = [
        f"from {lost.end_seconds:.3f} s" + (f" to {after.start_seconds:.3f} s" if after else "")
        for lost, after in zip(losses, [*losses[1:], None], strict=True)
        if lost.end_seconds is not None
    ]
    if stretches:
        more = f" and {len(stretches) - _LISTED} more stretches" if len(stretches) > _LISTED else ""
        readable += f" and again {', '.join(stretches[:_LISTED])}{more}"
    error = DamagedError(
        f"{path}: {asked}: the video is damaged ({losses[0].reason}); {readable} (allow_partial=True reads that)"
    )
    error.lost = losses[0]
    return error


def loss_text(losses: Sequence[Lost], missing: str) -> str:
    """The warning that goes with what is readable; `missing` says how many frames are not."""
    stretches = [
        f"from {lost.start_seconds:.3f} s " + ("on" if lost.end_seconds is None else f"to {lost.end_seconds:.3f} s")
        for lost in losses
    ]
    more = f" and {len(losses) - _LISTED} more stretches" if len(losses) > _LISTED else ""
    lost = ", ".join(stretches[:_LISTED]) + more
    return f"the video is damaged ({losses[0].reason}): lost {lost}; {missing}"

"""Videos and texts through a cross-modal model: each video through the CNN once, each pair compared once.

A block of videos is read, seen, compared with its texts and forgotten, so memory holds one block and the scores. Texts
are turned into word ids once; texts that are the same to the model (equal, or cut to the same words) are compared once
and have the same score to the last bit, so that a tie is a tie. Processes take whole blocks: their number changes no
bit.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from twinreel.data.clip import Batch, Clip, Fault
from twinreel.data.dataset import ViewRules
from twinreel.data.loader import WorkerStart
from twinreel.distributed import exchange, gather_objects, world
from twinreel.errors import ConfigError
from twinreel.evaluation.views import blocks_of, frames_fact, view_blocks
from twinreel.recipe import EvalSection
from twinreel.tasks import VideoTextMatching

__all__ = [
    "Compared",
    "Lists",
    "PairScores",
    "TextTable",
    "check_outputs",
    "compare_pairs",
    "log_odds",
    "score_pairs",
    "views_facts",
]

ROWS_AT_ONCE = 8  # of a block at most: what processes take in turn is that small, because a row may cost minutes
SHARED_NUMBERS = 1 << 22  # scores that a process sends to the others at once: 16 MB

Read = Callable[[Tensor], Tensor]
Lists = Sequence[Sequence[int]]


class TextTable(NamedTuple):
    """Texts as a model reads them: word ids int64 (U, L) of those that differ, and which of them each text is."""

    tokens: Tensor
    place: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module, texts: Sequence[str]) -> TextTable:
        """The table of any texts; each is tokenized once.

        Args:
            model: with `tokenize`.
            texts: at least one; repeated ones count once.
        """
        matcher: Any = model
        names = list(dict.fromkeys(texts))
        tokens: Tensor = matcher.tokenize(names)
        seen: dict[bytes, int] = {}
        kept: list[int] = []
        place: dict[str, int] = {}
        for row, (name, words) in enumerate(zip(names, tokens.cpu().numpy(), strict=True)):
            key = words.tobytes()
            if key not in seen:
                seen[key] = len(kept)
                kept.append(row)
            place[name] = seen[key]
        return cls(tokens if len(kept) == len(names) else tokens[kept], place)

    def places(self, texts: Sequence[str]) -> list[int]:
        """Which row of `tokens` each text is."""
        return [self.place[text] for text in texts]


class Compared(NamedTuple):
    """What comparing took, over all processes.

    `valid` bool (N,): which rows could be read; `faults`: why the others could not; `repeated_frames` repeat the last
    one of a short video; `num_clips` went through the CNN; `num_pairs` of a row and a text were compared; `seconds` of
    the slowest process.
    """

    valid: Tensor
    faults: list[Fault]
    repeated_frames: int
    num_clips: int
    num_pairs: int
    seconds: float


class PairScores(NamedTuple):
    """Scores of rows and texts, see `VideoTextMatching.scores`, and what it took, as `Compared` says it.

    `scores` holds for each row a float32 tensor on the CPU, (its texts,): all of them or those that were wanted, in the
    order in which they were given; NaN where the row could not be read.
    """

    scores: list[Tensor]
    valid: Tensor
    faults: list[Fault]
    repeated_frames: int
    num_clips: int
    num_pairs: int
    seconds: float


class _Count:
    """What this process has done."""

    clips = pairs = passed = faults = 0


@torch.no_grad()
def compare_pairs(
    model: nn.Module,
    rows: Sequence[Clip],
    rules: ViewRules,
    tokens: Tensor,
    read: Read,
    results: Sequence[Tensor],
    *,
    wanted: Lists | None = None,
    device: torch.device,
    batch_size: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    allow_missing: bool = True,
    report: Callable[[int, int], None] | None = None,
) -> Compared:
    """Compare rows with texts and put what is read from the logits into `results`, in every process all of it.

    Args:
        model: a `models.matcher.Matcher` in eval mode, on the device.
        rows: videos, each seen once.
        rules: which views of them; all views of a row are its clips.
        tokens: word ids int64 (U, L) of the texts.
        read: logits (n, clips, R, outputs) of n rows with R texts each -> (n, R, ...).
        results: for each row a float32 tensor on the CPU, (its texts, ...), to be written; of a row that cannot be
            read it stays as it is.
        wanted: for each row the places of the texts it is compared with; None: all.
        device: where the model is.
        batch_size: clips through the CNN, and clips with a text each through the rest, at once.
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model, e.g. for an ablation.
        allow_missing: False: once a row could not be read this process compares nothing more, because there will be no
            scores; it goes on reading, so that all such rows are named.
        report: called with (pairs done, pairs in all), about: of several processes it is what this one has done, times
            their number.
    """
    if not rows:
        return Compared(torch.ones(0, dtype=torch.bool), [], 0, 0, 0, 0.0)
    began, count, size = time.monotonic(), _Count(), world().size
    clips_at_once = min(batch_size, ROWS_AT_ONCE * rules.clips_a_row)
    lists: Lists = [range(len(tokens))] * len(rows) if wanted is None else wanted
    total = sum(map(len, lists))
    matcher: Any = model

    def look(video: Tensor) -> Tensor:
        grid: Tensor = matcher.encode_grid(video)
        return grid

    def take(block: range, batch: Batch, grids: Tensor) -> None:
        count.faults += len(batch.faults)
        count.clips += int(batch.valid.sum()) * rules.clips_a_row
        if count.faults and not allow_missing:
            return
        at_once = max(1, batch_size // grids.shape[1])
        count.passed += sum(
            len(lists[row]) for row, valid in zip(block, batch.valid.tolist(), strict=True) if not valid
        )
        for pieces in _groups(block, batch.valid.tolist(), lists, at_once):
            texts = torch.tensor([list(lists[row][span]) for row, span in pieces], device=tokens.device)
            own = grids[[row - block.start for row, _ in pieces]]
            found = read(_logits(matcher, own, tokens[texts], batch_size).float()).cpu()
            for (row, span), values in zip(pieces, found, strict=True):
                results[row][span] = values
            count.pairs += texts.numel()
            done = (count.pairs + count.passed) * size
            if report is not None and done < total:  # the end is said once, when all processes are there
                report(done, total)

    seen = view_blocks(
        rows, rules, look, take, device=device, batch_size=clips_at_once, num_workers=num_workers,
        worker_start=worker_start, transform=transform,
    )  # fmt: skip
    _share(results, blocks_of(len(rows), rules, clips_at_once))
    everyone = exchange([count.clips, count.pairs, time.monotonic() - began])
    if report is not None:
        report(total, total)
    clips, pairs = everyone[:, :2].sum(0).tolist()
    return Compared(*seen, int(clips), int(pairs), float(everyone[:, 2].max()))


def log_odds(task: VideoTextMatching, logits: Tensor) -> Tensor:
    """Scores (n, R) from logits (n, clips, R, outputs), see `VideoTextMatching.scores`.

    Raises:
        ConfigError: the model has another number of outputs than the task.
    """
    check_outputs(task, logits)
    return task.scores(logits)


def check_outputs(task: VideoTextMatching, logits: Tensor) -> None:
    """Refuse logits (..., outputs) that would be read as something else.

    Raises:
        ConfigError: the model has another number of outputs than the task.
    """
    if logits.shape[-1] != task.num_outputs:
        raise ConfigError(
            f"the model gives {logits.shape[-1]} outputs for a pair of video and text, and task.goal={task.goal} reads "
            f"{task.num_outputs}: let its builder take num_outputs"
        )


def views_facts(task: VideoTextMatching, section: EvalSection, rules: ViewRules, compared: Compared) -> dict[str, Any]:
    """What was seen of the videos and what it took, for the protocol of a report."""
    crops = "" if rules.num_crops == 1 else f" x {rules.num_crops} crops"
    frames = len(compared.valid) * rules.windows_a_row * rules.preprocessing.num_frames
    speed = f" ({compared.num_pairs / compared.seconds:.3g} pairs a second)" if compared.seconds > 0 else ""
    return {
        "windows": f"{rules.windows_a_row}{crops} a video, {section.windows}, logits pooled by {task.pooling}",
        "frames": frames_fact(rules.preprocessing, section.windows),
        "repeated_frames": f"{compared.repeated_frames} of {frames} (the last one of a video shorter than a clip)",
        "crop": rules.framing,
        "cnn": f"{compared.num_clips} clips of {int(compared.valid.sum())} videos, each once",
        "seconds": f"{compared.seconds:.1f}{speed}",
    }


def _groups(block: range, valid: Sequence[bool], lists: Lists, at_once: int) -> Iterator[list[tuple[int, slice]]]:
    """Texts of rows in pieces; pieces of one length that follow each other are compared together."""
    pieces = [
        (row, slice(first, min(first + at_once, len(lists[row]))))
        for row, readable in zip(block, valid, strict=True)
        if readable
        for first in range(0, len(lists[row]), at_once)
    ]
    group: list[tuple[int, slice]] = []
    for row, span in pieces:
        length = span.stop - span.start
        if group and (group[0][1].stop - group[0][1].start != length or (len(group) + 1) * length > at_once):
            yield group
            group = []
        group.append((row, span))
    if group:
        yield group


def _logits(matcher: Any, grids: Tensor, tokens: Tensor, most: int) -> Tensor:
    """Logits (n, clips, R, outputs) of what was seen (n, clips, ...) and word ids (n, R, L), `most` pairs at once."""
    at_once = max(1, most // tokens.shape[1])
    clips = torch.split(grids.flatten(0, 1), at_once)
    texts = torch.split(tokens.repeat_interleave(grids.shape[1], dim=0), at_once)
    logits = torch.cat([matcher.match(own, words) for own, words in zip(clips, texts, strict=True)])
    return logits.view(len(grids), grids.shape[1], *logits.shape[1:])


def _share(results: Sequence[Tensor], blocks: Sequence[range]) -> None:
    """Give every process what the others have found, some blocks of each at a time."""
    rank, size = world()
    if size == 1:
        return
    largest = max(sum(results[row].numel() for row in block) for block in blocks)
    a_round = size * max(1, SHARED_NUMBERS // max(1, largest))
    for first in range(0, len(blocks), a_round):
        own = [row for block in blocks[first : first + a_round][rank::size] for row in block]
        # copies: of a part of a matrix the whole matrix would be sent
        for other in gather_objects([(row, results[row].clone()) for row in own]):
            for row, values in other:
                results[row][:] = values


def score_pairs(
    model: nn.Module,
    task: VideoTextMatching,
    rows: Sequence[Clip],
    texts: Sequence[str],
    rules: ViewRules,
    *,
    wanted: Mapping[str, Sequence[int]] | None = None,
    device: torch.device,
    batch_size: int,
    num_workers: int = 0,
    worker_start: WorkerStart = "auto",
    transform: Callable[[Batch], Batch] | None = None,
    allow_missing: bool = True,
    report: Callable[[int, int], None] | None = None,
) -> PairScores:
    """How well texts fit videos, for all pairs or for those that are wanted; in every process that of all processes.

    Memory holds a number a pair that is compared, and nothing of the others.

    Args:
        model: a `models.matcher.Matcher` in eval mode, on the device.
        task: pools over clips and reads logits.
        rows: videos; one that nothing is asked of is not read, and counts as readable.
        texts: at least one.
        rules: which views.
        wanted: by row id, the positions of the texts that the row is compared with; a row that is not named is compared
            with none. None: every row with every text.
        device: where the model is.
        batch_size: clips, and pairs, at once.
        num_workers: reader processes.
        worker_start: how they are started.
        transform: changes a batch before it reaches the model.
        allow_missing: False: compare nothing more once a row could not be read, as in `compare_pairs`.
        report: called with (pairs done, pairs in all).
    """
    table, read = TextTable.of(model, texts), partial(log_odds, task)
    columns = table.places(texts)
    options: dict[str, Any] = {
        "device": device, "batch_size": batch_size, "num_workers": num_workers, "worker_start": worker_start,
        "transform": transform, "allow_missing": allow_missing, "report": report,
    }  # fmt: skip
    if wanted is None:
        values = torch.full((len(rows), len(table.tokens)), torch.nan)
        compared = compare_pairs(model, rows, rules, table.tokens, read, values.unbind(), **options)
        values = values if len(table.tokens) == len(texts) else values[:, columns]
        return PairScores(list(values.unbind()), *compared)
    asked = [place for place, row in enumerate(rows) if wanted.get(row.id)]
    lists = [array("q", dict.fromkeys(columns[text] for text in wanted[rows[place].id])) for place in asked]
    found = [torch.full((len(own),), torch.nan) for own in lists]
    compared = compare_pairs(
        model, [rows[place] for place in asked], rules, table.tokens, read, found, wanted=lists, **options
    )
    scores, valid = [torch.empty(0)] * len(rows), torch.ones(len(rows), dtype=torch.bool)
    for place, own, values, readable in zip(asked, lists, found, compared.valid.tolist(), strict=True):
        at = {text: number for number, text in enumerate(own)}
        scores[place] = values[[at[columns[text]] for text in wanted[rows[place].id]]]
        valid[place] = readable
    return PairScores(scores, *compared._replace(valid=valid))

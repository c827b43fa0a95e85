"""Where the time of the data path goes, whether the device waits for it, and which knob to turn.

Nothing is trained: clips of the recipe are read stage by stage in this process, read by as many readers as the recipe
has, and the model runs forward and backward on them a few times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch

from twinreel.assembly import pick_device
from twinreel.data.clip import Batch, Clip, Sample
from twinreel.data.dataset import ClipDataset
from twinreel.data.loader import collate, load_batches
from twinreel.data.read_ahead import plan_ahead, usable_cores
from twinreel.data.reading_costs import ReadingCosts, reading_costs
from twinreel.data.training_sample import TrainingRules
from twinreel.data.transforms import network_input
from twinreel.errors import DataError
from twinreel.gradients import GradientStep
from twinreel.knobs import DataPath, FloorShare
from twinreel.parts import Parts, build_parts, for_device, sample_bytes, training_rules
from twinreel.recipe import Recipe

__all__ = ["LoaderReport", "bench_loader"]

MOST_SECONDS = 60.0  # of reading stage by stage
LEAST_ROWS = 4
HANDED_OVER_BYTES = 128 * 2**20  # of a batch that is passed on for measuring
NUM_HANDED_OVER = 6
COMPUTE_SECONDS = 20.0  # on a CPU: a batch that takes longer is measured on two clips
Say = Callable[[str], None]
Key = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """What was measured, what it means, and what to turn."""

    path: DataPath
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`: milliseconds a clip, clips a second, shares as fractions."""
        path = self.path
        return {
            "facts": self.facts,
            "milliseconds": path.stages | path.device_stages,
            "clips_per_second_a_core": {name: 1e3 / value for name, value in path.stages.items() if value > 0},
            "clips_per_second": {"one_reader": path.reader_rate, "readers": path.rate, "compute": path.compute_rate},
            "floor": None if path.floor is None else asdict(path.floor),
            "waiting_share": path.waiting,
            "readers_needed": path.readers_needed,
            "turn": path.advice(),
            "notes": self.notes,
        }

    def to_table(self) -> str:
        """For people: a line a stage, then what it means."""
        path = self.path
        lines = [f"{name.replace('_', ' ')}: {value}" for name, value in self.facts.items()]
        lines += ["", f"{'':18}{'ms a clip':>10}{'clips/s a core':>16}"]
        for name, value in (path.stages | {"one_reader": path.reader_milliseconds}).items():
            rate = f"{1e3 / value:16.1f}" if value >= 0.005 else f"{'-':>16}"
            lines.append(f"{name.replace('_', ' '):18}{value:10.2f}{rate}{path.remark(name)}")
        lines += [
            f"{name.replace('_', ' '):18}{value:10.2f}{'':16}{path.remark(name)}"
            for name, value in path.device_stages.items()
        ]
        lines = [line.rstrip() for line in lines]
        return "\n".join([*lines, "", *path.meaning(), *(f"turn: {text}" for text in path.advice()), *self.notes])


def bench_loader(recipe: Recipe, *, clips: int = 64, say: Say = lambda text: None) -> LoaderReport:
    """Measure the data path of a recipe on the first clips that it would train on.

    Args:
        recipe: what would be trained.
        clips: how many are read; the more, the surer the numbers. Stage by stage at most a minute of them.
        say: is told what is being measured.

    Raises:
        ConfigError, DataError: what training would stop at; no clip can be read.
    """
    device = pick_device(recipe.train.device)
    recipe = for_device(recipe, device)
    parts = build_parts(recipe, device)
    rules = training_rules(recipe, parts.model, parts.rows)
    views = recipe.data.repeated_augmentation
    micro_batches = parts.plan.micro_batches(0, sys.maxsize, parts.shares)
    keys = list(islice((key for batch in micro_batches for key in batch), max(1, clips // views)))
    ahead = plan_ahead(
        sample_bytes(recipe, parts.model), parts.shares.largest, num_workers=recipe.data.num_workers, held=1
    )
    costs, faults = _stage_costs(parts.rows, keys, rules, say)
    batch = _whole_batch(parts, keys, rules)
    say("handing over")
    hand_over = _hand_over_seconds(recipe, batch)
    say(f"{recipe.data.num_workers} readers")
    rate = _loader_rate(recipe, parts, rules, keys)
    say("computing")
    path = _data_path(costs, rules, hand_over=hand_over, rate=rate, recipe=recipe)
    path = _with_device(path, recipe, parts, batch)
    facts = {
        "clips": f"{len(costs)} rows read stage by stage, {len(keys) * views} clips by the readers; each "
        f"{rules.preprocessing.clip_words(rules.clip_start)}, {rules.preprocessing.crop_size} x "
        f"{rules.preprocessing.crop_size} pixels",
        "videos": _sizes(costs),
        "device": str(device),
    }
    notes = [f"note: left out, cannot be read: {fault}" for fault in faults[:5]]
    notes += [f"warning: {short}" for short in (ahead.warning(),) if short]
    return LoaderReport(path=path, facts=facts, notes=notes)


def _stage_costs(
    rows: Sequence[Clip], keys: Sequence[Key], rules: TrainingRules, say: Say
) -> tuple[list[ReadingCosts], list[str]]:
    """Costs of the rows of the keys, in turn, and why others could not be read."""
    costs: list[ReadingCosts] = []
    faults: list[str] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a reader
    began = time.monotonic()
    try:
        for number, (epoch, index) in enumerate(keys):
            say(f"reading {number}/{len(keys)} rows")
            if len(costs) >= LEAST_ROWS and time.monotonic() - began > MOST_SECONDS:
                break
            try:
                costs.append(reading_costs(rows[index], lambda row, epoch=epoch: rules(row, epoch)))  # type: ignore[misc]
            except DataError as error:
                faults.append(str(error))
    finally:
        torch.set_num_threads(threads)
    if not costs:
        raise DataError(f"none of the {len(keys)} rows looked at can be read; first: {faults[0]}")
    return costs, faults


def _whole_batch(parts: Parts, keys: Sequence[Key], rules: TrainingRules) -> Batch:
    """A micro-batch of readable clips; where few were read they are repeated."""
    wanted = parts.shares.largest
    samples: list[Sample] = []
    for epoch, index in keys[:wanted]:
        read = rules(parts.rows[index], epoch)
        samples += [sample for sample in (read if isinstance(read, list) else [read]) if sample.fault is None]
        if len(samples) >= wanted:
            break
    return collate(list(islice(cycle(samples), wanted)))


class _Held:
    """Gives a sample that lies in memory: what is left is to pass it on."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __call__(self, row: Clip, epoch: int) -> Sample:
        return self.sample


def _hand_over_seconds(recipe: Recipe, batch: Batch) -> float:
    """Seconds a clip to put clips side by side and hand them over, in one reader or, without any, here."""
    frames = batch.frames[0].clone()
    size = max(1, min(len(batch.ids), HANDED_OVER_BYTES // frames.nbytes))
    sample = Sample(
        id="a", frames=frames, pts_seconds=batch.pts_seconds[0], captions=batch.captions[0],
        caption_mask=batch.caption_mask[0].tolist(),
    )  # fmt: skip
    dataset = ClipDataset([Clip(id="a", video="a")], _Held(sample))
    keys = [[(0, 0)] * size] * NUM_HANDED_OVER
    start = recipe.data.worker_start
    arrivals = []
    loader = load_batches(dataset, keys, num_workers=min(1, recipe.data.num_workers), worker_start=start)
    with closing(loader) as batches:
        for _ in batches:
            arrivals.append(time.perf_counter())
    return (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1) / size


def _loader_rate(recipe: Recipe, parts: Parts, rules: TrainingRules, keys: Sequence[Key]) -> float | None:
    """Clips a second of the recipe's readers once all of them are at work; None with too few clips to say."""
    readers = recipe.data.num_workers
    size = max(1, len(keys) // (4 * max(1, readers)))
    whole = [list(keys[first : first + size]) for first in range(0, len(keys) - size + 1, size)]
    if len(whole) <= max(1, readers):
        return None
    arrivals, counts = [], []
    loader = load_batches(
        ClipDataset(parts.rows, rules), whole, num_workers=readers, worker_start=recipe.data.worker_start
    )
    with closing(loader) as batches:
        for batch in batches:
            arrivals.append(time.perf_counter())
            counts.append(len(batch.ids))
    begun = max(1, readers) - 1
    return sum(counts[begun + 1 :]) / (arrivals[-1] - arrivals[begun])


def _data_path(
    costs: Sequence[ReadingCosts], rules: TrainingRules, *, hand_over: float, rate: float | None, recipe: Recipe
) -> DataPath:
    """The means a clip, in milliseconds."""
    clips = sum(cost.num_views for cost in costs)

    def mean(name: str) -> float:
        return float(1e3 * sum(getattr(cost, name) for cost in costs) / clips)

    floors = [(cost.floor, cost) for cost in costs if cost.floor is not None]
    floor = None
    if floors:
        seconds = sum(each.seek + each.decode for each, _ in floors)
        ours = sum(cost.seek + cost.decode for _, cost in floors)
        frames = sum(each.num_frames for each, _ in floors) / sum(cost.num_kept for _, cost in floors)
        floor = FloorShare(
            milliseconds=1e3 * seconds / sum(cost.num_views for _, cost in floors),
            share=seconds / max(ours, 1e-9), frames_per_kept=frames,
        )  # fmt: skip
    names = ("open", "seek", "decode", "convert", "captions", "storage")
    prep = rules.preprocessing
    return DataPath(
        stages={name: mean(name) for name in names} | {"collate": 1e3 * hand_over},
        device_stages={}, floor=floor, measured_rate=rate, readers=recipe.data.num_workers, cores=usable_cores(),
        video_short_side=sorted(min(cost.height, cost.width) for cost in costs)[len(costs) // 2],
        wanted_short_side=prep.short_side or prep.crop_size, crop=rules.crop, compute_core_milliseconds=None,
    )  # fmt: skip


def _with_device(path: DataPath, recipe: Recipe, parts: Parts, batch: Batch) -> DataPath:
    """The same with what the device does: to move a clip, to make network input of it, forward and backward."""
    device = parts.device
    preprocessing: Any = parts.model.preprocessing
    transfer = 0.0
    if device.type == "cuda":
        pinned = batch.frames.pin_memory()
        transfer = _timed(lambda: pinned.to(device, non_blocking=True), device)[0] / len(batch.ids)
    parts.train_mode()
    compute, cores, part = _compute_seconds(recipe, parts, batch)
    moved = replace(part, frames=part.frames.to(device))
    transform = _timed(lambda: network_input(moved, preprocessing, device), device)[0] / len(part.ids)
    stages = {"transfer": transfer, "device_transform": transform, "compute": max(0.0, compute - transform - transfer)}
    return replace(
        path,
        device_stages={name: 1e3 * value for name, value in stages.items()},
        compute_core_milliseconds=None if device.type == "cuda" else 1e3 * cores,
        computed_clips=len(part.ids),
    )


def _compute_seconds(recipe: Recipe, parts: Parts, batch: Batch) -> tuple[float, float, Batch]:
    """Real and CPU seconds a clip of forward and backward, and the clips it was measured on."""

    def work(clips: Batch) -> Callable[[], Any]:
        step = GradientStep(parts, recipe, [clips], 0)
        return step.cached if recipe.train.cached_negatives else step.plain

    if parts.device.type == "cpu" and len(batch.ids) > 2:
        few = _first(batch, 2)
        seconds, cores = _timed(work(few), parts.device, repeats=1)
        if seconds / 2 * len(batch.ids) > COMPUTE_SECONDS:
            return seconds / 2, cores / 2, few
    seconds, cores = _timed(work(batch), parts.device)
    return seconds / len(batch.ids), cores / len(batch.ids), batch


def _first(batch: Batch, number: int) -> Batch:
    """The first clips of a batch."""
    values = {name: getattr(batch, name)[:number] for name in ("ids", "frames", "pts_seconds", "flip", "valid")}
    values |= {name: getattr(batch, name)[:number] for name in ("captions", "caption_mask", "labels")}
    return replace(batch, **values)


def _timed(work: Callable[[], Any], device: torch.device, repeats: int = 3) -> tuple[float, float]:
    """Real and CPU seconds of the quickest of some runs, after one that is not counted."""
    runs = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began, cpu = time.perf_counter(), time.process_time()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        runs.append((time.perf_counter() - began, time.process_time() - cpu))
    return min(runs[1:])


def _sizes(costs: Sequence[ReadingCosts]) -> str:
    sizes = [f"{cost.width}x{cost.height}" for cost in costs]
    common = sorted(set(sizes), key=lambda size: (-sizes.count(size), size))
    return ", ".join(common[:3]) + (f" and {len(common) - 3} other sizes" if len(common) > 3 else "")

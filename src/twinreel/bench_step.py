"""Where time and memory of a training step go: measured on random clips of a recipe's shape, without its data.

The model, the loss and the optimizer are the recipe's, with new weights. Times are CPU time on a CPU (other programs do
not count), else the device's. Each part's share comes from a profile of forward and backward pass; bytes kept come from
autograd's saved tensors, at two numbers of clips, so that what does not grow with them is told apart.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import record_function

from twinreel.assembly import build_model, build_task, pick_device
from twinreel.data.clip import Batch, Clip
from twinreel.data.plan import Plan, Shares
from twinreel.errors import ConfigError, TrainingError
from twinreel.gradients import GradientStep, clip_gradient, finish
from twinreel.guards import repeatable_kernels
from twinreel.models.preferred import preferred
from twinreel.models.training_modes import apply_batch_norm, checkpoint_activations
from twinreel.optim import build_optimizer, build_schedule, freeze, parameter_groups
from twinreel.parts import Parts, for_device
from twinreel.recipe import Recipe
from twinreel.step_costs import PartCosts, StepCosts
from twinreel.tasks import ActionRecognition, VideoTextMatching, WholeModel

__all__ = ["bench_step", "part_names"]

NUM_CLASSES = 400  # where neither recipe nor labels say how many
NUM_OPTIONS = 5
WORDS = "a person opens the door and walks into the kitchen to cut an onion with knife".split()
RANGE = "twinreel part "
BACKWARD = "autograd::engine::evaluate_function: "
PARTS = ("input", "backbone", "temporal", "head", "text", "loss")
REPEATS = 2
Say = Callable[[str], None]


def part_names(model: nn.Module) -> dict[str, str]:
    """Module name -> part: `temporal` (a convolution's kernel above 1 in time, attention), `head`, `text`, `backbone`.

    Of a cross-modal model `text` is its BERT, which reads the picture too. What a module computes outside of its own
    modules belongs to its own part; inside attention everything does.
    """
    prefixes = [prefix.rstrip(".") for prefix in getattr(model, "head_prefixes", ())]
    names: dict[str, str] = {}
    for name, module in model.named_modules():
        parent = names.get(name.rpartition(".")[0], "backbone") if name else "backbone"
        top = name.removeprefix("video_tower.").partition(".")[0]
        kernel = module.kernel_size[0] if isinstance(module, nn.Conv3d) else 1
        tower = name.partition(".")[0]
        if tower == "text_tower" or (tower == "transformer" and name not in prefixes and parent != "head"):
            part = "text"
        elif top in ("head", "fc") or name in prefixes:
            part = "head"
        elif parent == "temporal" or kernel > 1 or "attention" in type(module).__name__.lower():
            part = "temporal"
        else:
            part = parent
        names[name] = part
    return names


def bench_step(recipe: Recipe, *, clips: int | None = None, say: Say = lambda text: None) -> StepCosts:
    """Measure a training step of a recipe on random clips; no file of its data is opened.

    Args:
        recipe: what would be trained, by one process.
        clips: at once, for the times; None = 2, or the recipe's micro-batch on a GPU if that fits.
        say: is told what is being measured.

    Raises:
        ConfigError: what training would stop at.
        TrainingError: not even the smallest number of clips fits.
    """
    device = pick_device(recipe.train.device)
    written, recipe = recipe, for_device(recipe, device)
    unit = recipe.clips_together
    parts, notes = _build(recipe, device)
    small = max(unit, 2 // unit * unit)
    say(f"memory of {small} clips")
    with repeatable_kernels(recipe, device):
        first = _memory(parts, recipe, small)
        free = _free_bytes(device)
        held = sum(first.kept.values())
        if 3 * held > free:
            raise TrainingError(
                f"{small} clips at once keep {held / 2**30:.2f} GB, and {free / 2**30:.2f} GB are free on {device}: "
                "nothing larger can be measured. Free memory, or use a smaller crop_size or fewer num_frames"
            )
        say(f"memory of {small + unit} clips")
        second = _memory(parts, recipe, small + unit)
        kept = {name: (second.kept.get(name, 0) - first.kept.get(name, 0)) / unit for name in PARTS}
        growth = None if first.peak is None or second.peak is None else max(0, second.peak - first.peak) / unit
        sizes = _buffers(parts)
        costs = StepCosts(
            parts={},
            optimizer_milliseconds=0.0,
            **sizes,
            kept_per_clip=sum(kept.values()),
            peak_per_clip=growth,
            fixed_bytes=None if growth is None or first.peak is None else max(0.0, first.peak - growth * small),
            free_bytes=free,
            micro_batch=recipe.train.micro_batch_size or recipe.train.global_batch_size,
            process_batch=recipe.train.global_batch_size,
            unit=unit,
            measured_clips=0,
            settings={
                "precision": recipe.train.precision,
                "memory_format": recipe.train.memory_format,
                "activation_checkpointing": recipe.train.activation_checkpointing,
            },
            preferred=_preferred(written, device),
            facts=_facts(parts, recipe),
            notes=notes,
        )
        number = clips or (small if device.type == "cpu" else max(small, costs.best_micro_batch))
        number = min(number, costs.largest_micro_batch // unit * unit or small)
        say(f"time of {number} clips")
        shares = _shares(parts, recipe, number)
        seconds, optimizer = _seconds(parts, recipe, number)
    for name in PARTS:
        forward, backward = shares.get((name, "forward"), 0.0), shares.get((name, "backward"), 0.0)
        if forward or backward or kept[name]:
            each = 1e3 * seconds / number
            costs.parts[name] = PartCosts(forward=each * forward, backward=each * backward, kept=kept[name])
    return replace(costs, optimizer_milliseconds=1e3 * optimizer, measured_clips=number)


def _preferred(recipe: Recipe, device: torch.device) -> dict[str, str]:
    """What `auto` means; the precision only where the recipe leaves it open, because it changes numbers."""
    memory_format, precision = preferred(recipe.model.name, device.type, recipe.train.precision)
    found: dict[str, str] = {"memory_format": memory_format}
    return found | ({"precision": precision} if recipe.train.precision == "auto" else {})


def _facts(parts: Parts, recipe: Recipe) -> dict[str, str]:
    prep: Any = parts.model.preprocessing
    name = torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else f"cpu, {_threads()}"
    return {
        "model": f"{recipe.model.name}, {sum(p.numel() for p in parts.model.parameters()):,} parameters",
        "clip": f"{recipe.data.num_clips} x " * (recipe.data.num_clips > 1)
        + f"{prep.num_frames} frames of {prep.crop_size} x {prep.crop_size}, random",
        "device": name,
        "settings": f"precision {recipe.train.precision}, {recipe.train.memory_format}, batch norm "
        f"{recipe.train.batch_norm}, activation checkpointing {str(recipe.train.activation_checkpointing).lower()}",
    }


def _threads() -> str:
    number = torch.get_num_threads()
    return f"{number} thread" + ("s" if number > 1 else "")


def _build(recipe: Recipe, device: torch.device) -> tuple[Parts, list[str]]:
    """What a run is built of, but for its rows, which are made up."""
    notes = []
    train, optim, section = recipe.train, recipe.optim, recipe.model
    if section.weights is not None:
        notes.append("note: with new weights; those of model.weights are not read, they cost the same")
    changed: dict[str, Any] = {"weights": None}
    if recipe.task.name == "contrastive" and ":" not in section.name:
        if section.vocabulary is not None and not Path(section.vocabulary).is_file():
            changed["vocabulary"] = None
        if changed.get("vocabulary", section.vocabulary) is None:
            notes.append(f"note: a text tower of {len(WORDS)} made-up words; its table will be larger")
    classifies = recipe.task.name == "action_recognition" or recipe.task.goal == "question_answering"
    if classifies and section.num_classes is None:
        notes.append(f"note: {NUM_CLASSES} classes; the data would say how many there are")
    recipe = recipe.model_copy(update={"model": section.model_copy(update=changed)})
    rows = _rows(section.num_classes or NUM_CLASSES)
    task = build_task(recipe, None, rows)
    model = build_model(recipe, task, [" ".join(WORDS)]).to(device)
    task.to(device)
    if train.memory_format == "channels_last":
        for parameter in model.parameters():
            if parameter.ndim == 5 and parameter[0, 0].numel() > 1:
                parameter.data = parameter.data.to(memory_format=torch.channels_last_3d)
    apply_batch_norm(model, train.batch_norm, device, 1)
    idle = freeze(model, section.freeze)
    if train.activation_checkpointing:
        checkpoint_activations(model)
    groups = parameter_groups(
        model, learning_rate=optim.learning_rate, learning_rates=optim.learning_rates, weight_decay=optim.weight_decay,
        extra=list(task.parameters()),
    )  # fmt: skip
    parts = Parts(
        rows=rows, rows_digest="", eval_rows=[], missing=[], caption_faults=[],
        plan=Plan(num_rows=len(rows), seed=train.seed, global_batch_size=recipe.clips_together, views_per_row=1),
        shares=Shares.cut(recipe.clips_together, 1, None, recipe.clips_together),
        total_steps=1, schedule=build_schedule(total_steps=1, steps_per_epoch=1, learning_rate=optim.learning_rate),
        model=model, task=task, whole=WholeModel(model, task), idle=idle, norms=[], average=None,
        optimizer=build_optimizer(
            optim.name, groups, betas=optim.betas, eps=optim.eps, momentum=optim.momentum, nesterov=optim.nesterov
        ),
        scaler=torch.amp.GradScaler(device.type, enabled=train.precision == "fp16"),
        device=device, description={},
    )  # fmt: skip
    parts.train_mode()
    return parts, notes


def _rows(num_classes: int) -> list[Clip]:
    return [Clip(id=str(place), video=f"{place}.mp4", labels=(place,)) for place in range(num_classes)]


def _random_batch(parts: Parts, recipe: Recipe, number: int) -> Batch:
    prep: Any = parts.model.preprocessing
    generator = torch.Generator().manual_seed(0)
    num_frames = prep.num_frames * recipe.data.num_clips
    shape = (number, num_frames, prep.crop_size, prep.crop_size, 3)
    candidates = recipe.task.num_candidates
    if isinstance(parts.task, VideoTextMatching) and parts.task.goal == "retrieval":
        candidates = 1 + parts.task.num_negatives
    texts = [[f"{WORDS[(clip + k) % len(WORDS)]} {WORDS[clip % len(WORDS)]}" for k in range(candidates)]
             for clip in range(number)]  # fmt: skip
    places = len(parts.task.classes) if isinstance(parts.task, ActionRecognition) else NUM_OPTIONS
    return Batch(
        ids=[str(clip) for clip in range(number)],
        frames=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        pts_seconds=torch.zeros(number, num_frames),
        flip=torch.zeros(number, dtype=torch.bool),
        valid=torch.ones(number, dtype=torch.bool),
        captions=texts,
        caption_mask=torch.ones(number, candidates, dtype=torch.bool),
        labels=[(clip % places,) for clip in range(number)],
        options=[tuple(WORDS[:NUM_OPTIONS])] * number,
        repeated_frames=0,
        faults=[],
    )


def _work(parts: Parts, recipe: Recipe, number: int) -> Callable[[], None]:
    """Forward and backward of so many clips at once, as training does it."""
    train = recipe.train.model_copy(update={"global_batch_size": number, "micro_batch_size": number})
    recipe = recipe.model_copy(update={"train": train})
    parts = replace(parts, shares=Shares.cut(number, 1, number, recipe.clips_together))
    batch = _random_batch(parts, recipe, number)

    def work() -> None:
        parts.optimizer.zero_grad(set_to_none=True)
        finish(parts, recipe, GradientStep(parts, recipe, [batch], 0).plain())

    return work


@dataclass(slots=True)
class _Memory:
    kept: dict[str, int] = field(default_factory=dict)
    peak: int | None = None


def _memory(parts: Parts, recipe: Recipe, number: int) -> _Memory:
    """Bytes that the graph keeps, by part, and how far the memory held grew above what lies there anyway."""
    work = _work(parts, recipe, number)
    found = _Memory()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*parts.model.parameters(), *parts.model.buffers())}
    seen: set[int] = set()
    with _following(parts) as following:

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                part = following[-1]
                found.kept[part] = found.kept.get(part, 0) + storage.nbytes()
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            work()
    _step(parts, recipe)
    found.peak = _peak_growth(work, parts.device)
    return found


def _step(parts: Parts, recipe: Recipe) -> None:
    """Clip and step, as the loop does."""
    clip_gradient(parts, recipe)
    parts.scaler.step(parts.optimizer)
    parts.scaler.update()


@contextmanager
def _following(parts: Parts) -> Iterator[list[str]]:
    """The part that is being computed, as the last of a list; in a profile, as a range."""
    stack: list[str] = ["input"]
    ranges: list[Any] = []
    handles = []

    def enter(part: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            stack.append(part)
            ranges.append(record_function(RANGE + part))
            ranges[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        stack.pop()
        ranges.pop().__exit__(None, None, None)

    def after(*_: Any) -> None:
        leave()
        stack[0] = "loss"  # what follows the model

    def before(*_: Any) -> None:
        stack[0] = "input"

    names = part_names(parts.model)
    try:
        handles.append(parts.whole.register_forward_pre_hook(before))
        for name, module in parts.model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(names[name])))
            handles.append(module.register_forward_hook(leave))
        handles.append(parts.whole.register_forward_pre_hook(enter("input")))
        handles.append(parts.whole.register_forward_hook(after))
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def _shares(parts: Parts, recipe: Recipe, number: int) -> dict[tuple[str, str], float]:
    """(part, forward or backward) -> its share of the time of both passes, from a profile of one."""
    work = _work(parts, recipe, number)
    cuda = parts.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if cuda else [])
    work()
    with _following(parts), torch.profiler.profile(activities=activities) as profile:
        work()
    events: list[Any] = sorted(profile.events() or [], key=lambda event: event.time_range.start)
    ranges = [event for event in events if event.name.startswith(RANGE)]
    ended = max((event.time_range.end for event in ranges), default=0.0)
    nodes: dict[int, str] = {}  # of the graph: the last operation that saw a number made the node
    spent: dict[tuple[str, str], float] = {}
    for event in events:
        if event.name.startswith((RANGE, BACKWARD)) or _inside_backward(event):
            continue
        part = _range_of(event) or ("input" if event.time_range.start < ended else "loss")
        if event.sequence_nr >= 0:
            nodes[event.sequence_nr] = part
        _add(spent, (part, "forward"), event.self_device_time_total if cuda else event.self_cpu_time_total)
    for event in events:
        if event.name.startswith(BACKWARD):
            part = nodes.get(event.sequence_nr, "loss")
            _add(spent, (part, "backward"), event.device_time_total if cuda else event.cpu_time_total)
    whole = sum(spent.values()) or 1.0
    return {key: value / whole for key, value in spent.items()}


def _add(spent: dict[tuple[str, str], float], key: tuple[str, str], value: float) -> None:
    spent[key] = spent.get(key, 0.0) + value


def _inside_backward(event: Any) -> bool:
    while event is not None:
        if event.name.startswith("autograd::engine"):
            return True
        event = event.cpu_parent
    return False


def _range_of(event: Any) -> str | None:
    while event is not None:
        if event.name.startswith(RANGE):
            return str(event.name.removeprefix(RANGE))
        event = event.cpu_parent
    return None


def _seconds(parts: Parts, recipe: Recipe, number: int) -> tuple[float, float]:
    """The quickest of some runs: forward and backward of so many clips, and the optimizer's step."""
    work = _work(parts, recipe, number)
    passes, steps = [], []
    for _ in range(REPEATS):
        passes.append(_timed(work, parts.device))
        steps.append(_timed(lambda: _step(parts, recipe), parts.device))
    return min(passes), min(steps)


def _timed(work: Callable[[], None], device: torch.device) -> float:
    """CPU seconds on a CPU, divided by the threads that share them; else seconds."""
    if device.type != "cuda":
        began = time.process_time()
        work()
        return (time.process_time() - began) / torch.get_num_threads()
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _buffers(parts: Parts) -> dict[str, int]:
    def size(tensors: Any) -> int:
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    state = [value for values in parts.optimizer.state.values() for value in values.values()]
    return {
        "parameter_bytes": size([*parts.model.parameters(), *parts.model.buffers()]),
        "gradient_bytes": size(parts.parameters),
        "optimizer_bytes": size(state),
    }


def _free_bytes(device: torch.device) -> int:
    """Memory that can still be had, on the device or the machine (a container's limit counts).

    Raises:
        ConfigError: the system does not say.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    _trim()
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if Path("/proc/meminfo").exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    if not found:
        raise ConfigError("free memory cannot be told on this system: /proc/meminfo is missing; measure on Linux")
    with suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        found.append(limit - int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii")))
    return max(0, min(found))


def _trim() -> None:
    """Give freed memory back to the system, so that it is seen as free and grows anew."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _peak_growth(work: Callable[[], None], device: torch.device) -> int | None:
    """Bytes by which the memory held rises during the work; None where the system does not say."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return int(torch.cuda.max_memory_allocated(device) - before)
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the highest size so far
        before = _status("VmRSS")
        work()
        return max(0, _status("VmHWM") - before)
    except (OSError, StopIteration):
        return None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))

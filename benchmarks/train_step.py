"""What forward and backward of a training step cost, by precision and memory layout, ours and the founding modules.

    python benchmarks/train_step.py --slowfast-checkout ../SlowFast --milnce-checkout ../MIL-NCE_HowTo100M
    python benchmarks/train_step.py --models s3dg --crop 64 --clips 1 --rounds 3     # quick; --json for programs

All forms of a network take turns within one process, in another order each round, so that whatever else runs on the
machine meets all alike; what is measured is CPU time (seconds on a GPU). A ratio is the median over rounds of
contiguous float32 (or of the founding module in the same form) by the form, with a 90 % interval (bootstrap over
rounds): above 1 is faster. bf16 on a CPU runs as training runs it, see `twinreel.models.half_on_cpu`.
The founding modules are theirs, imported from a checkout; without one, or where it cannot be imported, a row says "not
measured". `twinreel.models.preferred` is decided from this.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is imported

import torch
from torch import Tensor, nn

from twinreel.models import create_model
from twinreel.models.half_on_cpu import RoomyConvolutions

MODELS = ("slowfast_4x16_r50", "slowfast_8x8_r50", "x3d_m", "s3dg")
YAMLS = {
    "slowfast_4x16_r50": "SLOWFAST_4x16_R50.yaml",
    "slowfast_8x8_r50": "SLOWFAST_8x8_R50.yaml",
    "x3d_m": "X3D_M.yaml",
}
FORMS = [(precision, layout) for precision in ("fp32", "bf16") for layout in ("contiguous", "channels_last")]
NUM_CLASSES = 400
Work = Callable[[], None]


def founding(name: str, arguments: argparse.Namespace, crop: int) -> Callable[[Tensor], Tensor] | str:
    """The founding module as a function of one video, or why it is not measured."""
    folder = arguments.milnce_checkout if name == "s3dg" else arguments.slowfast_checkout
    if folder is None:
        return "not measured: no checkout named"
    try:
        return founding_s3dg(folder) if name == "s3dg" else founding_slowfast(folder, name, crop)
    except ImportError as error:
        return f"not measured: {error}"


def founding_s3dg(folder: Path) -> Callable[[Tensor], Tensor]:
    spec = importlib.util.spec_from_file_location("founding_s3dg", folder / "s3dg.py")
    if spec is None or spec.loader is None or not (folder / "s3dg.py").is_file():
        raise ImportError(f"{folder} has no s3dg.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Sentence_Embedding = lambda *args, **kwargs: nn.Identity()  # the text module wants a file of words
    model = module.S3D(num_classes=NUM_CLASSES).train()
    return Founding(model, lambda video: model.forward_video(video))


def founding_slowfast(folder: Path, name: str, crop: int) -> Callable[[Tensor], Tensor]:
    sys.path.insert(0, str(folder))
    from slowfast.config.defaults import get_cfg
    from slowfast.models import build_model

    found = [
        path for path in folder.rglob(YAMLS[name]) if "Kinetics" in path.parts and path.parent.name != "pytorchvideo"
    ]
    if not found:
        raise ImportError(f"{folder} has no configs/Kinetics/{YAMLS[name]}")
    cfg = get_cfg()
    cfg.merge_from_file(str(min(found, key=lambda path: len(path.parts))))
    cfg.NUM_GPUS = 0
    cfg.DATA.TRAIN_CROP_SIZE = cfg.DATA.TEST_CROP_SIZE = crop
    model = build_model(cfg).train()

    def run(video: Tensor) -> Tensor:
        if len(cfg.DATA.INPUT_CHANNEL_NUM) == 1:
            return model([video])
        last = video.shape[2] - 1
        slow = torch.linspace(0, last, video.shape[2] // cfg.SLOWFAST.ALPHA).long()
        return model([video.index_select(2, slow), video])

    return Founding(model, run)


class Founding:
    """A founding module and how it is called."""

    def __init__(self, model: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        self.model, self.run = model, run

    def __call__(self, video: Tensor) -> Tensor:
        """Logits of a video."""
        return self.run(video)


class Ours(Founding):
    """Our module of the name."""

    def __init__(self, name: str, crop: int) -> None:
        model = create_model(name, num_classes=NUM_CLASSES, preprocessing={"crop_size": crop, "short_side": crop})
        super().__init__(model.train(), model)


def pass_of(form: Founding, video: Tensor, precision: str, layout: str) -> Work:
    """Forward and backward of a module in a precision and layout."""
    memory = torch.channels_last_3d if layout == "channels_last" else torch.contiguous_format
    shaped = video.contiguous(memory_format=memory)

    def work() -> None:
        for parameter in form.model.parameters():
            parameter.grad = None
            if parameter.ndim == 5 and parameter[0, 0].numel() > 1:
                parameter.data = parameter.data.contiguous(memory_format=memory)
        with ExitStack() as stack:
            if precision == "bf16":
                stack.enter_context(RoomyConvolutions())
                stack.enter_context(torch.autocast(video.device.type, torch.bfloat16))
            outputs = form(shaped)
        outputs.float().square().mean().backward()

    return work


def seconds(work: Work, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.process_time()
        work()
        return time.process_time() - began
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Median over rounds of above / below, and its 90 % interval."""
    each = [a / b for a, b in zip(above, below, strict=True)]
    chance = random.Random(0)
    medians = sorted(statistics.median(chance.choices(each, k=len(each))) for _ in range(1000))
    return [statistics.median(each), medians[50], medians[949]]


def measure(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a form of a network."""
    device = torch.device(arguments.device)
    torch.manual_seed(0)
    probe = create_model(name, num_classes=2).preprocessing
    crop = arguments.crop or probe.crop_size
    forms: dict[str, Any] = {"ours": Ours(name, crop), "founding": founding(name, arguments, crop)}
    video = torch.randn(arguments.clips, 3, probe.num_frames, crop, crop, device=device)
    works = {}
    for who, form in forms.items():
        if isinstance(form, str):
            continue
        form.model.to(device)
        works |= {(who, *key): pass_of(form, video, *key) for key in FORMS}
    times: dict[tuple[str, ...], list[float]] = {key: [] for key in works}
    chance = random.Random(0)
    for number in range(arguments.rounds + 1):
        for key in chance.sample(list(works), k=len(works)):
            spent = seconds(works[key], device)
            if number:  # the first round warms up
                times[key].append(spent)
    rows = []
    for key in FORMS:
        own, theirs = times["ours", *key], times.get(("founding", *key))
        rows.append(
            {
                "model": name, "precision": key[0], "memory_format": key[1], "crop": crop, "clips": arguments.clips,
                "seconds_a_clip": statistics.median(own) / arguments.clips,
                "to_contiguous_fp32": ratio(times["ours", "fp32", "contiguous"], own),
                "to_founding": forms["founding"] if theirs is None else ratio(theirs, own),
            }
        )  # fmt: skip
    return rows


def line(row: dict[str, Any]) -> str:
    shown = [
        value if isinstance(value, str) else f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})"
        for value in (row["to_contiguous_fp32"], row["to_founding"])
    ]
    return (
        f"{row['model']:20}{row['precision']:6}{row['memory_format']:15}{row['seconds_a_clip']:10.3f}"
        f"{shown[0]:>20}  {shown[1]:>20}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--crop", type=int, help="pixels; default the training crop of each model")
    parser.add_argument("--clips", type=int, default=2, help="at once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slowfast-checkout", type=Path, help="a checkout of PySlowFast, for its modules")
    parser.add_argument("--milnce-checkout", type=Path, help="a checkout of MIL-NCE_HowTo100M")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    if not arguments.json:
        print(f"torch {torch.__version__}, {arguments.device}, {arguments.threads} threads, {arguments.clips} clips")
        print(f"{'':20}{'':6}{'':15}{'s a clip':>10}{'to fp32 contiguous':>20}  {'to founding':>20}")
    for name in arguments.models:
        rows += measure(name, arguments)
        if not arguments.json:
            print("\n".join(map(line, rows[-len(FORMS) :])), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

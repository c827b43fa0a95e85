"""Where a trained classifier looks in a video: an mp4 and pictures of a layer's Grad-CAM."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twinreel.assembly import load_run, pick_device
from twinreel.config import nearest
from twinreel.data.clip import Clip, Sample
from twinreel.data.dataset import ViewRules
from twinreel.errors import ConfigError, DataError
from twinreel.grad_cam import find_layer, grad_cam, overlay, write_images, write_video
from twinreel.tasks import ActionRecognition

__all__ = ["Explanation", "explain"]

SLOWEST = 1.0  # frames a second of the mp4: a clip whose frames lie further apart is shown faster than it was


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What was asked of which clip, and what was written.

    Attributes:
        video: the file.
        start_seconds: of the first frame.
        end_seconds: of the last frame.
        layer: whose features were asked.
        class_name: for which the pictures speak.
        score: of this class in this clip.
        top_class: the one with the largest score.
        top_score: its score.
        files: what was written: for each pathway an mp4, and a picture a frame.
        empty: pathways in which nothing speaks for the class; their pictures show no heat.
    """

    video: str
    start_seconds: float
    end_seconds: float
    layer: str
    class_name: str
    score: float
    top_class: str
    top_score: float
    files: list[str]
    empty: list[str]

    def to_json(self) -> dict[str, Any]:
        """Everything, ready for `json.dumps`."""
        return asdict(self)

    def to_table(self) -> str:
        """For people."""
        videos = [name for name in self.files if name.endswith(".mp4")]
        lines = [
            f"{self.video}  {self.start_seconds:.2f}-{self.end_seconds:.2f} s",
            f"top class: {self.top_class} ({self.top_score:.3f})",
            f"explained: {self.class_name} ({self.score:.3f}), layer {self.layer}",
            *(f"written: {name}" for name in videos),
            f"written: {len(self.files) - len(videos)} pictures beside",
        ]
        return "\n".join([*lines, *(f"note: nothing in {name} speaks for {self.class_name}" for name in self.empty)])


def explain(
    run: str | Path,
    video: str,
    out: str | Path,
    *,
    layer: str,
    class_name: str | None = None,
    start_seconds: float | None = None,
    checkpoint: str | None = None,
) -> Explanation:
    """Write where the model of a run looks in one clip of a video.

    Args:
        run: a run folder of `task.name=action_recognition`.
        video: a file.
        out: a folder; files of the same names there are written anew.
        layer: a name of `model.named_modules()`, e.g. `s5`; each pathway that it gives has its own files.
        class_name: for which class; None = the one with the largest score.
        start_seconds: where the clip begins; None = in the middle of the video.
        checkpoint: `last`, `best`, `step_N`; None = best, else last.

    Raises:
        ConfigError: the run is no classifier's, there is no such layer or class.
        DataError: the video cannot be read, or files cannot be written.
    """
    loaded = load_run(run, checkpoint)
    task = loaded.task
    if not isinstance(task, ActionRecognition):
        raise ConfigError(f"{run}: Grad-CAM explains a class, and this run has none (task.name={task.name})")
    model = loaded.model
    find_layer(model, layer)
    wanted = _place_of(class_name, task)
    device = pick_device(loaded.recipe.train.device)
    model.to(device)
    sample = _read(video, start_seconds, model)
    frames, times = sample.frames[0], sample.pts_seconds[0]
    preprocessing: Any = model.preprocessing
    inputs = preprocessing.normalize(frames[None].to(device))
    with torch.no_grad():
        scores = task.scores(model, inputs)[0]
    top = int(scores.argmax())
    chosen = top if wanted is None else wanted
    maps = [heat[0].cpu() for heat in grad_cam(model, inputs, layer, [chosen])]
    names = [layer] if len(maps) == 1 else [f"{layer}.pathway{number}" for number in range(len(maps))]
    files = _write(Path(out), dict(zip(names, maps, strict=True)), frames, times)
    return Explanation(
        video=video,
        start_seconds=float(times[0]),
        end_seconds=float(times[-1]),
        layer=layer,
        class_name=task.classes.names[chosen],
        score=float(scores[chosen]),
        top_class=task.classes.names[top],
        top_score=float(scores[top]),
        files=[str(path) for path in files],
        empty=[name for name, heat in zip(names, maps, strict=True) if not bool(heat.any())],
    )


def _place_of(class_name: str | None, task: ActionRecognition) -> int | None:
    if class_name is None:
        return None
    names = list(task.classes.names)
    if class_name not in names:
        raise ConfigError(f"--class {class_name}: the model knows no such class{nearest(class_name, names)}")
    return names.index(class_name)


def _read(video: str, start_seconds: float | None, model: nn.Module) -> Sample:
    """One clip, framed as in evaluation."""
    preprocessing: Any = model.preprocessing
    length = preprocessing.clip_seconds if preprocessing.frame_rate is not None else None
    end = None if start_seconds is None or length is None else start_seconds + length
    sample = ViewRules(preprocessing=preprocessing, num_clips=1)(
        Clip(id=video, video=video, start_seconds=start_seconds, end_seconds=end), 0
    )
    if sample.fault is not None:
        raise DataError(sample.fault.reason)
    return sample


def _write(out: Path, maps: dict[str, Tensor], frames: Tensor, times: Tensor) -> list[Path]:
    """Frames beside frames with heat, as `LAYER.mp4` and `LAYER_frame_00.png`, ..."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"{out}: no folder can be made there: {error.strerror}; choose another --out") from error
    seconds = float(times[-1] - times[0])
    rate = max(SLOWEST, (len(frames) - 1) / seconds) if seconds > 0 else SLOWEST
    files = []
    for name, heat in maps.items():
        both = torch.cat([frames, overlay(frames, heat)], dim=2)
        path = out / f"{name}.mp4"
        write_video(path, both, rate)
        files += [path, *write_images(out, {f"{name}_frame_{i:02d}": picture for i, picture in enumerate(both)})]
    return files

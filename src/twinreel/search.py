"""Embed a collection window by window, then find the seconds that a sentence means.

An index folder holds `index.json` (which run, which windows), `parts/*.safetensors` (embeddings) with
`parts/*.json` (video, seconds), and `faults.jsonl`. It is written a part at a time, so a killed run goes on.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinreel.assembly import Run, load_run, pick_device
from twinreel.checkpoint import weights_file
from twinreel.data.clip import Clip, Fault
from twinreel.data.storage import video_state
from twinreel.data.windows import SeenWindows, check_stride, see_windows
from twinreel.errors import CheckpointError, ConfigError, DataError
from twinreel.evaluation import embed_sentences
from twinreel.evaluation.rerank import SecondStage, load_second_stage
from twinreel.models.preprocessing import Preprocessing

__all__ = ["EmbedResult", "Found", "embed_collection", "embed_known", "search_collection"]

WINDOWS_AT_ONCE = 16
VIDEOS_A_PART = 32
# What of a recipe a search makes use of.
SEARCHED_BY = (
    "rerank.run", "rerank.checkpoint", "rerank.k", "rerank.num_clips", "eval.max_words", "data.num_workers",
    "data.worker_start", "train.device",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedResult:
    """What became of every listed row: listed = written + already there + failed.

    `repeated_frames` counts frames that repeat the last one of a video shorter than a clip.
    """

    listed: int
    written: int
    already_there: int
    windows: int
    repeated_frames: int
    faults: list[Fault]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One answer of a search; the window [start, end) in seconds.

    `score` is the towers' similarity; `rerank_score` that of the matching model, the log-odds or the logit of a match,
    see `VideoTextMatching.scores`; None where it was not asked.
    """

    id: str
    video: str
    start_seconds: float
    end_seconds: float
    score: float
    rerank_score: float | None = None


def embed_collection(
    run: str | Path | Run,
    rows: Sequence[Clip],
    out: str | Path,
    *,
    checkpoint: str | None = None,
    stride_seconds: float | None = None,
    report: Callable[[int, int], None] | None = None,
) -> EmbedResult:
    """Embed windows of every row into an index folder; goes on where a killed run stopped.

    Args:
        run: a run folder, or a loaded run.
        rows: what to embed; a row's own window is respected.
        out: the index folder.
        checkpoint: `last`, `best`, `step_N`.
        stride_seconds: from window to window; None = half a clip.
        report: called with (rows done, rows in all).

    Raises:
        ConfigError: the folder holds an index made with another model or other windows.
    """
    loaded = run if isinstance(run, Run) else load_run(run, checkpoint)
    preprocessing: Any = loaded.model.preprocessing
    check_stride(stride_seconds)
    stride = stride_seconds
    if stride is None and preprocessing.frame_stride is None:
        stride = preprocessing.clip_seconds / 2
    folder = Path(out)
    _open_index(folder, loaded, stride, preprocessing)
    todo = _not_yet_there(folder, rows)
    device = pick_device(loaded.recipe.train.device)
    loaded.model.to(device)
    faults: list[Fault] = []
    repeated_frames = 0
    number = len(_parts(folder))
    for first in range(0, len(todo), VIDEOS_A_PART):
        block = todo[first : first + VIDEOS_A_PART]
        windows, embeddings = [], []
        marks = {row.id: _fingerprint(row) for row in block}  # of the files before they are read
        for row, spans, values, repeated in _see(loaded, block, device, faults, stride, 0.5):
            mark = marks[row.id]
            windows += [
                {"row": row.id, "video": row.video, "start_seconds": start, "end_seconds": end, "mark": mark}
                for start, end, *_ in spans
            ]
            embeddings.append(values)
            repeated_frames += repeated
        if windows:
            _write_part(folder / "parts", number, windows, torch.cat(embeddings))
            number += 1
        if report is not None:
            report(len(rows) - len(todo) + min(first + VIDEOS_A_PART, len(todo)), len(rows))
    _write_faults(folder, faults)
    total = sum(len(_read_json(part)) for part in _parts(folder))
    return EmbedResult(
        listed=len(rows),
        written=len(todo) - len(faults),
        already_there=len(rows) - len(todo),
        windows=total,
        repeated_frames=repeated_frames,
        faults=faults,
    )


def _fingerprint(row: Clip) -> list[Any]:
    """What a row's embeddings depend on beside the model: the file as it is, and the row's window."""
    window = [os.path.abspath(row.video), row.start_seconds, row.end_seconds]
    state = video_state(row.video)
    return window if state is None else [*window, *state]  # without one, reading it will say why


def _not_yet_there(folder: Path, rows: Sequence[Clip]) -> list[Clip]:
    """The rows that an index lacks.

    Raises:
        ConfigError: it holds a row under the same id from another file or window, or from a file that changed since.
    """
    done = {window["row"]: window["mark"] for part in _parts(folder) for window in _read_json(part)}
    for row in rows:
        if row.id in done and video_state(row.video) is not None and done[row.id] != _fingerprint(row):
            raise ConfigError(
                f"{folder}: {row.id} is there already, from {done[row.id][0]} as it was then; {row.video} is another "
                "file or window, or has changed since. Choose another --out"
            )
    return [row for row in rows if row.id not in done]


def _parts(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("[0-9]*.json"))


def _see(
    run: Run, rows: Sequence[Clip], device: torch.device, faults: list[Fault], stride: float | None, share: float
) -> Iterator[SeenWindows]:
    """Embeddings of the windows of each row that can be read whole; the others go to `faults`."""
    preprocessing: Any = run.model.preprocessing
    data = run.recipe.data
    return see_windows(
        rows,
        preprocessing,
        lambda video: run.towers.encode_video(run.model, video),
        faults,
        stride_seconds=stride,
        clip_share=share,
        device=device,
        at_once=WINDOWS_AT_ONCE,
        num_workers=data.num_workers,
        worker_start=data.worker_start,
    )


def _open_index(folder: Path, run: Run, stride: float | None, preprocessing: Preprocessing) -> None:
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: a file; an index is a folder, choose another --out")
    contents = json.loads((run.checkpoint / "contents.json").read_text(encoding="utf-8"))
    wanted = {
        "run": str(run.folder.resolve()),
        "checkpoint": run.checkpoint.name,
        "weights_checksum": contents[weights_file(run.checkpoint, averaged=True).name][1],
        "stride_seconds": stride,
        "clip_seconds": preprocessing.clip_length if preprocessing.frame_rate is None else preprocessing.clip_seconds,
    }
    path = folder / "index.json"
    if path.exists():
        found = _read_json(path)
        changed = [
            f"{key}: {found.get(key)} there, {value} now" for key, value in wanted.items() if found.get(key) != value
        ]
        if changed:
            raise ConfigError(
                f"{folder} holds an index made otherwise ({'; '.join(changed)}); choose another --out or delete it"
            )
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    _write_json(path, wanted)


def _write_part(folder: Path, number: int, windows: list[dict[str, Any]], embeddings: Tensor) -> None:
    """The embeddings first, the list that makes them count last."""
    temporary = folder / f".part_{number:06d}"
    save_file({"embeddings": embeddings.contiguous()}, temporary)
    os.replace(temporary, folder / f"{number:06d}.safetensors")
    _write_json(folder / f"{number:06d}.json", windows)


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".part_{path.name}")
    temporary.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    os.replace(temporary, path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: damaged ({error}); delete the index and run `twinreel embed` again") from error


def _write_faults(folder: Path, faults: Sequence[Fault]) -> None:
    text = "".join(json.dumps(asdict(fault), ensure_ascii=False) + "\n" for fault in faults)
    (folder / "faults.jsonl").write_text(text, encoding="utf-8")


def search_collection(
    folder: str | Path,
    sentence: str,
    *,
    top: int = 5,
    run: Run | None = None,
    overrides: Sequence[str] = (),
    report: Callable[[int, int], None] | None = None,
) -> list[Found]:
    """The windows of an index that fit a sentence best; of overlapping ones in a video only the best.

    With `rerank.run` the first `rerank.k` of these are looked at again by that run and put in its order; the others
    follow in the order of the index's own run.

    Args:
        folder: what `embed_collection` wrote.
        sentence: what to look for.
        top: how many answers.
        run: the loaded run, if it is at hand; else it is loaded from where the index says.
        overrides: of the run's recipe, `rerank.run=FOLDER` and the like; they go with `run=None`.
        report: called with (windows looked at again, all of those).

    Raises:
        CheckpointError: no index there, or its run is gone or has changed.
        ConfigError: no word of the sentence is known to the model, or an override does nothing here.
        DataError: the index is empty, or a video that shall be looked at again is gone or has changed.
    """
    folder = Path(folder)
    if not (folder / "index.json").is_file():
        raise CheckpointError(f"{folder}: not an index (no index.json); make one with `twinreel embed RUN --input ...`")
    index = _read_json(folder / "index.json")
    _refuse_idle(overrides, run)
    loaded = run or load_run(index["run"], index["checkpoint"], overrides)
    contents = _read_json(loaded.checkpoint / "contents.json")
    if contents[weights_file(loaded.checkpoint, averaged=True).name][1] != index["weights_checksum"]:
        raise CheckpointError(f"{folder}: its run {index['run']} has changed since; run `twinreel embed` again")
    second = load_second_stage(loaded.recipe.rerank, loaded)
    parts = _parts(folder)
    if not parts:
        raise DataError(f"{folder}: the index is empty; see its faults.jsonl")
    windows = [window for part in parts for window in _read_json(part)]
    videos = torch.cat([load_file(part.with_suffix(".safetensors"))["embeddings"] for part in parts])
    scores = loaded.towers.similarity(videos, embed_known(loaded, [sentence]))[:, 0]
    order = torch.argsort(scores, descending=True, stable=True).tolist()
    order = _apart(windows, order, top if second is None else max(top, second.k))
    again: dict[int, float] = {}
    if second is not None:
        again = _look_again(loaded, second, {i: windows[i] for i in order[: second.k]}, sentence, report)
        order = sorted(again, key=lambda i: -again[i]) + order[second.k :]
    return [_found(windows[i], float(scores[i]), again.get(i)) for i in order[:top]]


def _refuse_idle(overrides: Sequence[str], run: Run | None) -> None:
    idle = [text for text in overrides if run is not None or not text.startswith(SEARCHED_BY)]
    if idle:
        raise ConfigError(
            f"{', '.join(idle)}: does nothing in a search; what can be changed: {', '.join(SEARCHED_BY)}"
            + (" of a run that is not loaded yet" if run is not None else "")
        )


def _look_again(
    run: Run,
    second: SecondStage,
    windows: dict[int, dict[str, Any]],
    sentence: str,
    report: Callable[[int, int], None] | None,
) -> dict[int, float]:
    """Scores of windows by their places: the matching model looks at these very seconds.

    Raises:
        DataError: a video is gone or is not as it was when it was embedded, or a score is not finite.
    """
    rows = []
    for place, window in windows.items():
        path, _, _, *state = window["mark"]
        now = video_state(path)
        if now is None or list(now) != state:
            what = "is gone" if now is None else "has changed"
            raise DataError(f"{path}: {what} since it was embedded, and cannot be looked at again; embed it anew")
        start, end = window["start_seconds"], window["end_seconds"]
        rows.append(Clip(id=f"{window['row']}#{place}", video=path, start_seconds=start, end_seconds=end))
    data = run.recipe.data
    found = second.score(
        rows, [sentence], device=pick_device(run.recipe.train.device), num_workers=data.num_workers,
        worker_start=data.worker_start, report=report,
    )  # fmt: skip
    values = torch.cat(found.scores).tolist()
    for row, value in zip(rows, values, strict=True):
        if not math.isfinite(value):
            raise DataError(f"{row.video}: {second.name} scores {value}; look at its weights")
    return dict(zip(windows, values, strict=True))


def _found(window: dict[str, Any], score: float, rerank_score: float | None) -> Found:
    kept = {key: value for key, value in window.items() if key not in ("row", "mark")}
    return Found(id=window["row"], score=score, rerank_score=rerank_score, **kept)


def _apart(windows: Sequence[Mapping[str, Any]], order: Sequence[int], most: int) -> list[int]:
    """The first of `order` that do not overlap with a better one, so many at most."""
    kept: list[int] = []
    taken: dict[str, list[tuple[float, float]]] = {}
    for i in order:
        start, end = windows[i]["start_seconds"], windows[i]["end_seconds"]
        others = taken.setdefault(windows[i]["video"], [])
        if not any(start < later and earlier < end for earlier, later in others):
            others.append((start, end))
            kept.append(i)
        if len(kept) == most:
            break
    return kept


def embed_known(run: Run, sentences: Sequence[str]) -> Tensor:
    """Embeddings (N, D) of sentences by the towers of a run.

    Raises:
        ConfigError: no word of one is known to the model.
    """
    vocabulary = getattr(run.model, "vocabulary", None)
    for sentence in sentences:
        if not sentence.strip() or (vocabulary is not None and not vocabulary.encode(sentence)):
            raise ConfigError(
                f"{sentence!r}: no word of it is in the model's vocabulary; use words of its training captions"
            )
    with torch.no_grad():
        return embed_sentences(run.model, run.towers, list(sentences), run.recipe.eval.max_words)

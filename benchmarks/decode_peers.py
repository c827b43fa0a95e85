"""Ways to read clips from videos, each as its users would do it with one thread, and the floor: decoding alone.

Every method takes a `Clip` and a size and gives uint8 RGB frames: (T, size, size, 3), the center square scaled, or,
with size None, (T, H, W, 3) or (T, 3, H, W) as the method has them, ready to go to a device.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.codec.context import ThreadType
from torch import Tensor
from torch.nn import functional

from twinreel.data.decode import VideoReader
from twinreel.data.transforms import center_square
from twinreel.models.preprocessing import Preprocessing

__all__ = ["PEERS", "Clip", "Method", "decode_only", "missing_peers", "twinreel"]

SEEK_GAP_FRAMES = 64  # OpenCV users seek over a gap of that many frames, and grab through a shorter one


@dataclass(frozen=True)
class Clip:
    """Frames wanted of a file: runs of numbers that rise by `step`; `rate` in Hz is constant."""

    path: Path
    rate: int
    runs: tuple[tuple[int, ...], ...]
    step: int

    @property
    def indices(self) -> list[int]:
        """All numbers, ascending."""
        return [index for run in self.runs for index in run]


Method = Callable[[Clip, int | None], Tensor]


def twinreel(clip: Clip, size: int | None) -> Tensor:
    times = [(index + 0.5) / clip.rate for index in clip.indices]
    with VideoReader(clip.path) as reader:
        if size is None:
            return reader.frames_at(times, hold_last=True).data
        preprocessing = Preprocessing(num_frames=len(times), frame_rate=clip.rate, crop_size=size)
        cut = center_square(reader.info.height, reader.info.width, preprocessing)
        return reader.frames_at(times, hold_last=True, cut=cut).data


def torchcodec(clip: Clip, size: int | None) -> Tensor:
    """Approximate seek mode; scaled by torch."""
    from torchcodec.decoders import VideoDecoder

    decoder = VideoDecoder(clip.path, seek_mode="approximate", num_ffmpeg_threads=1, dimension_order="NHWC")
    frames = decoder.get_frames_at(clip.indices).data
    return frames if size is None else _scaled_square(frames, size)


def torchcodec_scaling(clip: Clip, size: int | None) -> Tensor:
    """Approximate seek mode; cut and scaled within the decoder. Its users know the size of their videos."""
    from torchcodec.decoders import VideoDecoder
    from torchcodec.transforms import CenterCrop, Resize

    assert size is not None
    side = _short_side(clip.path)
    decoder = VideoDecoder(
        clip.path,
        seek_mode="approximate",
        num_ffmpeg_threads=1,
        dimension_order="NHWC",
        transforms=[CenterCrop((side, side)), Resize((size, size))],
    )
    return decoder.get_frames_at(clip.indices).data


def opencv(clip: Clip, size: int | None) -> Tensor:
    """One seek per run of frames, `grab` in between; unscaled frames stay BGR: a device puts colors in order."""
    import cv2

    capture = cv2.VideoCapture(str(clip.path), cv2.CAP_FFMPEG, [cv2.CAP_PROP_N_THREADS, 1])
    images: list[Any] = []
    at = 0
    for index in clip.indices:
        if index - at > SEEK_GAP_FRAMES:
            capture.set(cv2.CAP_PROP_POS_FRAMES, index)
            at = index
        while at <= index:
            capture.grab()
            at += 1
        image = capture.retrieve()[1]
        if size is not None:
            height, width = image.shape[:2]
            side = min(height, width)
            top, left = (height - side) // 2, (width - side) // 2
            how = cv2.INTER_AREA if side >= 2 * size else cv2.INTER_LINEAR
            image = cv2.resize(image[top : top + side, left : left + side], (size, size), interpolation=how)
            image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
        images.append(image)
    capture.release()
    return torch.from_numpy(np.stack(images))


def decord2(clip: Clip, size: int | None) -> Tensor:
    """Scaled within the decoder to the short side, then cut."""
    import decord

    width = height = -1
    if size is not None:
        full_height, full_width = _frame_size(clip.path)
        short = min(full_height, full_width)
        width, height = round(full_width * size / short), round(full_height * size / short)
    reader = decord.VideoReader(str(clip.path), ctx=decord.cpu(0), num_threads=1, width=width, height=height)
    frames = torch.from_numpy(reader.get_batch(clip.indices).asnumpy())
    if size is None:
        return frames
    top, left = (height - size) // 2, (width - size) // 2
    return frames[:, top : top + size, left : left + size].contiguous()


def naive_pyav(clip: Clip, size: int | None) -> Tensor:
    """One seek to before the first frame, decode all frames up to the last one, convert those that are wanted."""
    wanted = set(clip.indices)
    with av.open(str(clip.path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_type, stream.codec_context.thread_count = ThreadType.NONE, 1
        start = stream.start_time or 0
        per_frame = 1 / (clip.rate * stream.time_base)
        container.seek(int(start + min(wanted) * per_frame), stream=stream)
        images = []
        for frame in container.decode(stream):
            index = round((frame.pts - start) / per_frame)
            if index in wanted:
                images.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
            if index >= clip.indices[-1]:
                break
    frames = torch.stack(images)
    return frames if size is None else _scaled_square(frames, size)


def ffmpeg_process(clip: Clip, size: int | None) -> Tensor:
    """A process for each run of frames, its pictures through a pipe, as the MIL-NCE loader reads.

    That loader lets the fps filter round to the nearest; here it is kept from taking frames that come later.
    """
    height, width = (size, size) if size is not None else _frame_size(clip.path)
    side = _short_side(clip.path)
    filters = [f"setpts=PTS-STARTPTS-0.5/{clip.rate}/TB", f"fps={clip.rate}/{clip.step}:round=up"]
    filters += [] if size is None else [f"crop={side}:{side}", f"scale={size}:{size}"]
    parts = []
    for run in clip.runs:
        start, seconds = max(0.0, (run[0] - 0.25) / clip.rate), len(run) * clip.step / clip.rate
        command = ["ffmpeg", "-nostdin", "-v", "error", "-threads", "1", "-ss", f"{start:.6f}", "-t", f"{seconds:.6f}"]
        command += ["-i", str(clip.path), "-an", "-filter_threads", "1", "-vf", ",".join(filters)]
        command += ["-frames:v", str(len(run)), "-f", "rawvideo", "-pix_fmt", "rgb24", "-threads", "1", "pipe:1"]
        raw = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
        parts.append(np.frombuffer(raw, np.uint8).reshape(-1, height, width, 3))
    return torch.from_numpy(np.concatenate(parts))


def decode_only(clip: Clip, *, discard: bool) -> Callable[[], int]:
    """The floor, ready to go: only seeking and decoding is left to do; the file is open and its key frames known.

    What is done decodes from the key frame before each wanted frame up to that frame, nothing twice and no packet
    that comes later in the file. It returns the number of wanted frames that came out.

    Args:
        clip: what is wanted.
        discard: leave out the frames that are not wanted and that no other refers to.
    """
    container = av.open(str(clip.path))
    stream = container.streams.video[0]
    context: Any = stream.codec_context
    context.thread_type, context.thread_count = ThreadType.NONE, 1
    all_pts, keys, order = _packets(clip.path)
    wanted = [all_pts[index] for index in clip.indices]
    spans: dict[int, int] = {}  # key frame -> how many packets from it on are needed
    for pts in wanted:
        key = keys[bisect_right(keys, pts) - 1]
        spans[key] = max(spans.get(key, 0), order[pts] - order[key] + 1)

    def run() -> int:
        found, kept = 0, set(wanted)
        at = -1  # the packet that comes next
        depth = context.reorder_depth
        for key, count in spans.items():
            if at != order[key]:
                if at >= 0:
                    found += sum(frame.pts in kept for frame in context.decode(None))
                container.seek(key, stream=stream)
                context.reorder_depth = depth
                packets = container.demux(stream)
            for _ in range(count):
                packet = next(packets)
                if discard:
                    context.skip_frame = "DEFAULT" if packet.pts in kept else "NONREF"
                found += sum(frame.pts in kept for frame in packet.decode())
            at = order[key] + count
        return found + sum(frame.pts in kept for frame in context.decode(None))

    return run


@cache
def _packets(path: Path) -> tuple[list[int], list[int], dict[int, int]]:
    """Times of all packets in display order, those of key frames, and the place of each in the file."""
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(container.streams.video[0]) if packet.pts is not None]
    order = {packet.pts: place for place, packet in enumerate(packets) if packet.pts is not None}
    return sorted(order), sorted(packet.pts for packet in packets if packet.is_keyframe), order


@cache
def _frame_size(path: Path) -> tuple[int, int]:
    with av.open(str(path)) as container:
        return container.streams.video[0].height, container.streams.video[0].width


def _short_side(path: Path) -> int:
    return min(_frame_size(path))


def _scaled_square(frames: Tensor, size: int) -> Tensor:
    """The center square of (T, H, W, 3) uint8, scaled by torch: (T, size, size, 3)."""
    height, width = frames.shape[1:3]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    part = frames[:, top : top + side, left : left + side].permute(0, 3, 1, 2)
    scaled = functional.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
    return scaled.permute(0, 2, 3, 1).contiguous()


PEERS: dict[str, Method] = {
    "torchcodec": torchcodec,
    "torchcodec scaling": torchcodec_scaling,
    "OpenCV": opencv,
    "decord2": decord2,
    "naive PyAV": naive_pyav,
    "ffmpeg process": ffmpeg_process,
}
_MODULES = {"torchcodec": "torchcodec", "torchcodec scaling": "torchcodec", "OpenCV": "cv2", "decord2": "decord"}


def missing_peers() -> list[str]:
    """The names in `PEERS` that can't be used here."""
    missing = [name for name, module in _MODULES.items() if importlib.util.find_spec(module) is None]
    return missing + ([] if shutil.which("ffmpeg") else ["ffmpeg process"])

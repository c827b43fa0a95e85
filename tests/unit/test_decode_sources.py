"""Sources other than paths, damaged files read in part, and times of frames told without decoding."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
import torch

from twinreel.data.decode import VideoReader, probe, read_frames
from twinreel.data.decode.filetype import missing_bytes
from twinreel.data.decode.frame_stream import FrameStream
from twinreel.errors import ConfigError, DataError
from videos import frame_numbers, make_audio, textured_image

MakeVideo = Callable[..., Path]


def packets_of(path: Path) -> list[tuple[int, int]]:
    """Position and size of the packets."""
    with av.open(str(path)) as container:
        return [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.size]


def spoil(path: Path, *numbers: int) -> None:
    """Overwrite the payload of some packets."""
    places = packets_of(path)
    with path.open("r+b") as file:
        for number in numbers:
            position, size = places[number]
            file.seek(position + 4)
            file.write(bytes([0xFF] * (size - 4)))


# ---- bytes and file objects


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.ts", "a.flv"])
def test_bytes_and_file_objects_give_what_the_path_gives(make_video: MakeVideo, name: str) -> None:
    codec = "mpeg4" if name == "a.avi" else "libx264"
    path = make_video(name, num_frames=50, gop=10, codec=codec, frame_rate=25, audio_seconds=1.0)
    content = path.read_bytes()
    good = read_frames(path)
    with path.open("rb") as file:
        for source in (content, bytearray(content), memoryview(content), io.BytesIO(content), file):
            with VideoReader(source) as reader:
                assert reader.info.duration_seconds == pytest.approx(probe(path).duration_seconds)
                assert torch.equal(reader.frames_between().data, good.data)
                picked = [int((good.pts_seconds <= time).sum()) - 1 for time in (1.9, 0.1, 1.0)]
                assert torch.equal(reader.frames_at([1.9, 0.1, 1.0]).data, good.data[picked])
                assert reader.frame_times() == good.pts_seconds.tolist()
        assert not file.closed


def test_two_readers_share_a_file_object(make_video: MakeVideo) -> None:
    path = make_video("a.mkv", num_frames=50, gop=10)
    with path.open("rb") as file, VideoReader(file) as one, VideoReader(file) as two:
        assert frame_numbers(one.frames_at([0.0, 1.0]).data) == [0, 10]
        assert frame_numbers(two.frames_at([4.0]).data) == [40]
        assert frame_numbers(one.frames_at([1.1, 4.9]).data) == [11, 49]


def test_bytes_with_a_name(make_video: MakeVideo) -> None:
    class Value:
        def __init__(self, data: bytes) -> None:
            self.name, self.data = "store.lmdb: a", memoryview(data)

    assert frame_numbers(read_frames(Value(make_video(num_frames=3).read_bytes())).data) == [0, 1, 2]
    with pytest.raises(DataError, match=r"^store\.lmdb: a: can't be read as a video: an empty file"):
        probe(Value(b""))


def test_errors_name_the_source(make_video: MakeVideo, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^<bytes>: .* a text file"):
        probe(b"this is not a video\n" * 9)
    with pytest.raises(DataError, match=r"^<BytesIO>: .* an empty file"):
        probe(io.BytesIO())
    path = tmp_path / "named.mp4"
    path.write_text("<html>404</html>")
    with path.open("rb") as file, pytest.raises(DataError, match=r"named\.mp4: .* an HTML page"):
        probe(file)
    with pytest.raises(DataError, match=r"^<bytes>: no video stream \(the file holds: audio\)"):
        probe(make_audio(tmp_path / "a.m4a").read_bytes())
    whole = make_video(container_options={"movflags": "faststart"}).read_bytes()
    assert "cut short: 100 bytes" in probe(whole[:-100]).warnings[-1]
    with pytest.raises(DataError, match=r"<bytes>: .*without its index"):
        content = make_video("b.mp4").read_bytes()
        probe(content[: len(content) * 2 // 3])


def test_sources_that_can_not_serve(tmp_path: Path, make_video: MakeVideo) -> None:
    path = make_video(num_frames=2)
    with path.open(encoding="latin-1") as text, pytest.raises(ConfigError, match="gives text, not bytes"):
        probe(text)
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe, os.fdopen(writing, "wb"):
        with pytest.raises(ConfigError, match="can't seek; give a path, bytes, or a seekable file object"):
            probe(pipe)
    file = path.open("rb")
    file.close()
    with pytest.raises(ConfigError, match="can't be read"):
        probe(file)
    with (tmp_path / "new").open("wb") as file, pytest.raises(ConfigError, match="can't be read"):
        probe(file)
    for source in (None, 3, [path]):
        with pytest.raises(ConfigError, match="a video can't be read from"):
            probe(source)


def test_a_file_object_that_fails_says_so(make_video: MakeVideo) -> None:
    class Failing(io.BytesIO):
        reads = 0

        def read(self, size: int | None = -1) -> bytes:
            self.reads += 1
            if self.reads > 3:
                raise OSError("the disk is gone")
            return super().read(size)

    with pytest.raises(DataError, match=r"<Failing>: .*the disk is gone"):
        probe(Failing(make_video("a.mkv", num_frames=200).read_bytes()))


def test_a_list_of_other_files_opens_none_of_them(make_video: MakeVideo, tmp_path: Path) -> None:
    other = make_video("other.ts", num_frames=10)
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:5\n#EXTINF:1.0,\nfile:{other}\n#EXT-X-ENDLIST\n"
    (tmp_path / "list.m3u8").write_text(playlist)
    for source in (playlist.encode(), tmp_path / "list.m3u8", f"ffconcat version 1.0\nfile '{other}'\n".encode()):
        with pytest.raises(DataError, match="a text file, not a video"):
            probe(source)


# ---- damaged files in part


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.avi"])
def test_what_is_readable_is_given_with_a_warning(make_video: MakeVideo, name: str) -> None:
    codec = "mpeg4" if name == "a.avi" else "libx264"
    path = make_video(name, num_frames=50, gop=10, codec=codec, frame_rate=25)
    good = read_frames(path)
    spoil(path, 24, 43)
    frames = read_frames(path, allow_partial=True)
    kept = [*range(24), *range(30, 43)]
    assert torch.equal(frames.data, good.data[kept]) and torch.equal(frames.pts_seconds, good.pts_seconds[kept])
    assert frames.num_missing == 13
    words = "lost from 0.960 s to 1.200 s, from 1.720 s on; about 13 of the frames asked for are missing"
    assert words in frames.warnings[-1]
    with pytest.raises(DataError, match=r"damaged .*readable up to 0\.960 s and again from 1\.200 s to 1\.720 s"):
        read_frames(path)


def test_all_readable_stretches_are_named(make_video: MakeVideo) -> None:
    path = make_video(num_frames=60, gop=10)
    spoil(path, 14, 33)
    words = r"readable up to 1\.400 s and again from 2\.000 s to 3\.300 s, from 4\.000 s \(allow_partial=True"
    with pytest.raises(DataError, match=words):
        read_frames(path)
    with pytest.raises(DataError, match=r"readable up to 3\.300 s and again from 4\.000 s"):
        read_frames(path, start_seconds=2.5, end_seconds=4.5)


def test_times_at_which_frames_are_lost_are_left_out(make_video: MakeVideo) -> None:
    path = make_video(num_frames=50, gop=10)
    good = read_frames(path).data
    spoil(path, 24)
    with VideoReader(path) as reader:
        frames = reader.frames_at([3.1, 2.45, 0.3, 2.9, 4.9], allow_partial=True)
        assert torch.equal(frames.data, good[[31, 3, 49]])
        assert frames.pts_seconds.tolist() == pytest.approx([3.1, 0.3, 4.9]) and frames.num_missing == 2
        words = "lost from 2.400 s to 3.000 s; 2 of the 5 frames asked for are missing"
        assert words in frames.warnings[-1]
        with pytest.raises(
            DataError, match=r"2 times: the video is damaged .*readable up to 2\.400 s and again from 3"
        ):
            reader.frames_at([2.4, 2.8], allow_partial=True)
        with pytest.raises(DataError, match="lies outside the video"):  # not damage
            reader.frames_at([1.0, 5.1], allow_partial=True)
        held = reader.frames_at([2.45, 4.9, 5.1], allow_partial=True, hold_last=True)
        assert held.num_held == 1 and held.num_missing == 1 and len(held.data) == 2
        sound = reader.frames_at([0.1, 3.3], allow_partial=True)
        assert sound.num_missing == 0 and sound.warnings == ()
    assert read_frames(path, at=[2.5, 1.0], allow_partial=True).num_missing == 1


@pytest.mark.parametrize(
    ("start", "end", "kept"),
    [
        (2.0, 2.4, range(20, 24)),  # ends where the damage begins
        (2.0, 2.7, range(20, 24)),
        (2.5, 3.2, range(30, 32)),  # begins within the damage
        (3.0, 3.2, range(30, 32)),
        (2.32, 2.38, (23,)),  # no frame appears: the one on show
        (2.35, 2.8, (23,)),  # the rest is lost
    ],
)
def test_windows_near_damage(make_video: MakeVideo, start: float, end: float, kept: Any) -> None:
    path = make_video(num_frames=50, gop=10)
    good = read_frames(path).data
    spoil(path, 24)
    frames = read_frames(path, start_seconds=start, end_seconds=end, allow_partial=True)
    assert torch.equal(frames.data, good[list(kept)])
    touches = end > 2.4 and start < 3.0
    assert any("damaged" in words for words in frames.warnings) == touches
    if touches:
        with pytest.raises(DataError, match="damaged"):
            read_frames(path, start_seconds=start, end_seconds=end)
    else:
        read_frames(path, start_seconds=start, end_seconds=end)


def test_a_window_of_which_nothing_is_readable_is_an_error(make_video: MakeVideo) -> None:
    path = make_video(num_frames=50, gop=10)
    spoil(path, 24)
    with pytest.raises(DataError, match=r"the window \[2\.5, 2\.9\) s: the video is damaged"):
        read_frames(path, start_seconds=2.5, end_seconds=2.9, allow_partial=True)


def test_a_lost_beginning_is_named(make_video: MakeVideo) -> None:
    path = make_video(num_frames=30, gop=10)
    good = read_frames(path).data
    spoil(path, 0)
    frames = read_frames(path, allow_partial=True)
    assert torch.equal(frames.data, good[10:]) and frames.pts_seconds[0] == pytest.approx(1.0)
    assert "lost from 0.000 s to 1.000 s; about 10 of" in frames.warnings[-1]


def test_a_file_cut_short_is_given_up_to_the_cut(make_video: MakeVideo) -> None:
    path = make_video(num_frames=50, gop=10, container_options={"movflags": "faststart"})
    good = read_frames(path).data
    path.write_bytes(path.read_bytes()[: packets_of(path)[33][0] + 5])
    assert missing_bytes(path) > 0
    frames = read_frames(path, allow_partial=True)
    assert torch.equal(frames.data, good[:33])
    assert "lost from 3.300 s on; about 17 of the frames asked for are missing" in frames.warnings[-1]
    assert frames.num_missing == 17


def picture_parameters(path: Path) -> bytes:
    """The picture parameter set of an H.264 MP4."""
    content = path.read_bytes()
    at = content.index(b"avcC") + 10  # behind the number of sequence parameter sets
    at += 2 + int.from_bytes(content[at : at + 2], "big") + 1  # the only one, and the number of picture parameter sets
    return content[at + 2 : at + 2 + int.from_bytes(content[at : at + 2], "big")]


def test_damage_does_not_spoil_what_follows(make_video: MakeVideo) -> None:
    """Damaged bytes may be taken for new parameters, which a decoder keeps until it is replaced."""
    options: dict[str, Any] = {"num_frames": 50, "gop": 10, "picture": textured_image, "size": (128, 96)}
    path = make_video(**options)
    other = make_video("b.mp4", codec_options={"x264-params": "chroma-qp-offset=8"}, **options)
    good = read_frames(path)
    wrong = picture_parameters(other)
    assert len(wrong) < 100 and wrong != picture_parameters(path)
    position, size = packets_of(path)[24]
    unit = len(wrong).to_bytes(4, "big") + wrong
    junk = (size - len(unit) - 4).to_bytes(4, "big") + bytes([0x61] + [0xFF] * (size - len(unit) - 5))
    content = path.read_bytes()
    path.write_bytes(content[:position] + unit + junk + content[position + size :])
    frames = read_frames(path, allow_partial=True)
    assert torch.equal(frames.data, good.data[[*range(24), *range(30, 50)]])
    with VideoReader(path) as reader:
        reader.frames_between(allow_partial=True)
        assert torch.equal(reader.frames_at([3.5]).data, good.data[[35]])


@pytest.mark.parametrize("codec", ["libvpx-vp9", "ffv1"])
def test_matroska_checksums_are_checked(make_video: MakeVideo, codec: str) -> None:
    """The decoders of these codecs do not notice a wrong bit; the container does."""
    path = make_video("a.mkv", num_frames=50, gop=10, codec=codec, picture=textured_image, size=(128, 96))
    good = read_frames(path)
    position, size = packets_of(path)[25]
    content = bytearray(path.read_bytes())
    content[position + size // 2] ^= 4
    for source in (path, bytes(content)):
        path.write_bytes(content)
        with pytest.raises(DataError, match="its checksum is wrong"):
            read_frames(source)
        with pytest.raises(DataError, match="its checksum is wrong"):
            read_frames(source, at=[2.5])
        frames = read_frames(source, allow_partial=True)
        times = good.pts_seconds.tolist()
        kept = [times.index(time) for time in frames.pts_seconds.tolist()]
        assert 0 < len(kept) < 50 and 25 not in kept and torch.equal(frames.data, good.data[kept])


def test_hevc_checksums_are_checked(make_video: MakeVideo) -> None:
    options = {"x265-params": "log-level=none:keyint=10:min-keyint=10:scenecut=0:pools=1:open-gop=0:hash=1"}
    path = make_video(num_frames=50, codec="libx265", codec_options=options, picture=textured_image, size=(128, 96))
    assert len(read_frames(path).data) == 50
    position, size = packets_of(path)[25]
    content = bytearray(path.read_bytes())
    content[position + size // 2] ^= 4
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        read_frames(path)


# ---- times of frames without decoding

TIMED: dict[str, tuple[str, dict[str, Any], bool]] = {  # whether the packets tell
    "mp4": ("a.mp4", {}, True),
    "B-frames": ("a.mp4", {"b_frames": 3}, True),
    "open GOPs": ("a.mp4", {"b_frames": 3, "codec_options": {"x264opts": "open-gop"}}, True),
    "variable rate": ("a.mkv", {"pts_seconds": [i * i / 400 for i in range(40)], "b_frames": 2}, True),
    "fragments": ("a.mp4", {"container_options": {"movflags": "frag_keyframe+empty_moov"}}, True),
    "ts": ("a.ts", {"b_frames": 2, "frame_rate": 25}, True),
    "mpeg2 ts": ("a.ts", {"codec": "mpeg2video", "b_frames": 2, "frame_rate": 25}, True),
    "program stream": ("a.mpg", {"codec": "mpeg2video", "b_frames": 2, "frame_rate": 25}, False),
    "avi": ("a.avi", {"codec": "mpeg4"}, True),
    "avi, B-frames": ("a.avi", {"codec": "mpeg4", "b_frames": 2}, False),
    "vp8": ("a.webm", {"codec": "libvpx"}, True),
    "vp9": ("a.webm", {"codec": "libvpx-vp9"}, True),
    "gif": ("a.gif", {"codec": "gif", "pix_fmt": "rgb8"}, True),
    "raw": ("a.h264", {"b_frames": 2}, False),
    "hevc": ("a.mp4", {"codec": "libx265"}, True),
}


@pytest.mark.parametrize("kind", list(TIMED))
def test_frame_times_are_those_of_the_frames(make_video: MakeVideo, monkeypatch: Any, kind: str) -> None:
    name, options, told = TIMED[kind]
    if options.get("codec", "libx264") not in av.codecs_available:
        pytest.skip(f"this PyAV has no encoder {options['codec']}")
    path = make_video(name, **{"num_frames": 40, **options})
    times = read_frames(path).pts_seconds.tolist()
    assert len(times) == 40
    with VideoReader(path) as reader:
        decoded: list[int] = []
        plain = FrameStream.next
        monkeypatch.setattr(FrameStream, "next", lambda self: decoded.append(1) or plain(self))
        assert reader.frame_times() == times == reader.frame_times()
        assert bool(decoded) != told
        assert frame_numbers(reader.frames_at([times[7]]).data) == [7]  # the reader stands where it stood


def rewrite(source: Path, target: Path, change: Callable[[int, bytes], list[bytes]]) -> None:
    """Copy the packets of a video; `change` may replace each by others of its time."""
    with av.open(str(source)) as whole, av.open(str(target), "w") as copy:
        stream = copy.add_stream_from_template(whole.streams.video[0])
        for number, packet in enumerate(whole.demux(video=0)):
            for content in change(number, bytes(packet)) if packet.size else ():
                changed = av.Packet(content)
                changed.pts, changed.dts, changed.time_base = packet.pts, packet.dts, packet.time_base
                changed.is_keyframe, changed.stream = packet.is_keyframe, stream
                copy.mux(changed)


def test_hidden_vp8_frames_have_no_time(make_video: MakeVideo, tmp_path: Path) -> None:
    path = tmp_path / "hidden.webm"
    source = make_video("a.webm", num_frames=40, codec="libvpx")
    hide = (7, 20)  # coded, never shown: what encoders do with alternate references
    rewrite(source, path, lambda number, data: [bytes([data[0] & ~0x10]) + data[1:] if number in hide else data])
    frames = read_frames(path)
    assert len(packets_of(path)) == 40 and len(frames.data) == 38
    with VideoReader(path) as reader:
        assert reader.frame_times() == frames.pts_seconds.tolist()
        assert reader.frames_at([0.75]).pts_seconds.tolist() == pytest.approx([0.6])
    assert probe(path).num_frames == 38


def test_hidden_vp9_frames_have_no_time(make_video: MakeVideo, tmp_path: Path) -> None:
    path = tmp_path / "superframes.webm"
    source = make_video("a.webm", num_frames=40, codec="libvpx-vp9")

    def superframe(_: int, data: bytes) -> list[bytes]:
        """The packet as a superframe of one frame (VP9 bitstream, annex B)."""
        return [data + b"\xd8" + len(data).to_bytes(4, "little") + b"\xd8"]

    rewrite(source, path, superframe)
    assert torch.equal(read_frames(path).data, read_frames(source).data)
    with VideoReader(path) as reader:
        assert len(reader.frame_times()) == 40


def test_frame_times_leave_out_what_an_edit_list_leaves_out(make_video: MakeVideo, tmp_path: Path) -> None:
    source = make_video(num_frames=60, gop=20, b_frames=2)
    path = tmp_path / "cut.mp4"
    with av.open(str(source)) as whole, av.open(str(path), "w") as cut:
        stream = cut.add_stream_from_template(whole.streams.video[0])
        for packet in whole.demux(video=0):
            if packet.size:
                packet.pts -= packet.stream.time_base.denominator // 2  # half a second before 0: hidden by an edit list
                packet.dts -= packet.stream.time_base.denominator // 2
                packet.stream = stream
                cut.mux(packet)
    times = read_frames(path).pts_seconds.tolist()
    with VideoReader(path) as reader:
        assert reader.frame_times() == times and times[0] == 0


def test_probe_compares_the_header_with_the_packets(make_video: MakeVideo) -> None:
    info = probe(make_video(num_frames=30, frame_rate=Fraction(30000, 1001)))
    assert info.num_frames == 30 and info.warnings == ()
    info = probe(make_video("a.mkv", num_frames=20, pts_seconds=[i / 4 for i in range(20)], frame_rate=25))
    assert info.num_frames == 20 and info.frame_rate == pytest.approx(4.0)
    assert any("gives no number of frames: 20 by the packets" in words for words in info.warnings)
    assert any("the header says 25 Hz, by the times of the packets it is 4 Hz" in words for words in info.warnings)
    path = make_video("a.avi", codec="mpeg4", num_frames=30)
    content = path.read_bytes()
    at = content.index(b"strh") + 8 + 32  # dwLength: the number of frames
    assert int.from_bytes(content[at : at + 4], "little") == 30
    path.write_bytes(content[:at] + (77).to_bytes(4, "little") + content[at + 4 :])
    info = probe(path)
    assert info.num_frames == 30 and "the header counts 77 frames, the packets 30" in info.warnings


def test_transparency_is_left_out_and_said(make_video: MakeVideo) -> None:
    info = probe(make_video("a.mkv", num_frames=2, codec="ffv1", pix_fmt="yuva420p"))
    assert any("transparency" in words for words in info.warnings)
    assert probe(make_video("b.mp4", num_frames=2)).warnings == ()


# ---- many opens, and processes


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def growth(path: str, warm_up: int, cycles: int) -> float:
    """By how many MB memory grows over `cycles` times open, read, close."""
    before = 0.0
    for index in range(warm_up + cycles):
        if index == warm_up:
            gc.collect()
            before = resident_megabytes()
        source = path if index % 2 else Path(path).read_bytes()
        with VideoReader(source) as reader:
            reader.frames_at([0.5, 3.3])
            reader.frames_between(1.0, 1.1)
    gc.collect()
    return resident_megabytes() - before


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the memory use from /proc")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_memory_stays_flat_over_two_thousand_opens(make_video: MakeVideo, num_workers: int) -> None:  # B019
    path = str(make_video(num_frames=150, frame_rate=30, gop=30, size=(128, 96)))
    if num_workers == 0:
        grown = [growth(path, 200, 2000)]
    else:
        with multiprocessing.get_context("fork").Pool(num_workers) as pool:
            grown = pool.starmap(growth, [(path, 200, 2000)] * num_workers)
    assert max(grown) < 50, grown


def three_frames(path: str) -> list[int]:
    """Numbers of three frames, the reader left before its end."""
    with VideoReader(path) as reader:
        return frame_numbers(reader.frames_at([0.1, 0.2, 0.3]).data)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_that_break_early_never_hang(make_video: MakeVideo, method: str) -> None:  # B021 B022
    paths = [str(make_video(f"{index}.mp4", num_frames=30, gop=10, first_number=index)) for index in range(20)]
    with VideoReader(paths[0]) as reader:  # opened, and used, before the workers start
        before = reader.frames_at([0.5])
        for _ in range(20 if method == "fork" else 3):
            with multiprocessing.get_context(method).Pool(2) as pool:
                for index, numbers in enumerate(pool.imap(three_frames, paths)):
                    assert numbers == [index + 1, index + 2, index + 3]
                    if index == 12:
                        break
        assert torch.equal(reader.frames_at([0.5]).data, before.data)
        assert frame_numbers(reader.frames_at([2.9, 0.0]).data) == [29, 0]


def test_the_commands_of_the_page_on_reading_run(make_video: MakeVideo, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reading.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(make_video("cut.mp4", num_frames=40).parent)
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["info"].num_frames == 40 and frame_numbers(names["frames"].data) == list(range(40))

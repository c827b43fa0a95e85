"""`prepare`: the same frames at the same times, in files that are quick to read; resumed = undisturbed."""

import errno
import hashlib
import json
import random
import shutil
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image

from twinreel.data.clip import Caption, Clip
from twinreel.data.manifest import read_manifest, write_manifest
from twinreel.data.preparation import encode, prepare, prepare_work
from twinreel.data.preparation.collection import Listed
from twinreel.data.preparation.encode import Encoding, output_size
from twinreel.data.preparation.pack import pack_collection
from twinreel.data.preparation.prepare import prepare_collection
from twinreel.data.preparation.prepare_gain import Pair, measure_gain
from twinreel.data.preparation.prepare_plan import plan_stretches
from twinreel.data.storage import open_video
from twinreel.errors import ConfigError, DataError, DependencyError
from videos import BLUE, YELLOW, frame_numbers, make_audio, numbered_image

SMALL = Encoding(short_side=48, gop=4)
IRREGULAR = [0.0, 0.1, 0.15, 0.4, 0.9, 1.7, 1.72, 1.80001, 3.0, 3.01]


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def prepared(source, out, **options):
    return prepare_collection(source, out, **{"encoding": SMALL, "num_workers": 0, "measured_files": 0, **options})


def packets(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return [(packet.is_keyframe, packet.pts != packet.dts) for packet in container.demux(stream) if packet.size]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((720, 1280), (256, 456)),  # 455.1 wide: the nearest even number
        ((1280, 720), (456, 256)),
        ((240, 320), (240, 320)),  # never larger
        ((97, 131), (96, 130)),
        ((256, 257), (256, 256)),
        ((1, 1), (2, 2)),
        ((300, 300), (256, 256)),
        ((258, 100_000), (256, 99224)),
    ],
)
def test_sizes_are_even_and_never_larger(size, expected):
    assert output_size(*size, 256) == expected


KINDS = {
    "plain.mp4": {"num_frames": 40},
    "ntsc.mp4": {"num_frames": 60, "frame_rate": Fraction(30_000, 1001), "b_frames": 2, "gop": 30},
    "irregular.mp4": {"num_frames": 10, "pts_seconds": IRREGULAR},
    "milliseconds.mkv": {"num_frames": 50, "frame_rate": 30, "time_base": Fraction(1, 1000)},
    "late.mkv": {"num_frames": 20, "pts_seconds": [1.5 + i / 10 for i in range(20)]},
    "turned.mp4": {"num_frames": 12, "rotation": 90, "size": (48, 64)},
    "odd.mp4": {"num_frames": 12, "size": (97, 131), "pix_fmt": "yuv444p"},
    "frames.avi": {"num_frames": 60, "frame_rate": 30, "codec": "mpeg4"},  # its ticks are frames
    "short.mp4": {"num_frames": 1},
    "sound.mp4": {"num_frames": 20, "audio_seconds": 2.5},
}


@pytest.mark.parametrize("name", KINDS)
def test_at_every_time_the_same_frame_is_on_show(make_video, tmp_path, name):  # B007, B015, B017
    source = make_video(f"in/{name}", **KINDS[name])
    result = prepared(tmp_path / "in", tmp_path / "out")
    assert (result.listed, result.written, result.failed) == (1, 1, 0)
    [record] = lines(tmp_path / "out" / "map.jsonl")
    with open_video(str(source)) as before, open_video(str(tmp_path / "out" / record["output"])) as after:
        duration = before.info.duration_seconds
        assert after.info.duration_seconds == pytest.approx(duration, abs=5e-4)
        own = before.frame_times()
        assert after.frame_times() == pytest.approx(own, abs=1e-6)
        draw = random.Random(name)
        # grid times meet the borders of frames, where a file is as lenient as its ticks are coarse
        times = [draw.uniform(0, 0.999 * duration) for _ in range(50)]
        times += [time for k in range(40) if (time := k / (before.info.frame_rate or 25)) < duration]
        wanted, given = before.frames_at(times), after.frames_at(times)
    assert frame_numbers(given.data) == frame_numbers(wanted.data)
    assert torch.allclose(given.pts_seconds, wanted.pts_seconds, atol=1e-6)
    assert min(given.data.shape[1:3]) == min(48, min(wanted.data.shape[1:3]) // 2 * 2)


def test_files_have_close_key_frames_and_no_sound_and_say_their_colors(make_video, tmp_path):
    make_video("in/a.mp4", num_frames=30, audio_seconds=3.0, gop=30)
    prepared(tmp_path / "in", tmp_path / "out")
    path = tmp_path / "out" / "videos" / "a.mp4"
    assert [key for key, _ in packets(path)] == [i % 4 == 0 for i in range(30)]  # in decoding order too: closed
    with av.open(str(path)) as container:
        assert [stream.type for stream in container.streams] == ["video"]
        context = container.streams.video[0].codec_context
        assert (context.name, context.pix_fmt, context.colorspace, context.color_range) == ("h264", "yuv420p", 6, 1)
    data = path.read_bytes()
    assert 0 < data.find(b"moov") < data.find(b"mdat")  # the index comes first


def test_b_frames_only_where_all_frames_last_equally_long(make_video, tmp_path):
    make_video("in/even.mp4", num_frames=30)
    make_video("in/uneven.mp4", num_frames=10, pts_seconds=IRREGULAR)
    prepared(tmp_path / "in", tmp_path / "out", encoding=Encoding(short_side=48, gop=16))
    videos = tmp_path / "out" / "videos"
    assert any(reordered for _, reordered in packets(videos / "even.mp4"))
    assert not any(reordered for _, reordered in packets(videos / "uneven.mp4"))


@pytest.mark.parametrize("source", [{}, {"pix_fmt": "yuvj420p"}, {"codec": "mpeg4", "b_frames": 2}])
def test_colors_stay(make_video, tmp_path, source):  # B030
    size = (192, 144)
    make_video("in/a.mp4", num_frames=4, size=size, **source)
    prepared(tmp_path / "in", tmp_path / "out", encoding=Encoding(short_side=72, crf=16))
    with open_video(str(tmp_path / "out" / "videos" / "a.mp4")) as reader:
        frames = reader.frames_between().data.numpy().astype(int)
    expected = numbered_image(2, (96, 72))
    for color in (BLUE, YELLOW):
        area = (expected == color).all(2)
        assert np.abs(np.median(frames[2][area], axis=0) - color).max() < 4


def test_a_fine_picture_keeps_its_detail(tmp_path):
    rng = np.random.default_rng(0)
    texture = torch.from_numpy(rng.normal(size=(1, 20, 30)))[None].expand(1, 3, 20, 30)
    smooth = torch.nn.functional.interpolate(texture, (160, 240), mode="bicubic")
    picture = (128 + 40 * smooth[0].permute(1, 2, 0)).clamp(0, 255).byte().numpy()
    folder = tmp_path / "in" / "a"
    folder.mkdir(parents=True)
    for i in range(3):
        Image.fromarray(picture).save(folder / f"img_{i}.png")
    (folder / "frames.json").write_text('{"frame_rate": 5}')
    result = prepared(tmp_path / "in", tmp_path / "out", encoding=Encoding(short_side=80, crf=10))
    assert (result.files, result.num_frames) == (1, 3)  # a folder of images is read as any video
    [record] = lines(tmp_path / "out" / "map.jsonl")
    with open_video(str(tmp_path / "out" / record["output"])) as reader:
        got = reader.frames_at([0.0, 0.25, 0.5]).data.float()
    wanted = torch.nn.functional.interpolate(
        torch.from_numpy(picture).permute(2, 0, 1)[None].float(), (80, 120), mode="bilinear", antialias=True
    )[0].permute(1, 2, 0)
    assert (got - wanted).abs().mean() < 3


# ---- windows


def row(id, start=None, end=None, **more):
    return Clip(id=id, video="/v/a.mp4", start_seconds=start, end_seconds=end, **more)


def planned(rows, clip_seconds):
    listed = Listed(rows=rows, files={"/v/a.mp4": "a.mp4"}, left_out={})
    plan = plan_stretches(listed, clip_seconds)
    return [(s.start_seconds, s.end_seconds, s.needed_from) for s in plan.stretches["/v/a.mp4"]]


def test_stretches_that_meet_are_one():
    rows = [row("c", 30, 31), row("a", 5, 6), row("b", 9, 9.5), row("d", 100)]
    assert planned(rows, 2.0) == [(28.0, 33.0, 30), (3.0, 11.5, 5), (98.0, None, 100)]
    assert planned(rows, 1.0) == [(29.0, 32.0, 30), (4.0, 7.0, 5), (8.0, 10.5, 9), (99.0, None, 100)]
    assert planned(rows, 50.0) == [(0.0, None, 5)]
    assert planned(rows, None) == [(0.0, None, 0.0)]
    assert planned([row("long", 5, 20), row("inside", 6, 7)], 1.0) == [(4.0, 21.0, 5)]


def test_a_row_about_the_whole_video_keeps_it_whole_for_all():
    assert planned([row("a", 5, 6), row("b")], 2.0) == [(0.0, None, 0.0)]
    assert planned([row("a", 5, 6), row("b", 7, 8, caption_file="b.csv")], 2.0) == [(0.0, None, 0.0)]
    timed = (Caption(text="one", start_seconds=20.0, end_seconds=21.0), Caption(text="two"))
    assert planned([row("a", 5, 6, captions=timed)], 2.0) == [(3.0, 23.0, 5)]


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "above 0"), (float("nan"), "above 0"), (2.0, "no row has a wind")]
)
def test_clip_seconds_without_sense_is_refused(seconds, words):
    with pytest.raises(ConfigError, match=words):
        planned([row("a")], seconds)


def test_windows_find_the_same_frames_in_their_own_small_files(make_video, tmp_path):
    make_video("in/a.mp4", num_frames=200, frame_rate=10, gop=50)
    make_video("in/irregular.mp4", num_frames=10, pts_seconds=IRREGULAR)
    windows = {
        "x": ("a.mp4", 5.0, 6.0),
        "y": ("a.mp4", 5.55, 7.0),
        "z": ("a.mp4", 15.03, 15.04),
        "e": ("a.mp4", 19.5, None),
    }
    windows["i"] = ("irregular.mp4", 1.75, 2.0)
    rows = [
        Clip(id=id, video=str(tmp_path / "in" / name), start_seconds=start, end_seconds=end, labels=("l",), split="val")
        for id, (name, start, end) in windows.items()
    ]
    timed = (Caption(text="cut", start_seconds=5.2, end_seconds=5.4),)
    rows[0] = Clip(id="x", video=rows[0].video, start_seconds=5.0, end_seconds=6.0, captions=timed)
    write_manifest(tmp_path / "in" / "rows.jsonl", rows)
    result = prepared(tmp_path / "in" / "rows.jsonl", tmp_path / "out", clip_seconds=1.0)
    assert (result.files, result.rows, result.listed, result.failed) == (4, 5, 2, 0)
    moved = {clip.id: clip for clip in read_manifest(tmp_path / "out" / "manifest.jsonl")}
    assert list(moved) == list(windows)
    assert (moved["z"].labels, moved["z"].split) == (("l",), "val")
    assert moved["x"].video == moved["y"].video != moved["z"].video
    shift = 5.0 - moved["x"].start_seconds
    assert moved["x"].captions[0].start_seconds == pytest.approx(5.2 - shift)
    for before in rows:
        after = moved[before.id]
        with open_video(before.video) as source, open_video(after.video) as copy:
            duration = source.info.duration_seconds
            last = duration if before.end_seconds is None else before.end_seconds
            times = np.linspace(max(0.0, before.start_seconds - 0.999), min(last + 0.999, duration - 0.001), 25)
            wanted = source.frames_at(times.tolist())
            # a clip of up to 1 s may begin anywhere in the window, and end beyond it
            given = copy.frames_at((times - before.start_seconds + after.start_seconds).tolist())
        assert frame_numbers(given.data) == frame_numbers(wanted.data), before
        assert (after.end_seconds is None) == (before.end_seconds is None)
    assert result.seconds < 12


# ---- what is left behind


@pytest.fixture
def folder(make_video, tmp_path):
    for i in range(4):
        make_video(f"in/{'abcd'[i]}/{i}.mp4", num_frames=20 + i, first_number=100 * i)
    return tmp_path / "in"


def test_bytes_do_not_depend_on_the_workers_and_say_where_they_come_from(folder, tmp_path):  # B040
    alone = prepared(folder, tmp_path / "alone")
    several = prepared(folder, tmp_path / "several", num_workers=2)
    assert contents(tmp_path / "alone") == contents(tmp_path / "several")
    assert alone.bytes_after == several.bytes_after and several.written == 4
    [first, *_] = lines(tmp_path / "alone" / "map.jsonl")
    source = folder / "a" / "0.mp4"
    assert first["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (first["bytes"], first["video"]) == (source.stat().st_size, str(source))
    assert (first["output"], first["num_frames"], first["seconds"]) == ("videos/a/0.mp4", 20, 2.0)
    assert first["settings"] == {"short_side": 48, "gop": 4, "crf": 21, "clip_seconds": None}
    assert [line["id"] for line in lines(tmp_path / "alone" / "manifest.jsonl")] == [
        f"{'abcd'[i]}/{i}.mp4" for i in range(4)
    ]


def test_one_picture_stream_gives_the_same_bytes_every_time(make_video, tmp_path):
    make_video("in/a.mp4", num_frames=60, size=(342, 192), gop=30, codec_options={"crf": "30"})
    found = set()
    for i in range(4):
        junk = [bytearray(random.Random(i).randbytes(200_000)) for _ in range(20)]  # other memory at every run
        prepared(tmp_path / "in", tmp_path / f"out{i}", encoding=Encoding(short_side=192))
        found.add((tmp_path / f"out{i}" / "videos" / "a.mp4").read_bytes())
        assert junk
    assert len(found) == 1


def test_a_stopped_run_goes_on_and_leaves_what_an_undisturbed_one_leaves(folder, tmp_path):
    prepared(folder, tmp_path / "whole")

    def stop(done, total):
        if done == stop.after:
            raise KeyboardInterrupt

    stop.after = 2
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, tmp_path / "out", report=stop)
    assert not (tmp_path / "out" / "manifest.jsonl").exists()
    journal = tmp_path / "out" / prepare.JOURNAL
    journal.write_bytes(journal.read_bytes()[:-20])  # a kill cuts a line
    (tmp_path / "out" / prepare_work.PARTIAL / "half.mp4").write_bytes(b"half")
    with pytest.raises(KeyboardInterrupt):
        prepared(folder, tmp_path / "out", report=stop)
    result = prepared(folder, tmp_path / "out")
    assert (result.listed, result.written, result.already_there) == (4, 2, 2)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out" / prepare_work.PARTIAL).exists()
    again = prepared(folder, tmp_path / "out")
    assert (again.written, again.already_there, again.bytes_after) == (0, 4, result.bytes_after)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_what_has_changed_or_gone_is_redone(folder, tmp_path, make_video):
    prepared(folder, tmp_path / "out")
    make_video("in/b/1.mp4", num_frames=15, first_number=7)
    (tmp_path / "out" / "videos" / "c" / "2.mp4").unlink()
    (tmp_path / "out" / "videos" / "d" / "3.mp4").write_bytes(b"cut short")
    result = prepared(folder, tmp_path / "out")
    assert (result.written, result.already_there, result.changed) == (3, 1, [str(folder / "b" / "1.mp4")])
    assert "1 videos have changed since and were redone" in result.to_table()
    prepared(folder, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_sources_may_be_moved_away_but_not_spoiled(folder, tmp_path):
    rows = [Clip(id=str(i), video=str(folder / "abcd"[i] / f"{i}.mp4")) for i in range(4)]
    write_manifest(tmp_path / "rows.csv", rows)
    prepared(tmp_path / "rows.csv", tmp_path / "out")
    before = contents(tmp_path / "out")
    (folder / "b" / "1.mp4").rename(tmp_path / "moved.mp4")
    result = prepared(tmp_path / "rows.csv", tmp_path / "out")
    assert (result.already_there, result.failed, len(result.unread)) == (4, 0, 1)
    assert "1 videos that were prepared before can't be read any more; their files are kept" in result.to_table()
    assert contents(tmp_path / "out") == before
    (folder / "b" / "1.mp4").write_bytes(b"no video")
    result = prepared(tmp_path / "rows.csv", tmp_path / "out")
    assert (result.already_there, result.failed, result.unread) == (3, 1, [])
    prepared(tmp_path / "rows.csv", tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_another_collection_or_other_settings_are_refused(folder, tmp_path):
    prepared(folder, tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(DataError, match="gop: 4 there, 8 now"):
        prepared(folder, tmp_path / "out", encoding=Encoding(short_side=48, gop=8))
    shutil.rmtree(folder / "d")
    with pytest.raises(ConfigError, match=r"1 files or rows that are not listed now .*videos/d/3.mp4"):
        prepared(folder, tmp_path / "out")
    assert contents(tmp_path / "out") == before


def test_rows_of_the_same_videos_do_not_replace_one_another(folder, tmp_path):
    rows = [Clip(id=f"{split}{i}", video=str(folder / "a" / "0.mp4"), split=split) for split in "tv" for i in range(2)]
    write_manifest(tmp_path / "t.csv", rows[:2])
    write_manifest(tmp_path / "v.csv", rows[2:])
    prepared(tmp_path / "t.csv", tmp_path / "out")
    with pytest.raises(ConfigError, match="row 't0'"):
        prepared(tmp_path / "v.csv", tmp_path / "out")


def test_no_place_that_holds_something_else(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"lies in .*in, which is prepared; choose a place beside it"):
        prepared(folder, folder / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    with pytest.raises(ConfigError, match="holds other things"):
        prepared(folder, tmp_path / "mine")
    prepared(folder, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds .*0.mp4, which is to be prepared"):
        prepared(tmp_path / "out" / "manifest.jsonl", tmp_path / "out")


# ---- faults


def test_bad_files_are_named_and_the_rest_goes_on(folder, tmp_path):  # B001, B011, B028, B037
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "page.mp4").write_text("<html>not found</html>")
    make_audio(folder / "sound.mp4")
    whole = (folder / "a" / "0.mp4").read_bytes()
    (folder / "0cut.mp4").write_bytes(whole[: len(whole) // 2])
    result = prepared(folder, tmp_path / "out")
    assert (result.listed, result.written, result.already_there, result.failed) == (8, 4, 0, 4)
    faults = {line["id"]: line["reason"] for line in lines(tmp_path / "out" / "faults.jsonl")}
    assert list(faults) == ["0cut.mp4", "empty.mp4", "page.mp4", "sound.mp4"]
    for name, word in (("0cut", "cut short"), ("empty", "empty"), ("page", "page"), ("sound", "no video stream")):
        assert word in faults[f"{name}.mp4"] and f"{name}.mp4" in faults[f"{name}.mp4"]
    assert len(lines(tmp_path / "out" / "manifest.jsonl")) == 4
    (folder / "0cut.mp4").write_bytes(whole)  # mended
    for name in ("empty", "page", "sound"):
        (folder / f"{name}.mp4").unlink()
    mended = prepared(folder, tmp_path / "out")
    assert (mended.written, mended.already_there, mended.failed) == (1, 4, 0)
    assert not (tmp_path / "out" / "faults.jsonl").exists()


def test_a_missing_video_and_a_window_outside_are_faults_of_their_rows(folder, tmp_path):
    video = str(folder / "a" / "0.mp4")
    rows = [Clip(id="good", video=video, start_seconds=0.5, end_seconds=1.0)]
    rows += [Clip(id="outside", video=video, start_seconds=7.0, end_seconds=8.0)]
    rows += [Clip(id="missing", video=str(folder / "none.mp4"), start_seconds=0.0, end_seconds=1.0)]
    write_manifest(tmp_path / "rows.jsonl", rows)
    for clip_seconds in (None, 0.1):
        out = tmp_path / f"out{clip_seconds}"
        result = prepared(tmp_path / "rows.jsonl", out, clip_seconds=clip_seconds)
        assert (result.rows, result.listed, result.failed, result.files) == (1, 2, 2, 1)
        reasons = {line["id"]: line["reason"] for line in lines(out / "faults.jsonl")}
        assert "lies outside the video, which has 2.000 s" in reasons["outside"]
        assert "no such file" in reasons["missing"]
        assert prepared(tmp_path / "rows.jsonl", out, clip_seconds=clip_seconds).files == 1


@pytest.fixture
def damaged(make_video, tmp_path):
    """20 s, damaged in the middle: cut short in the packets."""
    path = make_video("in/a.mkv", num_frames=200, frame_rate=10, gop=10)
    data = path.read_bytes()
    path.write_bytes(data[: int(0.6 * len(data))])
    return tmp_path / "in"


def test_what_comes_before_damage_is_kept_if_asked_for(damaged, tmp_path):  # B003
    rows = [
        Clip(id=str(start), video=str(damaged / "a.mkv"), start_seconds=start, end_seconds=start + 1.0)
        for start in (2.0, 18.0)
    ]
    write_manifest(damaged / "rows.jsonl", rows)
    refused = prepared(damaged / "rows.jsonl", tmp_path / "out")
    assert (refused.failed, refused.manifest) == (1, None)
    assert "damaged" in refused.faults[0].reason and "readable up to" in refused.faults[0].reason
    result = prepared(damaged / "rows.jsonl", tmp_path / "out", allow_partial=True)
    assert (result.rows, [fault.id for fault in result.faults]) == (1, ["18.0"])
    [record] = lines(tmp_path / "out" / "map.jsonl")
    assert "damaged" in record["partial"] and 5 < record["seconds"] < 15
    with open_video(str(damaged / "a.mkv")) as before, open_video(str(tmp_path / "out" / record["output"])) as after:
        times = np.arange(0, record["seconds"] - 0.05, 0.1).tolist()
        assert frame_numbers(after.frames_at(times).data) == frame_numbers(before.frames_at(times).data)
        with pytest.raises(DataError):  # nothing readable is left out
            before.frames_at([record["seconds"] + 0.05])
    again = prepared(damaged / "rows.jsonl", tmp_path / "out")  # not asked for any more
    assert (again.failed, again.files) == (1, 0)
    assert not (tmp_path / "out" / record["output"]).exists()


def test_a_full_disk_stops_the_run_with_advice(folder, tmp_path, monkeypatch):
    calls = []

    def full(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device", "x")
        return encode.encode_stretch(*arguments, **options)

    monkeypatch.setattr(prepare_work, "encode_stretch", full)
    with pytest.raises(DataError, match=r"out: the disk is full; 1 of 4 videos are done and stay"):
        prepared(folder, tmp_path / "out")
    monkeypatch.undo()
    assert prepared(folder, tmp_path / "out").already_there == 1


def test_a_pyav_without_x264_is_said(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(av, "codecs_available", av.codecs_available - {"libx264"})
    with pytest.raises(DependencyError, match="without the encoder libx264; install"):
        prepared(folder, tmp_path / "out")


@pytest.mark.parametrize("options", [{"short_side": 255}, {"gop": 0}, {"crf": 52}])
def test_settings_without_sense_are_refused(options):
    [name] = options
    with pytest.raises(ConfigError, match=name):
        Encoding(**options)


def test_a_file_that_does_not_read_back_the_same_is_a_fault(folder, tmp_path, monkeypatch):
    real = encode._Encoder.add

    def late(self, picture, ticks, duration):
        real(self, picture, ticks, duration)
        self.ticks[-1] += 1

    monkeypatch.setattr(encode._Encoder, "add", late)
    result = prepared(folder, tmp_path / "out")
    assert result.failed == 4 and "does not read back as it was given" in result.faults[0].reason


def test_names_keep_their_endings_apart(make_video, tmp_path):
    make_video("in/a.mp4", num_frames=5)
    make_video("in/a.mkv", num_frames=5)
    prepared(tmp_path / "in", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out" / "videos").iterdir()} == {"a.mp4", "a.mkv.mp4"}


def test_a_store_is_prepared_as_its_files_are(folder, tmp_path):
    for path in sorted(folder.rglob("*.mp4")):
        path.rename(folder / path.name)
    pack_collection(folder, tmp_path / "in.lmdb")
    prepared(tmp_path / "in.lmdb", tmp_path / "from_store")
    prepared(folder, tmp_path / "from_files")
    written = [contents(tmp_path / name / "videos") for name in ("from_store", "from_files")]
    assert written[0] == written[1] and len(written[0]) == 4
    sums = [[line["sha256"] for line in lines(tmp_path / name / "map.jsonl")] for name in ("from_store", "from_files")]
    assert sums[0] == sums[1]


def test_the_gain_is_measured_on_the_same_clips(make_video, tmp_path):
    source = make_video("in/a.mp4", num_frames=150, frame_rate=30, gop=150, size=(480, 360))
    result = prepared(tmp_path / "in", tmp_path / "out", measured_files=3)
    assert (result.gain.num_files, result.gain.num_clips) == (1, 6)
    assert result.gain.ratio > 1
    assert "random clips (16 frames at 5 Hz" in result.to_table()
    assert measure_gain([], 4) is None
    assert measure_gain([Pair(str(source), 0.0, str(source), 5.0)], 0) is None


def test_what_the_encoder_refuses_is_a_fault_of_the_file(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "_X264", {**encode._X264, "profile": "no such profile"})
    result = prepared(folder, tmp_path / "out")
    assert result.failed == 4 and "0.mp4: 64x48 pixels can't be encoded: " in result.faults[0].reason
    assert not list((tmp_path / "out").rglob("*.mp4"))

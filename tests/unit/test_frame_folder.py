"""A folder of images answers as the video it came from; what is missing, doubled or unreadable in it is named."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from twinreel.data.decode import VideoReader
from twinreel.data.manifest import read_folder, read_manifest
from twinreel.data.preparation import extract
from twinreel.data.preparation.extract import extract_collection
from twinreel.data.storage import open_video
from twinreel.data.storage.frame_folder import FrameFolder, image_size
from twinreel.data.transforms import Cut
from twinreel.errors import ConfigError, DataError
from videos import frame_numbers, numbered_image


def write_images(folder, numbers, *, rate=10.0, pattern="img_{:05d}.png", size=(64, 48)):
    """Images whose pictures carry their place (from 0) in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for place, number in enumerate(numbers):
        Image.fromarray(numbered_image(place, size)).save(folder / pattern.format(number))
    if rate is not None:
        (folder / "frames.json").write_text(json.dumps({"frame_rate": rate}))
    return folder


def extracted(video, out, **options):
    """The folder of images of one video."""
    (out.parent / "list.csv").write_text(f'video\n"{video}"\n')
    result = extract_collection(out.parent / "list.csv", out, **options)
    assert not result.faults, result.faults
    return out / Path(video).stem


VIDEOS = {
    "constant.mp4": {"num_frames": 45, "frame_rate": 30, "b_frames": 2, "gop": 15},
    "ntsc.mp4": {"num_frames": 45, "frame_rate": 29.97, "gop": 15},
    "gaps.mkv": {"num_frames": 30, "pts_seconds": [1.5 + 0.04 * i + (i > 12) + 0.3 * (i > 20) for i in range(30)]},
}


@pytest.mark.parametrize("name", VIDEOS)
def test_images_answer_as_the_video_does(name, make_video, tmp_path):
    video = make_video(name, **VIDEOS[name])
    rng = random.Random(name)
    with VideoReader(video) as ours, FrameFolder(extracted(video, tmp_path / "out")) as images:
        assert (images.info.height, images.info.width) == (ours.info.height, ours.info.width)
        assert images.info.duration_seconds == ours.info.duration_seconds
        assert images.frame_times() == ours.frame_times()
        duration = ours.info.duration_seconds
        grids = [[k / 5 for k in range(5)], [k / 25 for k in range(25)], ours.frame_times()]
        edges = [[max(0.0, time - d) for time in ours.frame_times()] for d in (1e-7, 2e-5, 2e-4, 9e-4)]
        for times in (*grids, *edges, *([rng.uniform(0, 1.2 * duration) for _ in range(8)] + [0.0] for _ in range(20))):
            one, other = ours.frames_at(times, hold_last=True), images.frames_at(times, hold_last=True)
            assert frame_numbers(one.data) == frame_numbers(other.data)
            assert torch.equal(one.pts_seconds, other.pts_seconds) and one.num_held == other.num_held
        for start, end in [sorted(rng.uniform(-0.5, 1.3 * duration) for _ in range(2)) for _ in range(40)] + [(0, 9)]:
            answers = []
            for reader in (ours, images):
                try:
                    frames = reader.frames_between(start, end)
                    warned = [warning for warning in frames.warnings if "the header says" not in warning]
                    answers.append((frames.pts_seconds.tolist(), frame_numbers(frames.data), warned))
                except DataError as error:
                    answers.append(str(error).replace(reader.path, ""))
            assert answers[0] == answers[1], (start, end)
        for times in ([-0.01], [duration + 0.1], [0.0, duration], [], [float("nan")]):
            for reader in (ours, images):
                with pytest.raises(DataError):
                    reader.frames_at(times)
        for reader in (ours, images):
            with pytest.raises(DataError, match="lies outside the video"):
                reader.frames_at([duration + 0.1, duration + 0.2], hold_last=True)


@pytest.mark.parametrize("first", [0, 1, 37])
def test_the_first_number_is_found_and_the_last_image_reached(tmp_path, first):  # B043
    folder = write_images(tmp_path / "v", range(first, first + 10))
    with open_video(str(folder)) as reader:
        assert frame_numbers(reader.frames_between().data) == list(range(10))
        assert reader.info.duration_seconds == pytest.approx(1.0)
        assert frame_numbers(reader.frames_at([0.0, 0.1, 0.99, 0.85]).data) == [0, 1, 9, 8]
        with pytest.raises(DataError, match=r"1 s lies outside the video, which has 1\.000 s"):
            reader.frames_at([1.0])


def test_numbers_that_are_missing_are_named(tmp_path):  # B043
    folder = write_images(tmp_path / "v", [1, 2, 3, 5, 6, 9])
    with pytest.raises(DataError, match=r"3 images are missing between number 1 and 9 \(4, 7, 8\)"):
        FrameFolder(folder)
    times = {"times_seconds": [0.0, 0.1, 0.2, 0.4, 0.5, 0.8], "end_seconds": 0.9}
    (folder / "frames.json").write_text(json.dumps(times))
    assert frame_numbers(FrameFolder(folder).frames_at([0.35, 0.79, 0.85]).data) == [2, 4, 5]


def test_two_images_of_one_number_are_named(tmp_path):
    folder = write_images(tmp_path / "v", [1, 2])
    write_images(folder, [1], pattern="flow_x_{:05d}.png")
    with pytest.raises(DataError, match=r"flow_x_00001.png and img_00001.png both have the number 1"):
        FrameFolder(folder)


def test_images_without_a_number_are_left_out_with_a_warning(tmp_path):
    folder = write_images(tmp_path / "v", [1, 2])
    Image.new("RGB", (9, 9)).save(folder / "cover.jpg")
    (folder / ".hidden_7.png").write_bytes(b"")
    assert FrameFolder(folder).info.warnings == ("images without a number are left out (1): cover.jpg",)


def test_numbers_are_numbers_and_not_text(tmp_path):
    folder = write_images(tmp_path / "v", [8, 9, 10, 11], pattern="{}.png")
    assert frame_numbers(FrameFolder(folder).frames_between().data) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (None, ["nothing says when its 2 images appear", '{"frame_rate": 25}', "for all folders"]),
        ("{", ["frames.json", "can't be read"]),
        ("[]", ["must be an object"]),
        ('{"frame_rate": 0}', ["frame_rate 0", "above 0"]),
        ('{"frame_rate": true}', ["frame_rate True"]),
        ('{"rate": 5}', ["must have frame_rate, or times_seconds"]),
        ('{"times_seconds": [0, 1, 2], "end_seconds": 3}', ["2 images", "3 times"]),
        ('{"times_seconds": [0, 0], "end_seconds": 3}', ["must increase"]),
        ('{"times_seconds": [0, 1], "end_seconds": 1}', ["end_seconds come after"]),
        ('{"times_seconds": [0, NaN], "end_seconds": 1}', ["a list of numbers"]),
    ],
)
def test_times_that_are_not_said_or_make_no_sense(tmp_path, said, words):
    folder = write_images(tmp_path / "v", [1, 2], rate=None)
    if said is not None:
        (folder / "frames.json").write_text(said)
    with pytest.raises(DataError) as error:
        FrameFolder(folder)
    for word in words:
        assert word in str(error.value)


def test_a_rate_above_holds_for_all_folders_there(tmp_path):
    folders = [write_images(tmp_path / name, [1, 2, 3, 4], rate=None) for name in "ab"]
    (tmp_path / "frames.json").write_text('{"frame_rate": 2}')
    assert [FrameFolder(folder).info.duration_seconds for folder in folders] == [2.0, 2.0]
    assert [row.id for row in read_folder(tmp_path)] == ["a", "b"]
    (tmp_path / "frames.json").write_text('{"times_seconds": [0], "end_seconds": 1}')
    with pytest.raises(DataError, match="above folders of images has frame_rate alone"):
        FrameFolder(folders[0])


def test_pictures_of_every_kind_become_rgb(tmp_path):  # ClipBERT defect 22
    folder = write_images(tmp_path / "v", [1])
    Image.new("L", (64, 48), 100).save(folder / "img_00002.jpg")
    Image.new("CMYK", (64, 48), (0, 0, 0, 0)).save(folder / "img_00003.jpg")
    Image.new("RGBA", (64, 48), (10, 20, 30, 0)).save(folder / "img_00004.png")
    Image.new("P", (64, 48)).save(folder / "img_00005.png")
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(numbered_image(5))))
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned to the right
    turned.save(folder / "img_00006.png", exif=exif)
    frames = FrameFolder(folder).frames_between()
    assert frames.data.shape == (6, 48, 64, 3) and not frames.warnings
    assert frames.data[1].unique().tolist() == [100] and frames.data[2].unique().tolist() == [255]
    assert frames.data[3, 0, 0].tolist() == [10, 20, 30]
    assert frame_numbers(frames.data[[0, 5]]) == [0, 5]


def test_a_size_that_changes_is_scaled_to_the_first_with_a_warning(tmp_path):
    folder = write_images(tmp_path / "v", [1, 2])
    write_images(folder, [3, 4], size=(128, 96))
    reader = FrameFolder(folder)
    assert reader.frames_at([0.0]).warnings == ()
    frames = reader.frames_between()
    assert frames.data.shape == (4, 48, 64, 3) and frame_numbers(frames.data) == [0, 1, 0, 1]
    assert frames.warnings == ("the size of the images changes: all are scaled to the first one's 64x48",)


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "empty file"), (b"<html>", "an HTML page"), (b"\x89PNG\r\n", "an unknown format"), ("half", "truncated")],
)
def test_an_image_that_cannot_be_read_is_named_when_it_is_asked_for(tmp_path, content, said):
    folder = write_images(tmp_path / "v", range(1, 6))
    path = folder / "img_00003.png"
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000] if content == "half" else content)
    reader = FrameFolder(folder)
    assert frame_numbers(reader.frames_at([0.0, 0.1, 0.3]).data) == [0, 1, 3]  # the others are read
    with pytest.raises(DataError, match=rf"img_00003\.png: can't be read as an image: .*{said}"):
        reader.frames_at([0.2])


def test_deep_pixels_are_refused(tmp_path):
    folder = write_images(tmp_path / "v", [1])
    Image.fromarray(np.full((48, 64), 40_000, np.uint16)).save(folder / "img_00002.png")
    with pytest.raises(DataError, match=r"img_00002.png: an image of more than 8 bits"):
        FrameFolder(folder).frames_between()


def test_only_images_that_are_asked_for_are_read(tmp_path, monkeypatch):
    folder = write_images(tmp_path / "v", range(1, 11))
    reader, read = FrameFolder(folder), []
    opened = Image.open
    monkeypatch.setattr(Image, "open", lambda path: read.append(path) or opened(path))
    reader.frames_at([0.31, 0.35, 0.7, 0.3])
    assert [os.path.basename(path) for path in read] == ["img_00004.png", "img_00008.png"]


def test_a_cut_is_that_part_of_each_image_scaled(tmp_path):
    reader = FrameFolder(write_images(tmp_path / "v", range(1, 4)))
    whole, cut = reader.frames_between().data, Cut(8, 16, 24, 24, 24)
    assert torch.equal(reader.frames_at([0.0, 0.1, 0.2], cut=cut).data, whole[:, 8:32, 16:40])
    assert reader.frames_at([0.0], cut=Cut(0, 0, 48, 48, 20)).data.shape == (1, 20, 20, 3)


def test_folders_without_images_and_none_at_all(tmp_path):
    (tmp_path / "v").mkdir()
    for path, words in ((tmp_path / "v", "no image with a number"), (tmp_path / "none", "no such file")):
        with pytest.raises(DataError, match=words):
            open_video(str(path))


# ---- extracting


def test_a_rate_takes_the_frame_on_show_at_each_multiple(make_video, tmp_path):
    video = make_video("v.mp4", num_frames=34, frame_rate=17)
    folder = extracted(video, tmp_path / "out", rate=5)
    with VideoReader(video) as ours, FrameFolder(folder) as images:
        assert images.frame_times() == [k / 5 for k in range(10)]
        grid = images.frame_times()
        assert frame_numbers(images.frames_between().data) == frame_numbers(ours.frames_at(grid).data)
        said = json.loads((folder / "frames.json").read_text())
        assert said["source_times_seconds"] == ours.frames_at(grid).pts_seconds.tolist()
        assert (images.info.frame_rate, images.info.duration_seconds) == (5.0, 2.0)


def test_a_video_shorter_than_a_step_gives_one_image(make_video, tmp_path):  # B037
    result = extract_collection(
        make_video("in/short.mp4", num_frames=9, frame_rate=30).parent, tmp_path / "out", rate=1
    )
    assert (result.listed, result.written, result.images) == (1, 1, 1)
    assert [path.name for path in sorted((tmp_path / "out/short").iterdir())] == ["frames.json", "img_00001.jpg"]


def test_the_short_side_is_scaled_down_and_never_up(make_video, tmp_path):
    make_video("in/wide.mp4", num_frames=2, size=(160, 96))
    make_video("in/small.mp4", num_frames=2, size=(64, 48))
    extract_collection(tmp_path / "in", tmp_path / "out", short_side=60)
    sizes = [image_size(str(tmp_path / "out" / name / "img_00001.jpg")) for name in ("wide", "small")]
    assert sizes == [(100, 60), (64, 48)]
    assert frame_numbers(FrameFolder(tmp_path / "out/wide").frames_between().data) == [0, 1]


def test_long_videos_are_extracted_in_pieces(make_video, tmp_path, monkeypatch):
    monkeypatch.setattr(extract, "AT_ONCE_BYTES", 4 * 3 * 48 * 64)
    job = extract._Job(
        video=str(make_video("v.mp4", num_frames=26, gop=9, b_frames=2)),
        out=str(tmp_path / "out"), name="v", rate=None, quality=95, short_side=None,
    )  # fmt: skip
    assert isinstance(extract._extract_one(job), extract._Written)
    assert frame_numbers(FrameFolder(tmp_path / "out/v").frames_between().data) == list(range(26))


def test_bad_files_are_listed_and_the_counts_add_up(make_video, tmp_path):  # B001, B037
    for i in range(3):
        make_video(f"in/{i}.mp4", num_frames=4)
    (tmp_path / "in/empty.mp4").write_bytes(b"")
    (tmp_path / "in/page.mp4").write_bytes(b"<html>")
    short = make_video("in/short.mkv", num_frames=40, gop=4)
    short.write_bytes(short.read_bytes()[: short.stat().st_size * 2 // 3])  # all frames before the cut can be read
    result = extract_collection(tmp_path / "in", tmp_path / "out", num_workers=2)
    assert (result.listed, result.written, len(result.faults)) == (6, 3, 3)
    lines = [json.loads(line) for line in (tmp_path / "out/faults.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == ["empty.mp4", "page.mp4", "short.mkv"]
    assert "empty file" in lines[0]["reason"] and "HTML" in lines[1]["reason"] and "cut short" in lines[2]["reason"]
    rows = read_manifest(result.manifest)
    assert [row.id for row in rows] == ["0.mp4", "1.mp4", "2.mp4"]
    assert not (tmp_path / "out/.partial").exists()
    make_video("in/empty.mp4", num_frames=4)
    (tmp_path / "in/page.mp4").unlink()
    short.unlink()
    again = extract_collection(tmp_path / "in", tmp_path / "out")
    assert (again.written, again.already_there, again.faults) == (1, 3, [])
    assert not (tmp_path / "out/faults.jsonl").exists()


KILLED = """
import os, signal, sys
from twinreel.data.preparation.extract import extract_collection

def report(done, total):
    if done == 3:
        os.kill(os.getpid(), signal.SIGKILL)

extract_collection(sys.argv[1], sys.argv[2], report=report)
"""


def test_a_killed_run_goes_on_and_leaves_nothing_half(make_video, tmp_path):
    for i in range(6):
        make_video(f"in/sub/{i}.mp4", num_frames=5, first_number=i)

    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "in", tmp_path / "out"], capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    complete = [path.parent for path in (tmp_path / "out/sub").glob("*/frames.json")]
    assert 3 <= len(complete) < 6 and len(complete) == len(list((tmp_path / "out/sub").iterdir()))
    result = extract_collection(tmp_path / "in", tmp_path / "out")
    assert result.already_there >= 3 and result.written + result.already_there == 6
    for i in range(6):
        assert frame_numbers(FrameFolder(tmp_path / f"out/sub/{i}").frames_between().data) == list(range(i, i + 5))


def test_what_is_there_from_other_options_or_another_video_is_not_mixed(make_video, tmp_path):
    make_video("in/v.mp4", num_frames=4)
    extract_collection(tmp_path / "in", tmp_path / "out")
    with pytest.raises(DataError, match=r"begun otherwise \(rate: not given there, 5.0 now\)"):
        extract_collection(tmp_path / "in", tmp_path / "out", rate=5)
    os.utime(tmp_path / "in/v.mp4")  # the same bytes, copied anew
    assert extract_collection(tmp_path / "in", tmp_path / "out").already_there == 1
    (tmp_path / "out/v/img_00002.jpg").unlink()
    [fault] = extract_collection(tmp_path / "in", tmp_path / "out").faults
    assert "is incomplete or was changed; delete it" in fault.reason
    make_video("in/v.mp4", num_frames=5)
    extract_collection(tmp_path / "in", tmp_path / "new")
    make_video("in/v.mp4", num_frames=6)
    [fault] = extract_collection(tmp_path / "in", tmp_path / "new").faults
    assert "was made from another video" in fault.reason


def test_two_videos_of_one_folder_are_refused_by_name(make_video, tmp_path):
    make_video("in/a.mp4", num_frames=2)
    make_video("in/a.avi", num_frames=2, codec="mpeg4")
    with pytest.raises(DataError, match=r"a\.avi and .*a\.mp4"):
        extract_collection(tmp_path / "in", tmp_path / "out")
    make_video("nested/a.mp4", num_frames=2)
    make_video("nested/a/b.mp4", num_frames=2)
    with pytest.raises(DataError, match=r"nested/a\.mp4: its images would lie in the folder that .*a/b\.mp4 lies in"):
        extract_collection(tmp_path / "nested", tmp_path / "out")


@pytest.mark.parametrize("options", [{"rate": 0.0}, {"rate": float("inf")}, {"quality": 0}, {"short_side": 0}])
def test_options_without_sense_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        extract_collection(tmp_path, tmp_path / "out", **options)


@pytest.mark.slow
def test_odd_real_files_give_images_that_answer_as_they_do(test_data, tmp_path):
    result = extract_collection(test_data / "torture", tmp_path / "out", num_workers=2, short_side=64)
    assert result.written == result.listed - len(result.faults) > 40
    for row in read_manifest(result.manifest):
        rng = random.Random(row.id)
        with open_video(str(test_data / "torture" / row.id)) as ours, open_video(row.video) as images:
            duration = ours.info.duration_seconds
            times = [0.0, *(rng.uniform(0, 1.1 * duration) for _ in range(20))]
            one, other = ours.frames_at(times, hold_last=True), images.frames_at(times, hold_last=True)
            assert torch.equal(one.pts_seconds, other.pts_seconds) and one.num_held == other.num_held, row.id
            assert images.info.duration_seconds == pytest.approx(duration), row.id

"""What measured times mean, and which knob is named for them."""

import dataclasses

import pytest

from twinreel.knobs import DataPath, FloorShare

STAGES = {"open": 1.0, "seek": 0.5, "decode": 6.0, "convert": 1.5, "captions": 0.0, "storage": 0.0, "collate": 1.0}
DEVICE_STAGES = {"transfer": 0.5, "device_transform": 0.5, "compute": 1.0}


def path(stages=(), **values):
    return DataPath(
        **{
            "stages": STAGES | dict(stages), "device_stages": DEVICE_STAGES,
            "floor": FloorShare(milliseconds=6.0, share=0.92, frames_per_kept=2.0), "measured_rate": None, "readers": 2,
            "cores": 8, "video_short_side": 240, "wanted_short_side": 224, "crop": "square",
            "compute_core_milliseconds": None, "computed_clips": 4,
        }
        | values
    )  # fmt: skip


def test_waiting_is_what_the_readers_lack_as_a_share_of_computing():
    two = path()  # 10 ms a clip and reader, 2 ms a clip computing
    assert (two.reader_milliseconds, two.reader_rate, two.expected_rate, two.compute_rate) == (
        10.0,
        100.0,
        200.0,
        500.0,
    )
    assert two.waiting == pytest.approx(1.5)  # 5 ms between clips, 2 of them computing
    assert two.readers_needed == 5 and path(readers=5).waiting == 0.0
    assert path(readers=0).waiting == pytest.approx(5.0)  # reads and computes in turn
    assert path(readers=16, cores=4).expected_rate == 400.0
    assert path(measured_rate=100.0).waiting == pytest.approx(4.0)  # what was measured counts


def test_where_the_model_has_the_same_cores_both_must_fit_on_them():
    shared = path(readers=8, cores=2, compute_core_milliseconds=4.0, measured_rate=1000.0)
    assert shared.waiting == pytest.approx((10 + 4) / 2 / 2 - 1)
    assert any("the model computes on the same cores" in line for line in shared.meaning())


def test_nothing_is_to_be_turned_where_nothing_waits():
    assert path(readers=5).advice() == ["nothing: the device does not wait"]


def test_more_readers_come_first_as_far_as_there_are_cores():
    assert path().advice() == ["data.num_workers=5 (now 2, 8 cores)"]
    first, second = path(cores=4).advice()
    assert first == "data.num_workers=4 (now 2, 4 cores)" and "decoding costs most" in second
    assert path(readers=0).advice()[0] == "data.num_workers=5 (now 0, 8 cores)"


def test_readers_that_hinder_one_another_are_told():
    assert "top" in path(readers=5, measured_rate=100.0).advice()[0]


FLOOR = FloorShare(milliseconds=6.0, share=0.9, frames_per_kept=12.0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"stages": {"storage": 9.0}}, ["data pack", "local disk"]),
        ({"floor": FLOOR}, ["data prepare", "--gop 16", "--short-side 240"]),
        ({"video_short_side": 720}, ["data prepare", "--short-side 272", "720", "224"]),
        ({"video_short_side": 720, "stages": {"convert": 20.0}}, ["data prepare"]),
        ({"video_short_side": 720, "crop": "random"}, ["data.crop=random then sees more"]),
        ({"stages": {"convert": 20.0}}, ["crop_size", "num_frames"]),
        ({"stages": {"open": 20.0}}, ["--clip-seconds", "data pack"]),
        ({"stages": {"captions": 20.0}}, ["caption files"]),
        ({"stages": {"collate": 20.0}}, ["handing over"]),
        ({}, ["data.repeated_augmentation"]),
        ({"floor": None}, ["decoding costs most"]),
    ],
)
def test_the_dearest_stage_is_made_cheaper_when_the_cores_are_used_up(changed, words):
    [advice] = path(readers=4, cores=4, **changed).advice()
    for word in words:
        assert word in advice


def test_the_floor_stands_beside_decoding():
    said = path().remark("decode")
    assert "6.00 ms" in said and "92%" in said and "2.0 frames decoded for each one kept" in said
    assert path(floor=None).remark("decode") == ""
    assert "N / 100.0" in path().meaning()[-1]
    assert "no readers" in dataclasses.replace(path(), readers=0).meaning()[0]

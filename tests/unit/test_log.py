"""What a run says: times, lines and numbers, and the metrics file of a resumed run."""

import io
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from twinreel import log as log_module
from twinreel.errors import ConfigError
from twinreel.log import Meter, Progress, RunLog, format_seconds, peak_memory_gb, read_metrics

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"), (0, "0s"), (0.4, "0s"), (42, "42s"), (59.4, "59s"), (59.6, "1m00s"), (185, "3m05s"),
        (3599, "59m59s"), (3600, "1h00m"), (7800, "2h10m"), (86399, "23h59m"), (86400, "1d00h"), (273600, "3d04h"),
    ],
)  # fmt: skip
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_peak_memory_is_that_of_this_process_in_gb():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here to compare with")
    kilobytes = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory_gb(CPU) == pytest.approx(kilobytes * 1024 / 2**30, rel=0.05)


# ---- metrics.jsonl


def steps_of(folder):
    return [(r["kind"], r["step"]) for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())]


def write_run(folder, steps, resume_step=None):
    with RunLog(folder, resume_step=resume_step, quiet=True) as log:
        for step in steps:
            log.record("train", step, {"loss": 1 / step, "name": "words", "bad": math.nan})
            if step % 2 == 0:
                log.record("eval", step, {"loss": 2 / step})


def test_metrics_are_cut_back_to_the_checkpoint_on_resume(tmp_path):
    write_run(tmp_path / "whole", range(1, 7))
    write_run(tmp_path / "parts", range(1, 6))
    write_run(tmp_path / "parts", range(4, 7), resume_step=3)
    assert (tmp_path / "parts" / "metrics.jsonl").read_text() == (tmp_path / "whole" / "metrics.jsonl").read_text()
    assert not list((tmp_path / "parts").glob("*.part"))


@pytest.mark.parametrize("cut", [1, 5, 20, 30])
def test_a_line_that_a_kill_cut_off_is_dropped_on_resume(tmp_path, cut):
    write_run(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    half = path.read_text().splitlines()[-1][:cut]
    path.write_text(path.read_text() + half)
    write_run(tmp_path, range(4, 5), resume_step=3)
    assert steps_of(tmp_path) == [("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]


def test_a_line_that_a_kill_cut_off_is_no_line_to_whoever_reads_while_the_run_stands_still(tmp_path):
    assert read_metrics(tmp_path) == []
    write_run(tmp_path, range(1, 4))
    whole = read_metrics(tmp_path)
    assert whole == [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] != []
    for cut in (1, 5, 20, 30):
        path = tmp_path / str(cut) / "metrics.jsonl"
        path.parent.mkdir()
        path.write_text((tmp_path / "metrics.jsonl").read_text() + json.dumps(whole[-1])[:cut])
        assert read_metrics(path.parent) == whole


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_does_not_know_is_null(tmp_path, value):
    with RunLog(tmp_path, quiet=True) as log:
        log.record("train", 1, {"loss": value, "steps": 3, "name": "a"})
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert record == {"kind": "train", "step": 1, "loss": None, "steps": 3, "name": "a"}


def test_resuming_without_a_metrics_file_starts_one(tmp_path):
    write_run(tmp_path, [5], resume_step=4)
    assert steps_of(tmp_path) == [("train", 5)]


def test_numbers_reach_tensorboard_and_what_is_not_finite_does_not(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_run(tmp_path, [1, 2, 3])
    write_run(tmp_path, [3, 4], resume_step=2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "eval/loss"}
    assert [(e.step, round(e.value, 5)) for e in events.Scalars("train/loss")] == [
        (1, 1.0), (2, 0.5), (3, 0.33333), (4, 0.25),
    ]  # fmt: skip


def test_a_folder_that_cannot_be_is_an_error_of_the_user(tmp_path):
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(ConfigError, match="no run folder can be made there"):
            RunLog(folder)
    assert (tmp_path / "file").read_text() == "mine"


# ---- messages


def test_messages_go_to_stderr_and_log_txt_and_warnings_with_a_key_are_said_once(tmp_path, capsys):
    with RunLog(tmp_path) as log:
        log.say("first\nsecond")
        for number in (1, 2, 3):
            log.warn(f"waiting {number}", once="waiting")
            log.warn(f"each {number}")
        log.warn("other", once="other")
    expected = ["first", "second", "warning: waiting 1", *(f"warning: each {n}" for n in (1, 2, 3)), "warning: other"]
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.splitlines() == expected
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line[20:] for line in lines] == expected
    assert all(line[4] == "-" and line[13] == ":" for line in lines)  # 2025-01-31 12:00:00


def test_a_quiet_log_writes_its_file_alone_and_one_without_a_folder_stderr_alone(tmp_path, capsys):
    with RunLog(tmp_path, quiet=True) as log:
        log.say("to the file")
        log.show_progress("nowhere", force=True)
    assert capsys.readouterr().err == "" and "to the file" in (tmp_path / "log.txt").read_text()
    with RunLog(None) as log:
        log.say("to stderr")
        log.record("train", 1, {"loss": 1.0})
    assert capsys.readouterr().err == "to stderr\n"
    assert sorted(item.name for item in tmp_path.iterdir()) == ["log.txt", "tensorboard"]


# ---- the progress line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

    monkeypatch.setattr(log_module.time, "monotonic", lambda: Clock.now)
    return Clock


def test_progress_off_a_terminal_is_a_line_every_ten_seconds_and_on_demand(monkeypatch, clock):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    for second in range(25):
        clock.now = 1000.0 + second
        progress.show(f"second {second}")
    progress.show("the end", force=True)
    progress.clear()
    assert stream.getvalue().splitlines() == ["second 0", "second 10", "second 20", "the end"]
    assert "\r" not in stream.getvalue()


def test_progress_on_a_terminal_rewrites_one_line_and_leaves_none(monkeypatch, clock):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    for number, text in enumerate(("a long line", "short", "not yet due")):
        clock.now += 0.3 if number < 2 else 0.1
        progress.show(text)
    progress.clear()
    print("next", file=sys.stderr)
    assert "\n" not in stream.getvalue().removesuffix("next\n") and "not yet due" not in stream.getvalue()
    screen = ""
    for piece in stream.getvalue().split("\r"):
        screen = piece + screen[len(piece) :]
    assert screen.rstrip() == "next"
    assert "\rshort      " in stream.getvalue()  # covers the longer line before it


def test_a_line_longer_than_the_terminal_is_cut_because_a_wrapped_one_cannot_be_rewritten(monkeypatch, clock):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "20")
    Progress().show("x" * 50, force=True)
    assert stream.getvalue().strip("\r") == "x" * 19


# ---- the meter


def test_the_meter_divides_by_what_really_passed():
    meter = Meter(CPU)
    meter.add(2.0, 1.0, clips=6, captions=12, masked=1, waited=1.0, seconds=2.0)
    meter.add(4.0, 3.0, clips=6, captions=12, masked=2, waited=1.0, seconds=4.0)
    meter.add(
        None, math.inf, clips=6, captions=12, masked=0, waited=0.0, seconds=2.0
    )  # no usable sample, or a step that fp16 skipped
    values = meter.take(0.25)
    assert values["loss"] == 3.0 and values["gradient_norm"] == 2.0 and values["learning_rate"] == 0.25
    assert values["clips_per_second"] == pytest.approx(18 / 8)
    assert values["waiting_share"] == pytest.approx(2 / 6)  # of the computing time, not of the whole
    assert (values["step_seconds"], values["data_seconds"]) == pytest.approx((8 / 3, 2 / 3))  # B088
    assert values["masked_captions"] == pytest.approx(3 / 36)
    assert values["memory_gb"] > 0
    meter.add(1.0, 5.0, clips=2, captions=4, masked=0, waited=0.0, seconds=1.0)
    again = meter.take(0.1)
    assert (again["loss"], again["clips_per_second"], again["waiting_share"], again["masked_captions"]) == (1, 2, 0, 0)


def test_the_meter_has_no_loss_where_there_was_none():
    meter = Meter(CPU)
    meter.add(None, math.nan, clips=2, captions=4, masked=0, waited=0.0, seconds=1.0)
    values = meter.take(0.1)
    assert math.isnan(values["loss"]) and math.isnan(values["gradient_norm"]) and values["clips_per_second"] == 2


def test_the_progress_line_has_the_speed_and_the_time_left_of_the_last_steps():
    meter = Meter(CPU)
    for _ in range(30):
        # long ago: none of it counts any more
        meter.add(9.0, 1.0, clips=10, captions=10, masked=0, waited=0.0, seconds=100.0)
    meter.take(0.1)
    for _ in range(20):
        meter.add(1.5, 1.0, clips=10, captions=10, masked=0, waited=0.4, seconds=2.0)
    line = meter.line(step=50, total_steps=140, learning_rate=0.002)
    assert line.startswith("step 50/140  loss 1.500  lr 2.00e-03  5 clips/s  waiting 25%  peak ")
    assert line.endswith(f"peak {peak_memory_gb(CPU):.1f} GB  left 3m00s")

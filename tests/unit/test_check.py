"""Look before you train: the contact sheet shows what the model sees, and the facts are those of the files."""

import csv
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from twinreel.check import check_recipe, draw_contact_sheet
from twinreel.data.clip import Batch
from twinreel.data.plan import Plan
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import load_recipe
from videos import frame_number, make_video, numbered_image

SIDE = 144  # pixels; large enough that the seconds written into a frame do not hide its number
NOTE = 34  # pixels of text under a row
PREP = Preprocessing(num_frames=4, frame_rate=10.0, crop_size=SIDE)


def numbered_batch(rows, num_frames, size=SIDE):
    """Row r, frame t carries the number 100 r + t."""
    frames = [[numbered_image(100 * r + t, (size, size)) for t in range(num_frames)] for r in range(rows)]
    return Batch(
        ids=[f"v{r}" for r in range(rows)],
        frames=torch.from_numpy(np.array(frames)),
        pts_seconds=torch.arange(num_frames).double().repeat(rows, 1) / 10,
        flip=torch.zeros(rows, dtype=torch.bool),
        valid=torch.ones(rows, dtype=torch.bool),
        captions=[[f"caption {r}", ""] for r in range(rows)],
        caption_mask=torch.tensor([[True, False]] * rows),
        labels=[()] * rows,
        repeated_frames=0,
        faults=[],
    )


def draw(batch, path, preprocessing=PREP):
    draw_contact_sheet(batch, preprocessing.normalize(batch.frames), preprocessing, path)
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def cell(sheet, row, column, side=SIDE):
    top = row * (side + NOTE)
    return sheet[top : top + side, column * side : (column + 1) * side]


def note(sheet, row, side=SIDE):
    top = row * (side + NOTE) + side
    return sheet[top : top + NOTE]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"value_range": (-1.0, 1.0), "channel_order": "bgr"},
        {"mean": (0.45, 0.4, 0.35), "std": (0.2, 0.22, 0.24)},
    ],
)
def test_each_frame_lies_in_its_row_and_column_as_it_was_before_normalizing(tmp_path, changes):
    batch = numbered_batch(rows=3, num_frames=4)
    sheet = draw(batch, tmp_path / "new" / "sheet.png", PREP.replace(**changes))
    assert sheet.shape == (3 * (SIDE + NOTE), 4 * SIDE, 3)
    for row in range(3):
        for column in range(4):
            picture = cell(sheet, row, column)
            assert frame_number(picture) == 100 * row + column
            assert (picture[20:] == batch.frames[row, column, 20:].numpy()).all()  # the seconds stand above


@pytest.mark.parametrize("column", [0, 1])
def test_the_seconds_are_written_into_their_own_frame(tmp_path, column):
    batch = numbered_batch(rows=2, num_frames=2)
    plain = draw(batch, tmp_path / "a.png")
    batch.pts_seconds[0, column] += 7.25
    later = draw(batch, tmp_path / "b.png")
    changed = np.argwhere((plain != later).any(-1))
    assert len(changed) and changed[:, 0].max() < 20
    assert {column} == set((changed[:, 1] // SIDE).tolist())


def test_large_batches_and_long_clips_show_eight_rows_and_eight_frames_from_first_to_last(tmp_path):
    sheet = draw(numbered_batch(rows=10, num_frames=16), tmp_path / "sheet.png")
    assert sheet.shape == (8 * (SIDE + NOTE), 8 * SIDE, 3)
    shown = [frame_number(cell(sheet, 7, column)) - 700 for column in range(8)]
    assert shown[0] == 0 and shown[-1] == 15 and shown == sorted(set(shown))


def test_small_frames_are_enlarged(tmp_path):
    sheet = draw(numbered_batch(rows=2, num_frames=3, size=32), tmp_path / "sheet.png", PREP.replace(crop_size=32))
    assert sheet.shape == (2 * (112 + NOTE), 3 * 112, 3)
    picture = cell(sheet, 1, 2, side=112)
    expected = numbered_image(102, (112, 112)).astype(int)
    assert np.abs(picture[40:] - expected[40:]).mean() < 12  # soft at the edges of the cells alone


@pytest.mark.parametrize("what", ["mirrored", "unreadable", "other captions", "masked caption", "other id"])
def test_what_is_written_under_a_row_belongs_to_that_row(tmp_path, what):
    plain = draw(numbered_batch(rows=2, num_frames=2), tmp_path / "a.png")
    batch = numbered_batch(rows=2, num_frames=2)
    if what == "mirrored":
        batch.flip[1] = True
    elif what == "unreadable":
        batch.valid[1] = False
    elif what == "other captions":
        batch.captions[1][0] = "cut the onion"
    elif what == "masked caption":
        batch.caption_mask[1, 0] = False
    else:
        batch.ids[1] = "another"
    sheet = draw(batch, tmp_path / "b.png")
    assert (note(sheet, 0) == note(plain, 0)).all() and (note(sheet, 1) != note(plain, 1)).any()
    assert (cell(sheet, 1, 1) == cell(plain, 1, 1)).all()
    hidden = (note(sheet, 1)[17:] == 255).all()
    assert hidden == (what == "masked caption")  # a caption that takes no part is not shown


def test_captions_of_any_length_and_script_are_drawn(tmp_path):
    batch = numbered_batch(rows=1, num_frames=2)
    batch.captions[0] = ["na\u00efve \u5207\u6d0b\u8471 " * 100, "\U0001f9c5 onion"]
    batch.caption_mask[0] = True
    assert draw(batch, tmp_path / "sheet.png").shape == (SIDE + NOTE, 2 * SIDE, 3)


@pytest.mark.parametrize("name", ["sheet.nope", "file/sheet.png"])
def test_a_sheet_that_cannot_be_written_is_an_error_of_the_user(tmp_path, name):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="the contact sheet cannot be written"):
        draw(numbered_batch(rows=1, num_frames=1), tmp_path / name)


# ---- the whole check


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    """Eight videos of 20 frames at 10 Hz; video i carries the numbers from 100 i on."""
    folder = tmp_path_factory.mktemp("videos")
    for i in range(8):
        make_video(folder / f"{i}.mp4", num_frames=20, frame_rate=10, size=(SIDE, SIDE), first_number=100 * i)
    return folder


@pytest.fixture
def collection(videos, tmp_path):
    """A copy of the videos, to be spoiled."""
    return shutil.copytree(videos, tmp_path / "collection")


def manifest(folder, captions=None, names=None):
    captions = captions or [f"number {i} of eight" for i in range(8)]
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("video", "caption"))
        writer.writerows(zip(names or [f"{i}.mp4" for i in range(8)], captions, strict=True))
    return path


def recipe(folder, *overrides):
    return load_recipe(
        "s3dg_small_own_videos",
        [
            f"data.manifest={folder / 'rows.csv'}", "model.name=conv3d_small", "model.embedding_size=8",
            f"model.preprocessing={{num_frames: 4, frame_rate: 10.0, crop_size: {SIDE}}}", "data.crop=center",
            "data.clip_start=start", "data.flip=0", "train.global_batch_size=4", "train.device=cpu",
            *overrides,
        ],
    )  # fmt: skip


def test_the_facts_are_those_of_the_files_and_the_sheet_shows_the_first_batch(collection):
    manifest(collection)
    wanted = recipe(collection)
    result = check_recipe(wanted, collection / "sheet.png")
    facts = result.facts
    assert (facts["rows"], facts["missing_files"], facts["captions"]) == (8, 0, 8)
    assert facts["steps"].startswith("2 an epoch, ")
    assert facts["vocabulary"] == "11 words; 0 unknown" and facts["masked_captions"].startswith("0 ")
    assert facts["clip"] == "4 frames at 10 a second = 0.4 s"
    assert facts["network_input"] == f"4x3x4x{SIDE}x{SIDE}"
    assert facts["unreadable"] == "0 of the first 4 samples" and facts["repeated_frames"] == 0
    loss, words = facts["loss"].split(" ", 1)
    assert 0 < float(loss) < 20 and words == "over 4 rows"
    low, high = map(float, facts["value_range"].split(" to "))
    assert 0 <= low < 0.3 and 0.7 < high <= 1
    assert result.warnings == [] and facts["contact_sheet"] == str(collection / "sheet.png")

    sheet = np.asarray(Image.open(collection / "sheet.png").convert("RGB")).astype(int)
    first = Plan(num_rows=8, seed=wanted.train.seed, global_batch_size=4).batch(0)
    for row, (_, index) in enumerate(first):
        assert [frame_number(cell(sheet, row, t)) for t in range(4)] == [100 * index + t for t in range(4)]


def test_what_evaluation_would_see_is_said(collection):
    names = [f"{i}.mp4" for i in range(7)] + ["gone.mp4"]
    with (collection / "judge.csv").open("w") as file:
        file.write("video,captions,split\n")
        file.writelines(f'{name},"[""one {i}"", ""two""]",val\n' for i, name in enumerate(names))
    manifest(collection)
    judge = (f"eval.manifest={collection / 'judge.csv'}", "eval.split=val")
    for more, words in (
        ((), "none (set eval.split, eval.manifest or eval.source)"),
        ((*judge, "eval.allow_missing=true"), "16 queries, 8 videos"),
        ((*judge, "eval.allow_missing=true", "eval.merge_equal_captions=true"), "9 queries, 8 videos"),
    ):
        assert check_recipe(recipe(collection, *more), collection / "sheet.png").facts["evaluation"] == words
    with pytest.raises(DataError, match=r"1 of 8 evaluation rows have no video file \(first: .*gone\.mp4\)"):
        check_recipe(recipe(collection, *judge), collection / "sheet.png")


def test_columns_that_are_not_used_are_named(collection):
    path = manifest(collection)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},mood", *(f"{line},good" for line in lines[1:])]))
    result = check_recipe(recipe(collection), collection / "sheet.png")
    assert result.warnings == [f"{path}: columns not used: mood"]


def test_the_table_has_a_line_for_each_fact_and_the_json_is_the_same(collection):
    manifest(collection)
    result = check_recipe(recipe(collection), collection / "sheet.png")
    table = result.to_table().splitlines()
    assert [line.split("  ")[0] for line in table] == [name.replace("_", " ") for name in result.facts]
    assert result.to_json() == {"facts": result.facts, "warnings": [], "problems": []}


def test_a_mirrored_clip_is_shown_mirrored_because_the_model_sees_it_so(collection):
    manifest(collection)
    check_recipe(recipe(collection), collection / "plain.png")
    check_recipe(recipe(collection, "data.flip=1.0"), collection / "mirrored.png")
    plain, mirrored = (np.asarray(Image.open(collection / f"{name}.png")) for name in ("plain", "mirrored"))
    assert (cell(mirrored, 0, 2)[20:] == cell(plain, 0, 2)[20:, ::-1]).all()


def test_unknown_words_and_captions_without_a_known_one_are_counted(collection):
    manifest(collection, ["onion onion fish", "cut the fish", "hello", "...", *(["cut"] * 4)])
    (collection / "words.txt").write_text("cut\nthe\n")
    facts = check_recipe(
        recipe(collection, f"model.vocabulary={collection / 'words.txt'}"), collection / "sheet.png"
    ).facts
    assert facts["vocabulary"] == "2 words; 3 unknown: onion (2), fish (2), hello (1)"
    assert facts["masked_captions"] == "3 captions without a known word"


def test_clips_longer_than_the_videos_are_counted_and_warned_of(collection):
    for i in range(8):
        make_video(collection / f"{i}.mp4", num_frames=2, frame_rate=10, size=(SIDE, SIDE))
    manifest(collection)
    result = check_recipe(recipe(collection), collection / "sheet.png")
    assert result.facts["repeated_frames"] == 8  # 2 of 4 frames of 4 clips
    assert any("repeat the last one" in text for text in result.warnings)
    assert "warning: 50% of the frames repeat the last one" in result.to_table()


def test_broken_videos_of_the_first_batch_are_named_and_masked(collection):
    manifest(collection)
    broken = Plan(num_rows=8, seed=1, global_batch_size=4).batch(0)[2][1]
    (collection / f"{broken}.mp4").write_bytes(b"")
    result = check_recipe(recipe(collection), collection / "sheet.png")
    assert result.facts["unreadable"] == "1 of the first 4 samples" and result.facts["loss"].endswith("over 3 rows")
    assert len(result.warnings) == 1 and f"{broken}.mp4" in result.warnings[0] and "empty file" in result.warnings[0]


def test_what_training_would_stop_at_stops_the_check_and_draws_nothing(collection):
    manifest(collection, names=[*(f"{i}.mp4" for i in range(7)), "gone.mp4"])
    with pytest.raises(DataError, match=r"1 of 8 listed videos do not exist(?s:.)*gone\.mp4(?s:.)*data\.root"):
        check_recipe(recipe(collection), collection / "sheet.png")
    assert check_recipe(recipe(collection, "data.max_faults=0.2"), collection / "s.png").facts["missing_files"] == 1
    for i in range(8):
        (collection / f"{i}.mp4").write_text("no video")
    manifest(collection)
    with pytest.raises(DataError, match=r"no sample of the first batch can be read; first: .*a text file"):
        check_recipe(recipe(collection), collection / "sheet.png")
    with pytest.raises(ConfigError, match="more than the 8 rows"):
        check_recipe(recipe(collection, "train.global_batch_size=16"), collection / "sheet.png")
    assert not (collection / "sheet.png").exists()


class LeakyTowers(nn.Module):
    """Towers with a part that takes no part, and a text tower that may be blown up."""

    def __init__(self, scale):
        super().__init__()
        self.preprocessing = PREP
        self.video_tower = nn.Linear(3, 4)
        self.forgotten = nn.Linear(2, 2)
        self.scale = scale

    def encode_video(self, video):
        return self.video_tower(video.mean((2, 3, 4)))

    def encode_text(self, captions):
        return torch.ones(len(captions), 4) * self.scale


def leaky_towers(*, scale: float = 1.0) -> nn.Module:
    return LeakyTowers(scale)


@pytest.mark.parametrize(("scale", "words"), [(1.0, "no gradient reaches"), (3e38, "the loss is not finite")])
def test_parts_without_a_gradient_and_a_loss_that_is_not_finite_are_warned_of(collection, scale, words):
    manifest(collection)
    model = f"model={{name: 'test_check:leaky_towers', scale: {scale}}}"
    result = check_recipe(recipe(collection, model, "task.normalize=false"), collection / "sheet.png")
    assert any(words in text for text in result.warnings), result
    assert any("forgotten.weight, forgotten.bias (2 parameters)" in text for text in result.warnings)
    assert "vocabulary" not in result.facts

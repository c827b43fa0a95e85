"""A row reads the same from a file, an LMDB and a folder of images, in any process; a store that is wrong says so."""

import errno
import json
import os
import pickle
import shutil
import signal
from pathlib import Path

import lmdb
import pytest
import torch

from twinreel.data.clip import Clip
from twinreel.data.dataset import ClipDataset, ViewRules
from twinreel.data.loader import load_batches, refuse_missing_files
from twinreel.data.manifest import missing_videos, read_folder, read_manifest
from twinreel.data.preparation import extract, pack
from twinreel.data.preparation.extract import extract_collection
from twinreel.data.preparation.pack import pack_collection
from twinreel.data.storage import content_digest, lmdb_store, open_video, video_state
from twinreel.errors import ConfigError, DataError
from twinreel.models.preprocessing import Preprocessing
from videos import frame_numbers, make_video

LOOK = ViewRules(preprocessing=Preprocessing(num_frames=3, frame_rate=5.0, crop_size=32), num_clips=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """50 numbered videos of 8 frames at 8 Hz, in two folders; `7.mp4` begins with the frame 7."""
    top = tmp_path_factory.mktemp("collection") / "videos"
    for i in range(50):
        path = top / ("even" if i % 2 == 0 else "odd") / f"{i}.mp4"
        path.parent.mkdir(parents=True, exist_ok=True)
        make_video(path, num_frames=8, frame_rate=8, size=(48, 32), first_number=i)
    return top


@pytest.fixture(scope="module")
def store(folder):
    out = folder.parent / "all.lmdb"
    pack_collection(folder, out)
    return out


@pytest.fixture(scope="module")
def images(folder):
    out = folder.parent / "images"
    extract_collection(folder, out)
    return out


@pytest.fixture
def small(tmp_path):
    """A store of two videos, `a` and `b`, that may be spoiled."""
    for number, name in ((1, "a.mp4"), (2, "b.mp4")):
        (tmp_path / "two").mkdir(exist_ok=True)
        make_video(tmp_path / "two" / name, num_frames=4, frame_rate=8, size=(48, 32), first_number=10 * number)
    pack_collection(tmp_path / "two", tmp_path / "two.lmdb")
    return tmp_path / "two.lmdb"


def write_store(path, values, **options):
    """A store as another program writes it."""
    with lmdb.open(str(path), map_size=2**24, **options) as environment, environment.begin(write=True) as transaction:
        for key, value in values.items():
            transaction.put(key.encode(), value)
    return path


def first_number(video):
    with open_video(str(video)) as reader:
        return frame_numbers(reader.frames_at([0.0]).data)[0]


def refused(video, *words):
    with pytest.raises(DataError) as error, open_video(str(video)):
        pass
    for word in words:
        assert str(word) in str(error.value), error.value


# ---- the same bytes everywhere


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_read_the_same_bytes_from_every_place(start, folder, store, images):  # B038, B022, ClipBERT defect 20
    ids = [row.id for row in read_folder(folder)]
    rows = [Clip(id=f"{place}/{id}", video=str(place / id)) for place in (folder, store, images) for id in ids]
    dataset = pickle.loads(pickle.dumps(ClipDataset(rows, LOOK)))
    here = [dataset[0, index] for index in range(len(rows))]  # in this process, before the workers start
    keys = [[(0, index) for index in range(first, first + 10)] for first in range(0, len(rows), 10)]
    batches = list(load_batches(dataset, keys, num_workers=2, worker_start=start))
    assert [id for batch in batches for id in batch.ids] == [row.id for row in rows]
    assert not any(batch.faults for batch in batches)
    assert torch.equal(torch.cat([batch.frames for batch in batches]), torch.stack([one.frames for one in here]))
    pts_seconds = torch.cat([batch.pts_seconds for batch in batches]).view(3, 50, 2, 3)
    assert torch.equal(pts_seconds[0], pts_seconds[1]) and torch.equal(pts_seconds[0], pts_seconds[2])
    for index in range(50):  # a file and the value under its key are the same bytes, hence the same pixels
        assert torch.equal(here[index].frames, here[50 + index].frames)


def test_a_forked_child_opens_the_store_anew_and_the_parent_reads_on(small):  # B022
    with open_video(str(small / "a.mp4")) as reader:
        before = lmdb_store._opened[os.path.realpath(small)]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with open_video(str(small / "b.mp4")) as other:
                    anew = lmdb_store._opened[os.path.realpath(small)] is not before
                    code = 0 if anew and frame_numbers(other.frames_at([0.0]).data) == [20] else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert frame_numbers(reader.frames_between().data) == [10, 11, 12, 13]


def test_many_readers_of_one_store_at_once(small):
    with open_video(str(small / "a.mp4")) as one, open_video(str(small / "b")) as other:
        assert frame_numbers(one.frames_between().data) == [10, 11, 12, 13]
        assert frame_numbers(other.frames_between().data) == [20, 21, 22, 23]


def test_errors_of_a_stored_video_name_store_and_key(tmp_path):
    refused(write_store(tmp_path / "x.lmdb", {"a": b"<html>"}) / "a.mp4", "x.lmdb: a", "an HTML page")


# ---- ClipBERT's format


def test_clipbert_reads_what_we_pack(folder, store):
    with lmdb.open(str(store), readonly=True, create=False) as environment, environment.begin(buffers=True) as values:
        keys = [bytes(key).decode() for key in values.cursor().iternext(keys=True, values=False)]
        assert sorted(keys) == sorted(str(i) for i in range(50))  # nothing but the files
        for path in folder.rglob("*.mp4"):
            assert bytes(values.get(path.stem.encode())) == path.read_bytes()


@pytest.mark.parametrize("options", [{}, {"subdir": False}])
def test_we_read_what_clipbert_packs(tmp_path, make_video, options):
    video = make_video("7.mp4", num_frames=4, first_number=7)
    store = write_store(tmp_path / "video_lmdb.lmdb", {"video7": video.read_bytes()}, **options)
    (tmp_path / "rows.jsonl").write_text('{"clip_name": "video7", "caption": "one", "sen_id": 3}\n')
    [row] = read_manifest(tmp_path / "rows.jsonl", root=store)
    assert first_number(row.video) == 7
    assert [found.id for found in read_folder(store)] == ["video7"]


def test_a_folder_that_holds_data_mdb_is_a_store_under_any_name(tmp_path, make_video):
    store = write_store(tmp_path / "packed", {"v": make_video("v.mp4", first_number=3).read_bytes()})
    assert first_number(store / "v.avi") == 3


# ---- which key a row means


@pytest.mark.parametrize(
    ("asked", "number"),
    [
        ("a.mp4", 1),
        ("deep/er/a.MP4", 1),
        ("a", 1),
        ("v1.0", 2),  # a name with a dot, without ending
        ("v1.0.mp4", 2),
        ("whole.mp4", 3),  # a store of another program, with endings in its keys
        ("whole.avi", None),
        ("v1", None),
        ("b.mp4", None),
    ],
)
def test_keys_are_names_without_extension(tmp_path, asked, number):
    videos = {name: make_video(tmp_path / f"{n}.mp4", first_number=n) for n, name in ((1, "a"), (2, "v1.0"))}
    videos["whole.mp4"] = make_video(tmp_path / "3.mp4", first_number=3)
    store = write_store(tmp_path / "x.lmdb", {key: path.read_bytes() for key, path in videos.items()})
    row = Clip(id="the row", video=str(store / asked))
    assert missing_videos([row]) == ([] if number else [row])
    if number:
        assert first_number(store / asked) == number
    else:
        refused(store / asked, "x.lmdb", repr(asked), row.video)


def test_a_name_that_may_mean_two_keys_is_refused(tmp_path, make_video):
    content = make_video("v.mp4").read_bytes()
    store = write_store(tmp_path / "x.lmdb", {"v1": content, "v1.0": content})
    refused(store / "v1.0", "'v1'", "'v1.0'", "both are there")
    assert first_number(store / "v1.0.mp4") == 0


def test_keys_with_folders_find_their_own_file_alone(tmp_path):
    for number, name in ((1, "x/a.mp4"), (2, "y/a.mp4"), (3, "a.mp4")):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        make_video(tmp_path / "in" / name, first_number=number)
    result = pack_collection(tmp_path / "in", tmp_path / "x.lmdb", keys="path")
    assert [first_number(row.video) for row in read_manifest(result.manifest)] == [3, 1, 2]
    assert [first_number(tmp_path / "x.lmdb" / name) for name in ("x/a.mp4", "y/a", "a.mp4")] == [1, 2, 3]
    refused(tmp_path / "x.lmdb" / "z/a.mp4", "no key for 'z/a.mp4'")


def test_a_missing_key_is_a_fault_that_names_key_store_and_row(small):  # ClipBERT defect 20
    row = Clip(id="the row", video=str(small / "c.mp4"))
    fault = ClipDataset([row], LOOK)[0, 0].fault
    assert fault is not None and fault.id == "the row"
    for words in ("c.mp4", str(small), row.video):
        assert words in fault.reason
    assert missing_videos([row, Clip(id="b", video=str(small / "b.mp4"))]) == [row]
    with pytest.raises(DataError, match=r"1 of 1 listed videos do not exist"):
        refuse_missing_files([row], 0.05)


# ---- stores that are wrong


def test_no_store_and_an_unfinished_one(tmp_path):
    refused(tmp_path / "none.lmdb" / "a.mp4", "none.lmdb", "no such store", "twinreel data pack")
    (tmp_path / "half.lmdb.partial").mkdir()
    refused(tmp_path / "half.lmdb" / "a.mp4", "packing was stopped", "run `twinreel data pack` again")
    (tmp_path / "empty.lmdb").mkdir()
    refused(tmp_path / "empty.lmdb" / "a.mp4", "it has no data.mdb")


@pytest.mark.parametrize(("content", "said"), [(b"", "LMDB"), (b"x" * 9000, "not an LMDB that can be read here")])
def test_a_file_that_is_no_store(tmp_path, content, said):
    (tmp_path / "x.lmdb").write_bytes(content)
    refused(tmp_path / "x.lmdb" / "a.mp4", str(tmp_path / "x.lmdb"), said)


def test_a_store_that_is_cut_short_is_refused_and_does_not_end_the_process(small):
    data = small / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    refused(small / "a.mp4", str(small), "cut short", "bytes are missing")
    with pytest.raises(DataError, match="cut short"):  # all of it is tried in another process, and that ends
        missing_videos([Clip(id="a", video=str(small / "a.mp4"))])


def test_a_store_whose_last_pages_were_never_written_is_whole(tmp_path, make_video):
    content = make_video("v.mp4", first_number=7).read_bytes()
    store = tmp_path / "x.lmdb"
    with lmdb.open(str(store), map_size=2**24) as environment:
        for values in ({b"x": bytes(50_000)}, {b"x": None}, {b"y": b"y"}, {b"a": content, b"b": bytes(300_000)}):
            with environment.begin(write=True) as transaction:
                for key, value in values.items():
                    transaction.delete(key) if value is None else transaction.put(key, value)
                transaction.delete(b"b")
        needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    assert (store / "data.mdb").stat().st_size < needed
    assert first_number(store / "a.mp4") == 7


def test_a_store_that_was_replaced_is_read_anew_but_never_under_a_reader(small, tmp_path, make_video):
    assert first_number(small / "a.mp4") == 10
    other = write_store(tmp_path / "other.lmdb", {"a": make_video("n.mp4", first_number=99).read_bytes()})
    with open_video(str(small / "a.mp4")) as reader:
        os.replace(other / "data.mdb", small / "data.mdb")
        refused(small / "a.mp4", "replaced while it was being read")
        assert frame_numbers(reader.frames_at([0.0]).data) == [10]
    del reader
    assert first_number(small / "a.mp4") == 99


def test_a_damaged_note_about_the_keys_is_named(small):
    (small / "twinreel.json").write_text('{"keys": "other"}')
    refused(small / "a.mp4", "twinreel.json", "'other'", "'name'")


def test_a_store_that_is_open_by_other_means_says_so(small):
    with lmdb.open(str(small), readonly=True, lock=False):
        refused(small / "a.mp4", "has it open by other means")


def test_where_a_video_lies_says_when_it_changes(small, folder, images):
    kinds = [str(folder / "even/0.mp4"), str(small / "a.mp4"), str(images / "even/0")]
    states = [video_state(video) for video in kinds]
    assert all(states) and len(set(states)) == 3
    assert states[1] is not None and states[1][0] == (small.parent / "two/a.mp4").stat().st_size
    assert video_state(str(small / "none.mp4")) is None and video_state(str(folder / "none.mp4")) is None
    assert content_digest(str(small / "a.mp4")) == content_digest(str(small.parent / "two/a.mp4"))
    assert content_digest(str(images / "even/0")) is None


# ---- packing


def test_two_files_with_one_key_are_refused_by_name(tmp_path):  # ClipBERT defect 21
    for name in ("x/a.mp4", "y/a.avi", "b.mp4"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(make_video(tmp_path / "v.mp4"), tmp_path / "in" / name)
    with pytest.raises(DataError, match="1 keys would stand for several") as error:
        pack_collection(tmp_path / "in", tmp_path / "x.lmdb")
    assert "x/a.mp4" in str(error.value) and "y/a.avi" in str(error.value) and "--keys path" in str(error.value)
    assert not (tmp_path / "x.lmdb").exists() and not (tmp_path / "x.lmdb.partial").exists()
    result = pack_collection(tmp_path / "in", tmp_path / "x.lmdb", suffixes={".mp4"})
    assert (result.listed, result.packed, result.left_out) == (2, 2, {".avi": 1})


def kill_packer(source, out, phase, number):
    """Pack in a process that is killed when so many files are packed or verified."""
    child = os.fork()
    if child == 0:
        pack.COMMIT_BYTES = 1
        seen = []

        def report(what, done, total):
            seen.append(what)
            if seen.count(phase) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            pack_collection(source, out, report=report)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(("phase", "number", "kept"), [("packing", 20, 20), ("verifying", 30, 50)])
def test_a_killed_run_goes_on(folder, store, tmp_path, phase, number, kept):
    out = tmp_path / "x.lmdb"
    kill_packer(folder, out, phase, number)
    assert not out.exists() and (tmp_path / "x.lmdb.partial").is_dir()
    result = pack_collection(folder, out)
    assert (result.listed, result.packed, result.already_there) == (50, 50 - kept, kept)
    assert content_of(out) == content_of(store)
    assert not (tmp_path / "x.lmdb.partial").exists()


def content_of(store):
    with lmdb.open(str(store), readonly=True, lock=False) as environment, environment.begin() as transaction:
        return dict(transaction.cursor())


def test_files_that_changed_or_went_between_a_kill_and_the_next_run(tmp_path):
    for number, name in enumerate("abc"):
        (tmp_path / "in").mkdir(exist_ok=True)
        make_video(tmp_path / "in" / f"{name}.mp4", first_number=number)
    kill_packer(tmp_path / "in", tmp_path / "x.lmdb", "verifying", 1)
    make_video(tmp_path / "in/b.mp4", first_number=50)
    (tmp_path / "in/c.mp4").unlink()
    result = pack_collection(tmp_path / "in", tmp_path / "x.lmdb")
    assert (result.packed, result.already_there) == (1, 1)
    assert content_of(tmp_path / "x.lmdb") == {n.encode(): (tmp_path / f"in/{n}.mp4").read_bytes() for n in "ab"}


def test_what_was_begun_from_something_else_is_not_mixed(folder, tmp_path):
    kill_packer(folder, tmp_path / "x.lmdb", "packing", 3)
    with pytest.raises(DataError, match=r"begun otherwise .*source: .*choose another --out"):
        pack_collection(folder / "even", tmp_path / "x.lmdb")


def test_two_packers_of_one_store_do_not_mix(folder, tmp_path, monkeypatch):
    def second(*arguments):
        with pytest.raises(DataError, match="another process is at work there"):
            pack_collection(folder, tmp_path / "x.lmdb")
        return verify(*arguments)

    verify = pack._verify
    monkeypatch.setattr(pack, "_verify", second)
    assert pack_collection(folder, tmp_path / "x.lmdb").packed == 50


def test_a_store_that_is_there_is_verified_and_left_alone(folder, store, small):
    before = (store / "data.mdb").stat().st_mtime_ns
    result = pack_collection(folder, store)
    assert (result.packed, result.already_there) == (0, 50)
    assert (store / "data.mdb").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="is there already and is not this collection"):
        pack_collection(folder, small)


def test_a_value_that_is_not_its_file_is_found(folder, tmp_path, monkeypatch):
    def spoil(environment, piece):
        commit(environment, piece)
        with environment.begin(write=True) as transaction:
            for key in piece:
                transaction.put(key.encode(), transaction.get(key.encode())[:-1] + b"?")

    commit = pack._commit
    monkeypatch.setattr(pack, "_commit", spoil)
    with pytest.raises(DataError, match=r"is not what .* holds now"):
        pack_collection(folder, tmp_path / "x.lmdb")
    assert not (tmp_path / "x.lmdb").exists()


def test_the_store_grows_where_the_estimate_was_too_small(folder, store, tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "SPARE_BYTES", 2**15)
    monkeypatch.setattr(pack, "_PAGE", 1)
    pack_collection(folder, tmp_path / "x.lmdb")
    assert content_of(tmp_path / "x.lmdb") == content_of(store)


def test_what_cannot_be_packed_is_reported_and_the_rest_packed(tmp_path, make_video):
    content = make_video("v.mp4").read_bytes()
    names = {"good.mp4": content, "empty.mp4": b"", "page.mp4": b"<!DOCTYPE html>", f"{'k' * 200}.mp4": content}
    rows = [{"id": f"row {name[:8]}", "video": name, "caption": "one"} for name in names]
    for name, value in names.items():
        (tmp_path / name).write_bytes(value)
    rows.append({"id": "row gone", "video": "gone.mp4", "caption": "one"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = pack_collection(tmp_path / "rows.jsonl", tmp_path / "x.lmdb")
    reasons = {Path(fault.video).name[:8]: fault.reason for fault in result.faults}
    assert (result.listed, result.packed) == (5, 2) and len(reasons) == 3
    assert (
        "empty file" in reasons["empty.mp"] and "HTML" in reasons["page.mp4"] and "no such file" in reasons["gone.mp4"]
    )
    assert [row.id for row in read_manifest(result.manifest)] == ["row good.mp4", "row kkkkkkkk"]
    written = [json.loads(line) for line in (tmp_path / "x.lmdb/faults.jsonl").read_text().splitlines()]
    assert {fault["reason"] for fault in written} == set(reasons.values())
    with pytest.raises(DataError, match="none of its 1 files can be packed"):
        (tmp_path / "only.jsonl").write_text(json.dumps(rows[1]))
        pack_collection(tmp_path / "only.jsonl", tmp_path / "y.lmdb")


def test_rows_keep_everything_but_their_place(tmp_path, make_video):
    make_video("clips/a.mp4", num_frames=20, frame_rate=10)
    (tmp_path / "words.csv").write_text("start,end,text\n0,1,one\n")
    lines = [
        {"id": "1", "video": "clips/a.mp4", "start_seconds": 0.5, "end_seconds": 1.5, "captions": ["x", "y"]},
        {"id": "2", "video": "clips/a.mp4", "label": ["cut", 3], "split": "val", "caption_file": "words.csv"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = read_manifest(tmp_path / "rows.jsonl")
    for result in (
        pack_collection(tmp_path / "rows.jsonl", tmp_path / "x.lmdb"),
        extract_collection(tmp_path / "rows.jsonl", tmp_path / "images"),
    ):
        after = read_manifest(result.manifest)
        assert [(row.id, row.captions, row.labels, row.split, row.caption_file) for row in after] == [
            (row.id, row.captions, row.labels, row.split, row.caption_file) for row in before
        ]
        assert [(row.start_seconds, row.end_seconds) for row in after] == [(0.5, 1.5), (None, None)]
        assert [first_number(row.video) for row in after] == [0, 0]
        again = read_manifest(tmp_path / "rows.jsonl", root=Path(result.manifest).parent)
        assert [first_number(row.video) for row in again] == [0, 0]


def test_images_are_packed_as_they_are(tmp_path):
    from PIL import Image

    Image.new("L", (8, 6), 7).save(tmp_path / "grey.png")
    Image.new("CMYK", (8, 6)).save(tmp_path / "print.jpg")
    (tmp_path / "no.jpg").write_bytes(b"not an image")
    result = pack_collection(tmp_path, tmp_path.parent / f"{tmp_path.name}.lmdb", kind="image")
    assert (result.packed, [Path(fault.video).name for fault in result.faults]) == (2, ["no.jpg"])
    assert content_of(result.store)[b"grey"] == (tmp_path / "grey.png").read_bytes()


def test_a_store_inside_the_folder_that_is_packed_is_refused(folder):
    with pytest.raises(ConfigError, match=r"lies in .*, which is packed; choose a place beside it"):
        pack_collection(folder, folder / "x.lmdb")
    with pytest.raises(DataError, match="--root goes with a manifest"):
        pack_collection(folder, folder.parent / "y.lmdb", root="/data")


def test_images_inside_the_folder_that_is_extracted_are_refused(tmp_path, make_video):
    make_video("in/a.mp4", num_frames=2)
    (tmp_path / "rows.jsonl").write_text('{"video": "in/a.mp4"}\n')
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for source, out in (("in", "in"), ("in", "in/images"), ("in", "link/images"), ("rows.jsonl", "in")):
        with pytest.raises(ConfigError, match=r"which is (to be )?extracted; choose a place beside it"):
            extract_collection(tmp_path / source, tmp_path / out)
        with pytest.raises(ConfigError, match=r"which is (to be )?packed; choose a place beside it"):
            pack_collection(tmp_path / source, tmp_path / out)
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == ["a.mp4"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota"),
        (errno.EROFS, "Read-only"),
        (errno.EIO, "Input/outp"),
    ],
)
def test_a_full_disk_stops_an_extraction_with_advice(tmp_path, make_video, monkeypatch, number, said):
    for name in "abc":
        make_video(f"in/{name}.mp4", num_frames=2)

    def one_by_one(work, items, **options):
        return ((index, work(item)) for index, item in enumerate(items))

    def flush(folder, names=()):
        if any(video.startswith("img_") for video in names) and (tmp_path / "out/a").exists():
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(extract, "each_file", one_by_one)
    monkeypatch.setattr(extract, "flush_folder", flush)
    with pytest.raises(DataError, match=f"out: {said}.*; 1 of 3 videos are done and stay.*run the same command again"):
        extract_collection(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out/b").exists() and not list((tmp_path / "out/.partial").glob("*"))
    monkeypatch.undo()
    result = extract_collection(tmp_path / "in", tmp_path / "out")
    assert (result.already_there, result.written, result.faults) == (1, 2, [])


@pytest.mark.parametrize(("free", "said"), [(0, "the disk is full"), (2**40, "LMDB says: .*Input/output error")])
def test_an_input_output_error_of_lmdb_on_a_full_disk_says_that_it_is_full(
    tmp_path, make_video, monkeypatch, free, said
):
    make_video("in/a.mp4", num_frames=2)

    def fail(environment, piece):
        raise lmdb.Error("mdb_txn_commit: Input/output error")

    monkeypatch.setattr(pack, "_commit", fail)
    monkeypatch.setattr(pack.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - free, free))
    with pytest.raises(DataError, match=said):
        pack_collection(tmp_path / "in", tmp_path / "x.lmdb")


def test_places_that_cannot_be_made_are_refused_before_the_work(tmp_path, make_video, monkeypatch):
    make_video("in/a.mp4", num_frames=2)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(pack, "_write", None)  # would fail otherwise
    for store in (pack_collection, extract_collection):
        with pytest.raises(DataError, match=r"dangling is a link to .*gone, which is not there; choose another --out"):
            store(tmp_path / "in", tmp_path / "dangling")
        with pytest.raises(DataError, match=r"can't be made or written"):
            store(tmp_path / "in", "/dev/null/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "in"]


def test_an_extraction_of_which_nothing_is_kept_leaves_no_old_manifest(tmp_path, make_video):
    make_video("in/a.mp4", num_frames=2)
    make_video("in/b/c.mp4", num_frames=2)
    assert extract_collection(tmp_path / "in", tmp_path / "out").unlisted == []
    (tmp_path / "in/a.mp4").unlink()
    result = extract_collection(tmp_path / "in", tmp_path / "out")
    assert result.unlisted == ["a"] and [row.id for row in read_manifest(result.manifest)] == ["b/c.mp4"]
    (tmp_path / "in/b/c.mp4").rename(tmp_path / "in/d.mp4")
    (tmp_path / "in/d.mp4").write_bytes(b"<html>")
    result = extract_collection(tmp_path / "in", tmp_path / "out")
    assert (result.manifest, result.unlisted, len(result.faults)) == (None, ["a", "b/c"], 1)
    assert not (tmp_path / "out/manifest.jsonl").exists()


def test_a_rate_above_that_of_a_video_is_told(tmp_path, make_video):
    video = str(make_video("in/a.mp4", num_frames=20, frame_rate=10))
    for _ in range(2):  # written and already there
        assert extract_collection(tmp_path / "in", tmp_path / "fast", rate=20).repeated == {video: 20}
    assert extract_collection(tmp_path / "in", tmp_path / "same", rate=10).repeated == {}
    assert extract_collection(tmp_path / "in", tmp_path / "near", rate=10.01).repeated == {}
    with pytest.raises(ConfigError, match=r"rate=1e\+09: .* up to 1000; leave it out for every frame"):
        extract_collection(tmp_path / "in", tmp_path / "out", rate=1e9)

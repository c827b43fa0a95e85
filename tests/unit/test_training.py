"""The loop: resumed = uninterrupted, chunked = whole, faults, precision, and what a run folder holds."""

import contextlib
import json

import pytest
import torch
from small_runs import CPU, assert_same, assert_same_runs, be_killed, in_step, own, recipe, records, weights_of
from torch import nn

from twinreel import training
from twinreel.assembly import build_model, build_task, load_model, load_run, training_rows
from twinreel.checkpoint import find_checkpoint, load_training_state
from twinreel.data.captions import collection_captions
from twinreel.data.dataset import ClipDataset
from twinreel.data.loader import load_batches
from twinreel.data.plan import Shares
from twinreel.data.transforms import network_input
from twinreel.errors import CheckpointError, ConfigError, DataError, TrainingError
from twinreel.evaluation import evaluate
from twinreel.gradients import global_gradient
from twinreel.models import create_model
from twinreel.parts import build_parts, training_rules
from twinreel.recipe import load_recipe
from twinreel.start_line import start_line
from twinreel.tasks import Contrastive, WholeModel
from twinreel.training import train


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [recipe, own])  # B061
def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, videos, workers, make, monkeypatch):
    settings = ["train.num_steps=15", "train.save_every=8 steps", f"data.num_workers={workers}"]
    wanted = make(videos, *settings)
    train(wanted, tmp_path / "whole", quiet=True)

    in_step(monkeypatch, 11, be_killed)  # 8 steps saved, 2 more lost, then resumed from 8
    with pytest.raises(KeyboardInterrupt):
        train(wanted, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    torch.manual_seed(12345)  # resuming must not depend on the process's own random state
    result = train(wanted, tmp_path / "parts", resume=True, quiet=True)
    assert result.steps == 15
    assert_same_runs(tmp_path / "whole", tmp_path / "parts")
    assert len(records(tmp_path / "parts")) == 15 and len(records(tmp_path / "parts", "eval")) == 1


@pytest.mark.filterwarnings("ignore:This DataLoader will create 4 worker")
def test_batches_do_not_depend_on_the_number_of_workers(tmp_path, videos):
    for workers in (0, 2, 4):
        train(recipe(videos, f"data.num_workers={workers}"), tmp_path / str(workers), quiet=True)
    for workers in (2, 4):
        assert_same(weights_of(tmp_path / "0"), weights_of(tmp_path / str(workers)))


def test_two_runs_with_one_seed_are_equal_and_with_another_differ(tmp_path, videos):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(recipe(videos, f"train.seed={seed}"), tmp_path / name, quiet=True)
    assert_same(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))
    assert any(not torch.equal(v, weights_of(tmp_path / "c")[k]) for k, v in weights_of(tmp_path / "a").items())


def test_the_loss_falls_on_a_handful_of_videos(tmp_path, videos):
    train(recipe(videos, "train.num_steps=60", "optim.learning_rate=3e-3"), tmp_path / "run", quiet=True)
    losses = [record["loss"] for record in records(tmp_path / "run")]
    assert sum(losses[-10:]) < 0.75 * sum(losses[:10])


def test_accumulation_divides_by_the_valid_rows_of_the_global_batch(videos):
    """A loss that is a mean over rows must not see the micro-batches."""

    def row_mean(video, text, *, mask, valid):
        rows = video.pow(2).sum(1)[valid]
        return rows.mean() if len(rows) else rows.sum()

    def gradients(micro):
        wanted = own(videos, f"train.micro_batch_size={micro}")
        parts = build_parts(wanted, CPU)
        parts.model.double()
        for module in parts.model.modules():
            if isinstance(module, nn.Dropout | nn.BatchNorm3d):
                module.eval()
        parts.task = Contrastive(loss=row_mean, num_candidates=wanted.task.num_candidates)
        parts.whole = WholeModel(parts.model, parts.task)
        batches = list(
            load_batches(
                ClipDataset(parts.rows, training_rules(wanted, parts.model, parts.rows)),
                parts.plan.micro_batches(0, 1, parts.shares),
                num_workers=0,
            )
        )
        batches[0].valid[0] = False  # an unreadable sample
        result = global_gradient(parts, wanted, batches, 0)
        assert result.rows == 3 and result.valid() == [False, True, True, True] and len(batches) == 4 // micro
        found = [p.grad.clone() for p in parts.model.video_tower.parameters()]
        rows = [
            parts.model.encode_video(network_input(b, parts.model.preprocessing, parts.device))[b.valid]
            for b in batches
        ]
        parts.model.zero_grad()
        torch.cat(rows).pow(2).sum(1).mean().backward()  # the mean over the three rows that count, by hand
        for ours, wished in zip(found, parts.model.video_tower.parameters(), strict=True):
            assert torch.allclose(ours, wished.grad, rtol=1e-9, atol=1e-12)
        return result.mean_loss, found

    whole_loss, whole = gradients(4)
    for micro in (1, 2):
        loss, parts = gradients(micro)
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        for a, b in zip(whole, parts, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_and_its_state_is_saved(tmp_path, videos, precision):
    train(recipe(videos, f"train.precision={precision}"), tmp_path / "run", quiet=True)
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in records(tmp_path / "run"))
    state = load_training_state(find_checkpoint(tmp_path / "run")[0])
    assert bool(state["scaler"]) == (precision == "fp16")
    train(recipe(videos, f"train.precision={precision}"), tmp_path / "again", quiet=True)
    assert_same(weights_of(tmp_path / "run"), weights_of(tmp_path / "again"))
    assert torch.backends.mkldnn.enabled
    assert all(value.dtype == torch.float32 for name, value in weights_of(tmp_path / "run").items() if "bn" in name)


def test_frozen_parts_do_not_change_nor_their_statistics(tmp_path, videos):
    wanted = own(videos, "model.freeze=[video_tower]")
    before = build_parts(wanted, CPU).model.state_dict()
    train(wanted, tmp_path / "run", quiet=True)
    after = weights_of(tmp_path / "run")
    for name, value in before.items():
        assert torch.equal(value, after[name]) == name.startswith("video_tower"), name


def test_word_vectors_stay_frozen_through_a_resume_without_their_file(tmp_path, videos):
    rows = training_rows(recipe(videos))
    words = len(build_model(recipe(videos), build_task(recipe(videos)), collection_captions(rows)).vocabulary)
    torch.save(torch.randn(words + 1, 12), tmp_path / "word2vec.pth")
    settings = [f"model.word_vectors={tmp_path / 'word2vec.pth'}", "model.word_embedding_size=12"]
    train(recipe(videos, *settings), tmp_path / "whole", quiet=True)
    (tmp_path / "word2vec.pth").unlink()
    before = weights_of(tmp_path / "whole")
    train(recipe(videos, *settings), tmp_path / "whole", resume="step_2", quiet=True)
    assert_same(before, weights_of(tmp_path / "whole"))
    first = weights_of(tmp_path / "whole", "step_2")["text_tower.word_embd.weight"]
    assert torch.equal(first, before["text_tower.word_embd.weight"])


def test_starting_weights_of_one_tower(tmp_path, videos):
    train(recipe(videos), tmp_path / "a", quiet=True)
    weights = find_checkpoint(tmp_path / "a")[0] / "weights.safetensors"
    started = build_parts(recipe(videos, f"model.weights={{video_tower: {weights}}}", "train.seed=5"), CPU)
    trained, now = weights_of(tmp_path / "a"), started.model.state_dict()
    same = {name for name in trained if torch.equal(trained[name], now[name].contiguous())}
    assert {name for name in trained if name.startswith("video_tower")} <= same
    assert "text_tower.fc1.weight" not in same


def test_the_run_folder_says_what_happened(tmp_path, videos):  # B050: batch, accumulation, learning rate are said
    run = tmp_path / "run"
    result = train(recipe(videos, "eval.every=3 steps"), run)
    assert result.steps == 6 and result.stopped_by is None
    assert {"recipe.yaml", "versions.json", "log.txt", "metrics.jsonl", "tensorboard", "checkpoints", "lock"} == {
        item.name for item in run.iterdir()
    }
    assert {item.name for item in (run / "checkpoints").iterdir()} >= {"last", "best", "step_0000006"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, 7))
    for line in trained:
        assert {"loss", "learning_rate", "gradient_norm", "clips_per_second", "waiting_share", "memory_gb"} <= set(line)
        assert line["gradient_norm"] > 0 and line["clips_per_second"] > 0 and line["memory_gb"] > 0
        assert line["video_norm"] > 0 and line["text_norm"] > 0 and 1 <= line["effective_rank"] <= 4
        assert -1 <= line["negative_similarity"] <= line["positive_similarity"] <= 1 and line["similarity_spread"] > 0
        assert line["logit_scale"] == pytest.approx(10)  # 1 / temperature
    assert trained[0]["learning_rate"] == pytest.approx(2e-3 * 0.1)
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [3, 6]
    log = (run / "log.txt").read_text()
    for words in ("rows 8", "global batch 4 = 1 process x 1 micro-batch x 4 clips on cpu",
                  "12 negative captions a clip (of the global batch)",
                  "4 frames at 8 a second = 0.5 s",
                  "learning rate first 0.0002, highest 0.002", "its curve: step 1 0.0002, step 3 0.002, ",
                  "trained, 0 frozen", "from step 0"):  # fmt: skip
        assert words in log, words
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    for tag in ("train/loss", "eval/loss", "train/learning_rate", "train/gradient_norm", "train/clips_per_second",
                "train/waiting_share", "train/memory_gb", "train/effective_rank", "train/logit_scale"):  # fmt: skip
        assert tag in tags
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 7))


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ((8, 1, 4), "global batch 8 = 1 process x 2 micro-batches x 4 clips on cpu, "
                    "12 negative captions a clip (of the micro-batch across processes), precision fp32"),
        ((8, 2, 2), "global batch 8 = 2 processes x 2 micro-batches x 2 clips on cpu, "
                    "12 negative captions a clip (of the micro-batch across processes)"),
        ((8, 3, None), "global batch 8 = 3 processes x 1 micro-batch x 3 or 2 clips on cpu, "
                       "28 negative captions a clip (of the global batch)"),
    ],
)  # fmt: skip
def test_the_start_line_says_how_the_batch_is_shared_and_what_a_clip_is_compared_with(videos, shares, words):  # B050
    wanted = recipe(videos, "train.global_batch_size=8", "train.ema_decay=0.999", "train.seed=7")
    parts = build_parts(wanted, CPU)
    parts.shares = Shares.cut(*shares)
    line = start_line(wanted, parts, 3)
    assert words in line
    for words in ("seed 7", "weights averaged (EMA 0.999); going on from step 3", "batch norm per_process",
                  "it belongs to the global batch and is never scaled"):  # fmt: skip
        assert words in line


def test_a_loaded_model_answers_as_the_trained_one_and_best_is_taken(tmp_path, videos):
    run = tmp_path / "run"
    result = train(recipe(videos), run, quiet=True)
    model = load_model(run)
    assert not model.training and model.vocabulary is not None
    report = evaluate(run)
    for name, value in result.report.metrics.items():
        assert report.metrics[name] == pytest.approx(value, abs=1e-6), name
    assert load_run(run).checkpoint.name == (run / "checkpoints" / "best").resolve().name
    assert load_run(run, "step_4").checkpoint.name == "step_0000004"
    assert (
        create_model("conv3d_small", weights=load_run(run).checkpoint / "weights.safetensors").encode_video is not None
    )


def test_a_second_run_into_a_folder_is_refused_and_a_finished_one_has_nothing_to_do(tmp_path, videos, capsys):
    run = tmp_path / "run"
    wanted = recipe(videos)
    train(wanted, run, quiet=True)
    with pytest.raises(ConfigError, match=r"already holds a run; go on with --resume"):
        train(wanted, run, quiet=True)
    assert train(wanted, run, resume=True).steps == 6
    assert "nothing to do" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="nothing to resume here"):
        train(wanted, tmp_path / "other", resume=True, quiet=True)
    with pytest.raises(ConfigError, match=r"optim.learning_rate: 0.002 in the run, 0.5 now"):
        train(recipe(videos, "optim.learning_rate=0.5"), run, resume=True, quiet=True)


def test_resume_from_a_named_checkpoint(tmp_path, videos):
    run = tmp_path / "run"
    train(recipe(videos), run, quiet=True)
    before = weights_of(run)
    train(recipe(videos), run, resume="step_4", quiet=True)
    assert_same(before, weights_of(run))
    assert [r["step"] for r in records(run)] == list(range(1, 7))


def test_a_broken_newest_checkpoint_is_named_and_training_goes_on_from_the_one_before(tmp_path, videos, capsys):
    run = tmp_path / "run"
    train(recipe(videos), run, quiet=True)
    before = weights_of(run)
    (run / "checkpoints" / "step_0000006" / "weights.safetensors").write_bytes(b"half")
    train(recipe(videos), run, resume=True)
    assert "step_0000006 is broken" in capsys.readouterr().err
    assert_same(before, weights_of(run))


def test_clipping_bounds_the_step(tmp_path, videos):
    train(recipe(videos, "optim.clip_norm=0.001", "optim.name=sgd", "optim.momentum=0", "optim.learning_rate=1.0",
                 "optim.weight_decay=0", "train.num_steps=3", "train.save_every=1 steps", "optim.decay=none",
                 "optim.warmup_steps=0"), tmp_path / "run", quiet=True)  # fmt: skip
    before, after = weights_of(tmp_path / "run", "step_1"), weights_of(tmp_path / "run", "step_2")
    moved = sum(
        float((after[name] - value).pow(2).sum())
        for name, value in before.items()
        if "running" not in name and value.is_floating_point()
    )
    assert 0 < moved**0.5 <= 0.0011


def test_a_gpu_that_is_not_there_is_refused_before_any_work(tmp_path, videos):  # B049
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="sees no GPU here"):
        train(recipe(videos, "train.device=cuda"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_a_warm_up_longer_than_the_run_is_refused(tmp_path, videos):
    with pytest.raises(ConfigError, match="a warm-up of 9 steps is not shorter than the run of 6 steps"):
        train(recipe(videos, "optim.warmup_steps=9"), tmp_path / "run", quiet=True)


def test_errors_of_data_come_through(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv"):
        train(
            load_recipe("s3dg_small_own_videos", [f"data.manifest={tmp_path / 'none.csv'}"]),
            tmp_path / "run",
            quiet=True,
        )


def test_lines_of_metrics_do_not_depend_on_where_a_run_was_resumed(tmp_path, videos):
    wanted = recipe(videos, "train.num_steps=10", "train.log_every=5", "train.save_every=3 steps", "train.keep_last=9")
    train(wanted, tmp_path / "run", quiet=True)
    before = records(tmp_path / "run")
    assert [record["step"] for record in before] == [5, 10]
    train(wanted, tmp_path / "run", resume="step_9", quiet=True)
    assert records(tmp_path / "run") == before


def test_a_changed_manifest_is_refused_on_resume(tmp_path):
    from videos import make_video

    numbers = "one two three four five six".split()
    lines = ["video,caption"]
    for i in range(6):
        make_video(tmp_path / f"{i}.mp4", num_frames=8, frame_rate=8, size=(48, 48))
        lines.append(f"{i}.mp4,sentence number {numbers[i]}")
    manifest = tmp_path / "m.csv"
    manifest.write_text("\n".join(lines))
    base = [
        f"data.manifest={manifest}", "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32}",
        "train.num_epochs=null", "train.num_steps=4", "train.global_batch_size=4", "data.num_workers=0",
        "train.save_every=2 steps", "optim.warmup_epochs=0", "model.name=conv3d_small",
    ]  # fmt: skip
    train(load_recipe("s3dg_small_own_videos", base), tmp_path / "run", quiet=True)
    manifest.write_text("\n".join([lines[0], *lines[:0:-1]]))
    with pytest.raises(CheckpointError, match=r"the training rows have changed since \(6 rows"):
        train(load_recipe("s3dg_small_own_videos", base), tmp_path / "run", resume="step_2", quiet=True)
    manifest.write_text("\n".join(lines))
    assert train(load_recipe("s3dg_small_own_videos", base), tmp_path / "run", resume="step_2", quiet=True).steps == 4


def test_frames_may_be_spread_over_the_whole_window(tmp_path, videos):
    wanted = recipe(videos, "data.clip_start=uniform", "eval.windows=whole")
    result = train(wanted, tmp_path / "run", quiet=True)
    assert result.report.protocol["windows"] == "1 a video, whole, embeddings averaged"
    rules = training_rules(wanted, load_model(tmp_path / "run"), [])
    sample = rules(training_rows(wanted)[0], 0)
    steps = sample.pts_seconds.diff()
    assert float(steps.min()) > 1.5 / 8  # further apart than frames at 8 a second would be


def test_two_hundred_steps_at_ten_times_the_rate_stay_finite_or_stop_with_the_reason(tmp_path, videos):  # B082
    wanted = recipe(videos, "train.num_steps=200", "optim.learning_rate=0.02", "train.save_every=200 steps",
                    "train.log_every=20", "eval.split=null")  # fmt: skip
    try:
        train(wanted, tmp_path / "run", quiet=True)
    except TrainingError as error:
        assert "no weight was changed" in str(error) and "optim.learning_rate" in str(error)
    else:
        assert all(record["loss"] is not None for record in records(tmp_path / "run"))


@pytest.mark.parametrize("temperature", ["0", "-1", "0.0001", "100"])
def test_a_temperature_that_no_scale_survives_is_refused(tmp_path, videos, temperature):  # B082
    with pytest.raises(ConfigError, match="temperature"):
        train(recipe(videos, f"task.temperature={temperature}"), tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("killed_in", ["evaluate_task", "set_link"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_run_killed_while_it_is_judged_ends_as_an_undisturbed_one(tmp_path, videos, monkeypatch, killed_in, call):
    wanted = recipe(videos, "eval.every=3 steps")
    train(wanted, tmp_path / "whole", quiet=True)
    real, calls = getattr(training, killed_in), []

    def killed(*args, **options):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(training, killed_in, killed)
    with contextlib.suppress(KeyboardInterrupt):
        train(wanted, tmp_path / "parts", quiet=True)
    monkeypatch.undo()
    train(wanted, tmp_path / "parts", resume=True, quiet=True)
    for kind in ("train", "eval"):
        assert records(tmp_path / "whole", kind) == records(tmp_path / "parts", kind)
    for link in ("best", "last"):
        one, other = (tmp_path / run / "checkpoints" / link for run in ("whole", "parts"))
        assert one.resolve().name == other.resolve().name
    assert_same(weights_of(tmp_path / "whole", "best"), weights_of(tmp_path / "parts", "best"))


def test_a_run_that_began_with_founding_weights_resumes_with_its_table_frozen(tmp_path, videos):
    begun = build_parts(recipe(videos), CPU).model
    founding = {
        name.replace("text_tower.", "text_module.").removeprefix("video_tower."): value.contiguous().clone()
        for name, value in begun.state_dict().items()
    }
    torch.save(founding, tmp_path / "founding.pth")
    wanted = recipe(videos, f"model.weights={tmp_path / 'founding.pth'}")
    train(wanted, tmp_path / "run", quiet=True)
    before = weights_of(tmp_path / "run")
    assert torch.equal(before["text_tower.word_embd.weight"], founding["text_module.word_embd.weight"])
    train(wanted, tmp_path / "run", resume="step_2", quiet=True)
    assert_same(before, weights_of(tmp_path / "run"))


def own_videos(folder, captions, broken=(), *more):
    """A recipe of one epoch over numbered videos, a caption each; some are no videos at all."""
    from videos import make_video

    lines = ["video,caption"]
    for i, caption in enumerate(captions):
        if i in broken:
            (folder / f"{i}.mp4").write_text("no video")
        else:
            make_video(folder / f"{i}.mp4", num_frames=8, frame_rate=8, size=(48, 48))
        lines.append(f"{i}.mp4,{caption}")
    (folder / "m.csv").write_text("\n".join(lines))
    return lambda *overrides: load_recipe("s3dg_small_own_videos", [
        f"data.manifest={folder / 'm.csv'}", "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32}",
        "train.num_epochs=1", f"train.global_batch_size={len(captions)}", "data.num_workers=0",
        "optim.warmup_epochs=0", "model.name=conv3d_small", "data.max_faults=1.0", "train.log_every=1", *more,
        *overrides,
    ])  # fmt: skip


def test_faults_and_masked_captions_are_those_of_the_global_batch_whatever_the_micro_batches(tmp_path):
    """Of the 4 captions of the two clips that can be read, 2 are padding and one says no known word."""
    captions = ["red one", "red two", "zebra", "red three"]
    wanted = own_videos(tmp_path, captions, (1, 3), "task.num_candidates=2", "model.min_word_count=2")
    for micro in (4, 2, 1):
        train(wanted(f"train.micro_batch_size={micro}"), tmp_path / str(micro), quiet=True)
    order = [row for _, row in build_parts(wanted(), CPU).plan.batch(0)]
    faults = [json.loads(line) for line in (tmp_path / "4" / "faults.jsonl").read_text().splitlines()]
    assert [(fault["step"], fault["id"]) for fault in faults] == [
        (1, f"{row}.mp4") for row in order if row in (1, 3)
    ]  # fmt: skip
    for micro in (4, 2, 1):
        [line] = records(tmp_path / str(micro))
        assert (line["faults"], line["masked_captions"]) == (2, 3 / 4)
        assert (tmp_path / str(micro) / "faults.jsonl").read_text() == (tmp_path / "4" / "faults.jsonl").read_text()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_batch_without_a_usable_sample_changes_nothing_and_the_run_goes_on(tmp_path, precision, capsys):
    from videos import make_video

    make_video(tmp_path / "0.mp4", num_frames=8, frame_rate=8, size=(48, 48))
    (tmp_path / "1.mp4").write_text("no video")
    (tmp_path / "m.csv").write_text("video,caption\n0.mp4,one\n1.mp4,two\n")
    wanted = load_recipe("s3dg_small_own_videos", [
        f"data.manifest={tmp_path / 'm.csv'}", "model.preprocessing={num_frames: 4, frame_rate: 8.0, crop_size: 32}",
        "train.num_epochs=3", "train.global_batch_size=1", "data.num_workers=0", "optim.warmup_epochs=0",
        "model.name=conv3d_small", "data.max_faults=1.0", f"train.precision={precision}",
    ])  # fmt: skip
    assert train(wanted, tmp_path / "run").steps == 6
    said = capsys.readouterr().err
    assert said.count("no sample of this batch could be used") == 3 and "3 samples were left out" in said
    assert said.count("left out: ") == 1  # each fault is said once


def test_only_the_best_and_the_last_are_kept(tmp_path, videos):
    train(recipe(videos, "train.keep_last=1", "eval.every=1 steps"), tmp_path / "run", quiet=True)
    folders = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.is_symlink()}
    best = (tmp_path / "run" / "checkpoints" / "best").resolve().name
    assert folders == {best, "step_0000006"}

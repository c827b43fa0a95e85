"""What a run says about its health: statistics against a naive computation, each warning on a planted case."""

import inspect
import math
import re
import time

import numpy as np
import pytest
import torch

from twinreel import recipe
from twinreel.losses import milnce
from twinreel.monitors import Monitor, embedding_statistics

KEYS = [
    "video_norm", "text_norm", "positive_similarity", "negative_similarity", "similarity_gap", "similarity_spread",
    "effective_rank", "text_effective_rank",
]  # fmt: skip


def batch(clips, candidates, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    videos = torch.randn(clips, size, generator=generator) * 3 + 0.5
    texts = torch.randn(clips * candidates, size, generator=generator) * 2 - 0.2
    return videos, texts, torch.ones(clips, candidates, dtype=torch.bool), torch.ones(clips, dtype=torch.bool)


def statistics(videos, texts, mask, valid):
    return embedding_statistics(videos, texts, mask=mask, valid=valid)


def naive_rank(rows):
    """From the matrix of D x D instead of rows x rows."""
    values = np.linalg.svd(np.array(rows), compute_uv=False) ** 2
    shares = [value / values.sum() for value in values if value > 1e-12]
    return math.exp(-sum(share * math.log(share) for share in shares))


def naive_statistics(videos, texts, mask, valid):
    videos = videos.double().numpy()
    texts = texts.double().numpy().reshape(*mask.shape, -1)
    clips = [i for i in range(len(videos)) if valid[i] and mask[i].any()]
    captions = [(i, k) for i in clips for k in range(mask.shape[1]) if mask[i, k]]

    def unit(row):
        return row / math.sqrt((row * row).sum())

    cosine = {(i, j, k): float(unit(videos[i]) @ unit(texts[j, k])) for i in clips for j, k in captions}
    best = {i: max((cosine[i, j, k], k) for j, k in captions if j == i) for i in clips}
    positive = np.mean([score for score, _ in best.values()])
    negative = np.mean([score for (i, j, _), score in cosine.items() if i != j])
    return {
        "video_norm": np.mean([math.sqrt((videos[i] ** 2).sum()) for i in clips]),
        "text_norm": np.mean([math.sqrt((texts[c] ** 2).sum()) for c in captions]),
        "positive_similarity": positive,
        "negative_similarity": negative,
        "similarity_gap": positive - negative,
        "similarity_spread": np.std(list(cosine.values())),
        "effective_rank": naive_rank([unit(videos[i]) for i in clips]),
        "text_effective_rank": naive_rank([unit(texts[i, k]) for i, (_, k) in best.items()]),
    }


# ---- statistics


@pytest.mark.parametrize(("clips", "candidates", "size"), [(2, 1, 3), (9, 3, 5), (12, 4, 32)])
def test_statistics_are_those_of_a_naive_computation(clips, candidates, size):
    videos, texts, mask, valid = batch(clips, candidates, size)
    if candidates > 1:
        mask = torch.rand(clips, candidates) < 0.6
        mask[:3, 0] = True
        mask[4] = False
        valid[5] = False
    values = statistics(videos, texts, mask, valid)
    assert list(values) == KEYS
    assert values == pytest.approx(naive_statistics(videos, texts, mask, valid), rel=1e-4, abs=1e-6)


def test_rows_that_take_no_part_change_nothing_whatever_they_hold():
    videos, texts, mask, valid = batch(10, 2, 8)
    mask[3] = False
    mask[6, 1] = False
    valid[7] = False
    want = statistics(videos, texts, mask, valid)
    videos[[3, 7]] = math.nan
    texts[[6, 7, 13]] = math.inf
    texts[[14, 15]] = 1e4
    assert statistics(videos, texts, mask, valid) == want
    rest = [0, 1, 2, 4, 5, 6, 8, 9]
    fewer = texts.view(10, 2, 8)[rest].flatten(0, 1)
    assert statistics(videos[rest], fewer, mask[rest], valid[rest]) == pytest.approx(want, rel=1e-5)


def test_the_first_128_usable_clips_are_looked_at():
    videos, texts, mask, valid = batch(172, 1, 8)
    valid[:10] = False
    videos[138:], texts[138:] = 7.0, -7.0
    values = statistics(videos, texts, mask, valid)
    assert values == statistics(videos[10:138], texts[10:138], mask[10:138], valid[10:138])
    videos[137] = 7.0
    assert values != statistics(videos, texts, mask, valid)


def test_segments_are_averaged_before_anything_else():
    videos, texts, mask, valid = batch(6, 2, 8)
    shift = torch.randn(6, 8)
    segments = torch.stack([videos + shift, videos - shift], dim=1)
    assert statistics(segments, texts, mask, valid) == pytest.approx(statistics(videos, texts, mask, valid), rel=1e-4)


@pytest.mark.parametrize("usable", [0, 1])
def test_fewer_than_two_usable_clips_say_nothing(usable):
    videos, texts, mask, valid = batch(4, 2, 8)
    mask[usable:2] = False
    valid[2:] = False
    assert statistics(videos, texts, mask, valid) == {}
    assert statistics(videos[:0], texts[:0], mask[:0], valid[:0]) == {}


def test_effective_rank_counts_the_directions_in_use():
    texts, mask, valid = torch.randn(12, 16), torch.ones(12, 1).bool(), torch.ones(12).bool()
    alike = torch.randn(1, 16) * torch.arange(1.0, 13.0)[:, None]
    assert statistics(alike, texts, mask, valid)["effective_rank"] == pytest.approx(1.0, abs=1e-4)
    three = torch.eye(16)[:3].repeat(4, 1) * torch.arange(1.0, 13.0)[:, None]
    assert statistics(three, texts, mask, valid)["effective_rank"] == pytest.approx(3.0, rel=1e-4)
    assert statistics(texts, three, mask, valid)["text_effective_rank"] == pytest.approx(3.0, rel=1e-4)
    assert statistics(torch.eye(16)[:12], texts, mask, valid)["effective_rank"] == pytest.approx(12.0, rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])  # the square of the last is beyond float32
def test_embeddings_that_are_not_finite_give_nan(bad):
    videos, texts, mask, valid = batch(6, 1, 8)
    wrong = videos.clone()
    wrong[2, 3] = bad
    values = statistics(wrong, texts, mask, valid)
    assert list(values) == KEYS
    assert {name for name, value in values.items() if math.isfinite(value)} == {"text_norm", "text_effective_rank"}
    wrong = texts.clone()
    wrong[2, 3] = bad
    values = statistics(videos, wrong, mask, valid)
    assert {name for name, value in values.items() if math.isfinite(value)} == {"video_norm", "effective_rank"}


def test_embeddings_of_zeros_are_alike_and_have_no_rank():
    _, texts, mask, valid = batch(6, 2, 8)
    values = statistics(torch.zeros(6, 8), texts, mask, valid)
    assert values["video_norm"] == values["similarity_spread"] == values["similarity_gap"] == 0
    assert math.isnan(values["effective_rank"])


def test_precision_and_autocast_of_the_caller_do_not_matter():
    videos, texts, mask, valid = batch(8, 2, 8)
    videos, texts = videos.bfloat16(), texts.bfloat16()
    want = statistics(videos.float(), texts.float(), mask, valid)
    videos.requires_grad_()
    texts.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert statistics(videos, texts, mask, valid) == want


def test_statistics_are_cheap():
    videos, texts, mask, valid = batch(1024, 4, 512)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        statistics(videos, texts, mask, valid)
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.25  # all 1024 clips: 4096 x 1024 scores and a rank of 1024 rows take longer


# ---- warnings


HEALTHY = {
    "loss": 2.5, "waiting_share": 0.05, "masked_captions": 0.1, "loss_scale": 65536.0, "logit_scale": 10.0,
    "video_norm": 4.2, "text_norm": 5.1, "positive_similarity": 0.7, "negative_similarity": 0.1,
    "similarity_gap": 0.6, "similarity_spread": 0.2, "effective_rank": 6.0, "text_effective_rank": 8.0,
}  # fmt: skip
SETTINGS = {
    "normalize": True, "temperature": 0.1, "num_clips": 32, "num_workers": 3, "patience_steps": 100,
    "chance_loss": math.log(32),
}  # fmt: skip
PLAIN = {"normalize": False, "temperature": 1.0}
LEARNED = {"temperature": None}


def monitor(**settings):
    said = []
    return Monitor(lambda text, key: said.append((key, text)), **(SETTINGS | settings)), said


def look(times=7, first=100, settings=None, **values):
    """What is said in some looks, 10 steps apart, at a healthy line but for what is given."""
    watcher, said = monitor(**(settings or {}))
    for i in range(times):
        watcher.look(first + 10 * i, HEALTHY | values)
    return said


PLANTED = [
    ("temperature", {"temperature": 0.02}, {}, ["fixed temperature is 0.02", "0.05 to 0.2", "unstable"]),
    ("temperature", {"temperature": 0.5}, {}, ["fixed temperature is 0.5", "alike", "task.temperature"]),
    ("temperature", LEARNED, {"logit_scale": 100.0}, ["learned temperature is 0.01", "keep it fixed"]),
    ("temperature", LEARNED, {"logit_scale": 4.9}, ["learned temperature is 0.204"]),
    ("normalize", {"normalize": False}, {}, ["temperature is 0.1", "task.normalize=true"]),
    ("normalize", LEARNED | {"normalize": False}, {"logit_scale": 14.0}, ["0.0714", "task.normalize=true"]),
    ("normalize", PLAIN, {"video_norm": 6.0, "text_norm": 9.0}, ["6 (videos)", "9 (captions)", "54", "normalize=true"]),
    ("collapse", {}, {"effective_rank": 1.21}, ["all videos look", "1.21", "optim.learning_rate", "warmup_steps"]),
    ("collapse", {}, {"text_effective_rank": 1.3}, ["all captions look", "1.30", "train.micro_batch_size"]),
    ("similarity", {}, {"similarity_spread": 5e-5}, ["5.0e-05", "4.2 and 5.1", "model.weights"]),
    ("chance", {}, {"loss": 3.47}, ["3.47 over the last 5", "3.466", "step 140", "optim.learning_rate"]),
    ("loss_scale", {}, {"loss_scale": 0.5}, ["0.5", "overflow", "train.precision=bf16"]),
    ("waiting", {}, {"waiting_share": 0.35}, ["35%", "data.num_workers (now 3)"]),
    ("masked_captions", {}, {"masked_captions": 0.75}, ["75%", "known word", "model.vocabulary"]),
]


@pytest.mark.parametrize(("key", "settings", "values", "words"), PLANTED)
def test_a_planted_illness_is_named_once_with_its_numbers_and_a_remedy(key, settings, values, words):
    said = look(settings=settings, **values)
    assert [name for name, _ in said] == [key]
    for word in words:
        assert word in said[0][1]


@pytest.mark.parametrize(("key", "settings", "values", "words"), PLANTED)
def test_every_remedy_is_a_key_of_the_recipe(key, settings, values, words):
    sections = {
        "model": recipe.ModelSection, "task": recipe.TaskSection, "data": recipe.DataSection,
        "optim": recipe.OptimSection, "train": recipe.TrainSection,
    }  # fmt: skip
    named = re.findall(r"\b(model|task|data|optim|train)\.([a-z_]+)", look(settings=settings, **values)[0][1])
    assert named
    for section, option in named:
        known = set(sections[section].model_fields)
        known |= set(inspect.signature(milnce).parameters) if section == "task" else set()
        assert option in known, f"{section}.{option}"


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({}, {}),
        ({"temperature": 0.05}, {}),
        ({"temperature": 0.2}, {}),
        (LEARNED, {"logit_scale": float(np.nextafter(np.float32(5), np.float32(0)))}),
        (LEARNED, {"logit_scale": float(np.nextafter(np.float32(20), np.float32(30)))}),
        (LEARNED, {"logit_scale": math.nan}),
        (PLAIN, {"logit_scale": 1.0}),
        (LEARNED | {"normalize": False}, {"logit_scale": None}),
        ({}, {"video_norm": 90.0}),
        ({"num_clips": 7}, {"effective_rank": 1.2}),
        ({}, {"effective_rank": 1.5, "similarity_spread": 1e-4, "loss_scale": 1.0}),
        ({}, {"waiting_share": 0.2, "masked_captions": 0.5}),
        ({}, {"loss": math.log(32) * 0.98}),
        ({}, {"loss": math.log(32) * 1.02}),
        ({"chance_loss": None}, {"loss": math.log(32)}),
        ({"safe_temperatures": (0.2, 0.6), "temperature": 0.5}, {}),
    ],
)
def test_a_healthy_run_hears_nothing(settings, values):
    assert look(settings=settings, **values) == []


def test_settings_alone_are_enough_before_the_first_step():
    watcher, said = monitor(temperature=0.5)
    watcher.look(0, {})
    assert [key for key, _ in said] == ["temperature"]
    watcher, said = monitor(temperature=None)
    watcher.look(0, {})
    assert said == []
    watcher.look(10, HEALTHY | {"logit_scale": 40.0})
    assert [key for key, _ in said] == ["temperature"]


@pytest.mark.parametrize("values", [{"effective_rank": 1.1}, {"similarity_spread": 0.0}, {"loss": math.log(32)}])
def test_fresh_towers_are_given_the_steps_of_patience(values):
    assert look(times=10, first=5, **values) == []  # steps 5 to 95
    assert look(times=1, first=99, **values) == []
    assert len(look(times=11, first=5, **values)) == 1  # step 105: past it
    assert len(look(times=5, first=60, **values)) == 1  # step 100: just there


def test_the_first_line_waits_for_readers_that_are_starting():
    assert look(times=1, first=1, waiting_share=0.9) == []
    assert [key for key, _ in look(times=2, first=1, waiting_share=0.9)] == ["waiting"]


def test_all_illnesses_are_said_side_by_side():
    values = {"loss": math.log(32), "waiting_share": 1.0, "masked_captions": 1.0, "loss_scale": 0.1}
    values |= {"effective_rank": 1.0, "text_effective_rank": 1.0, "similarity_spread": 0.0}
    said = dict(look(settings={"temperature": 1.0}, **values))
    assert set(said) == {
        "temperature", "waiting", "masked_captions", "loss_scale", "collapse", "similarity", "chance",
    }  # fmt: skip
    assert "all videos and all captions look alike" in said["collapse"]


def test_chance_is_judged_by_the_mean_of_five_looks_also_after_a_resume():
    chance = math.log(32)
    assert look(times=4, first=5000, loss=chance) == []
    assert [key for key, _ in look(times=5, first=5000, loss=chance)] == ["chance"]
    watcher, said = monitor()
    for i, loss in enumerate([2.0, 2.0, *[chance] * 4, math.nan]):  # four at chance; a line without a loss is no look
        watcher.look(200 + i, {"loss": loss})
    assert said == []
    watcher.look(300, {"loss": chance})
    assert [key for key, _ in said] == ["chance"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "?"])
def test_what_is_missing_or_not_finite_is_passed_over(value):
    for settings in ({}, PLAIN, LEARNED, LEARNED | {"normalize": False}):
        watcher, said = monitor(**settings)
        for step in range(0, 1000, 100):
            watcher.look(step, {})
            watcher.look(step, dict.fromkeys(HEALTHY, value))
        assert said == []
    watcher.look(1000, {"logit_scale": -1.0})
    watcher.look(1000, {"logit_scale": 0.0, "similarity_spread": 0.0})
    assert [key for key, _ in said] == ["similarity"]


def test_a_collapsed_batch_is_found_from_its_embeddings():
    videos, texts, mask, valid = batch(32, 2, 64)
    assert look(**statistics(videos, texts, mask, valid)) == []
    alike = torch.ones(1, 64) + 0.05 * videos
    assert [key for key, _ in look(**statistics(alike, texts, mask, valid))] == ["collapse"]
    constant = torch.ones(32, 64), torch.ones(64, 64)
    said = dict(look(**statistics(*constant, mask, valid)))
    assert set(said) == {"collapse", "similarity"}
    assert "mean lengths 8 and 8" in said["similarity"]

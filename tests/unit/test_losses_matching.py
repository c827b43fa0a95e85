"""Losses of matching: by their formulas, over processes and micro-batches, with videos left out; what is refused."""

import math

import pytest
import torch
from torch.nn import functional

from twinreel.errors import ConfigError
from twinreel.losses import LOSSES, MATCHING_LOSSES, match_cross_entropy, match_hinge, pool_clips, pretraining_loss

NAMES = [name for names in MATCHING_LOSSES.values() for name in names]
POOLINGS = ["lse", "mean", "max"]
ALL = pytest.mark.parametrize("name", NAMES)
CASES = pytest.mark.parametrize(
    ("name", "pooling"),
    [(name, pooling) for name in NAMES for pooling in POOLINGS if (name, pooling) != ("match_hinge", "lse")],
)


def problem(name, batch=7, clips=3, size=4, seed=0, dtype=torch.float64):
    """Logits and targets of a batch: `size` texts or answers."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, size) if name.startswith("answer") else (size, 2 if name == "match_cross_entropy" else 1)
    logits = torch.randn(batch, clips, *shape, generator=generator, dtype=dtype) * 2
    right = torch.randint(size, (batch,), generator=generator)
    targets = functional.one_hot(right, size).to(dtype)
    if name == "answer_binary_cross_entropy":
        targets = torch.rand(batch, size, generator=generator, dtype=dtype)
    return logits, targets


def pooled(logits, pooling):
    return {"lse": logits.logsumexp(1), "mean": logits.mean(1), "max": logits.max(1).values}[pooling]


def naive(name, logits, targets, pooling, margin=0.2):
    """One video, one text and one pair at a time."""
    scores, terms, clips = pooled(logits, pooling), [], logits.shape[1]
    for video, wanted in zip(scores, targets, strict=True):
        if name == "match_cross_entropy":
            each = [functional.cross_entropy(text, one.long()) for text, one in zip(video, wanted, strict=True)]
            terms.append(torch.stack(each).mean())
        elif name == "match_hinge":
            chances = video.squeeze(1).sigmoid()
            costs = [
                (margin + chances[wrong] - chances[right]).clamp(min=0)
                for right in range(len(wanted)) for wrong in range(len(wanted))
                if wanted[right] == 1 and wanted[wrong] == 0
            ]  # fmt: skip
            terms.append(torch.stack(costs).mean())
        elif name == "match_and_choice":
            odds = video[:, 0] - pooled(torch.zeros(1, clips, dtype=video.dtype), pooling)
            each = functional.binary_cross_entropy_with_logits(odds, wanted)
            terms.append(each + functional.cross_entropy(video.flatten(), wanted.argmax()))
        elif name == "answer_binary_cross_entropy":
            each = functional.binary_cross_entropy_with_logits(video.squeeze(0), wanted)
            terms.append(each * len(wanted))
        else:
            terms.append(functional.cross_entropy(video.flatten(), wanted.argmax()))
    return torch.stack(terms).mean()


def value_and_gradient(name, logits, targets, **options):
    leaf = logits.detach().clone().requires_grad_()
    loss = LOSSES[name](leaf, targets, **options)
    loss.backward()
    return loss.detach(), leaf.grad


def test_each_goal_has_its_losses_the_usual_one_first():
    assert MATCHING_LOSSES == {
        "retrieval": ("match_cross_entropy", "match_hinge", "match_and_choice", "choice_cross_entropy"),
        "multiple_choice": ("choice_cross_entropy",),
        "question_answering": ("answer_cross_entropy", "answer_binary_cross_entropy"),
    }


@CASES
def test_losses_are_their_formulas(name, pooling):
    for seed in range(5):
        logits, targets = problem(name, seed=seed)
        leaf = logits.clone().requires_grad_()
        want = naive(name, leaf, targets, pooling)
        [want_gradient] = torch.autograd.grad(want, leaf)
        loss, gradient = value_and_gradient(name, logits, targets, pooling=pooling)
        torch.testing.assert_close(loss, want.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(gradient, want_gradient, rtol=1e-10, atol=1e-14)


def test_lse_of_all_clips_and_outputs_minus_that_of_the_right_output_is_the_cross_entropy_of_pooled_logits():
    logits, targets = problem("match_cross_entropy")
    everything = logits.permute(0, 2, 1, 3).flatten(2).logsumexp(2)
    right = logits.logsumexp(1).gather(2, targets.long()[:, :, None]).squeeze(2)
    want = (everything - right).mean()
    torch.testing.assert_close(match_cross_entropy(logits, targets), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_equal_clips_are_one_clip_to_every_softmax(pooling):
    logits, targets = problem("match_cross_entropy", clips=1)
    one, four = (match_cross_entropy(logits.expand(-1, clips, -1, -1), targets, pooling=pooling) for clips in (1, 4))
    torch.testing.assert_close(one, four, rtol=1e-12, atol=0)


def test_several_texts_of_a_video_may_match():
    logits, targets = problem("match_hinge", batch=3)
    targets[0], targets[1] = torch.tensor([1.0, 0, 1, 0]), torch.tensor([0.0, 1, 1, 1])
    for name in ("match_hinge", "match_cross_entropy"):
        logits, _ = problem(name, batch=3)
        loss = LOSSES[name](logits, targets, pooling="mean")
        torch.testing.assert_close(loss, naive(name, logits, targets, "mean"), rtol=1e-12, atol=0)


@pytest.mark.parametrize("margin", [0.05, 0.2, 0.9])
def test_hinge_of_two_texts_by_hand(margin):
    logits = torch.tensor([math.log(3.0), math.log(1.0)], dtype=torch.float64).view(1, 1, 2, 1)  # chances 3/4 and 1/2
    targets = torch.tensor([[1, 0]])
    assert float(match_hinge(logits, targets, margin=margin)) == pytest.approx(max(0, margin - 0.25))
    assert float(match_hinge(logits, 1 - targets, margin=margin)) == pytest.approx(margin + 0.25)


@CASES
def test_shares_of_processes_add_up(name, pooling):
    logits, targets = problem(name)
    valid = torch.tensor([True, False, True, True, False, True, True])
    logits[1], targets[4] = math.nan, math.nan
    options = {"valid": valid, "pooling": pooling}
    whole, gradient = value_and_gradient(name, logits, targets, **options)
    for shares in ([[0, 1, 2], [3, 4, 5, 6]], [[5, 0], [1, 4], [2, 3, 6]], [[1, 4], [0, 2, 3, 5, 6]]):
        parts = [value_and_gradient(name, logits, targets, own=torch.tensor(share), **options) for share in shares]
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole, rtol=1e-14, atol=0)
        torch.testing.assert_close(sum(part for _, part in parts), gradient, rtol=1e-14, atol=0)


@ALL
def test_accumulation_of_micro_batches_is_a_true_mean(name):
    # The founding code sums the means of its micro-batches, without dividing by their number.
    logits, targets = problem(name, batch=6)
    whole, gradient = value_and_gradient(name, logits, targets)
    micro = [value_and_gradient(name, logits, targets, own=torch.tensor(own)) for own in ([0, 1], [2, 3], [4, 5])]
    torch.testing.assert_close(sum(loss for loss, _ in micro), whole, rtol=1e-14, atol=0)
    torch.testing.assert_close(sum(part for _, part in micro), gradient, rtol=1e-14, atol=0)


@CASES
def test_an_excluded_video_is_as_good_as_absent_whatever_it_holds(name, pooling):
    logits, targets = problem(name)
    valid = torch.tensor([True, False, True, True, True, True, False])
    want, want_gradient = value_and_gradient(name, logits[valid], targets[valid], pooling=pooling)
    logits[1], logits[6], targets[1], targets[6] = math.nan, math.inf, math.nan, 7
    loss, gradient = value_and_gradient(name, logits, targets, valid=valid, pooling=pooling)
    torch.testing.assert_close(loss, want, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient[valid], want_gradient, rtol=1e-14, atol=0)
    assert torch.equal(gradient[~valid], torch.zeros_like(gradient[~valid]))


@CASES
def test_nothing_valid_is_zero_and_never_nan(name, pooling):
    logits, targets = problem(name)
    logits, none = torch.full_like(logits, math.inf), torch.zeros(7, dtype=torch.bool)
    loss, gradient = value_and_gradient(name, logits, targets, valid=none, pooling=pooling)
    assert float(loss) == 0.0 and torch.equal(gradient, torch.zeros_like(logits))
    loss, gradient = value_and_gradient(name, logits, targets, own=torch.empty(0, dtype=torch.int64), pooling=pooling)
    assert float(loss) == 0.0 and torch.equal(gradient, torch.zeros_like(logits))


@CASES
def test_a_valid_video_that_is_not_finite_is_not_hidden(name, pooling):
    logits, targets = problem(name)
    logits[2, 1] = math.nan
    loss, gradient = value_and_gradient(name, logits, targets, pooling=pooling)
    assert not torch.isfinite(loss) and not torch.isfinite(gradient).all()


@CASES
def test_large_logits_stay_finite(name, pooling):
    logits, targets = problem(name)
    loss, gradient = value_and_gradient(name, logits.float() * 1e4, targets.float(), pooling=pooling)
    assert torch.isfinite(loss) and torch.isfinite(gradient).all()


@CASES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_is_float32_at_least_and_float64_is_kept(name, pooling, dtype):
    logits, targets = problem(name)
    logits = logits.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = LOSSES[name](logits, targets.float(), pooling=pooling)
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    reference = LOSSES[name](logits.double(), targets.float(), pooling=pooling)
    assert float(loss) == pytest.approx(float(reference), rel=1e-5)


@CASES
def test_gradients_are_right(name, pooling):
    logits, targets = problem(name, batch=3, clips=2, size=3, seed=1)
    valid = torch.tensor([True, False, True])
    options = {"valid": valid, "own": torch.tensor([2, 1]), "pooling": pooling}
    assert torch.autograd.gradcheck(lambda scores: LOSSES[name](scores, targets, **options), logits.requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_flags_may_be_of_any_type(dtype):
    for name in ("match_cross_entropy", "match_hinge", "choice_cross_entropy"):
        logits, targets = problem(name, dtype=torch.float32)
        want = LOSSES[name](logits, targets)
        torch.testing.assert_close(LOSSES[name](logits, targets.to(dtype)), want, rtol=0, atol=0)


# --- pretraining ---


def pretraining_problem(batch=3, texts=2, places=5, words=11):
    generator = torch.Generator().manual_seed(5)
    word_logits = torch.randn(batch, texts, places, words, generator=generator, dtype=torch.float64)
    targets = torch.full((batch, texts, places), -100)
    targets[0, 0, 2], targets[1, 1, 0], targets[2, 0, 4] = 3, 10, 0
    pair_logits = torch.randn(batch, texts, 2, generator=generator, dtype=torch.float64)
    return word_logits, targets, pair_logits, torch.randint(2, (batch, texts), generator=generator)


def test_pretraining_is_the_mean_over_all_places_plus_that_of_pairs():
    words, targets, pairs, flags = pretraining_problem()
    masked = functional.cross_entropy(words.flatten(0, 2), targets.flatten(), ignore_index=-100, reduction="sum")
    want = masked / targets.numel() + functional.cross_entropy(pairs.flatten(0, 1), flags.flatten())
    torch.testing.assert_close(pretraining_loss(words, targets, pairs, flags), want, rtol=1e-12, atol=0)


def test_pretraining_adds_up_over_processes_and_leaves_out_what_is_not_valid():
    words, targets, pairs, flags = pretraining_problem()
    valid = torch.tensor([True, False, True])
    want = pretraining_loss(words[valid], targets[valid], pairs[valid], flags[valid])
    words[1], pairs[1], targets[1] = math.nan, math.nan, 99
    words, pairs = words.requires_grad_(), pairs.requires_grad_()
    whole = pretraining_loss(words, targets, pairs, flags, valid=valid)
    torch.testing.assert_close(whole, want, rtol=1e-13, atol=0)
    parts = [
        pretraining_loss(words, targets, pairs, flags, valid=valid, own=torch.tensor(own)) for own in ([2], [0, 1])
    ]
    torch.testing.assert_close(sum(parts), want, rtol=1e-13, atol=0)
    whole.backward()
    assert torch.equal(words.grad[1], torch.zeros_like(words.grad[1])) and torch.isfinite(pairs.grad).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda a: a.update(words=a["words"].int()), r"words int64 .* torch.int32 of shape \(3, 2, 5\)"),
        (lambda a: a.update(words=a["words"][:, :, 1:]), r"words int64 \(pictures, texts, places\)"),
        (lambda a: a.update(pair_logits=a["pair_logits"][:, :1]), r"\(3, 1, 2\) must be of the same pictures"),
        (lambda a: a["words"].fill_(11), r"video 0 of the batch has a word that is neither -100 nor 0 to 10"),
        (lambda a: a["pairs"].fill_(2), r"video 0 of the batch has a target that is neither 1"),
    ],
)
def test_pretraining_refuses_in_words(change, words):
    names = ("word_logits", "words", "pair_logits", "pairs")
    arguments = dict(zip(names, pretraining_problem(), strict=True))
    change(arguments)
    with pytest.raises(ConfigError, match=words):
        pretraining_loss(**arguments)


# --- refusals ---


def test_another_pooling_is_refused():
    with pytest.raises(ConfigError, match="pooling='sum': clips are pooled by lse, mean, max"):
        pool_clips(torch.zeros(2, 3), "sum", 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": "lse"}, "match_hinge: pooling=lse refused"),
        ({"margin": 0.0}, "margin=0.0 refused"),
        ({"margin": 1.0}, "margin=1.0 refused"),
        ({"margin": math.nan}, "margin=nan refused"),
    ],
)
def test_hinge_refuses(options, words):
    with pytest.raises(ConfigError, match=words):
        match_hinge(*problem("match_hinge"), **options)


@ALL
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, t: (x[0], t), "logits must be floating point .* torch.float64 of shape"),
        (lambda x, t: (x.long(), t), "logits must be floating point .* torch.int64 of shape"),
        (lambda x, t: (x[:0], t[:0]), "not empty"),
        (lambda x, t: (x[:, :0], t), "not empty"),
        (lambda x, t: (x.new_zeros(7, 3, 3, 3), t), "logits must be floating point"),
        (lambda x, t: (x, t[:, :3]), r"targets must be of shape \(7, 4\), got \(7, 3\)"),
        (lambda x, t: (x, t * 3), r"video 0 of the batch has"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(name, change, words):
    logits, targets = change(*problem(name))
    with pytest.raises(ConfigError, match=f"^{name}: .*{words}"):
        LOSSES[name](logits, targets)


@ALL
def test_masks_that_do_not_fit_are_refused(name):
    logits, targets = problem(name)
    with pytest.raises(ConfigError, match=f"{name}: valid must be bool of shape"):
        LOSSES[name](logits, targets, valid=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ConfigError, match=f"{name}: own has positions from 7 to 7"):
        LOSSES[name](logits, targets, own=torch.tensor([7]))


def test_a_wrong_video_is_named_by_its_place_in_the_batch():
    logits, targets = problem("answer_cross_entropy")
    targets[5] = 0
    own = torch.tensor([0, 5])
    with pytest.raises(ConfigError, match=r"video 5 of the batch has targets .* not in the table must be left out"):
        LOSSES["answer_cross_entropy"](logits, targets, own=own)
    LOSSES["answer_cross_entropy"](logits, targets, own=own, valid=torch.arange(7) != 5)


def test_a_video_with_nothing_to_compare_is_refused_by_the_hinge():
    logits, targets = problem("match_hinge")
    for value in (0, 1):
        targets[3] = value
        with pytest.raises(ConfigError, match="video 3 of the batch has no matching text or no other"):
            match_hinge(logits, targets)

"""ClipBERT's JSON files become recipes that say the same, and every key is accounted for."""

import json
import math

import pytest
import torch
from command_line import twinreel

from clipbert_configs import FILES, PUBLISHED, clipbert_json
from twinreel.errors import ConfigError
from twinreel.founding_configs import convert_config
from twinreel.founding_configs.clipbert_keys import CHOICES, DEFAULTS, LENGTHS, kind_of
from twinreel.models import create_model
from twinreel.optim import build_schedule
from twinreel.recipe import load_recipe
from videos import make_video

MAPS = ("/img=/data/lmdb", "/txt=/data/txt", "/pretrain=/data/weights")
RETRIEVAL = [name for name in PUBLISHED if name.endswith("_ret")]
GOALS = {
    "msrvtt_ret": ("retrieval", "match_cross_entropy"),
    "didemo_ret": ("retrieval", "match_cross_entropy"),
    "anet_ret": ("retrieval", "match_cross_entropy"),
    "msrvtt_qa": ("question_answering", "answer_cross_entropy"),
    "tgif_qa_action": ("multiple_choice", "choice_cross_entropy"),
    "tgif_qa_transition": ("multiple_choice", "choice_cross_entropy"),
    "tgif_qa_frameqa": ("question_answering", "answer_cross_entropy"),
    "vqa": ("question_answering", "answer_binary_cross_entropy"),
}


def write(tmp_path, name, **changes):
    """A published file with other values; None takes a key out."""
    values = json.loads(clipbert_json(name)) | changes
    path = tmp_path / FILES[name]
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "OUT"}, indent=2))
    return path


def converted(path, *overrides, gpus=4, maps=MAPS):
    """The conversion, and the recipe that load_recipe makes of what was written."""
    result = convert_config(path, overrides, gpus=gpus, maps=maps)
    (path.parent / "recipe.yaml").write_text(result.yaml, encoding="utf-8")
    return result, load_recipe(path.parent / "recipe.yaml")


def refused(path, *overrides, **options):
    with pytest.raises(ConfigError) as error:
        convert_config(path, overrides, **options)
    return str(error.value)


def fates(result):
    return {row["key"]: (row["fate"], row["text"]) for row in result.rows}


@pytest.mark.parametrize("name", GOALS)
def test_every_published_file_becomes_a_recipe(tmp_path, name):
    path = write(tmp_path, name)
    given = json.loads(path.read_text())
    result, recipe = converted(path)
    model, prep, train, optim = recipe.model, recipe.model.preprocessing, recipe.train, recipe.optim
    assert (recipe.task.name, recipe.task.goal, recipe.task.loss) == ("video_text_matching", *GOALS[name])
    assert (model.name, model.options["max_text_tokens"]) == ("clipbert_base", given["max_txt_len"])
    assert (prep.crop_size, prep.fit, prep.channel_order) == (given["max_img_size"], "pad", "bgr")
    assert (prep.mean, prep.std, prep.value_range) == ((103.53, 116.28, 123.675), (1, 1, 1), (0, 255))
    picture = name == "vqa"
    assert (prep.num_frames, prep.frame_rate) == ((1, 1) if picture else (given["num_frm"], given["fps"]))
    assert recipe.data.num_clips == (1 if picture else given["train_n_clips"])
    assert recipe.task.options["pooling"] == given.get("score_agg_func", "mean")
    batch = given["train_batch_size"] * given["max_n_example_per_group"]
    accumulated = given["gradient_accumulation_steps"]
    assert train.global_batch_size == 4 * batch * accumulated and train.micro_batch_size == batch
    assert (train.num_epochs, train.precision, train.seed) == (given["num_train_epochs"], "fp16", 42)
    assert (optim.name, optim.betas, optim.eps, optim.weight_decay) == ("adamw", (0.9, 0.98), 1e-6, 1e-3)
    assert optim.eps_before_correction
    assert (optim.learning_rate, optim.learning_rates) == (given["learning_rate"], {"cnn": given["cnn_learning_rate"]})
    assert (optim.decay, optim.warmup_fraction) == ("linear", 0.1)
    assert optim.clip_norm == given["grad_norm"] / accumulated
    assert (recipe.data.crop, recipe.data.flip, recipe.data.clip_start) == ("pad", 0.0, "random")
    assert recipe.eval.windows == ("clipbert" if name in RETRIEVAL else "clipbert_start")
    assert {row["key"] for row in result.rows} == set(given)  # nothing goes without a word
    lost = {key for key, (fate, _) in fates(result).items() if fate == "lost"}
    assert lost == {"vqa": {"train_datasets", "max_n_example_per_group"}}.get(
        name, {"ans2label_path"} & set(given) if GOALS[name][0] == "question_answering" else set()
    )


def test_retrieval_in_full(tmp_path):
    result, recipe = converted(write(tmp_path, "msrvtt_ret"))
    assert recipe.model.weights == "/data/weights/clipbert_image_text_pretrained.pt"
    assert recipe.model.vocabulary == "/data/weights/bert-base-uncased/vocab.txt"
    assert (recipe.data.source, recipe.data.manifest) == ("manifest", "/data/txt/msrvtt_ret/train.jsonl")
    assert (recipe.data.root, recipe.eval.root) == ("/data/lmdb/msrvtt",) * 2
    assert recipe.eval.manifest == "/data/txt/msrvtt_ret/val.jsonl"
    assert (recipe.task.num_negatives, recipe.task.negatives, recipe.data.caption_rows) == (1, "random", "caption")
    assert (recipe.eval.num_clips, recipe.eval.batch_size, recipe.eval.every) == (1, 64, "1 epochs")
    said = fates(result)
    for key in ("dropout", "val_batch_size", "cnn_lr_decay", "output_dir"):
        assert said[key][0] == "dropped"
    assert "no effect" in said["dropout"][1]
    assert "container" not in result.account
    assert "warmup_ratio=0.1" in result.account and "ClipBERT's defaults count" in result.account


@pytest.mark.parametrize("name", ["msrvtt", "didemo", "activitynet"])
def test_the_shipped_recipe_is_the_published_file(tmp_path, name):
    """All but where things are: what import-config makes of the file and what the recipe says is the same."""
    file = {"activitynet": "anet_ret"}.get(name, f"{name}_ret")
    _, imported = converted(write(tmp_path, file))
    shipped = load_recipe(f"clipbert_{name}")
    where = {
        "model": {"weights", "vocabulary"},
        "data": {"source", "manifest", "root", "split", "caption_rows"},
        "eval": {"manifest", "root", "split", "every"},
        "train": {"save_every"},
    }
    for section in ("model", "task", "data", "optim", "train", "eval"):
        ours, theirs = (
            getattr(recipe, section).model_dump(exclude=where.get(section, set())) for recipe in (shipped, imported)
        )
        options = {"class_names"} if section in ("data", "eval") else set()  # of the source manifest
        for key, value in theirs.items():
            if key in options:
                continue
            if key == "preprocessing":
                value = {name: kept for name, kept in value.items() if kept is not None}
                assert ours[key].items() >= value.items()
            else:
                assert ours[key] == value, f"{section}.{key}"


def test_an_accumulated_sum_is_the_mean_with_a_smaller_clip():
    """ClipBERT adds up 4 batches and clips at 5; the import says a mean clipped at 1.25: the same walk."""

    def walk(factor, clip, eps):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
        optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.98), eps=eps, weight_decay=1e-3)
        norms = []
        for step in range(20):
            weight.grad = factor * torch.randn(6, dtype=torch.float64) * (1 + step % 3)
            norms.append(torch.nn.utils.clip_grad_norm_([weight], clip))
            optimizer.step()
        return weight.detach(), norms

    founding, norms = walk(4.0, 5.0, 1e-6)
    assert any(norm > 5 for norm in norms)  # some are clipped
    ours, _ = walk(1.0, 1.25, 1e-6 / 4)
    torch.testing.assert_close(ours, founding, rtol=1e-6, atol=1e-6)  # clip_grad_norm_ adds 1e-6 to a norm
    published_eps, _ = walk(1.0, 1.25, 1e-6)
    torch.testing.assert_close(published_eps, founding, rtol=1e-4, atol=1e-4)  # eps is all that is left
    other, _ = walk(1.0, 5.0, 1e-6)
    assert (other - founding).abs().max() > 1e-3  # the published 5 on a mean is another run


def test_accumulation_is_explained(tmp_path):
    result, recipe = converted(write(tmp_path, "didemo_ret"))
    assert recipe.optim.clip_norm == 1.25
    words = "adds up 4 batches and does not divide, so its gradient is 4 times the mean"
    assert words in result.account and "optim.clip_norm 1.25 here" in result.account
    assert "The learning rate stays" in result.account and "optim.eps=2.5e-07" in result.account
    assert "8 a GPU x 4 GPUs x 4 accumulated = train.global_batch_size 128" in result.account


def test_the_batch_is_of_so_many_gpus(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    assert converted(path, gpus=8)[1].train.global_batch_size == 128
    usual, recipe = converted(path, gpus=None)
    assert recipe.train.global_batch_size == 64 and "--gpus is not given: 4" in usual.account
    run = write(tmp_path, "msrvtt_ret", n_gpu=2)
    assert converted(run, gpus=None)[1].train.global_batch_size == 32
    assert converted(run, gpus=1)[1].train.global_batch_size == 16
    assert "--gpus 0: give at least 1" in refused(path, gpus=0)


@pytest.mark.parametrize(
    ("name", "rows", "steps", "valid", "save"),
    [("msrvtt_ret", 140200, 43813, 500, 438), ("anet_ret", 10009, 6256, 100, 62), ("didemo_ret", 8392, 1312, 100, 13)],
)
def test_validations_come_at_the_steps_of_the_founding_arithmetic(tmp_path, name, rows, steps, valid, save):
    """The numbers of tests/parity/golden/clipbert_schedule.json (step_arithmetic), of lists with so many rows."""
    path = write(tmp_path, name)
    list_path = tmp_path / "txt" / name / "train.jsonl"
    list_path.parent.mkdir(parents=True)
    list_path.write_text("{}\n" * rows)
    result, recipe = converted(path, maps=(f"/txt={tmp_path / 'txt'}",))
    assert (recipe.eval.every, recipe.train.save_every) == (f"{valid} steps", f"{save} steps")
    assert f"of {steps} steps" in fates(result)["num_valid"][1]
    _, known = converted(write(tmp_path, name, num_train_steps=steps, valid_steps=valid), maps=MAPS)
    assert (known.eval.every, known.train.save_every) == (recipe.eval.every, recipe.train.save_every)


def test_short_runs_are_saved_too(tmp_path):  # ClipBERT defect 3
    """Fewer than 100 steps: int(0.01 * steps) was 0 there, and the first update divided by it."""
    _, recipe = converted(write(tmp_path, "msrvtt_ret", num_train_steps=7))
    assert recipe.train.save_every == "1 steps"


def test_the_learning_rate_is_that_of_every_founding_update(tmp_path):
    _, recipe = converted(write(tmp_path, "msrvtt_ret"))
    optim, steps = recipe.optim, 1000
    schedule = build_schedule(
        total_steps=steps, steps_per_epoch=50, learning_rate=optim.learning_rate,
        warmup_fraction=optim.warmup_fraction, decay=optim.decay, final_learning_rate=optim.final_learning_rate,
    )  # fmt: skip
    for step in range(steps):
        update = step + 1  # counted before its rate is asked for
        founding = update / 100 if update < 100 else (steps - update) / 900
        assert schedule.factor(step) == pytest.approx(founding, abs=1e-12), step


def test_a_runs_own_args_are_read(tmp_path):
    """`log/args.json` has every key, flags as true and false, betas from a command line as texts."""
    values = {key: value for key, value in DEFAULTS.items() if value is not None}
    path = write(
        tmp_path, "msrvtt_ret", **{**values, **json.loads(clipbert_json("msrvtt_ret"))}, n_gpu=4, num_labels=2,
        num_train_steps=43813, valid_steps=500,
    )  # fmt: skip
    given = json.loads(path.read_text()) | {"fp16": True, "pin_mem": True, "betas": ["0.9", "0.98"]}
    path.write_text(json.dumps(given))
    result, recipe = converted(path, gpus=None)
    assert (recipe.eval.every, recipe.train.global_batch_size, recipe.optim.betas) == ("500 steps", 64, (0.9, 0.98))
    assert {row["key"] for row in result.rows} == set(given)
    assert all(fate != "lost" for fate, _ in fates(result).values())


def test_overrides_are_read_as_its_scripts_read_them(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    result, recipe = converted(
        path, "fps", "1", "--num_frm", "4", "--train_n_clips=2", "--betas", "0.8", "0.9", "img_pixel_mean", "[1, 2, 3]",
        "fp16", "0", "freeze_cnn", "1", "score_agg_func", "max",
    )  # fmt: skip
    prep = recipe.model.preprocessing
    assert (prep.frame_rate, prep.num_frames, recipe.data.num_clips, recipe.optim.betas) == (1.0, 4, 2, (0.8, 0.9))
    assert (prep.mean, recipe.train.precision) == ((3.0, 2.0, 1.0), "fp32")
    assert (recipe.model.freeze, recipe.task.options["pooling"]) == (("cnn.feature",), "max")
    assert result.yaml.startswith("# From ClipBERT's msrvtt_ret_base_resnet50.json fps 1 --num_frm 4 ")
    [row] = [row for row in result.rows if row["key"] == "fps"]
    assert row["place"] == "command line"


def test_other_values_are_translated(tmp_path):
    path = write(tmp_path, "msrvtt_ret")

    def recipe(*overrides, **changes):
        return converted(write(tmp_path, "msrvtt_ret", **changes) if changes else path, *overrides)[1]

    ranked = recipe("loss_type", "rank", "score_agg_func", "mean", "margin", "0.3", "itm_neg_size", "4")
    assert (ranked.task.loss, ranked.task.options["margin"], ranked.task.num_negatives) == ("match_hinge", 0.3, 4)
    assert recipe("grad_norm", "-1").optim.clip_norm is None
    assert recipe("random_sample_clips", "0").data.clip_start == "center"
    alone = {name: recipe("train_n_clips", "1", "frm_sampling_strategy", name) for name in ("uniform", "start", "end")}
    assert [item.data.clip_start for item in alone.values()] == ["uniform", "start", "center"]
    rates = recipe("transformer_lr_mul", "10", "transformer_lr_mul_prefix", "classifier", "cnn_lr_mul", "3")
    assert rates.optim.learning_rates == pytest.approx(
        {"cnn": 5e-5, "transformer.classifier": 5e-4, "cnn.grid_encoder": 1.5e-4}
    )
    assert recipe("transformer_lr_mul", "10").optim.learning_rates == {"cnn": 5e-5}  # no prefix: nothing had it
    judged = recipe("inference_txt_db", "/txt/test.jsonl", "inference_img_db", "/img/x", "inference_n_clips", "16")
    assert (judged.eval.manifest, judged.eval.root) == ("/data/txt/test.jsonl", "/data/lmdb/x")
    assert (judged.eval.num_clips, judged.eval.windows) == (16, "clipbert")
    assert recipe(img_pixel_mean=[0.5, 0.4, 0.3]).model.preprocessing.value_range == (0, 1)
    parts = recipe(
        e2e_weights_path=None,
        detectron2_weights_path="/pretrain/grid_feat_R-50.pth",
        bert_weights_path="/pretrain/bert-base-uncased/pytorch_model.bin",
    )
    assert parts.model.weights == {
        "cnn": "/data/weights/grid_feat_R-50.pth",
        "transformer.bert": "/data/weights/bert-base-uncased/pytorch_model.bin",
    }


def test_what_had_an_effect_and_has_none_here_is_named(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    for overrides, key in (
        (("data_ratio", "0.5"), "data_ratio"),
        (("cnn_weight_decay", "0.1"), "cnn_weight_decay"),
        (("cnn_lr_decay", "constant"), "cnn_lr_decay"),
        (("max_n_example_per_group", "2"), "max_n_example_per_group"),
        (("train_n_clips", "1", "frm_sampling_strategy", "middle"), "frm_sampling_strategy"),
    ):
        result, _ = converted(path, *overrides)
        assert fates(result)[key][0] == "lost", key
        assert "DROPPED ALTHOUGH THEY HAD AN EFFECT (1):" in result.account


def test_choices_need_no_table_of_answers(tmp_path):  # ClipBERT defect 15
    _, recipe = converted(write(tmp_path, "tgif_qa_action", ans2label_path="OUT"))
    assert (recipe.task.goal, recipe.data.manifest) == ("multiple_choice", "/data/txt/tgif_qa/action_train.jsonl")
    assert (recipe.eval.num_clips, recipe.eval.windows) == (1, "clipbert_start")


def test_a_table_of_answers_says_how_many_there_are(tmp_path):  # ClipBERT defect 14
    """As many outputs as answers: there the head had at least 1500, and naming one without an answer raised."""
    (tmp_path / "answers.json").write_text(json.dumps({"cat": 0, "dog": 1, "car": 2}))
    path = write(tmp_path, "msrvtt_qa", ans2label_path=str(tmp_path / "answers.json"))
    result, recipe = converted(path)
    assert recipe.model.num_classes == 3 and fates(result)["ans2label_path"][0] == "mapped"


def test_sizes_are_read_where_the_file_is(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "base_model.json").write_text(json.dumps(sizes | {"hidden_dropout_prob": 0.2, "model_type": "bert"}))
    result, recipe = converted(path)
    options = recipe.model.options
    assert [options[key] for key in ("hidden_size", "num_layers", "num_heads", "intermediate_size", "dropout")] == [
        64, 2, 4, 128, 0.2,
    ]  # fmt: skip
    assert "is not here" not in result.account
    (tmp_path / "base_model.json").write_text(json.dumps(sizes | {"hidden_act": "relu", "hidden_layers": 3}))
    said = refused(path)
    assert "hidden_act: 'relu'; the network has 'gelu'" in said and "hidden_layers: 3: unknown" in said


def test_a_network_without_dropout_is_one(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    sizes = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (tmp_path / "base_model.json").write_text(json.dumps(sizes))
    result, recipe = converted(path)
    assert recipe.model.options["dropout"] == 0.0 and fates(result)["model_config"][0] == "mapped"


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"hidden_dropout_prob": 3}, "hidden_dropout_prob: 3; it wants a number from 0 to below 1"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob: 1; it wants a number from 0"),
        ({"hidden_dropout_prob": -0.1}, "hidden_dropout_prob: -0.1; it wants a number from 0"),
        ({"hidden_dropout_prob": True}, "hidden_dropout_prob: true; it wants a number from 0"),
        ({"attention_probs_dropout_prob": "0.1"}, "attention_probs_dropout_prob: '0.1'; it wants a number from 0"),
        ({"hidden_size": 0}, "hidden_size: 0; it wants a whole number, 1 or more"),
        ({"num_hidden_layers": -2}, "num_hidden_layers: -2; it wants a whole number"),
        ({"intermediate_size": 64.0}, "intermediate_size: 64; it wants a whole number"),
        ({"num_attention_heads": None}, "num_attention_heads: null; it wants a whole number"),
        ({"num_attention_heads": 7}, "num_attention_heads: a hidden_size of 768 cannot be shared by 7 heads evenly"),
        ({"hidden_size": 100}, "hidden_size: a hidden_size of 100 cannot be shared by 12 heads evenly"),
    ],
)
def test_sizes_that_no_network_has_are_refused_with_their_lines(tmp_path, sizes, words):
    path = write(tmp_path, "msrvtt_ret")
    file = tmp_path / "base_model.json"
    file.write_text(json.dumps({"model_type": "bert"} | sizes, indent=1))
    line = next(i for i, text in enumerate(path.read_text().splitlines(), start=1) if '"model_config"' in text)
    assert f"{path.name}:{line}: model_config={file}:3: {words}" in refused(path)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"hidden_size": NaN}'])
def test_a_file_of_sizes_that_cannot_be_read_is_named(tmp_path, text):
    path = write(tmp_path, "msrvtt_ret")
    (tmp_path / "base_model.json").write_text(text)
    assert f"model_config={tmp_path / 'base_model.json'}: cannot be read: " in refused(path)


def test_paths_of_the_container(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    result, recipe = converted(path, maps=("/img=/data/a", "/img/msrvtt=/data/b/"))
    assert recipe.data.root == "/data/b"  # the longest counts
    assert "/pretrain, /txt are folders of ClipBERT's container: --map /pretrain=FOLDER --map /txt=FOLDER" in (
        result.account
    )
    said = refused(path, maps=("/image=/data",))
    assert "--map /image=...: no path begins with /image; the paths are: " in said and "/img/msrvtt" in said
    assert "/im" not in converted(path, maps=("/img=/data/a",))[1].data.root
    assert "no path begins with /im;" in refused(path, maps=("/im=/data",))  # whole folder names
    assert "--map /img: write FOLDER_IN_THE_FILE=FOLDER_HERE" in refused(path, maps=("/img",))
    assert "--map /img=... is given twice" in refused(path, maps=("/img=a", "/img/=b"))


def test_mistakes_are_named_all_at_once(tmp_path):  # B048
    path = write(tmp_path, "msrvtt_ret", learning_rat=1, fps="two", betas=[0.9], score_agg_func="sum", num_frm=True)
    said = refused(path, "lr", "0.1", "seed", "x", "task")
    lines = {key: text for key, text in enumerate(path.read_text().splitlines(), 1)}
    place = {
        word: number
        for number, text in lines.items()
        for word in ("learning_rat", "fps", "betas")
        if f'"{word}"' in text
    }
    for words in (
        f"{path.name}:{place['learning_rat']}: unknown key learning_rat; did you mean learning_rate?",
        f"{path.name}:{place['fps']}: fps: got 'two'; it wants a number",
        f"{path.name}:{place['betas']}: betas: got [0.9]; it wants 2 numbers",
        "score_agg_func: got 'sum'; there are mean, max, lse",
        "num_frm: got true; it wants a whole number",
        "command line: unknown key lr; did you mean learning_rate?",
        "command line: seed: got 'x'; it wants a whole number",
        "command line: task has no value",
    ):
        assert words in said, words
    assert len(said.splitlines()) == 8


def test_values_that_cannot_be(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    for overrides, words in (
        (("loss_type", "rank"), "score_agg_func=lse with loss_type=rank"),
        (("img_input_format", "RGB"), "the weights want BGR"),
        (("decay", "invsqrt"), "decay=invsqrt"),
        (("optim", "adamax"), "there are adamw and adam"),
        (("grad_norm", "0"), "or -1 for no clipping"),
        (("warmup_ratio", "1"), "give 0 to below 1"),
        (("train_batch_size", "0"), "train_batch_size=0: give at least 1"),
        (("fps", "0"), "fps=0: it must be above 0"),
        (("itm_neg_size", "0"), "itm_neg_size=0: give at least 1"),
        (("learning_rate", "0"), "learning_rate=0: it must be above 0"),
        (("save_steps_ratio", "0"), "save_steps_ratio=0"),
        (("detectron2_model_cfg", "X-152.yaml"), "image_tower"),
        (("inference_n_clips", "0"), "inference_n_clips=0"),
        (("tokenizer_dir", "null"), "tokenizer_dir: it is missing"),
        (("train_datasets", "null"), "train_datasets: it is missing"),
    ):
        assert words in refused(path, *overrides), overrides
    assert "tgif_qa_action_base_resnet50.json:" in refused(write(tmp_path, "tgif_qa_action"), "task", "frameqa")


def test_pretraining_is_refused_with_what_to_do(tmp_path):
    said = refused(write(tmp_path, "pretrain_image_text"))
    assert "pretraining on pictures and captions" in said and "clipbert_image_text_pretrained.pt" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"fps": 1,}', "m.json:1: not valid JSON"),
        ('{\n"fps": 1, // rate\n"seed": 2}', "m.json:2: not valid JSON"),
        ('{"fps": NaN}', "NaN is no number of JSON"),
        ("[1]", "m.json:1: ClipBERT's JSON is an object"),
        ("", "the file is empty"),
        ("TRAIN:\n  BATCH_SIZE: 4", "not valid JSON"),
    ],
)
def test_what_is_no_json_object(tmp_path, text, words):
    (tmp_path / "m.json").write_text(text)
    assert words in refused(tmp_path / "m.json")


def test_keys_that_stand_twice(tmp_path):
    path = write(tmp_path, "msrvtt_ret")
    path.write_text(path.read_text().replace("{", '{\n"seed": 1,', 1))
    result, recipe = converted(path)
    assert recipe.train.seed == 42 and "seed stands twice, in lines 2 and" in result.account


def test_every_key_has_a_kind_and_a_default_of_it():
    for key, default in DEFAULTS.items():
        assert kind_of(key), key
        if key in CHOICES and default is not None:
            assert default in CHOICES[key]
    assert set(LENGTHS) <= set(DEFAULTS) and set(CHOICES) <= set(DEFAULTS)
    assert math.isclose(DEFAULTS["warmup_ratio"], 0.1)


# Through the real entry point.


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path, "msrvtt_ret")
    outcome = twinreel("import-config", path.name, "fps", "1", "--map", "/img=/data/lmdb", "--gpus", "2")
    assert outcome.code == 0
    assert outcome.out.splitlines()[0] == (
        f"# From ClipBERT's {path.name} fps 1 --gpus 2 --map /img=/data/lmdb, by twinreel import-config."
    )
    (tmp_path / "mine.yaml").write_text(outcome.out)
    assert load_recipe("mine.yaml").train.global_batch_size == 32
    assert "16 a GPU x 2 GPUs = train.global_batch_size 32" in outcome.err and "this machine has" not in outcome.err
    outcome = twinreel("import-config", path.name, "--out", "other.yaml", "--json")
    assert json.loads(outcome.out)["recipe"]["data"]["num_clips"] == 8 and (tmp_path / "other.yaml").is_file()
    twinreel("import-config", path.name, "num_frames", "4").fails("unknown key num_frames; did you mean num_frm?")
    twinreel("import-config", "none.json").fails("none.json: cannot read this configuration")


def test_its_options_are_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slowfast.yaml").write_text("NUM_GPUS: 1\n")
    twinreel("import-config", "slowfast.yaml", "--gpus", "4").fails("--gpus and --map go with ClipBERT's JSON")
    twinreel("import-config", "slowfast.yaml", "--map", "/a=/b").fails("DATA.PATH_TO_DATA_DIR")


def test_the_network_is_an_ordinary_module():  # ClipBERT defect 19
    """`train()` can be chained, and `load_state_dict` takes a state dict."""
    model = create_model("clipbert_tiny")
    assert model.train() is model and model.eval() is model and model.cnn.train() is model.cnn
    assert model.cnn.feature.train(False) is model.cnn.feature
    keys = model.load_state_dict(model.state_dict())
    assert not keys.missing_keys and not keys.unexpected_keys


@pytest.mark.parametrize(("goal", "loss"), [("retrieval", "match_cross_entropy"), *sorted(set(GOALS.values()))])
def test_where_clips_begin_is_a_key_of_every_goal(goal, loss):  # ClipBERT defect 28
    task = f"task={{name: video_text_matching, goal: {goal}, loss: {loss}, pooling: mean}}"
    recipe = load_recipe("clipbert_small", [task, "data.clip_start=center", "data.num_clips=3", "data.manifest=x.csv"])
    assert (recipe.data.clip_start, recipe.data.num_clips) == ("center", 3)


@pytest.mark.slow
def test_an_imported_recipe_trains_from_its_lists_and_its_lmdb(tmp_path):
    """ClipBERT's files as they are: JSONL lists, an LMDB by names without ending, vocab.txt, model_config."""
    videos = tmp_path / "videos"
    videos.mkdir()
    for i in range(6):
        make_video(videos / f"video{i}.mp4", num_frames=30, frame_rate=10, size=(64, 48), first_number=20 * i)
    assert twinreel("data", "pack", videos, "--out", tmp_path / "img" / "msrvtt.lmdb").code == 0
    for part, numbers in (("train", range(4)), ("val", range(4, 6))):
        lines = [
            {"caption": f"a man cuts onion {n} {k}", "clip_name": f"video{n}", "sen_id": k}
            for n in numbers
            for k in "ab"
        ]
        path = tmp_path / "txt" / "msrvtt_ret" / f"{part}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "man", "cut", "##s", "onion", "b", *map(str, range(6))]
    (tmp_path / "bert-base-uncased").mkdir()
    (tmp_path / "bert-base-uncased" / "vocab.txt").write_text("\n".join(words) + "\n")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    (tmp_path / "base_model.json").write_text(json.dumps(sizes))
    config = write(tmp_path, "msrvtt_ret", e2e_weights_path=None, max_img_size=64, train_n_clips=2, num_train_epochs=2)
    outcome = twinreel(
        "import-config", config, "train_batch_size", "2", "fp16", "0", "n_workers", "0", "--gpus", "2",
        "--map", f"/img/msrvtt={tmp_path / 'img' / 'msrvtt.lmdb'}", "--map", f"/txt={tmp_path / 'txt'}",
        "--map", f"/pretrain={tmp_path}", "--out", tmp_path / "recipe.yaml",
    )  # fmt: skip
    assert outcome.code == 0, outcome
    assert "everything would be trained from scratch" in outcome.err
    outcome = twinreel("train", tmp_path / "recipe.yaml", "train.device=cpu", "--out", tmp_path / "run")
    assert outcome.code == 0, outcome
    assert "done: 4 steps" in outcome.err  # 2 epochs of 8 captions, 4 a step
    assert "evaluated: 2/2 videos" in outcome.out and "queries: 4" in outcome.out

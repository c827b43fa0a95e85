"""Founding files of ClipBERT, its CNN and BERT: recognized, counted, loaded whole or refused."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from twinreel.checkpoint import save_checkpoint
from twinreel.cli import app
from twinreel.errors import CheckpointError, ConfigError, TwinreelError
from twinreel.imported_run import import_run
from twinreel.models import create_model
from twinreel.models.clipbert import ClipBert
from twinreel.models.importing import import_weights, inspect_weights
from twinreel.models.weights import load_partial, load_weights, read_weights, sizes_of_parts
from twinreel.wordpiece import SPECIAL_PIECES, WordPiece

State = dict[str, Tensor]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 24,
    "max_positions": 24,
}
SIZES |= {"vocab_size": 30}
CNN: dict[str, Any] = {"cnn_width": 8, "cnn_blocks": (1, 1, 1, 1)}
DETECTOR = "cnn.feature."
KEYS = Path(__file__).parents[1] / "parity" / "golden"
PIECES = WordPiece((*SPECIAL_PIECES, *(f"word{number}" for number in range(25))))


def small(seed: int = 0, **options: Any) -> ClipBert:
    torch.manual_seed(seed)
    model: Any = create_model("clipbert_base", **{**SIZES, **CNN, **options})
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.rand_like(value) + 0.5)
    return model  # type: ignore[no-any-return]


def founding(model: ClipBert) -> State:
    """The model's state as the founding code saves it, with all that nothing reads."""
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return state | {
        f"{DETECTOR}proposal_generator.rpn_head.conv.weight": torch.ones(2, 3),
        f"{DETECTOR}proposal_generator.anchor_generator.cell_anchors.0": torch.ones(5, 4),
        f"{DETECTOR}roi_heads.box_head.fc1.bias": torch.ones(7),
        "transformer.bert.visual_embeddings.position_embeddings.weight": torch.ones(12, 32),
    }


def detectron(model: ClipBert, version: int | None = None) -> dict[str, Any]:
    """The model's CNN as detectron2 saves it."""
    state = OrderedDict(
        (key.removeprefix(DETECTOR), value.clone()) for key, value in founding(model).items() if DETECTOR in key
    )
    if version is not None:
        norms = {key.rpartition(".")[0] for key in state if ".norm." in key}
        state._metadata = {norm: {"version": version} for norm in norms}  # type: ignore[attr-defined]
    return {"model": state, "iteration": 9}


def bert(model: ClipBert, prefix: str = "") -> State:
    """The model's BERT as Hugging Face's code saves it."""
    state = {
        key.replace("transformer.bert.", prefix).replace("transformer.", ""): value.clone()
        for key, value in model.state_dict().items()
        if key.startswith(("transformer.bert.", "transformer.cls.")) and "visual" not in key
    }
    return {**state, f"{prefix}embeddings.position_ids": torch.arange(12)[None]}


def config(**values: Any) -> str:
    sizes = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 24}
    fixed = {"model_type": "bert", "hidden_act": "gelu", "layer_norm_eps": 1e-12, "vocab_size": 30}
    return json.dumps({**sizes, **fixed, "max_position_embeddings": 24, **values})


def same(model: ClipBert, state: State, start: str = "") -> bool:
    own = {key: value for key, value in model.state_dict().items() if key.startswith(start)}
    return bool(own) and all(torch.equal(value, state[key]) for key, value in own.items())


def changed(model: ClipBert, before: State) -> bool:
    return not same(model, before)


# --- ClipBERT's own files


def test_a_fine_tuned_file(tmp_path: Path):
    source = small(num_outputs=5)
    torch.save(founding(source), tmp_path / "model_step_500.pt")
    weights = read_weights(tmp_path / "model_step_500.pt")
    assert weights.layout == "clipbert" and weights.tensors.keys() == source.state_dict().keys()
    counts = {kind.kind: (len(kind.names), kind.numbers) for kind in weights.unused}
    assert counts == {
        "the region proposals of the CNN's detector": (2, 26),
        "the box and attribute heads of the CNN's detector": (1, 7),
        "a visual position table": (1, 384),
    }
    model: Any = create_model("clipbert_base", weights=weights, num_heads=4, **CNN)
    assert same(model, source.state_dict()) and model.num_outputs == 5
    report = load_weights(model, weights)
    assert (report.dropped, report.kept, report.parameter_share) == ((), (), 1.0)
    assert "read by nothing: 26 numbers in 2 tensors of the region proposals of the CNN's detector" in str(report)


@pytest.mark.parametrize("outputs", [1, 2])
def test_another_head_is_refused_or_new(outputs: int):
    state = founding(small(num_outputs=outputs))
    options = {"weights": state, "num_outputs": 9, "num_heads": 4, **CNN}
    with pytest.raises(ConfigError, match=rf"num_outputs is {outputs} in the weights, but 9 was asked for; .*backbone"):
        create_model("clipbert_base", **options)
    model: Any = create_model("clipbert_base", weights_scope="backbone", **options)
    assert model.num_outputs == 9 and same(model, state, "transformer.bert.") and same(model, state, "cnn.")


def test_a_file_of_pretraining_starts_a_new_head_and_says_so(caplog: pytest.LogCaptureFixture):
    source = small(pretraining_heads=True)
    state = founding(source)
    model: Any = create_model("clipbert_base", weights=state, num_outputs=1, num_heads=4, **CNN)
    assert same(model, state, "transformer.bert.") and same(model, state, "cnn.")
    assert (
        "the file is of pretraining: its heads for masked words and matching are left out, the head is new"
        in caplog.text
    )
    assert "left out of the file: transformer.cls." in caplog.text
    assert "at their start values: transformer.classifier.0.weight" in caplog.text
    heads: Any = create_model("clipbert_base", weights=state, pretraining_heads=True, num_heads=4, **CNN)
    assert same(heads, state)
    with pytest.raises(
        CheckpointError, match=r"\d missing \(transformer\.cls\..*\), 4 unexpected \(transformer\.class"
    ):
        load_weights(heads, founding(small()))


def test_what_is_shared_must_be_the_same():
    state = founding(small(pretraining_heads=True))
    state["transformer.cls.predictions.decoder.weight"] += 1
    with pytest.raises(
        CheckpointError, match=r"decoder\.weight should be the same as .*word_embeddings\.weight, which"
    ):
        read_weights(state)


@pytest.mark.parametrize("wrap", ["module", "restore", "half"])
def test_wrapped_files(tmp_path: Path, wrap: str):
    source = small()
    state: Any = (
        {key: value.half() for key, value in founding(source).items()} if wrap != "module" else founding(source)
    )
    if wrap == "module":
        state = {f"module.{key}": value for key, value in state.items()}
    if wrap == "restore":
        state = {"global_step": 7, "model_state_dict": state, "optim_state_dict": {}, "amp_state_dict": {}}
    torch.save(state, tmp_path / "restore.pt")
    weights = read_weights(tmp_path / "restore.pt")
    assert weights.left_out == (("global_step", "optim_state_dict", "amp_state_dict") if wrap == "restore" else ())
    model = small(1)
    load_weights(model, weights)
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, source.state_dict()[key], atol=1e-3, rtol=0)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "mis-shaped"])
def test_never_half(fault: str):
    state, model = founding(small()), small(1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    key = "transformer.bert.encoder.layer.1.output.dense.bias"
    if fault == "missing":
        del state[key]
    elif fault == "unexpected":
        state["transformer.bert.encoder.layer.7.output.dense.bias"] = state[key]
    else:
        state[key] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=rf"nothing was loaded: 1 {fault} \(transformer\.bert\.encoder"):
        load_weights(model, state)
    assert same(model, before)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path):  # ClipBERT defect 25
    torch.save({"transformer.bert.x": CliRunner()}, tmp_path / "a.pt")
    with pytest.raises(
        CheckpointError, match=r"holds Python objects beside tensors .*refused because unpickling can run"
    ):
        read_weights(tmp_path / "a.pt")
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({"model": CliRunner()}))
    with pytest.raises(CheckpointError, match="refused because unpickling it can run code"):
        read_weights(tmp_path / "b.pkl")


def test_heads_of_attention_come_from_the_run_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    state = founding(small())
    (tmp_path / "ckpt").mkdir()
    path = tmp_path / "ckpt" / "model_step_1.pt"
    torch.save(state, path)

    def heads(**options: Any) -> int:
        model: Any = create_model("clipbert_base", weights=path, **CNN, **options)
        assert getattr(model, "imported_options", options)["num_heads"] == model_heads(model)  # kept in checkpoints
        return model_heads(model)

    assert heads() == 1 and "does not say how many attention heads it has; taken: 1" in caplog.text  # 64 numbers each
    assert heads(num_heads=8) == 8
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "model_config.json").write_text(config())
    assert heads() == 4
    with pytest.raises(ConfigError, match="num_heads is 4 in the weights, but 8 was asked for"):
        heads(num_heads=8)


def model_heads(model: ClipBert) -> int:
    layer: Any = model.transformer.bert.encoder.layer[0]
    return int(layer.attention.self.num_heads)


def positions(model: ClipBert) -> tuple[int, ...]:
    """Rows and columns of the grid of a picture, which follow from grid_pool."""
    return tuple(model.encode_grid(torch.zeros(1, 3, 1, 64, 64)).shape[1:3])


def test_heads_of_a_run_stay_the_builders():
    model: Any = create_model("clipbert_small", hidden_size=64, vocab_size=30)
    again: Any = create_model("clipbert_small", hidden_size=64, weights=model.state_dict())
    assert model_heads(model) == model_heads(again) == 4  # not the 64 numbers a head of founding files


def checkpoint(run: Path, **options: Any) -> tuple[ClipBert, Path]:
    """A small ClipBERT and its file, with its model.json, in a checkpoint of a run."""
    torch.manual_seed(3)
    reads = {"num_frames": 3, "frame_rate": 1.0, "crop_size": 32, "fit": "pad"}
    options = {"hidden_size": 128, "num_heads": 2, "max_text_tokens": 9, "grid_pool": 2, "vocab_size": 30, **options}
    model: Any = create_model("clipbert_small", **options, preprocessing=reads)
    description = {"name": "clipbert_small", "options": options, "preprocessing": model.preprocessing.to_dict()}
    return model, save_checkpoint(run, 1, model, description, {}) / "weights.safetensors"


@pytest.mark.parametrize("scope", ["all", "backbone"])
def test_a_checkpoint_of_our_own_says_what_no_shape_shows(tmp_path: Path, scope: Any):
    model, path = checkpoint(tmp_path)
    again: Any = create_model("clipbert_small", weights=path, weights_scope=scope)
    assert (model_heads(again), positions(again), again.preprocessing) == (2, positions(model), model.preprocessing)
    assert again.max_text_tokens == (9 if scope == "all" else 20)
    assert again.imported_options["num_heads"] == 2  # the next model.json says it, too
    grid, tokens = torch.randn(1, 2, 2, 128), torch.randint(30, (1, 2, 9))
    if scope == "all":
        assert torch.equal(again.match(grid, tokens), model.eval().match(grid, tokens))
    other: Any = create_model("clipbert_small", weights=path, max_text_tokens=12, preprocessing={"num_frames": 1})
    assert (other.max_text_tokens, other.preprocessing.num_frames, other.preprocessing.crop_size) == (12, 1, 32)
    with pytest.raises(ConfigError, match="num_heads is 2 in the weights, but 4 was asked for"):
        create_model("clipbert_small", weights=path, num_heads=4, weights_scope=scope)
    with pytest.raises(
        CheckpointError, match=r"num_heads is 2 in the weights, and 4 in the model; set model\.num_heads=2"
    ):
        load_partial(create_model("clipbert_small", vocab_size=30), "transformer.bert", path)
    assert sizes_of_parts({"transformer.bert": path})["num_heads"] == 2


def test_a_checkpoint_of_our_own_and_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    _, path = checkpoint(tmp_path, hidden_size=64, num_heads=8, cnn_width=8, cnn_norm="frozen", cnn_blocks=(1, 1, 1, 1))
    model: Any = create_model("clipbert_base", weights=path, **CNN)
    assert model_heads(model) == 8 and model.max_text_tokens == 20
    assert "is of a clipbert_small; here it starts a clipbert_base" in caplog.text
    (path.with_name("model.json")).write_text("{}")
    with pytest.raises(CheckpointError, match=r"model\.json: the description of the weights beside it is damaged"):
        read_weights(path)


def test_heads_that_nothing_states_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    model, path = checkpoint(tmp_path)
    (path.parent / "model.json").unlink()
    for weights in (path, model.state_dict()):
        caplog.clear()
        again: Any = create_model("clipbert_small", weights=weights)
        assert model_heads(again) == again.imported_options["num_heads"] == 4
        assert "does not say how many attention heads it has; taken: 4" in caplog.text
    caplog.clear()
    create_model("clipbert_small", weights=path, num_heads=2)
    create_model("clipbert_small", weights=read_weights(path))
    assert caplog.text == ""


def a_tower() -> torch.nn.Module:
    return torch.nn.Conv2d(3, 4, 16, 16)


def test_a_file_starts_no_image_tower(tmp_path: Path):
    """Its name is code: the user gives it."""
    tower = f"{__name__}:a_tower"
    _, path = checkpoint(tmp_path, image_tower=tower, num_heads=8)
    with pytest.raises(ConfigError, match=rf"set model\.image_tower={tower}"):
        create_model("clipbert_small", weights=path)
    again: Any = create_model("clipbert_small", weights=path, image_tower=tower)
    assert (model_heads(again), positions(again)) == (8, (2, 2))


# --- the CNN


def test_grid_features(tmp_path: Path):
    source, model = small(), small(1)
    torch.save(detectron(source, version=3), tmp_path / "grid_feat_R-50.pth")
    weights = read_weights(tmp_path / "grid_feat_R-50.pth")
    assert (weights.layout, weights.left_out, weights.notes) == ("grid_feat", ("iteration",), ())
    assert [kind.numbers for kind in weights.unused] == [26, 7]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = load_partial(model, "cnn", tmp_path / "grid_feat_R-50.pth")
    assert same(model, source.state_dict(), "cnn.feature.")
    assert same(model, before, "cnn.grid_encoder.") and same(model, before, "transformer.")
    assert report.kept == ("cnn.grid_encoder.0.weight",) and report.parameter_share == 1.0
    again = small(2)
    load_partial(again, "cnn.feature", tmp_path / "grid_feat_R-50.pth")
    assert same(again, source.state_dict(), "cnn.feature.")
    with pytest.raises(
        CheckpointError, match=r"a CNN of detectron2 alone, .*model\.weights=\{cnn: .*grid_feat_R-50\.pth\}"
    ):
        load_weights(model, tmp_path / "grid_feat_R-50.pth")
    with pytest.raises(CheckpointError, match="mis-shaped"):
        load_partial(create_model("clipbert_base", **SIZES), "cnn", tmp_path / "grid_feat_R-50.pth")


@pytest.mark.parametrize("version", [None, 1, 2, 3])
def test_frozen_norms_of_every_version(version: int | None):
    source, model = small(), small(1)
    report = load_partial(model, "cnn", detectron(source, version))
    old = version is not None and version < 3
    for key, value in source.state_dict().items():
        if key.startswith("cnn.feature."):
            wanted = value - 1e-5 if old and key.endswith("running_var") else value
            assert torch.equal(model.state_dict()[key], wanted), key
    assert ("17 frozen norms are older than version 3: 1e-05 was taken off" in str(report)) == old


def test_norms_that_were_not_frozen_or_have_no_statistics():
    source, model = small(), small(1)
    file = detectron(source, 2)
    file["model"]["backbone.stem.conv1.norm.num_batches_tracked"] = torch.tensor(4)
    report = load_partial(model, "cnn", file)
    stem = "cnn.feature.backbone.stem.conv1.norm."
    assert same(model, source.state_dict(), stem)  # its batch norm always added the epsilon
    assert "1 norms of the CNN were not frozen" in str(report) and "16 frozen norms are older" in str(report)
    assert "1 numbers in 1 tensor of counters num_batches_tracked" in str(report)
    file = detectron(source)
    for name in ("running_mean", "running_var"):
        del file["model"][f"backbone.stem.conv1.norm.{name}"]
    report = load_partial(model, "cnn", file)
    state = model.state_dict()
    assert state[f"{stem}running_mean"].eq(0).all() and state[f"{stem}running_var"].eq(1).all()
    assert "2 running statistics that the file lacks are 0 (mean) and 1 (variance)" in str(report)
    file = detectron(source, 3)
    del file["model"]["backbone.stem.conv1.norm.running_var"]
    with pytest.raises(CheckpointError, match=r"1 missing \(cnn\.feature\.backbone\.stem\.conv1\.norm\.running_var\)"):
        load_partial(model, "cnn", file)


def test_a_pickle_of_arrays(tmp_path: Path):
    source, model = small(), small(1)
    file = {key: value.numpy() for key, value in detectron(source)["model"].items()}
    file["pixel_mean"] = file["pixel_std"] = torch.ones(3, 1, 1).numpy()
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"model": file, "__author__": "them"}))
    report = load_partial(model, "cnn", tmp_path / "a.pkl")
    assert same(model, source.state_dict(), "cnn.feature.")
    assert "6 numbers in 2 tensors of the detector's pixel mean and deviation" in str(report)


# --- BERT


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("old", [False, True])
def test_bert(prefix: str, old: bool):
    source, model = small(pretraining_heads=True), small(1)
    state = bert(source, prefix)
    if old:
        state = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in state.items()
        }
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = load_partial(model, "transformer.bert", state)
    for key, value in model.state_dict().items():
        given = key.startswith("transformer.bert.") and "visual" not in key
        assert torch.equal(value, source.state_dict()[key] if given else before[key]), key
    assert "at their start values: transformer.bert.visual_embeddings.row_position" in str(report)
    assert len(report.kept) == 5 and "left out of the file: transformer.cls.predictions.bias" in str(report)
    assert ("12 tensors had the old names gamma and beta of norms" in str(report)) == old
    assert "how many attention heads it has; 4 are taken" in str(report)


def test_bert_with_its_heads():
    source, model = small(pretraining_heads=True), small(1, pretraining_heads=True)
    report = load_partial(model, "transformer", bert(source, "bert."))
    assert {key for key in report.kept if "visual_embeddings" not in key} == set()
    assert same(model, source.state_dict(), "transformer.cls.") and report.dropped == ()
    report = load_partial(small(2), "transformer", bert(source, "bert."))
    assert "transformer.classifier.0.weight" in report.kept and "transformer.cls.predictions.bias" in report.dropped


def test_bert_without_a_pooler_or_with_another_head():
    source, model = small(), small(1)
    state = {key: value for key, value in bert(source, "bert.").items() if "pooler" not in key}
    state["classifier.weight"] = torch.ones(2, 32)
    report = load_partial(model, "transformer.bert", state)
    assert "transformer.bert.pooler.dense.weight" in report.kept
    assert "64 numbers in 1 tensor of heads of other tasks" in str(report)
    del state["bert.encoder.layer.1.output.dense.bias"]
    with pytest.raises(
        CheckpointError, match=r"1 missing \(transformer\.bert\.encoder\.layer\.1\.output\.dense\.bias\)"
    ):
        load_partial(model, "transformer.bert", state)


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_bert(tmp_path: Path, file: str):
    source = small()
    (tmp_path / "config.json").write_text(config())
    if file == "pytorch_model.bin":
        torch.save(bert(source), tmp_path / file)
    else:
        save_file(bert(source), tmp_path / file)
    sizes = sizes_of_parts({"transformer.bert": tmp_path})
    assert sizes == SIZES
    model: Any = create_model("clipbert_base", **sizes, **CNN)
    load_partial(model, "transformer.bert", tmp_path)
    assert same(model, source.state_dict(), "transformer.bert.encoder.")
    other: Any = create_model("clipbert_base", **{**sizes, "num_heads": 8}, **CNN)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"a BERT of other sizes than transformer\.bert, num_heads 4 \(the model: 8\)"
    ):
        load_partial(other, "transformer.bert", tmp_path)
    assert same(other, before)
    other = create_model("clipbert_small", vocab_size=30)
    with pytest.raises(
        CheckpointError, match=r"hidden_size 32 \(the model: 128\), .*set model.hidden_size=32 model\.max_p"
    ):
        load_partial(other, "transformer.bert", tmp_path)
    with pytest.raises(CheckpointError, match=r"a BERT alone, .* model\.weights=\{transformer\.bert: "):
        create_model("clipbert_base", weights=tmp_path / file, **CNN)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_act": "gelu_new"}, "hidden_act is 'gelu_new', ClipBERT's is 'gelu'"),
        ({"model_type": "roberta"}, "model_type is 'roberta', ClipBERT's is 'bert'"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps is 1e-05, ClipBERT's is 1e-12"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3, in the weights 2"),
        ({"num_attention_heads": None}, "num_attention_heads is None, which is no number of heads"),
    ],
)
def test_a_configuration_of_another_network(tmp_path: Path, values: dict[str, Any], words: str):
    (tmp_path / "config.json").write_text(config(**values))
    torch.save(bert(small()), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=f"config.json, does not fit: {words}"):
        read_weights(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read as JSON"):
        read_weights(tmp_path)


def test_a_vocabulary_of_other_words(tmp_path: Path):
    PIECES.save(tmp_path / "vocab.txt")
    state = founding(small())
    model: Any = create_model("clipbert_base", weights=state, vocabulary=tmp_path / "vocab.txt", num_heads=4, **CNN)
    assert model.tokenize(["word3 zebra"], 5).tolist() == [[2, 8, 1, 3, 0]]
    WordPiece((*SPECIAL_PIECES, "a")).save(tmp_path / "vocab.txt")
    options: dict[str, Any] = {"vocabulary": tmp_path / "vocab.txt", "num_heads": 4, **CNN}
    larger = founding(small(vocab_size=70))
    with pytest.raises(
        CheckpointError, match="has 70 rows and the vocabulary 6 pieces, so they do not belong together"
    ):
        create_model("clipbert_base", weights=larger, **options)


# --- twinreel import


def command(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["import", *map(str, arguments)])
    if isinstance(result.exception, TwinreelError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def table(name: str) -> State:
    """The state dict of a golden key table, zeros."""
    keys = json.loads((KEYS / f"{name}.json").read_text())["state_dict"]
    return {key: torch.zeros(shape) for key, (shape, _) in keys.items()}


def test_import_of_pretraining(tmp_path: Path):
    path = tmp_path / "clipbert_image_text_pretrained.pt"
    torch.save(table("clipbert_pretrain_tiny"), path)
    text = command(path, "--inspect")
    assert "ClipBERT\n" in text and "read by nothing: 50,593,344 of its " in text
    assert "37,904,519 numbers in 7 tensors of the region proposals of the CNN's detector" in text
    assert "12,619,729 numbers in 13 tensors of the box and attribute heads of the CNN's detector" in text
    assert "4,096 numbers in 1 tensor of a visual position table" in text
    assert "65,000 numbers in 2 tensors of second copies of the word table and of its bias" in text
    assert "heads of pretraining: 5,418 numbers in 7 tensors" in text
    assert "num_layers 2; how many attention heads, no shape says" in text
    assert "model: clipbert_tiny (by keys and shapes, the sizes that are its own or nearest)" in text
    result = json.loads(command(path, "--json"))
    assert result["model"] == "clipbert_tiny" and "pretraining_heads" not in result["options"]
    assert result["preprocessing"]["channel_order"] == "bgr"
    heads: Any = create_model("clipbert_tiny", weights=result["out"], pretraining_heads=True)
    assert heads.transformer.cls is not None
    model: Any = create_model("clipbert_tiny", weights=result["out"], num_outputs=1)
    assert model.num_outputs == 1


def test_import_of_parts_says_where_they_go(tmp_path: Path):
    source = small()
    torch.save(detectron(source, 2), tmp_path / "grid.pth")
    text = command(tmp_path / "grid.pth", "--inspect")
    assert "a ResNet for grid features, detectron2" in text and "model.weights={cnn: " in text
    assert "1e-05 was taken off their running_var" in text
    torch.save(bert(source), tmp_path / "bert.bin")
    text = command(tmp_path / "bert.bin", "--inspect")
    assert "BERT, Hugging Face's keys" in text and "model.weights={transformer.bert: " in text
    assert inspect_weights(tmp_path / "bert.bin").to_json()["part"] == "transformer.bert"
    for name in ("grid.pth", "bert.bin"):
        with pytest.raises(
            CheckpointError, match=r"is a part of a model, so it is not converted; name the file itself"
        ):
            command(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert.bin", "grid.pth"]


def test_a_run_folder_of_a_fine_tuned_file(tmp_path: Path):
    from twinreel.assembly import load_run

    state = table("clipbert_retrieval_tiny")
    state["transformer.classifier.2.bias"] += torch.tensor([0.25, 4.0])
    torch.save(state, tmp_path / "model_step_1.pt")
    with pytest.raises(ConfigError, match=r"vocab\.txt: no such vocabulary; name the vocab\.txt that model_step_1\.pt"):
        import_run(tmp_path / "model_step_1.pt", tmp_path / "none")
    WordPiece((*SPECIAL_PIECES, *(f"word{number}" for number in range(995)))).save(tmp_path / "vocab.txt")
    import_run(tmp_path / "model_step_1.pt", tmp_path / "run")
    run: Any = load_run(tmp_path / "run")
    assert (run.task.goal, run.task.pooling, run.recipe.eval.windows, run.recipe.eval.num_clips) == (
        *("retrieval", "lse", "clipbert"),
        1,
    )
    assert run.model.tokenize(["word3"], 4).tolist() == [[2, 8, 3, 0]] and run.model.num_outputs == 2
    video = torch.zeros(1, 3, 2, 64, 64)
    assert run.model(video, run.model.tokenize(["word3"])[None]).flatten().tolist() == [0.25, 4.0]
    said = import_run(tmp_path / "model_step_1.pt", tmp_path / "run2", overrides=["model.max_text_tokens=12"])
    assert said.taken == {"model.max_text_tokens": "command line"} and "task.pooling" in said.assumed
    assert f"there is no {tmp_path.parent / 'log' / 'args.json'}" in said.to_table()
    assert "model.preprocessing.frame_rate=2.0" in said.to_table()
    torch.save(table("clipbert_msrvtt_qa_tiny"), tmp_path / "qa.pt")
    with pytest.raises(
        ConfigError, match=r"\d+ outputs, a table of answers that is not in it, so it cannot judge which"
    ):
        import_run(tmp_path / "qa.pt", tmp_path / "qa")


ARGUMENTS: dict[str, Any] = {"max_txt_len": 12, "num_frm": 3, "fps": 1, "max_img_size": 64, "score_agg_func": "mean"}


def run_folder(folder: Path, table_name: str, **arguments: Any) -> Path:
    """A run folder of ClipBERT's: weights, vocabulary and args.json; the file of weights."""
    for name in ("ckpt", "log"):
        (folder / name).mkdir(parents=True)
    torch.save(table(table_name), folder / "ckpt" / "model_step_1.pt")
    WordPiece((*SPECIAL_PIECES, *(f"word{number}" for number in range(995)))).save(folder / "ckpt" / "vocab.txt")
    (folder / "log" / "args.json").write_text(json.dumps({**ARGUMENTS, "learning_rate": 5e-5, **arguments}))
    return folder / "ckpt" / "model_step_1.pt"


def test_a_run_is_judged_as_its_founding_arguments_say(tmp_path: Path):
    from twinreel.assembly import load_run

    file = run_folder(tmp_path, "clipbert_retrieval_tiny", loss_type="ce", task=None)
    made = import_run(file, tmp_path / "run", overrides=["eval.num_clips=16", "model.max_text_tokens=10"])
    run: Any = load_run(tmp_path / "run")
    reads = run.model.preprocessing
    assert (reads.num_frames, reads.frame_rate, reads.crop_size, run.task.pooling) == (3, 1.0, 64, "mean")
    assert (run.model.max_text_tokens, run.recipe.eval.num_clips, run.recipe.eval.windows) == (10, 16, "clipbert")
    assert run.recipe.model.preprocessing.crop_size == 64 and run.recipe.model.options["max_text_tokens"] == 10
    assert made.assumed == ("model.num_heads", "eval.windows") and made.looked_for is None
    text = made.to_table()
    assert f"from {tmp_path / 'log' / 'args.json'}: model.preprocessing.num_frames=3, " in text
    assert "from command line: eval.num_clips=16, model.max_text_tokens=10" in text
    assert f"twinreel predict {tmp_path / 'run'} VIDEO --sentence TEXT" in text
    assert made.to_json()["taken"]["task.pooling"] == {"value": "mean", "from": str(tmp_path / "log" / "args.json")}
    import_run(file, tmp_path / "strides", overrides=["model.preprocessing.frame_stride=5"])
    reads = load_run(tmp_path / "strides").model.preprocessing
    assert (reads.frame_stride, reads.frame_rate) == (5, None)


def test_founding_heads_that_choose(tmp_path: Path):
    from twinreel.assembly import load_run

    file = run_folder(tmp_path / "hinge", "clipbert_retrieval_rank_tiny", loss_type="rank")
    import_run(file, tmp_path / "run")
    assert load_run(tmp_path / "run").recipe.task.loss == "match_hinge"
    file = run_folder(tmp_path / "choices", "clipbert_tgif_mc_tiny", task="action", score_agg_func="lse")
    import_run(file, tmp_path / "mc")
    run: Any = load_run(tmp_path / "mc")
    assert (run.task.goal, run.recipe.task.loss, run.task.pooling) == ("multiple_choice", "choice_cross_entropy", "lse")
    assert run.recipe.eval.windows == "clipbert_start"


def test_founding_arguments_that_do_not_fit(tmp_path: Path):
    for number, (arguments, asked, said) in enumerate(
        (
            ({"loss_type": "rank"}, [], r"has 2 outputs, and task\.loss=match_hinge wants 1"),
            ({"num_frm": 0}, [], r"args\.json \(num_frm\): .*num_frames: got 0"),
            ({"score_agg_func": "median"}, [], r"args\.json \(score_agg_func\): .*pooling"),
            ({"task": "frameqa"}, [], "task=frameqa, whose table of answers is not in the weights"),
            ({"img_pixel_mean": [1, 2, 3]}, [], r"give it as model\.preprocessing\.mean=\[\.\.\.\], .*blue first"),
            ({}, ["model.hidden_size=32"], "hidden_size is 64 in the weights, but 32 was asked for"),
            ({}, ["model.max_text_token=3"], r"did you mean model\.max_text_tokens"),
            ({}, ["task.goal=question_answering"], "needs a table of answers, which is not in the weights"),
            ({}, ["model.vocabulary=x.txt"], "model.vocabulary is not set here: --vocabulary says it"),
        )
    ):
        file = run_folder(tmp_path / str(number), "clipbert_retrieval_tiny", **arguments)
        with pytest.raises(ConfigError, match=said):
            import_run(file, tmp_path / "run", overrides=asked)
        assert not (tmp_path / "run" / "checkpoints").exists()
    (file.parent.parent / "log" / "args.json").write_text("{")
    with pytest.raises(ConfigError, match=r"args\.json: cannot be read as JSON"):
        import_run(file, tmp_path / "run")


@pytest.mark.parametrize("name", ["retrieval", "retrieval_rank", "msrvtt_qa", "frameqa", "tgif_mc", "vqa"])
def test_every_founding_key_is_known(name: str):
    state = table(f"clipbert_{name}_tiny")
    model: Any = create_model("clipbert_tiny", weights=state)
    assert model.num_outputs == len(state["transformer.classifier.2.bias"])
    unused = json.loads((KEYS / f"clipbert_{name}_tiny.json").read_text())["unused_keys"]
    assert {key for kind in read_weights(state).unused for key in kind.names} == set(unused)


@pytest.mark.slow
def test_the_released_file_at_its_size(tmp_path: Path):
    path = tmp_path / "clipbert_image_text_pretrained.pt"
    state = table("clipbert_keys_pretrain_base")
    state["transformer.bert.pooler.dense.bias"] += 1
    torch.save(state, path)
    found = inspect_weights(path)
    assert (found.model, found.fits) == ("clipbert_base", ("clipbert_base", "clipbert_tiny"))
    unused = sum(kind.numbers for kind in found.weights.unused)
    assert unused + sum(tensor.numel() for tensor in found.weights.tensors.values()) == 222_368_142
    del state, found
    imported = import_weights(path)
    assert "of its 222,368,142 numbers" in imported.to_table()
    model: Any = create_model("clipbert_base", weights=path, num_outputs=2)
    assert model.transformer.bert.pooler.dense.bias.eq(1).all() and model_heads(model) == 12

"""ClipBERT against the numbers that the founding code returned for the same weights, pictures and texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clipbert_fill
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from twinreel.losses import pretraining_loss
from twinreel.losses.pooling import pool_clips
from twinreel.models.clipbert import ClipBert, clipbert_base, clipbert_tiny

FOLDER = Path(__file__).parent / "golden"
# Ours differ by up to 9e-7 on logits of size 1 and by 3e-6 on word logits and tokens of size 4 (measured; sums in
# another order). A mistake is far larger: the stride in the 3 x 3 moves logits by 2e-2, norms with eps 1e-5 instead of
# 1e-12 by 1e-5 already, RGB instead of BGR by 5e-2.
LOGITS = {"atol": 5e-6, "rtol": 0.0}
TOKENS = {"atol": 2e-5, "rtol": 0.0}
# Mean, deviation, mean size, largest and smallest value of a stage; CNN stages have values up to 60.
STATISTICS = {"atol": 1e-5, "rtol": 2e-5}


class Golden:
    def __init__(self, name: str, **options: Any) -> None:
        self.spec: dict[str, Any] = json.loads((FOLDER / f"clipbert_{name}.json").read_text())
        self.arrays = dict(np.load(FOLDER / f"clipbert_{name}.npz"))
        self.inputs = self.spec["inputs"]
        self.num_clips = self.inputs.get("n_clips", 1)
        builder = clipbert_base if name.endswith("_base") else clipbert_tiny
        self.model = builder(dropout=0.0, **options).eval()
        self.model.preprocessing = self.model.preprocessing.replace(num_frames=self.inputs.get("num_frm", 1))
        self.model.load_state_dict(clipbert_fill.used(self.spec), strict=True)

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    @property
    def video(self) -> Tensor:
        """As `preprocessing.normalize` gives it: (B, 3, C * T, H, W), BGR, mean subtracted."""
        pixels = clipbert_fill.fill(*self.inputs["video" if "video" in self.inputs else "image"])
        frames = pixels.to(torch.uint8).permute(0, 1, 3, 4, 2)
        return self.model.preprocessing.normalize(frames)

    @property
    def clips(self) -> Tensor:
        """(C, B, 3, T, H, W): the founding code runs clip by clip."""
        return torch.stack(self.video.chunk(self.num_clips, dim=2))

    @property
    def tokens(self) -> Tensor:
        """(B, R, L); every video has as many texts."""
        counts = self.inputs["n_examples_list"]
        assert len(set(counts)) == 1
        return torch.tensor(self.inputs["text_ids"]).unflatten(0, (len(counts), counts[0]))


def tiny(name: str, **options: Any) -> Golden:
    return Golden(f"{name}_tiny", **options)


HEADS: dict[str, Callable[[], Golden]] = {
    "retrieval": lambda: tiny("retrieval"),
    "retrieval_rank": lambda: tiny("retrieval_rank", num_outputs=1),
    "tgif_mc": lambda: tiny("tgif_mc", num_outputs=1),
    "msrvtt_qa": lambda: tiny("msrvtt_qa", num_outputs=1500),
    "frameqa": lambda: tiny("frameqa", num_outputs=1540),
    "vqa": lambda: tiny("vqa", num_outputs=30),
}


@pytest.mark.parametrize("head", HEADS)
@torch.no_grad()
def test_logits_of_every_head(head: str) -> None:
    golden = HEADS[head]()
    seen: list[Tensor] = []
    golden.model.transformer.bert.pooler.register_forward_hook(lambda module, inputs, output: seen.append(output))
    grids: list[Tensor] = []
    golden.model.cnn.register_forward_hook(lambda module, inputs, output: grids.append(output))
    logits = golden.model(golden.video, golden.tokens)
    batch, texts = golden.tokens.shape[:2]
    assert logits.shape == (batch, golden.num_clips, texts, golden.model.num_outputs)
    theirs = golden["logits"].reshape(golden.num_clips, batch, texts, -1).transpose(0, 1)
    torch.testing.assert_close(logits, theirs, **LOGITS)
    if "pooled" in golden.arrays:
        pooled = golden["pooled"].reshape(golden.num_clips, batch, texts, -1).transpose(0, 1).flatten(0, 2)
        torch.testing.assert_close(seen[0], pooled, **TOKENS)
    if "grid_clip0" in golden.arrays:  # (B, T, h, w, D), before the mean over frames
        clip0 = grids[0].reshape(batch, golden.num_clips, -1, *grids[0].shape[1:])[:, 0].permute(0, 1, 3, 4, 2)
        torch.testing.assert_close(clip0, golden["grid_clip0"], **TOKENS)
    for pooling in ("lse", "mean", "max"):
        if f"agg_{pooling}" in golden.arrays:
            theirs = golden[f"agg_{pooling}"].reshape(batch, texts, -1)
            torch.testing.assert_close(pool_clips(logits, pooling, 1), theirs, **LOGITS)


def statistics(values: Tensor) -> Tensor:
    values = values.double()
    return torch.stack([values.mean(), values.std(), values.abs().mean(), values.max(), values.min()])


@pytest.mark.parametrize("size", ["tiny", pytest.param("base", marks=pytest.mark.slow)])
@torch.no_grad()
def test_every_stage(size: str) -> None:
    golden = Golden(f"retrieval_{size}")
    model = golden.model
    backbone, bert = model.cnn.feature.backbone, model.transformer.bert
    parts: dict[str, nn.Module] = {
        "stem": backbone.stem,
        "res2": backbone.res2,
        "res3": backbone.res3,
        "res4": backbone.res4,
        "res5": backbone.res5,
        "grid_encoder": model.cnn.grid_encoder,
        "text_emb": bert.embeddings,
        "visual_emb": bert.visual_embeddings,
        "layer0": bert.encoder.layer[0],
        "seq": bert.encoder,
        "pooled": bert.pooler,
    }
    found: dict[str, list[Tensor]] = {name: [] for name in parts}
    for name, part in parts.items():
        part.register_forward_hook(lambda module, inputs, output, name=name: found[name].append(output))
    for clip, theirs in zip(golden.clips, golden["logits"], strict=True):
        logits = model.match(model.encode_grid(clip), golden.tokens)
        torch.testing.assert_close(logits.flatten(0, 1), theirs, **LOGITS)
    found["visual_emb"] = [output.repeat_interleave(2, dim=0) for output in found["visual_emb"]]  # theirs once a text
    assert golden["stat_stem"].shape == (2, 5)
    for name, outputs in found.items():
        theirs = golden[f"stat_{name}"]
        ours = torch.stack([statistics(output) for output in outputs])
        torch.testing.assert_close(ours, theirs, **STATISTICS, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(found["res5"][0][:, :16], golden["res5_clip0_ch0_16"], atol=5e-5, rtol=0.0)
    torch.testing.assert_close(found["text_emb"][0][..., :64], golden["text_emb"], **TOKENS)
    torch.testing.assert_close(found["visual_emb"][0][..., :64], golden["visual_emb_clip0"], **TOKENS)
    torch.testing.assert_close(found["seq"][0][..., :64], golden["seq_clip0"], **TOKENS)


@torch.no_grad()
def test_pretraining() -> None:
    golden = tiny("pretrain", pretraining_heads=True)
    words, fits = golden.model.pretraining(golden.video, golden.tokens)
    torch.testing.assert_close(fits.flatten(0, 1), golden["itm_scores"], **LOGITS)
    torch.testing.assert_close(words.flatten(0, 1)[..., :32], golden["mlm_scores_first32"], **TOKENS)
    assert torch.equal(words.flatten(0, 1).argmax(dim=-1), golden["mlm_argmax"])
    torch.testing.assert_close(golden.model.match(golden.model.encode_grid(golden.video), golden.tokens), fits)
    loss = pretraining_loss(*batch_of(golden, words, fits))
    torch.testing.assert_close(loss.double(), golden["train_loss"], **LOGITS)


def batch_of(golden: Golden, words: Tensor, fits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    masked = torch.tensor(golden.inputs["mlm_labels"]).reshape(golden.tokens.shape)
    return words, masked, fits, torch.tensor(golden.inputs["itm_labels"]).reshape(golden.tokens.shape[:2])


def test_pretraining_on_some_of_the_visual_tokens() -> None:
    golden = tiny("pretrain", pretraining_heads=True)
    words, fits = golden.model.train().pretraining(golden.video, golden.tokens, golden["sample_idx"])
    torch.testing.assert_close(fits.flatten(0, 1), golden["sampled_itm_scores"], **LOGITS)
    loss = pretraining_loss(*batch_of(golden, words, fits))
    theirs = golden["sampled_mlm_mean"] + golden["sampled_itm_mean"]
    torch.testing.assert_close(loss.double(), theirs, **LOGITS)
    loss.backward()
    table = golden.model.transformer.bert.embeddings.word_embeddings.weight  # its gradient has the decoder's in it
    grid = golden.model.cnn.grid_encoder[0].weight
    for parameter, name in ((table, "grad_norm_word_emb"), (grid, "grad_norm_grid")):
        assert parameter.grad.norm().item() == pytest.approx(golden[name].item(), rel=1e-4)


@pytest.mark.parametrize("size", ["tiny", "base"])
def test_keys_order_and_trainable_parameters_are_the_founding_ones(size: str) -> None:
    spec = json.loads((FOLDER / f"clipbert_retrieval_{size}.json").read_text())
    unused = set(spec["unused_keys"])
    with torch.device("meta"):
        model: ClipBert = clipbert_base() if size == "base" else clipbert_tiny()
    theirs = {key: shape for key, (shape, _) in spec["state_dict"].items() if key not in unused}
    ours = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert ours == theirs and list(ours) == list(theirs)  # the order is that of an optimizer's state
    parameters = dict(model.named_parameters())
    frozen = [name for name, value in parameters.items() if not value.requires_grad]
    assert frozen == spec["frozen_parameters"]
    assert [name for name in parameters if name not in frozen] == [n for n in spec["trainable"] if n not in unused]


def test_the_released_pretraining_file_loads_strictly() -> None:
    """Keys and shapes of all 500 entries; the values are not needed."""
    spec = json.loads((FOLDER / "clipbert_keys_pretrain_base.json").read_text())
    table = {key: entry[0] for key, entry in spec["state_dict"].items() if key not in spec["unused_keys"]}
    with torch.device("meta"):
        model: ClipBert = clipbert_base(pretraining_heads=True)
    ours = {key: list(value.shape) for key, value in model.state_dict().items()}
    assert ours == table and list(ours) == list(table)


def test_the_founding_preprocessing() -> None:
    inputs = json.loads((FOLDER / "clipbert_retrieval_tiny.json").read_text())["inputs"]
    with torch.device("meta"):
        rules = clipbert_base().preprocessing
    pixels = clipbert_fill.fill(*inputs["video"])
    mean = torch.tensor(inputs["img_pixel_mean"])[:, None, None]
    theirs = (pixels - mean).flip(2).transpose(1, 2)  # the RGB mean first, then BGR
    ours = rules.normalize(pixels.to(torch.uint8).permute(0, 1, 3, 4, 2))
    torch.testing.assert_close(ours, theirs, atol=4e-5, rtol=0.0)
    assert (rules.num_frames, rules.frame_rate, rules.crop_size, rules.fit) == (2, 2.0, 448, "pad")

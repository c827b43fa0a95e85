"""Each row once, nothing substituted, the protocol beside every number."""

import pytest
import torch
from torch import nn

from twinreel import losses
from twinreel.data.choosing import evaluation_times
from twinreel.data.clip import Caption, Clip
from twinreel.data.dataset import ViewRules
from twinreel.data.storage import open_video
from twinreel.errors import DataError
from twinreel.evaluation import build_gallery, embed_videos, evaluate_retrieval
from twinreel.models.preprocessing import Preprocessing
from twinreel.recipe import EvalSection
from twinreel.tasks import Contrastive
from videos import make_video

PREP = Preprocessing(num_frames=2, frame_rate=5.0, crop_size=16)
CPU = torch.device("cpu")


class Numbers(nn.Module):
    """Towers that see a video's brightness, and read a caption such as `n3`: perfect by construction, or collapsed."""

    def __init__(self, collapsed=False):
        super().__init__()
        self.preprocessing = PREP
        self.collapsed = collapsed
        self.scale = nn.Parameter(torch.ones(1))

    def encode_video(self, video):
        angle = video.mean((1, 2, 3, 4)) * 1.5
        return self._at(angle) * self.scale

    def encode_text(self, captions):
        return self._at(torch.tensor([float(text.strip("n")) / 10 * 1.5 for text in captions]))

    def _at(self, angle):
        if self.collapsed:
            angle = torch.zeros_like(angle)
        return torch.stack([angle.cos(), angle.sin()], 1)


@pytest.fixture(scope="module")
def grey(tmp_path_factory):
    """Videos of even brightness i / 10."""
    import av
    import numpy as np

    folder = tmp_path_factory.mktemp("grey")
    for i in range(7):
        with av.open(str(folder / f"{i}.mp4"), "w") as container:
            stream = container.add_stream("libx264", rate=10)
            stream.width = stream.height = 16
            stream.pix_fmt = "yuv420p"
            for _ in range(10):
                frame = np.full((16, 16, 3), round(25.5 * i), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
    return folder


def rows(folder, numbers=range(7), **values):
    return [
        Clip(**({"id": f"v{i}", "video": str(folder / f"{i}.mp4"), "captions": (Caption(text=f"n{i}"),)} | values))
        for i in numbers
    ]


def task(**options):
    return Contrastive(loss=losses.milnce, loss_options={"normalize": True, "temperature": 0.1} | options)


def judge(model, listed, **section):
    return evaluate_retrieval(model, task(), listed, EvalSection(**({"num_clips": 2} | section)), device=CPU)


def test_a_perfect_model_is_perfect_and_the_protocol_says_how(grey):
    report = judge(Numbers(), rows(grey))
    for direction in ("text_to_video", "video_to_text"):
        assert report.metrics[f"{direction}/recall_at_1"] == 1.0
        assert report.metrics[f"{direction}/median_rank"] == 1.0
        assert report.metrics[f"chance/{direction}/recall_at_1"] == pytest.approx(1 / 7)
    table = report.to_table()
    for words in ("text to video", "video to text", "chance", "queries: 7", "candidates: 7", "evaluated: 7/7",
                  "2 a video, uniform", "2 at 5 a second", "center 16", "cosine", "count against"):  # fmt: skip
        assert words in table, words
    assert "recall_at_10" not in report.metrics or report.metrics["text_to_video/recall_at_10"] == 1.0


def test_a_collapsed_model_is_at_or_below_chance(grey):
    report = judge(Numbers(collapsed=True), rows(grey))
    for direction in ("text_to_video", "video_to_text"):
        assert report.metrics[f"{direction}/recall_at_1"] <= report.metrics[f"chance/{direction}/recall_at_1"]
        assert report.metrics[f"{direction}/median_rank"] == 7.0


@pytest.mark.parametrize("n", [1, 5, 7])
def test_each_row_is_embedded_once_whatever_the_batch_size(grey, n):
    listed = rows(grey, range(n))
    rules = ViewRules(preprocessing=PREP, num_clips=3)
    results = [
        embed_videos(Numbers(), task(), listed, rules, device=CPU, batch_size=size, num_workers=workers)[0]
        for size, workers in ((1, 0), (4, 0), (6, 2), (100, 0))
    ]
    for result in results:
        assert result.shape == (n, 2) and torch.allclose(result, results[0], atol=1e-6)


def test_evaluation_leaves_the_model_as_it_was(grey):
    model = Numbers().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    judge(model, rows(grey, range(3)))
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_non_finite_embeddings_are_refused_by_name(grey):
    model = Numbers()
    model.scale.data.fill_(float("nan"))
    with pytest.raises(DataError, match="v0"):
        judge(model, rows(grey, range(3)))


def test_an_unreadable_video_is_not_substituted(grey, tmp_path):
    broken = Clip(id="broken", video=str(tmp_path / "none.mp4"), captions=(Caption(text="n3"),))
    listed = [*rows(grey, range(3)), broken]
    with pytest.raises(DataError, match=r"1 of 4 videos could not be read; scores would be over 3(?s:.)*none.mp4"):
        judge(Numbers(), listed)
    report = judge(Numbers(), listed, allow_missing=True)
    assert report.protocol["evaluated"] == "3/4 videos" and [fault.id for fault in report.faults] == ["broken"]
    assert report.protocol["queries"] == 3
    with pytest.raises(DataError):
        judge(Numbers(), [broken], allow_missing=True)


def test_several_captions_a_video_and_one_video_in_several_rows(grey):
    listed = rows(grey, range(3))
    listed[1] = Clip(id="v1", video=listed[1].video, captions=(Caption(text="n1"), Caption(text="n1.1")))
    listed.append(Clip(id="v1#2", video=listed[1].video, captions=(Caption(text="n0.9"),)))
    gallery = build_gallery(listed, merge_equal_captions=False)
    assert [row.id for row in gallery.candidates] == ["v0", "v1", "v2"]
    assert gallery.queries == ["n0", "n1", "n1.1", "n2", "n0.9"]
    assert gallery.positives == [[0], [1], [1], [2], [1]]
    report = judge(Numbers(), listed)
    assert report.protocol["queries"] == 5 and report.protocol["candidates"] == 3
    assert report.metrics["video_to_text/recall_at_1"] == 1.0


def test_equal_captions_are_separate_queries_unless_merged(grey):
    listed = [Clip(id=f"v{i}", video=str(grey / f"{i}.mp4"), captions=(Caption(text="n3"),)) for i in (2, 3)]
    apart = build_gallery(listed, merge_equal_captions=False)
    assert apart.queries == ["n3", "n3"] and apart.positives == [[0], [1]]
    merged = build_gallery(listed, merge_equal_captions=True)
    assert merged.queries == ["n3"] and merged.positives == [[0, 1]]
    assert judge(Numbers(), listed).metrics["text_to_video/recall_at_1"] == 0.5
    assert judge(Numbers(), listed, merge_equal_captions=True).metrics["text_to_video/recall_at_1"] == 1.0


def test_windows_of_one_video_are_candidates_of_their_own(tmp_path):
    path = tmp_path / "long.mp4"
    make_video(path, num_frames=40, frame_rate=10, size=(48, 48))
    listed = [
        Clip(
            id=f"w{i}",
            video=str(path),
            start_seconds=2.0 * i,
            end_seconds=2.0 * i + 2,
            captions=(Caption(text=f"n{i}"),),
        )
        for i in range(2)
    ]
    assert len(build_gallery(listed, merge_equal_captions=False).candidates) == 2


def test_rows_without_captions_are_refused(grey):
    with pytest.raises(DataError, match="v0: no caption"):
        build_gallery(rows(grey, range(1), captions=()), merge_equal_captions=False)
    with pytest.raises(DataError, match="v0: no caption"):
        build_gallery(rows(grey, range(1), captions=(Caption(text="  "),)), merge_equal_captions=False)


def test_the_validation_loss_is_the_loss_of_the_embeddings(grey):
    report = judge(Numbers(), rows(grey))
    rules = ViewRules(preprocessing=PREP, num_clips=2)
    model = Numbers()
    videos, *_ = embed_videos(model, task(), rows(grey), rules, device=CPU, batch_size=4)
    texts = model.encode_text([f"n{i}" for i in range(7)])
    expected = losses.milnce(videos, texts.detach(), normalize=True, temperature=0.1)
    assert report.metrics["loss"] == pytest.approx(float(expected), rel=1e-5)


def test_founding_windows(grey):
    preprocessing = Preprocessing(num_frames=16, frame_rate=5.0, crop_size=16)
    with open_video(rows(grey)[0].video) as reader:
        clips = evaluation_times(reader, 47, 60, preprocessing, 4, "milnce").clips
    assert [clip[0] for clip in clips] == pytest.approx([47.0, 50.13333333333333, 53.266666666666666, 56.4])

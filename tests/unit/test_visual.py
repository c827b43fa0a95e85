"""What TensorBoard gets: the event file is read back."""

import io

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from twinreel.data.clip import Clip, Fault, Sample
from twinreel.errors import ConfigError
from twinreel.models import create_model
from twinreel.visual import confusion_picture, write_confusion, write_grad_cam, write_histograms

CPU = torch.device("cpu")


@pytest.fixture
def writer(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    yield writer
    writer.close()


def events(writer):
    writer.flush()
    return EventAccumulator(writer.log_dir, size_guidance={"images": 0, "histograms": 0}).Reload()


def test_histograms_of_weights_and_gradients(writer):
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False), nn.Linear(1, 1))
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    model(torch.ones(4, 2)).sum().backward()
    model[0].bias.grad[1] = float("nan")
    model[1].weight.grad = None
    assert write_histograms(writer, model, 7) == [
        "gradients/0.bias: not finite",
        "gradients/1.weight: it took no part in the step",
    ]
    read = events(writer)
    assert set(read.Tags()["histograms"]) == {
        "weights/0.weight", "weights/0.bias", "weights/1.weight", "gradients/0.weight",
    }  # fmt: skip
    [event] = read.Histograms("weights/0.weight")
    assert event.step == 7 and event.histogram_value.num == 6
    assert event.histogram_value.sum == pytest.approx(model[0].weight.sum().item(), rel=1e-5)
    assert write_histograms(None, model, 8) == []


# B095: enabled, but nothing written: here a picture appears, with names, with some of them, without.
@pytest.mark.parametrize("names", [None, ("walk", "run"), ("walk", "run", "sit é")])
def test_a_confusion_matrix_is_a_picture_with_or_without_names(writer, names):
    write_confusion(writer, [[3, 1, 0], [0, 5, 0], [2, 0, 2]], names, 9)
    [event] = events(writer).Images("eval/confusion_matrix")
    assert event.step == 9 and event.encoded_image_string.startswith(b"\x89PNG")
    picture = confusion_picture(torch.tensor([[3, 1, 0], [0, 5, 0], [2, 0, 2]]), names)
    assert picture.shape == (event.height, event.width, 3)
    write_confusion(None, [[1]], None, 9)


def test_darker_is_a_larger_share_of_the_row():
    counts = torch.zeros(100, 100, dtype=torch.long)
    counts[0, 0], counts[1, 0], counts[1, 1] = 1, 10, 30
    picture = confusion_picture(counts).float()
    assert picture.shape == (4 + 801, 4 + 801, 3)  # too many for names
    center = [
        picture[4 + 8 * row + 4, 4 + 8 * column + 4, 0].item() for row, column in ((0, 0), (1, 0), (1, 1), (2, 2))
    ]
    assert center[0] < center[2] < center[1] < center[3] == 255
    small = confusion_picture([[2, 0], [0, 0]], ["a", "b"])
    assert small.shape == (12 + 81, 12 + 81, 3)
    for wrong in ([[1, 2]], [[-1]], [[float("nan")]]):
        with pytest.raises(ConfigError, match="square and counts from 0"):
            confusion_picture(wrong)


def test_grad_cam_of_a_few_rows_is_a_moving_picture(writer):
    torch.manual_seed(0)
    model = create_model("slowfast_small", num_classes=3).train()
    prep = model.preprocessing

    def read(row, epoch):
        frames = torch.randint(0, 255, (3, prep.num_frames, prep.crop_size, prep.crop_size, 3), dtype=torch.uint8)
        fault = Fault(id=row.id, video=row.video, reason="b.mp4: cannot be read") if row.id == "b" else None
        return Sample(id=row.id, frames=frames, pts_seconds=torch.zeros(3, prep.num_frames), fault=fault)

    rows = [Clip(id=name, video=f"{name}.mp4") for name in "ab"]
    told = write_grad_cam(writer, model, rows, read, layer="s4", step=5, device=CPU, names=("walk", "run"))
    assert told[0] == "Grad-CAM of b: b.mp4: cannot be read" and model.training
    read_back = events(writer)
    [tag] = read_back.Tags()["images"]
    assert tag == "grad_cam/s4/a"
    [event] = read_back.Images(tag)
    assert event.step == 5 and event.encoded_image_string[:3] == b"GIF"
    assert (event.height, event.width) == (3 * prep.crop_size, prep.crop_size)  # the frame, two pathways
    assert Image.open(io.BytesIO(event.encoded_image_string)).n_frames > 1
    assert write_grad_cam(writer, model, [], read, layer="s4", step=5, device=CPU) == ["Grad-CAM: no row to look at"]
    with pytest.raises(ConfigError, match="has no layer 's55'; did you mean s5"):
        write_grad_cam(writer, model, rows, read, layer="s55", step=5, device=CPU)
    assert write_grad_cam(None, model, rows, read, layer="s55", step=5, device=CPU) == []

"""One global batch, one learning rate, however it is shared out; and batch norms of several processes in one."""

from types import SimpleNamespace

import pytest
import torch
from small_runs import CPU, recipe

from twinreel import training
from twinreel.data.plan import Shares
from twinreel.errors import ConfigError
from twinreel.models.training_modes import apply_batch_norm
from twinreel.parts import build_parts
from twinreel.run_state import State
from twinreel.start_line import start_line

SIXTEEN = "data.num_videos=16"


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    return tmp_path_factory.mktemp("videos")


def test_the_same_global_batch_has_the_same_learning_rate_however_it_is_shared_out(videos):  # B050
    options = ["train.global_batch_size=16", "optim.learning_rate=0.004"]
    rates, lines = [], []
    for micro, shares in ((None, (16, 1)), (None, (16, 2, 8)), (4, (16, 1, 4))):
        wanted = recipe(videos, SIXTEEN, *options, *([f"train.micro_batch_size={micro}"] if micro else []))
        parts = build_parts(wanted, CPU)
        parts.shares = Shares.cut(*shares)
        base = [group["base_learning_rate"] for group in parts.optimizer.param_groups]
        rates.append([rate * parts.schedule.factor(step) for rate in base for step in range(parts.total_steps)])
        lines.append(start_line(wanted, parts, 0))
    assert rates[0] == rates[1] == rates[2] and max(rates[0]) == 0.004
    for line, words in zip(
        lines, ("1 process x 1 micro-batch x 16", "2 processes x 1 micro-batch x 8", "1 process x 4 micro-batches x 4"),
        strict=True,
    ):  # fmt: skip
        assert f"global batch 16 = {words} clips" in line
        assert "highest 0.004" in line and "it belongs to the global batch and is never scaled" in line


def test_fewer_clips_than_processes_are_refused_where_clips_stay_together_too():  # B052
    assert [len(own) for own in Shares.cut(8, 4, None, 2).positions[0]] == [2, 2, 2, 2]
    with pytest.raises(ConfigError, match=r"global_batch_size=4 on 4 processes leaves 2 of them without .* to 8 or"):
        Shares.cut(4, 4, None, 2)
    with pytest.raises(ConfigError, match=r"global_batch_size=8 on 16 processes leaves 8 of them without a clip"):
        Shares.cut(8, 16)


def test_synchronized_norms_of_one_process_are_those_of_the_process_and_that_is_said(videos):  # B054
    wanted = recipe(videos, SIXTEEN)
    parts = build_parts(wanted, CPU)
    assert apply_batch_norm(parts.model, "sync", torch.device("cuda"), 1) is parts.model
    assert not any(isinstance(part, torch.nn.SyncBatchNorm) for part in parts.model.modules())
    synced = wanted.model_copy(update={"train": wanted.train.model_copy(update={"batch_norm": "sync"})})
    heard = {}
    for name, asked in (("plain", wanted), ("synced", synced)):
        heard[name] = []
        log = SimpleNamespace(say=lambda text: None, warn=heard[name].append)
        training._say_what_will_happen(asked, parts, State(), training._plan_ahead(asked, parts), log)
    words = "train.batch_norm=sync with one process is the same as per_process"
    assert words in heard["synced"] and words not in heard["plain"]

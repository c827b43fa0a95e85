from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from fill import RULES, fill, fill_all

# The stream of NumPy's PCG64 that the golden files were made with.
SELF_CHECK = (-0.6569462418556213, -2.292238712310791, -0.07810648530721664, -1.0795270204544067)


def test_the_random_stream_is_the_one_of_the_golden_files():
    assert torch.equal(fill("selfcheck", (4,), "input"), torch.tensor(SELF_CHECK))


def test_roles_scale_the_same_draw():
    draw = fill("a", (2, 3, 1, 2, 2), "input")
    torch.testing.assert_close(fill("a", (2, 3, 1, 2, 2), "conv_w"), draw * math.sqrt(2 / 12))
    torch.testing.assert_close(fill("a", (2, 3, 1, 2, 2), "linear_w"), draw * math.sqrt(1 / 12))
    torch.testing.assert_close(fill("a", (2, 3, 1, 2, 2), "gate_w"), draw * math.sqrt(4 / 12))
    torch.testing.assert_close(fill("a", (2, 3, 1, 2, 2), "run_var"), 1 + 0.1 * draw.abs())
    assert all(fill("a", (3, 2), role).dtype == torch.float32 for role in RULES)
    assert fill("a", (), "zero_i64").dtype == torch.int64


def test_clip_is_coarse_blocks_plus_half_a_fine_draw():
    generator = np.random.Generator(np.random.PCG64(zlib.crc32(b"v")))
    coarse = generator.standard_normal((1, 3, 2, 1, 2))
    fine = generator.standard_normal((1, 3, 5, 8, 20))
    clip = fill("v", (1, 3, 5, 8, 20), "clip")
    for time, height, width in ((0, 0, 0), (3, 7, 15), (4, 0, 0), (4, 7, 19), (0, 3, 16)):
        expected = coarse[0, 1, time // 4, height // 16, width // 16] + 0.5 * fine[0, 1, time, height, width]
        assert abs(clip[0, 1, time, height, width].item() - expected) < 1e-6


def test_fill_all_keeps_keys_and_shapes():
    state = fill_all({"a.weight": ([2, 3], "linear_w"), "a.count": ([], "zero_i64")})
    assert [(name, tuple(value.shape)) for name, value in state.items()] == [("a.weight", (2, 3)), ("a.count", ())]

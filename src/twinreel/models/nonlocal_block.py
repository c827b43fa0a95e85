"""Non-local block (arXiv:1711.07971): every position adds what it finds at all other positions of the clip.

Sub-modules have the names of the authors' PySlowFast code. What differs: the softmax form runs through torch's
scaled dot product attention, which never holds the positions x positions matrix where the device has a kernel for it.
Numbers are compared in tests/parity/test_slowfast_networks.py.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn import functional

from twinreel.errors import ConfigError

__all__ = ["NonLocal", "NonLocalForm"]

NonLocalForm: TypeAlias = Literal["softmax", "dot_product"]


class NonLocal(nn.Module):
    """Features (B, C, T, H, W) plus a normalized, weighted sum of the features of all positions; the same shape.

    Weights come from the products of a query (theta) and a key (phi) of C / 2 channels each. The keys and the values
    (g) are taken from a 1 x 2 x 2 max pool of the features.

    Args:
        channels: C.
        form: `softmax` of the products times (C / 2) ** -0.5, or `dot_product`: the products divided by their number.

    Raises:
        ConfigError: another form.
    """

    def __init__(self, channels: int, form: NonLocalForm) -> None:
        super().__init__()
        if form not in get_args(NonLocalForm):
            raise ConfigError(f"non_local must be none, softmax or dot_product; got {form!r}")
        self.form = form
        inner = channels // 2
        self.conv_theta = nn.Conv3d(channels, inner, 1)
        self.conv_phi = nn.Conv3d(channels, inner, 1)
        self.conv_g = nn.Conv3d(channels, inner, 1)
        self.conv_out = nn.Conv3d(inner, channels, 1)
        self.bn = nn.BatchNorm3d(channels)

    def forward(self, features: Tensor) -> Tensor:
        """Features (B, C, T, H, W) -> the same shape.

        Raises:
            ConfigError: H or W is below 2, so nothing is left after the pool.
        """
        if min(features.shape[3:]) < 2:
            height, width = features.shape[3:]
            raise ConfigError(
                f"a non-local block pools 2 x 2 features, but this video gives it {height} x {width}; use frames of "
                "more than 16 x 16 pixels, or non_local=none"
            )
        pooled = functional.max_pool3d(features, (1, 2, 2))
        query = _positions(self.conv_theta(features))
        key, value = _positions(self.conv_phi(pooled)), _positions(self.conv_g(pooled))
        if self.form == "softmax":
            found = functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        else:  # the products are linear in the query, so keys and values meet first: no positions x positions matrix
            found = query @ (key.transpose(1, 2) @ value / key.shape[1])
        found = found.transpose(1, 2).reshape(features.shape[0], -1, *features.shape[2:])
        added: Tensor = self.bn(self.conv_out(found))
        return features + added


def _positions(features: Tensor) -> Tensor:
    """(B, C, T, H, W) -> (B, T H W, C)."""
    return features.flatten(2).transpose(1, 2)

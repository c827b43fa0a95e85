"""Weight files: recognized, renamed, strictly loaded: all of a model, all but its heads, or one tower; never half.

Read are twinreel's own files, those of the founding MIL-NCE code, of PySlowFast (`.pyth`, and the Caffe2 `.pkl` of its
model zoo), of PyTorchVideo, of ClipBERT, BERT and detectron2, and pictures' networks of ImageNet, which are inflated.
`docs/weights.md` has the table. Files are read with safetensors, `weights_only=True`, or an unpickler that knows arrays
and containers alone; one that needs more is refused.

files        what a file holds, without running anything that is in it
pickles      plain pickles of arrays
layouts      which founding system wrote it, and its tensors under twinreel's keys
caffe2, pytorchvideo, clipbert, bert   what each of those means
unused       tensors that nothing reads
own          what a checkpoint of our own states beside its weights
placing      which keys of a model a file of a part stands for
strict       into a model
inflate      from a network of pictures into one of videos
sizes        options of a model that the shapes state
saving       one file with what is known of the model
"""

from __future__ import annotations

from twinreel.models.weights.files import read_tensor
from twinreel.models.weights.inflate import inflate_2d
from twinreel.models.weights.layouts import Layout, Source, Weights, read_weights
from twinreel.models.weights.loading import load_partial, load_weights
from twinreel.models.weights.saving import save_weights
from twinreel.models.weights.sizes import assumed_heads, sizes_of, sizes_of_parts
from twinreel.models.weights.strict import LoadReport, Scope
from twinreel.models.weights.unused import Unused

__all__ = [
    "Layout",
    "LoadReport",
    "Scope",
    "Source",
    "Unused",
    "Weights",
    "assumed_heads",
    "inflate_2d",
    "load_partial",
    "load_weights",
    "read_tensor",
    "read_weights",
    "save_weights",
    "sizes_of",
    "sizes_of_parts",
]

"""Whether two processes agree with one, and if not, which part of the way differs.

One process takes a small batch whole and is the reference. Two processes, started by torchrun on this machine's CPU,
take half of it each. They are compared along the way of the data: samples, embeddings, gathered embeddings, loss terms
(labels and candidates counted from the right place), gradients that come back through the gather, gradients that are
exchanged, and micro-batches under cached negatives.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twinreel.data.clip import Batch
from twinreel.data.plan import Shares
from twinreel.distributed import leave, process_group, world
from twinreel.errors import TrainingError, TwinreelError
from twinreel.gradients import Compared, GradientStep, global_gradient
from twinreel.parts import PLAIN_SCHEDULE, Parts, build_parts, for_device, read_batches
from twinreel.recipe import EvalSection, Recipe, load_recipe
from twinreel.tasks import Contrastive

__all__ = ["find_disagreement", "observe"]

NUM_CLIPS = 8
TOLERANCE = 1e-3  # of float32 sums in another order, relative to the largest
CPU = torch.device("cpu")


def find_disagreement(
    recipe: Recipe, launch: Callable[[Recipe], list[dict[str, Any]]] | None = None
) -> tuple[int, str | None]:
    """Compare two processes with one on the first clips of a recipe's first epoch, on the CPU in fp32.

    Dropout and batch norm are in eval mode: what they do belongs to the processes, not to the exchange.

    Args:
        recipe: what is trained.
        launch: what starts two processes and returns `observe` of each; None = torchrun.

    Returns:
        The number of clips compared; what differs, or None.

    Raises:
        TrainingError: the two processes could not be run.
    """
    small = _small(recipe)
    alone = observe(small)
    both = (launch or _launch)(small)
    clips = small.train.global_batch_size
    for name, explanation in STAGES.items():
        if name == "share":
            added = {name: torch.stack([own[name] for own in both]).sum()}
            differences = [_difference(alone, added, name)]
        else:
            differences = [_difference(alone, own, name) for own in (alone, *both) if name in own]
        wrong = [value for value in differences if not value <= (0 if name == "samples" else TOLERANCE)]  # NaN too
        if wrong:
            return clips, f"{explanation} (they differ by {wrong[0]:.2g} of the largest value)"
    return clips, None


STAGES = {
    "samples": "data: two processes do not read the samples that one process reads at the same positions",
    "embeddings": "model: a clip's output depends on which clips are in a batch with it, even in eval mode",
    "gathered": "gather: the gathered outputs are not those of all processes in the order of the batch",
    "share": "label offset: the processes' shares of the loss do not add up to that of the whole batch (`own`)",
    "terms": "label offset: in some process the loss of a clip is taken at another clip's place (`own`)",
    "embedding_gradients": "gather: the gradient that comes back through the gather is not that of the whole batch",
    "gradients": "gradient exchange: the processes' gradients are not added up to that of the whole batch",
    "accumulated": "accumulation: micro-batches do not give the gradient of the whole batch",
}


def _small(recipe: Recipe) -> Recipe:
    size = min(NUM_CLIPS, recipe.train.global_batch_size) // 2 * 2
    changed = {
        "global_batch_size": max(2, size),
        "micro_batch_size": None,
        "cached_negatives": False,
        "batch_norm": "per_process",
        "activation_checkpointing": False,
        "precision": "fp32",
        "device": "cpu",
        "num_epochs": 1,
        "num_steps": None,
        "ema_decay": None,
    }
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"repeated_augmentation": 1, "mixup": 0.0, "cutmix": 0.0}),
            "train": recipe.train.model_copy(update=changed),
            "optim": recipe.optim.model_copy(update=PLAIN_SCHEDULE),
            "eval": EvalSection.model_validate({}),
        }
    )


def observe(recipe: Recipe) -> dict[str, Any]:
    """What this process has at each stage, by position in the batch where there is one."""
    recipe = for_device(recipe, CPU)
    parts = build_parts(recipe, CPU)
    task: Any = parts.task
    rows = len(task.output_names)
    parts.whole.eval()
    for part in parts.model.modules():
        if "head_activation" in vars(part):
            part.head_activation = "none"  # type: ignore[assignment]  # logits in eval mode too
    batches = read_batches(recipe, parts)
    step, batch = GradientStep(parts, recipe, batches, 0), batches[0]
    text, facts = step.inputs(batch)
    with torch.no_grad():
        outputs = step.run(parts.whole, step.video(batch), text, 0)
    leaves = tuple(part.detach().requires_grad_() for part in outputs)
    compared = step.compare(leaves, facts, [[own] for own in parts.shares.positions[0]], 0)
    torch.autograd.backward(compared.share)
    mine = parts.shares.of_process(world().rank)[0]
    seen: dict[str, Any] = {
        "mine": torch.arange(mine.start, mine.stop),
        "samples": torch.tensor(_marks(batch), dtype=torch.float64),
        "embeddings": torch.cat([part.detach().reshape(len(batch.ids), -1) for part in outputs[:rows]], dim=1),
        "gathered": torch.cat([part.detach().reshape(len(compared.positions), -1) for part in compared.outputs], dim=1),
        "embedding_gradients": torch.cat([_gradient_rows(leaf, len(batch.ids)) for leaf in leaves[:rows]], dim=1),
    }
    seen["share"] = compared.share.detach() * compared.usable
    if "own" in task.takes:
        seen["terms"] = _terms(parts, compared)
    global_gradient(parts, recipe, [batch], 0)
    seen["gradients"] = _flat_gradients(parts)
    micro = recipe.train.global_batch_size // world().size // 2
    if micro:
        seen["accumulated"] = _accumulated(recipe, parts, micro)
    return seen


def _accumulated(recipe: Recipe, parts: Parts, micro: int) -> Tensor:
    negatives = isinstance(parts.task, Contrastive)
    cached = recipe.model_copy(update={"train": recipe.train.model_copy(update={"cached_negatives": negatives})})
    parts.shares = Shares.cut(recipe.train.global_batch_size, world().size, micro)
    global_gradient(parts, cached, read_batches(recipe, parts), 0)
    return _flat_gradients(parts)


def _marks(batch: Batch) -> list[list[float]]:
    """A number for the pixels, one for captions and labels, and one for the mirror of each sample."""
    said = [repr((captions, labels)).encode() for captions, labels in zip(batch.captions, batch.labels, strict=True)]
    return [
        [float(zlib.crc32(frames.numpy().tobytes())), float(zlib.crc32(words)), float(flip)]
        for frames, words, flip in zip(batch.frames, said, batch.flip.tolist(), strict=True)
    ]


def _gradient_rows(leaf: Tensor, rows: int) -> Tensor:
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return gradient.reshape(rows, -1)


@torch.no_grad()
def _terms(parts: Parts, compared: Compared) -> Tensor:
    """The loss terms of the clips that this process answers for, in the order of its clips."""
    task: Any = parts.task
    terms = [
        task.share(
            compared.outputs,
            compared.facts,
            own=own[None],
            log_scale=task.log_scale,
            negative_seed=compared.negative_seed,
        )
        for own in compared.own
    ]
    return torch.stack(terms) * compared.usable


def _flat_gradients(parts: Parts) -> Tensor:
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parts.parameters]
    return torch.cat([gradient.flatten() for gradient in gradients]).clone()


def _difference(alone: Mapping[str, Any], own: Mapping[str, Any], name: str) -> float:
    """The largest difference, relative to the largest value; of this process's rows where rows are its own."""
    wanted, found = alone["gradients" if name == "accumulated" else name], own[name]
    if name in ("samples", "embeddings", "terms", "embedding_gradients"):
        wanted = wanted[own["mine"]]
    if wanted.shape != found.shape:
        return float("inf")
    return float((wanted - found).abs().max() / wanted.abs().max().clamp(min=1e-12))


def _launch(recipe: Recipe) -> list[dict[str, Any]]:
    """Two processes under torchrun, as a run would have them."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "recipe.yaml").write_text(recipe.with_absolute_paths().to_yaml(), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run(
            [*command, "-m", "twinreel.agreement", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            said = [
                line for line in done.stderr.splitlines() if line.startswith("twinreel: ")
            ] or done.stderr.splitlines()
            raise TrainingError("two processes cannot run this recipe: " + "\n".join(said[-20:]))
        return [dict(torch.load(folder / f"{rank}.pt", weights_only=True)) for rank in (0, 1)]


def main(folder: Path) -> None:
    """One of two processes: observe, and leave what was seen in the folder."""
    recipe = load_recipe(folder / "recipe.yaml")
    with process_group(CPU):
        torch.save(observe(recipe), folder / f"{world().rank}.pt")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except TwinreelError as error:
        print(f"twinreel: {error}", file=sys.stderr)
        leave(2)
    leave(0)

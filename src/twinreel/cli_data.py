"""`twinreel data ...`: manifests and files, before anything is trained. One verb = one thin function."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from twinreel.errors import ConfigError

if TYPE_CHECKING:
    from twinreel.data.clip import Fault

__all__ = ["data_app"]

data_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Check, convert and store collections of videos.",
)


@data_app.callback()
def _data() -> None:
    """Check, convert and store collections of videos."""


@data_app.command()
def check(
    sources: Annotated[
        list[str], typer.Argument(metavar="MANIFEST... | FOLDER", help="CSV, JSONL, lists; or a folder")
    ],
    root: Annotated[str | None, typer.Option(help="folder that paths are relative to")] = None,
    split: Annotated[str | None, typer.Option(help="check the rows of this split only")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: one a core")] = None,
    deep: Annotated[bool, typer.Option("--deep", help="decode every frame, not the first and the last")] = False,
    num_classes: Annotated[int | None, typer.Option(min=1, help="labels must be 0 to this - 1")] = None,
    class_names: Annotated[str | None, typer.Option(help="a file with the names of class numbers")] = None,
    vocabulary: Annotated[str | None, typer.Option(help="words or BERT's vocab.txt, to count unknown words")] = None,
    max_faults: Annotated[float, typer.Option(min=0, max=1, help="share of excluded rows that is allowed")] = 0.05,
    timeout: Annotated[
        float | None, typer.Option(help="seconds a video may take; default 300, with --deep 7200")
    ] = None,
    write_clean: Annotated[Path | None, typer.Option(help="write the rows that can be used (.csv or .jsonl)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Open every video of a collection: what is there, what is odd, what will be excluded and why."""
    from twinreel.data.manifest import check_target, write_manifest
    from twinreel.data.preparation.collection_check import check_collection, read_collection
    from twinreel.log import Progress
    from twinreel.wordpiece import load_vocabulary

    if write_clean is not None:
        check_target(write_clean)
        if any(Path(source).exists() and write_clean.exists() and write_clean.samefile(source) for source in sources):
            raise ConfigError(f"--write-clean {write_clean} would overwrite the list that is checked; choose another")
    words = None if vocabulary is None else load_vocabulary(vocabulary)
    rows, groups = read_collection(sources, root=root, split=split, class_names=class_names)
    progress = Progress()
    result = check_collection(
        rows,
        groups,
        num_workers=workers or os.cpu_count() or 1,
        max_faults=max_faults,
        deep=deep,
        num_classes=num_classes,
        vocabulary=words,
        most_seconds=timeout,
        progress=lambda what, done, total: progress.show(f"{what} {done}/{total} videos", force=done == total),
    )
    progress.clear()
    print(json.dumps(result.to_json(), indent=1, ensure_ascii=False) if as_json else result.to_table())
    if write_clean is not None:
        write_manifest(write_clean, result.usable)
    if not result.passed:
        raise typer.Exit(2)


class _SeveralWords(TyperCommand):
    """A command whose `--ext` takes several words, as that of ClipBERT's script: `--ext mp4 avi`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Give each of the words an `--ext` of its own."""
        spread: list[str] = []
        in_list = False
        for at, word in enumerate(args):
            in_list = in_list and re.fullmatch(r"\.?[A-Za-z0-9]{1,5}", word) is not None and not os.path.exists(word)
            spread += ["--ext", word] if in_list and args[at - 1] != "--ext" else [word]
            in_list = in_list or word == "--ext"
        return super().parse_args(ctx, spread)


@data_app.command(cls=_SeveralWords)
def pack(
    source: Annotated[str, typer.Argument(metavar="FOLDER | MANIFEST", help="files to pack")],
    out: Annotated[Path, typer.Option(help="the LMDB to be, best named X.lmdb")],
    root: Annotated[str | None, typer.Option(help="folder that the manifest's paths start from")] = None,
    ext: Annotated[list[str] | None, typer.Option(metavar="EXT...", help="only these, such as --ext mp4 avi")] = None,
    kind: Annotated[Literal["video", "image"], typer.Option("--type", help="what the files are")] = "video",
    keys: Annotated[
        Literal["name", "path"], typer.Option(help="name: file name without extension (ClipBERT's); path: with folders")
    ] = "name",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Put files into one LMDB that ClipBERT can read too; goes on where a killed run stopped."""
    from twinreel.data.preparation.pack import pack_collection
    from twinreel.log import Progress

    progress = Progress()
    result = pack_collection(
        source,
        out,
        root=root,
        suffixes=_suffixes(ext),
        kind=kind,
        keys=keys,
        report=lambda what, done, total: progress.show(f"{what} {done / 1e6:.1f}/{total / 1e6:.1f} MB"),
    )
    progress.clear()
    print(_as_json(result) if as_json else _packed(result, kind))
    _end(result.faults, "not packed", Path(result.store))


@data_app.command()
def extract(
    source: Annotated[str, typer.Argument(metavar="MANIFEST | FOLDER", help="videos to extract")],
    out: Annotated[Path, typer.Option(help="the folder to be, with one folder of images a video")],
    root: Annotated[str | None, typer.Option(help="folder that the manifest's paths start from")] = None,
    rate: Annotated[float | None, typer.Option(help="images a second; default every frame")] = None,
    quality: Annotated[int, typer.Option(min=1, max=100, help="of JPEG")] = 95,
    short_side: Annotated[int | None, typer.Option(min=1, help="pixels; larger videos are scaled down")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="processes; default: one a core")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Write the frames of videos as images, with their exact seconds; goes on where a killed run stopped."""
    from twinreel.data.preparation.extract import extract_collection
    from twinreel.log import Progress

    progress = Progress()
    result = extract_collection(
        source,
        out,
        root=root,
        rate=rate,
        quality=quality,
        short_side=short_side,
        num_workers=workers or os.cpu_count() or 1,
        report=lambda done, total: progress.show(f"extracting {done}/{total} videos", force=done == total),
    )
    progress.clear()
    print(_as_json(result) if as_json else _extracted(result))
    if result.repeated:
        print(
            f"twinreel: --rate {rate:g} is above the rate of {len(result.repeated)} videos, whose images repeat frames "
            f"(first: {next(iter(result.repeated))}); leave --rate out for every frame",
            file=sys.stderr,
        )
    _end(result.faults, "not extracted", Path(result.folder))


@data_app.command()
def prepare(
    source: Annotated[str, typer.Argument(metavar="MANIFEST | FOLDER", help="videos to re-encode")],
    out: Annotated[Path, typer.Option(help="the folder to be, with videos/ and manifest.jsonl")],
    root: Annotated[str | None, typer.Option(help="folder that the manifest's paths start from")] = None,
    short_side: Annotated[int, typer.Option(help="pixels, even; smaller videos are not scaled up")] = 256,
    gop: Annotated[int, typer.Option(help="frames from key frame to key frame")] = 16,
    crf: Annotated[int, typer.Option(help="quality, 0 to 51; 18 is hardly told from the source")] = 21,
    clip_seconds: Annotated[
        float | None, typer.Option(help="keep only the rows' windows and so much around them: the longest clip read")
    ] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="of a damaged video keep what comes before the damage")
    ] = False,
    workers: Annotated[int | None, typer.Option(min=0, help="processes; default: one a core")] = None,
    max_faults: Annotated[float, typer.Option(min=0, max=1, help="share of rows that may fail")] = 0.0,
    measure: Annotated[int, typer.Option(min=0, help="files to measure the gain on; 0 for none")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON for programs")] = False,
) -> None:
    """Re-encode videos for fast random access, times kept; goes on where a killed run stopped."""
    from twinreel.data.preparation.encode import Encoding
    from twinreel.data.preparation.prepare import prepare_collection
    from twinreel.log import Progress

    progress = Progress()
    result = prepare_collection(
        source,
        out,
        root=root,
        encoding=Encoding(short_side=short_side, gop=gop, crf=crf),
        clip_seconds=clip_seconds,
        allow_partial=allow_partial,
        num_workers=(os.cpu_count() or 1) if workers is None else workers,
        measured_files=measure,
        report=lambda done, total: progress.show(f"preparing {done}/{total} videos", force=done == total),
    )
    progress.clear()
    print(_as_json(result) if as_json else result.to_table())
    for fault in result.faults[:5]:
        print(f"twinreel: not prepared: {fault.reason}", file=sys.stderr)
    if result.faults:
        share = f"{len(result.faults)} of {result.rows + len(result.faults)} rows; allowed --max-faults {max_faults:g}"
        print(f"twinreel: {share}; all are in {Path(result.folder) / 'faults.jsonl'}", file=sys.stderr)
    if not allow_partial and any("readable up to" in fault.reason for fault in result.faults):
        print("twinreel: --allow-partial keeps what is readable before the damage", file=sys.stderr)
    if len(result.faults) > max_faults * (result.rows + len(result.faults)):
        raise typer.Exit(2)


def _suffixes(words: list[str] | None) -> set[str] | None:
    """`mp4`, `.MP4` and `mp4,avi` -> suffixes with their dot, in lower case."""
    names = [name.strip().lstrip(".").lower() for word in words or [] for name in word.split(",")]
    if not all(names):
        raise ConfigError(f"--ext {' '.join(words or [])!r}: give endings such as --ext mp4 avi")
    return {f".{name}" for name in names} or None


def _packed(result: Any, kind: str) -> str:
    left_out = ", ".join(f"{number} {suffix or 'without ending'}" for suffix, number in result.left_out.items())
    lines = [
        f"{result.listed} files listed: {result.packed} packed, {result.already_there} already there, "
        f"{len(result.faults)} failed; {result.bytes / 1e6:.1f} MB of {kind}s, each compared with its file",
        *([f"left out by their ending: {left_out}"] if left_out else []),
        f"{result.store}",
        *([_train_from(result.store, result.manifest)] if kind == "video" else []),
    ]
    return "\n".join(lines)


def _extracted(result: Any) -> str:
    lines = [
        f"{result.listed} videos listed: {result.written} written, {result.already_there} already there, "
        f"{len(result.faults)} failed; {result.images} images, {result.bytes / 1e6:.1f} MB"
    ]
    if result.unlisted:
        lines.append(
            f"{len(result.unlisted)} folders are of videos that are not listed now and are not in the manifest; delete "
            f"them if they are not wanted (first: {result.unlisted[0]})"
        )
    lines.append(result.folder)
    if result.manifest is not None:
        lines.append(_train_from(result.folder, result.manifest))
    return "\n".join(lines)


def _train_from(root: str, manifest: str) -> str:
    return (
        f"train from it: data.manifest={manifest}\n"
        f"or with the manifest you have, if its paths are relative: data.root={root}"
    )


def _as_json(result: Any) -> str:
    from dataclasses import asdict

    return json.dumps(asdict(result), indent=1, ensure_ascii=False)


def _end(faults: list[Fault], what: str, folder: Path) -> None:
    """Name the first failures and end with 2, if there are any."""
    for fault in faults[:5]:
        print(f"twinreel: {what}: {fault.reason}", file=sys.stderr)
    if faults:
        print(f"twinreel: all {len(faults)} are in {folder / 'faults.jsonl'}", file=sys.stderr)
        raise typer.Exit(2)

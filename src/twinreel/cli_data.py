"""`twinreel data ...`: manifests and files, before anything is trained. One verb = one thin function."""

from __future__ import annotations

import typer

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

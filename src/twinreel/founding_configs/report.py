"""What became of every key, in words: for people on stderr, and as a table for programs."""

from __future__ import annotations

from typing import Any

from twinreel.founding_configs.draft import Draft, Fate
from twinreel.founding_configs.values import short

__all__ = ["account", "account_table"]

_TITLES: dict[Fate, str] = {
    "mapped": "became recipe keys",
    "dropped": "dropped, without an effect on results",
    "lost": "DROPPED ALTHOUGH THEY HAD AN EFFECT",
}


def account(draft: Draft) -> str:
    """The account of a conversion: notes first, then every given key, then the defaults that count."""
    lines = [f"{draft.settings.source}: {len(draft.settings.written)} keys"]
    lines += [f"  {note}" for note in dict.fromkeys([*draft.notes, *draft.settings.notes])]
    for fate, title in _TITLES.items():
        rows = [row for row in account_table(draft) if row["fate"] == fate]
        if rows:
            lines.append(f"{title} ({len(rows)}):")
            lines += [f"  {row['key']}: {row['value']} -> {row['text']}" for row in rows]
    if draft.defaults:
        values = ", ".join(f"{key}={short(draft.settings[key])}" for key in draft.defaults)
        lines.append(f"not in the file, so {draft.settings.system}'s defaults count: {values}")
    return "\n".join(lines)


def account_table(draft: Draft) -> list[dict[str, Any]]:
    """A row for each given key, in the order of the file: key, value, place, fate, text."""
    rows = []
    for key, written in draft.settings.written.items():
        outcomes = draft.outcomes.get(key, [])
        fates = [outcome.fate for outcome in outcomes]
        fate = next((worst for worst in ("lost", "mapped", "dropped") if worst in fates), None)
        assert fate is not None, f"nothing was said about {key}"
        kept = [outcome.text for outcome in outcomes if outcome.fate != "dropped" or fate == "dropped"]
        text = "; ".join(dict.fromkeys(kept))
        rows.append({"key": key, "value": short(written.value), "place": written.place, "fate": fate, "text": text})
    return rows

"""Tables for notebooks, which ``_repr_html_`` returns. Every text is escaped: a name may come from a user's file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

LEFT, RIGHT = ' style="text-align: left"', ' style="text-align: right"'


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return a table whose first column is on the left and whose others are on the right."""
    title = [f"<caption{LEFT}>{escape(caption)}</caption>"] if caption else []
    body = [_row("td", cells) for cells in rows]
    return "\n".join(
        ["<table>", *title, f"<thead>{_row('th', headings)}</thead>", "<tbody>", *body, "</tbody></table>"]
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    aligned = (f"<{tag}{RIGHT if place else LEFT}>{_text(cell)}</{tag}>" for place, cell in enumerate(cells))
    return f"<tr>{''.join(aligned)}</tr>"


def _text(cell: str) -> str:
    return escape(cell.strip()).replace("\n", "<br>")

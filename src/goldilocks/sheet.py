"""A table of words: on a terminal, in Markdown, in a notebook, and on the report's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

LEFT, RIGHT = ' style="text-align: left"', ' style="text-align: right"'


@dataclass(frozen=True)
class Sheet:
    """The first cell of a row is its name, which may have a colour. A line break in a heading narrows its column."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    colours: Mapping[str, str] = field(default_factory=dict)

    def on_terminal(self, gap: int = 2) -> Table:
        """Return a table for rich to print, with this many spaces between its columns."""
        from rich.table import Table
        from rich.text import Text  # which is printed as it is, while rich reads [a] in a plain string as markup

        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))
        two_lines = any("\n" in heading for heading in self.headings)
        for place, heading in enumerate(self.headings):
            lines = f"\n{heading}" if two_lines and "\n" not in heading else heading
            table.add_column(Text(lines), justify="right" if place else "left", no_wrap=True)
        for cells in self.rows:
            table.add_row(*map(Text, cells))
        return table

    def in_markdown(self) -> str:
        headings = [heading.replace("\n", " ") for heading in self.headings]
        rule = ["---", *["--:"] * (len(headings) - 1)]
        rows = ([cell.replace("|", "\\|") for cell in row] for row in (headings, rule, *self.rows))
        return "\n".join([self.title, "", *(f"| {' | '.join(row)} |" for row in rows), ""])

    def in_html(self) -> str:
        """Return a table for ``_repr_html_``. Every text is escaped: a name may come from a user's file."""
        title = [f"<caption{LEFT}>{escape(self.title)}</caption>"] if self.title else []
        head, rows = f"<thead>{_row('th', self.headings)}</thead>", [_row("td", row) for row in self.rows]
        return "\n".join(["<table>", *title, head, "<tbody>", *rows, "</tbody></table>"])


def _row(tag: str, cells: Sequence[str]) -> str:
    texts = (escape(cell.strip()).replace("\n", "<br>") for cell in cells)
    aligned = (f"<{tag}{RIGHT if place else LEFT}>{text}</{tag}>" for place, text in enumerate(texts))
    return f"<tr>{''.join(aligned)}</tr>"

"""Fit text and tables to the width of a terminal without cutting what is read or pasted."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

__all__ = ["TextTable", "wrapped"]

_COMMAND = re.compile(
    r"(?:(?<=: )|(?<=; )|(?<=\. )|(?<=^)|(?<=  ))(?:trt-eagle3|pip|make|rm|\S*\.sh)\b.*?"
    r"(?=  #|; |\. [A-Z]|, or |$)"
)
"""A command: it begins a line, or follows punctuation; a comment or the next sentence ends it."""
_JOINED = "\N{NO-BREAK SPACE}"
_GAP = "  "
_BELOW = 28  # a narrower last column goes below its row
_INDENT = 4  # of a last column below its row


def wrapped(text: str, width: int, hang: int = 2) -> list[str]:
    """Break ``text`` into lines of at most ``width`` columns, at spaces only.

    A word, path, URL or command that is longer keeps a line to itself. Lines after the first are
    indented by ``hang`` more than the first.
    """
    found = []
    for line in text.split("\n"):
        whole = _COMMAND.sub(lambda m: m[0].replace(" ", _JOINED), line)
        indent = whole[: len(whole) - len(whole.lstrip(" "))]
        parts = textwrap.wrap(
            whole.strip(" "),
            width,
            initial_indent=indent,
            subsequent_indent=indent + " " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        found += [part.replace(_JOINED, " ") for part in parts] or [""]
    return found


class TextTable:
    """A table without rules, which Rich prints.

    Where it is too wide, headers wrap first, then the last column. Where few columns remain for
    that one, it goes below its row. Nothing is cut: a table of long words is wider than the
    terminal.
    """

    def __init__(self, *header: str, right: int = 0) -> None:
        """Name the columns; the first ``right`` of them are aligned to the right."""
        self._header, self._right = header, right
        self._rows: list[tuple[tuple[str | Text, ...], str]] = []

    def add_row(self, *cells: str | Text, style: str = "") -> None:
        """Add one line; text has no markup."""
        assert len(cells) == len(self._header), (cells, self._header)
        self._rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in self._lines(options.max_width):
            line.no_wrap, line.overflow = True, "ignore"
            yield line

    def _lines(self, width: int) -> Iterator[Text]:
        header = [name.split("\n") for name in self._header]
        widths = self._widths(header)
        if _total(widths) > width:
            widths = self._widths([name.split() for name in self._header])
            pairs = zip(self._header, widths, strict=True)
            header = [wrapped(name.replace("\n", " "), w, hang=0) for name, w in pairs]
        room = width - _total(widths[:-1]) - len(_GAP)
        below = widths[-1] > room and room < _BELOW
        if below:
            header, widths = header[:-1], widths[:-1]
        height = max(map(len, header))
        yield from self._block([[""] * (height - len(h)) + h for h in header], widths, "bold")
        for cells, style in self._rows:
            *others, last = cells
            if below:
                yield from self._block([[cell] for cell in others], widths, style)
                below_row = wrapped(" " * _INDENT + str(last), width)
                yield from (Text(line, style) for line in below_row if line.strip())
            else:
                fits = cell_len(str(last)) <= room
                lines: Sequence[str | Text] = [last] if fits else wrapped(str(last), room, hang=0)
                yield from self._block([*([cell] for cell in others), lines], widths, style)

    def _widths(self, header: Sequence[Sequence[str]]) -> list[int]:
        columns = zip(*(map(str, cells) for cells, _ in self._rows), strict=True)
        found = [max(map(cell_len, names), default=0) for names in header]
        longest = [max(map(cell_len, column)) for column in columns] or found
        return [max(pair) for pair in zip(found, longest, strict=True)]

    def _block(
        self, cells: Sequence[Sequence[object]], widths: Sequence[int], style: str
    ) -> Iterator[Text]:
        """Return the lines of one row; each cell has its own lines."""
        for k in range(max(map(len, cells))):
            line = Text(style=style)
            for i, (parts, width) in enumerate(zip(cells, widths, strict=True)):
                part = parts[k] if k < len(parts) else ""
                shown = part if isinstance(part, Text) else Text(str(part))
                space = " " * (width - shown.cell_len)
                line.append(_GAP if i else "")
                line.append(space if i < self._right else "").append(shown)
                line.append("" if i < self._right else space)
            line.rstrip()
            yield line


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)

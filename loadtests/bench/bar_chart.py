"""Bar charts as one SVG: plain shapes, readable on light and dark pages, no library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, BAR_HEIGHT, GAP, LABEL_WIDTH, VALUE_WIDTH, TITLE_HEIGHT = 720, 20, 8, 190, 80, 40
INK, OURS, THEIRS = "#57606a", "#1f6feb", "#8b949e"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `value` is at least 0."""

    label: str
    value: float
    is_ours: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """Horizontal bars on one linear scale of their own, below a title."""

    title: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        """In pixels."""
        return TITLE_HEIGHT + len(self.bars) * (BAR_HEIGHT + GAP) + GAP


def bar_charts(title: str, panels: Sequence[Panel]) -> str:
    """The panels one below the other; `title` is for readers that don't see them."""
    height = sum(panel.height for panel in panels)
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">'
        ),
        f"<title>{escape(title)}</title>",
    ]
    top = 0
    for panel in panels:
        lines += _panel(panel, top)
        top += panel.height
    return "\n".join([*lines, "</svg>", ""])


def _panel(panel: Panel, top: int) -> list[str]:
    scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / max((bar.value for bar in panel.bars), default=1.0)
    lines = [f'<text x="8" y="{top + 24}" font-weight="600">{escape(panel.title)}</text>']
    for number, bar in enumerate(panel.bars):
        y = top + TITLE_HEIGHT + number * (BAR_HEIGHT + GAP)
        length = max(2.0, bar.value * scale)
        text_y = y + BAR_HEIGHT - 5
        lines += [
            f'<text x="{LABEL_WIDTH - 10}" y="{text_y}" text-anchor="end">{escape(bar.label)}</text>',
            (
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="3" '
                f'fill="{OURS if bar.is_ours else THEIRS}"/>'
            ),
            f'<text x="{LABEL_WIDTH + length + 8:.1f}" y="{text_y}">{bar.value:,.0f}</text>',
        ]
    return lines

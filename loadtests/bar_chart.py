"""A bar chart as SVG: plain shapes, readable on light and dark pages, no library."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, BAR_HEIGHT, GAP, LABEL_WIDTH, VALUE_WIDTH, TOP = 720, 22, 10, 230, 90, 44
INK, OURS, THEIRS = "#57606a", "#1f6feb", "#8b949e"


def bar_chart(title: str, bars: Sequence[tuple[str, float, bool]]) -> str:
    """Horizontal bars on one linear scale.

    Args:
        title: above the bars.
        bars: label, value, and whether it is ours.
    """
    scale = (WIDTH - LABEL_WIDTH - VALUE_WIDTH) / max(value for _, value, _ in bars)
    height = TOP + len(bars) * (BAR_HEIGHT + GAP) + GAP
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">'
        ),
        f"<title>{escape(title)}</title>",
        f'<text x="8" y="26" font-weight="600">{escape(title)}</text>',
    ]
    for number, (label, value, ours) in enumerate(bars):
        y = TOP + number * (BAR_HEIGHT + GAP)
        length = max(2.0, value * scale)
        text_y = y + BAR_HEIGHT - 6
        lines += [
            f'<text x="{LABEL_WIDTH - 10}" y="{text_y}" text-anchor="end">{escape(label)}</text>',
            (
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" rx="3" '
                f'fill="{OURS if ours else THEIRS}"/>'
            ),
            f'<text x="{LABEL_WIDTH + length + 8:.1f}" y="{text_y}">{value:,.0f}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])

"""Draws boxes, arrows and text as SVG, once for light and once for dark pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

WIDTH = 540
"""The width of each drawing. A phone shows it at two thirds of its size, so no text is smaller than `SMALL`."""
TEXT, SMALL = 16, 15
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
CHARACTER = {"sans": 0.55, "bold": 0.63, "mono": 0.61}
"""The width of a character as a share of the size of the font: a little more than the mean of common fonts."""


@dataclass(frozen=True)
class Theme:
    """The colors of a drawing.

    Attributes:
        name: The end of the file's name: `light` or `dark`.
        ink: The color of text and outlines.
        faint: The color of text that explains.
        fill: The color of a box.
        line: The color of the outline of a box.
        colors: The colors with a meaning, by name. Each is legible as text on the page and on a box.
    """

    name: str
    ink: str
    faint: str
    fill: str
    line: str
    colors: dict[str, str] = field(default_factory=dict)


# Each color has a contrast of at least 4.5 on the background of its pages: white, and the theme's near-black.
LIGHT = Theme(
    "light",
    ink="#1b1f24",
    faint="#57606a",
    fill="#f3f5f8",
    line="#8c959f",
    colors={"blue": "#0550ae", "green": "#116329", "red": "#a40e26", "orange": "#8a4600"},
)
DARK = Theme(
    "dark",
    ink="#e6edf3",
    faint="#a9b4c0",
    fill="#21262d",
    line="#6e7681",
    colors={"blue": "#79c0ff", "green": "#7ee787", "red": "#ff9b94", "orange": "#ffb86b"},
)
THEMES = (LIGHT, DARK)


@dataclass
class Drawing:
    """A drawing under construction.

    Attributes:
        theme: The colors.
        height: The height, in the unit of `WIDTH`.
        title: The text for readers who do not see the picture.
        parts: The elements so far, as text.
        texts: Each text with its left and right end and its base line, for a test that no text is cut or covered.
    """

    theme: Theme
    height: int
    title: str
    parts: list[str] = field(default_factory=list)
    texts: list[tuple[str, float, float, float]] = field(default_factory=list)

    def color(self, name: str) -> str:
        """Return a color of the theme.

        Args:
            name: `ink`, `faint`, `fill`, `line`, or the name of a color with a meaning.
        """
        return self.theme.colors.get(name) or str(getattr(self.theme, name))

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        color: str = "ink",
        size: int = TEXT,
        anchor: str = "start",
        is_bold: bool = False,
        is_code: bool = False,
    ) -> None:
        """Write one line of text.

        Args:
            x: The position that `anchor` names, from the left.
            y: The base line, from the top.
            words: The text.
            color: The name of a color.
            size: The size of the font.
            anchor: `start`, `middle` or `end`: the part of the text that is at `x`.
            is_bold: True for a heading.
            is_code: True for a font in which each character has the same width.
        """
        wide = len(words) * size * CHARACTER["mono" if is_code else "bold" if is_bold else "sans"]
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        self.texts.append((words, left, left + wide, y))
        weight = ' font-weight="600"' if is_bold else ""
        family = f' font-family="{MONO}"' if is_code else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" fill="{self.color(color)}" font-size="{size}" text-anchor="{anchor}"'
            f"{weight}{family}>{escape(words)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, *, line: str = "line", fill: str = "fill") -> None:
        """Draw a box with round corners.

        Args:
            x: The left side.
            y: The upper side.
            width: The width.
            height: The height.
            line: The name of the color of the outline.
            fill: The name of the color inside, or `none`.
        """
        inside = "none" if fill == "none" else self.color(fill)
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{inside}" '
            f'stroke="{self.color(line)}" stroke-width="1.5"/>'
        )

    def line(self, *points: tuple[float, float], color: str = "ink", wide: float = 2, is_dashed: bool = False) -> None:
        """Draw a line through points.

        Args:
            points: The points, each as x and y.
            color: The name of a color.
            wide: The width of the line.
            is_dashed: True for a line of dashes.
        """
        dashes = ' stroke-dasharray="5 4"' if is_dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{self.color(color)}" stroke-width="{wide:g}"{dashes}/>'
        )

    def arrow(self, start: tuple[float, float], end: tuple[float, float], *, color: str = "ink") -> None:
        """Draw a straight arrow.

        Args:
            start: Its begin, as x and y.
            end: Its tip, as x and y.
            color: The name of a color.
        """
        (x1, y1), (x2, y2) = start, end
        length = ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5
        ux, uy = (x2 - x1) / length, (y2 - y1) / length
        back_x, back_y = x2 - 9 * ux, y2 - 9 * uy
        self.line(start, (back_x, back_y), color=color)
        corners = ((x2, y2), (back_x - 4.5 * uy, back_y + 4.5 * ux), (back_x + 4.5 * uy, back_y - 4.5 * ux))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.parts.append(f'<polygon points="{path}" fill="{self.color(color)}"/>')

    def dot(self, x: float, y: float, words: str, *, color: str, radius: float = 12) -> None:
        """Draw a filled circle, or a pill for a longer text, with text in it.

        Args:
            x: The middle, from the left.
            y: The middle, from the top.
            words: The text, such as a number.
            color: The name of the color of the circle.
            radius: Half of its height.
        """
        half = max(radius, len(words) * SMALL * CHARACTER["sans"] / 2 + 7)
        self.parts.append(
            f'<rect x="{x - half:g}" y="{y - radius:g}" width="{2 * half:g}" height="{2 * radius:g}" rx="{radius:g}" '
            f'fill="{self.color(color)}"/>'
        )
        paper = "#ffffff" if self.theme.name == "light" else "#14181e"
        self.texts.append((words, x - half, x + half, y + 5))
        self.parts.append(
            f'<text x="{x:g}" y="{y + 5:g}" fill="{paper}" font-size="{SMALL}" font-weight="600" '
            f'text-anchor="middle">{escape(words)}</text>'
        )

    def svg(self) -> str:
        """Return the drawing as the text of an SVG file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" width="{WIDTH}" '
            f'height="{self.height}" role="img" font-family="{SANS}">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.parts, "</svg>", ""])


def write_drawing(draw: Callable[[Theme], Drawing], folder: Path, name: str) -> Iterator[Path]:
    """Write a drawing for each theme, and yield the files.

    Args:
        draw: Makes the drawing in the colors of a theme.
        folder: The folder of the files.
        name: The first part of the files' names.

    Example:
        list(write_drawing(draw, Path("docs/pictures"), "round"))
    """
    for theme in THEMES:
        path = folder / f"{name}-{theme.name}.svg"
        path.write_text(draw(theme).svg(), encoding="utf-8")
        yield path

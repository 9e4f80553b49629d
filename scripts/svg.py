"""The pictures of the guide as SVG that rustdoc shows inline. Text and lines have the colour of the page's text, so that they are
readable in light and dark; the palette is readable on both."""
from xml.sax.saxutils import escape

HELD, WAITING, FREE = "#2e8b57", "#b8860b", "#808080"


class Picture:
    def __init__(self, width, height, label, description=None):
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}" '
            f'style="max-width:{width}px;width:100%" font-family="sans-serif" font-size="13" fill="currentColor">'
        ]
        if description:
            self.lines.append(f"<title>{escape(label)}</title>")
            self.lines.append(f"<desc>{escape(description)}</desc>")

    def text(self, x, y, text, anchor="middle", size=None):
        size = f' font-size="{size}"' if size else ""
        self.lines.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}"{size}>{escape(text)}</text>')

    def bar(self, x, y, end, text, colour, dashed=False):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.lines.append(
            f'<rect x="{x}" y="{y}" width="{end - x}" height="26" rx="4" fill="{colour}" fill-opacity="0.25" stroke="{colour}"{dash}/>'
        )
        self.text((x + end) / 2, y + 18, text)

    def line(self, x1, y1, x2, y2, dashed=False, colour="currentColor", faint=False):
        dash = ' stroke-dasharray="3 3"' if dashed else ""
        dash += ' stroke-opacity="0.2"' if faint else ""
        self.lines.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"{dash}/>')

    def mark(self, x, y, colour, square=False, hollow=False, title=None):
        """A point of a chart; a browser shows its title under the pointer."""
        shape = f'<rect x="{x - 4}" y="{y - 4}" width="8" height="8"' if square else f'<circle cx="{x}" cy="{y}" r="4.5"'
        fill = "none" if hollow else colour
        title = f"<title>{escape(title)}</title>" if title else ""
        name = "rect" if square else "circle"
        self.lines.append(f'{shape} fill="{fill}" stroke="{colour}" pointer-events="all">{title}</{name}>')

    def arrow(self, x1, y1, x2, y2):
        self.line(x1, y1, x2, y2)
        down = 1 if y2 > y1 else -1
        if x1 == x2:
            self.lines.append(f'<path d="M{x2 - 4} {y2 - 7 * down} L{x2} {y2} L{x2 + 4} {y2 - 7 * down}" stroke="currentColor" fill="none"/>')
        else:
            self.lines.append(f'<path d="M{x2 - 7} {y2 - 4} L{x2} {y2} L{x2 - 7} {y2 + 4}" stroke="currentColor" fill="none"/>')

    def source(self):
        return "\n".join([*self.lines, "</svg>"]) + "\n"

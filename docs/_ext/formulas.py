"""Formulas as SVG, drawn when the site is built: no script, and nothing from a network."""

import html

import ziamath
from docutils.nodes import SkipNode
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

logger = logging.getLogger(__name__)

ziamath.config.svg2 = True  # glyphs as symbols, each once in a formula
ziamath.config.precision = 2

SIZE = 17.0  # pixels, for text of 16
_drawn: dict[tuple[str, bool], str] = {}


def drawn(tex: str, display: bool, node) -> str:
    """An `<svg>` of the height and depth of the formula, in the colour of the text."""
    key = tex, display
    if key not in _drawn:
        try:
            formula = ziamath.Latex(tex, size=SIZE, inline=not display, margin=0)
            svg = formula.svg()
        except Exception as e:
            logger.warning("formula %r: %s", tex, e, location=node)
            return f"<code>{html.escape(tex)}</code>"
        width, height = formula.getsize()
        shift = f"vertical-align:{formula.getyofst() / 16:.3f}em;" if not display else ""
        size = f"width:{width / 16:.3f}em;height:{height / 16:.3f}em;"
        label = html.escape(tex, quote=True)
        head, _, rest = svg.partition(">")
        box = head[head.index("viewBox=") :]
        head = f'<svg role="img" aria-label="{label}" style="{size}{shift}" {box}'
        _drawn[key] = f"{head}>{rest}".replace('"black"', '"currentColor"')
    return _drawn[key]


def visit_inline(self, node):
    self.body.append(self.starttag(node, "span", "", CLASS="math"))
    self.body.append(drawn(node.astext(), False, node) + "</span>")
    raise SkipNode


def visit_block(self, node):
    self.body.append(self.starttag(node, "div", CLASS="math"))
    if node["number"]:
        number = get_node_equation_number(self, node)
        self.body.append(f'<span class="eqno">({number})')
        self.add_permalink_ref(node, "Link to this equation")
        self.body.append("</span>")
    parts = [part for part in node.astext().split("\n\n") if part.strip()]
    self.body.append("<br>".join(drawn(part.strip(), True, node) for part in parts))
    self.body.append("</div>\n")
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("svg", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}

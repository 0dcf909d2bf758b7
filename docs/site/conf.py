"""Sphinx's settings for the site: `make site`."""

import dataclasses
import re
from html import escape
from textwrap import shorten
from typing import Any

from docutils import nodes
from docutils.nodes import Element
from figure import COLOURS
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

from thinwire import __version__

project = "thinwire"
author = "the thinwire maintainers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
extensions += ["sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["files/**"]
default_role = "code"
nitpicky = True
nitpick_ignore = [
    # the bases of the callbacks, and what types say of values that a program only hands on
    ("py:class", "thinwire.integrations.lightning._PerRankCallback"),
    ("py:class", "thinwire.local.averaging.OneAveraging"),
    ("py:class", "thinwire.compress.protocol.Compression"),
]
autodoc_mock_imports = ["lightning", "transformers"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

smartquotes = False  # it would make a dash of the -- of an option

html_theme = "furo"
html_title = f"thinwire {release}"
html_static_path = ["assets"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_theme_options = {
    "light_css_variables": COLOURS["light"],
    "dark_css_variables": COLOURS["dark"],
}
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"

_PACKAGES = (
    "collections",
    "datetime",
    "lightning",
    "numpy",
    "os",
    "pathlib",
    "torch",
    "transformers",
    "typing",
)
"""Names of others, which have no page here and no link without a network."""


def _link(app: Sphinx, env: BuildEnvironment, node: pending_xref, text: Element) -> Element | None:
    """A link to a name that a docstring gives in short, and plain text for the names of others."""
    name = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    if name.partition(".")[0] in _PACKAGES:
        return text
    domain = env.domains.python_domain
    pages = {
        entry.docname: entry.node_id
        for known, entry in domain.objects.items()
        if known.rpartition(".")[2] == name and not entry.aliased
    }
    if len(pages) != 1:
        return None
    ((page, anchor),) = pages.items()
    return make_refnode(app.builder, node["refdoc"], page, anchor, [text])


def _parts(app: Sphinx, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """State, communication and failure become paragraphs of their own; the attributes of a
    dataclass are what its constructor takes, which autodoc shows with their types.
    """
    if dataclasses.is_dataclass(found):
        lines[:] = ["Args:" if line == "Attributes:" else line for line in lines]
    text = re.sub(r"\s+(\*\*(State|Communication|Failure)\*\*)", r"\n\n\1", "\n".join(lines))
    lines[:] = text.split("\n")


def _dashes(app: Sphinx, document: nodes.document, page: str) -> None:
    """A dash between an argument and its meaning, where Sphinx puts two hyphens."""
    for text in list(document.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \u2013 "))


def _head(app: Sphinx, page: str, template: str, context: Any, document: Any) -> None:
    """The first paragraph as description of the page, and the script of the chooser."""
    first = next(document.findall(nodes.paragraph), None) if document else None
    if first is not None:
        words = escape(shorten(first.astext(), 160, placeholder=" ..."))
        context["metatags"] += f'<meta name="description" content="{words}">'
    if page == "chooser":
        app.add_js_file("chooser.js", loading_method="defer", priority=900)  # after site.js


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("doctree-resolved", _dashes)
    app.connect("html-page-context", _head)
    app.connect("missing-reference", _link)
    app.connect("autodoc-process-docstring", _parts, priority=400)

"""How the site is built: `make docs`, or `DOCS_EXECUTE=off make docs` without running it.

DOCS_EXECUTE is `cache` (run the notebooks that have changed), `force` (run all), `off`, or
names of pages with commas between them, which alone are run. With SPHINX_INTERSPHINX=1
the inventories of other projects are fetched, and their names become links.
"""

import importlib
import inspect
import os
import pkgutil
import re
import sys
from pathlib import Path

from docutils import nodes

import numpyro_sgp

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

project = "numpyro_sgp"
author = copyright = "the numpyro_sgp authors"
release = version = numpyro_sgp.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_design",
    "sphinx_copybutton",
    "formulas",  # _ext/formulas.py
]
templates_path = ["_templates"]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
nitpicky = True

# ---- text -------------------------------------------------------------------------------

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_math_renderer = "svg"

# ---- notebooks --------------------------------------------------------------------------

_execute = os.environ.get("DOCS_EXECUTE") or "cache"
nb_execution_mode = _execute if _execute in ("off", "cache", "force") else "cache"
nb_execution_cache_path = str(HERE / "_build" / ".jupyter_cache")
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_execution_show_tb = True
nb_output_stderr = "warn"  # a warning in the output of a page is a defect of the page
nb_number_source_lines = False
if nb_execution_mode != _execute:
    _named = _execute.split(",")
    _pages = {page.stem: page for page in HERE.rglob("*.md")}
    if missing := set(_named) - _pages.keys():
        raise ValueError(f"DOCS_EXECUTE names no pages: {sorted(missing)}")
    nb_execution_excludepatterns = [
        str(page.relative_to(HERE)) for name, page in _pages.items() if name not in _named
    ]

# ---- reference --------------------------------------------------------------------------

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

# Names of other projects are links where their inventories were fetched, else plain text.
intersphinx_mapping = {}
if os.environ.get("SPHINX_INTERSPHINX") == "1":
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "numpy": ("https://numpy.org/doc/stable", None),
        "scipy": ("https://docs.scipy.org/doc/scipy", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "numpyro": ("https://num.pyro.ai/en/stable", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
        "arviz": ("https://python.arviz.org/en/stable", None),
        "pandas": ("https://pandas.pydata.org/docs", None),
        "matplotlib": ("https://matplotlib.org/stable", None),
    }
#: What is inside: in annotations it is plain text.
_INSIDE = (
    "Descent|EllipticalSliceState|Field|Found|GPSite|InputKernel|InverseRoot|Nodes|Prior"
    "|Setup|Shown"
)
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(arviz|blackjax|collections|gpjax|jax|jaxlib|matplotlib|np|numpy|numpyro|optax"
        r"|os|pandas|pathlib|scipy|tinygp|types|typing|xarray)\..*",
    ),
    # Of these the package imports the types for checkers alone: they have no module.
    (
        "py:class",
        r"Axes|Figure|DataArray|DataFrame|DataTree|Dataset|InferenceData|SVI|SVIRunResult",
    ),
    ("py:.*", rf"numpyro_sgp\..*\._\w+|(numpyro_sgp\.\w+\.\w+\.)?({_INSIDE})(\.\w+)?"),
]

# A public name of the package and no file of its own: autodoc imports modules by path.
sys.modules.setdefault("numpyro_sgp.relaxation", numpyro_sgp.relaxation)

#: Rooms of which the reference has some names that are no attributes of the package.
_MORE = ["distributions", "elbo", "fitting", "fitting.verdict", "inducing"]


def _public_names():
    """Names under which the reference has what is defined elsewhere in the package."""
    found = {}
    rooms = {
        name: value
        for name in numpyro_sgp.__all__
        if inspect.ismodule(value := getattr(numpyro_sgp, name))
    }
    rooms |= {room: importlib.import_module(f"numpyro_sgp.{room}") for room in _MORE}
    for room, module in {"": numpyro_sgp, **rooms}.items():
        path = f"numpyro_sgp.{room}".rstrip(".")
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if inspect.isclass(value) or inspect.isroutine(value):
                defined = f"{value.__module__}.{value.__qualname__}"
                found.setdefault(defined, f"{path}.{name}")
                found.setdefault(name, f"{path}.{name}")
    for room in pkgutil.iter_modules(numpyro_sgp.__path__, "numpyro_sgp."):
        module = importlib.import_module(room.name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            defined = f"{getattr(value, '__module__', '')}.{name}"
            if defined in found:
                found.setdefault(f"{room.name}.{name}", found[defined])
    return found


_PUBLIC = _public_names()


def _find_public(app, env, node, contnode):
    """A link to `numpyro_sgp.SVGP` for `numpyro_sgp.guides.approximations.SVGP`, `SVGP`."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    target, full = node["reftarget"], None
    owner, _, attribute = target.rpartition(".")
    if target in _PUBLIC:
        full = _PUBLIC[target]
    elif owner in _PUBLIC:
        full = f"{_PUBLIC[owner]}.{attribute}"
    elif len(found := domain.find_obj(env, None, None, target, None, 1)) == 1:
        full = found[0][0]  # the one name in the reference that ends so
    if full is None:
        return None
    where = env, node["refdoc"], app.builder
    return domain.resolve_xref(*where, "obj", full, node, contnode)


def _public_bases(app, name, obj, options, bases):
    """Bases that the reference has, or other projects, for those that are inside."""

    def public(cls):
        ours = cls.__module__.startswith("numpyro_sgp")
        if not ours or f"{cls.__module__}.{cls.__qualname__}" in _PUBLIC:
            return [cls]
        return [found for base in cls.__bases__ for found in public(base)]

    known = [base for base in bases if inspect.isclass(base)]
    if len(known) == len(bases):
        bases[:] = dict.fromkeys(found for base in known for found in public(base))


def _tidy(app, doctree):
    """Of types after a Literal Sphinx makes no links: their names alone, without a path."""
    for text in list(doctree.findall(nodes.Text)):
        if text.startswith("~") and isinstance(text.parent, nodes.emphasis):
            text.parent.replace(text, nodes.Text(text.rpartition(".")[2]))
    for paragraph in list(doctree.findall(nodes.paragraph)):
        if paragraph.astext() == "Bases: object":
            paragraph.parent.remove(paragraph)


def _mend_source_pages(app, exception):
    """
    Pages of source code link back to the reference by one module for each file; where names
    of a file are documented under several, by the anchor that is there.
    """
    if exception or app.builder.name != "html":
        return
    objects = app.env.get_domain("py").objects

    def mend(match):
        page, anchor = match.groups()
        name = anchor.split(".")
        found = [
            full.split(".")
            for full, entry in objects.items()
            if page.endswith(f"{entry.docname}.html") and full.endswith(f".{name[-1]}")
        ]
        if anchor in objects or not found:
            return match[0]
        same = [len(os.path.commonprefix([full[::-1], name[::-1]])) for full in found]
        return f'href="{page}#{".".join(found[same.index(max(same))])}"'

    for path in (Path(app.outdir) / "_modules").rglob("*.html"):
        text = path.read_text(encoding="utf-8")
        text = re.sub(r'href="([^"#]*reference/api/[^"#]+)#([^"]+)"', mend, text)
        path.write_text(text, encoding="utf-8")


def setup(app):
    app.connect("doctree-read", _tidy)
    app.connect("build-finished", _mend_source_pages)
    app.connect("missing-reference", _find_public, priority=400)
    app.connect("autodoc-process-bases", _public_bases)


# ---- HTML -------------------------------------------------------------------------------

html_theme = "furo"
html_title = "numpyro_sgp"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

"""Configuration of the documentation: `sphinx-build -W --keep-going -b html docs OUT`."""

import atexit
import shutil
import sys
import tempfile
from importlib import import_module
from inspect import unwrap
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

import costgraph

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from outside import mapping

project = "costgraph"
version = release = costgraph.__version__
extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.intersphinx", "sphinx.ext.viewcode"),
    *("numpydoc", "myst_nb", "sphinx_copybutton", "derived", "pictures", "commands"),
]
exclude_patterns = ["_build", "_templates"]
# Inventories are local files, so the build needs no network.
_folder = Path(tempfile.mkdtemp(prefix="inventories-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
intersphinx_mapping = mapping(_folder)

# The copy button copies input only.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 3
# typographic quotes and ellipses, but no dashes: options begin with two hyphens
smartquotes_action = "qe"
myst_enable_extensions = ["deflist"]
# Each build runs the notebooks; a failing cell fails the build.
nb_execution_mode, nb_execution_raise_on_error = "force", True
nb_execution_timeout = 300
nb_merge_streams = True
highlight_language = "python"

# Sphinx writes a page for each entry of a table with `:toctree:`, into docs/reference/generated, which git ignores.
autosummary_generate = True
# Two names that differ only by case would share a file on some systems.
autosummary_filename_map = {
    "costgraph.dtype": "costgraph.dtype-function",
    "costgraph.torch.dispatched": "costgraph.torch.dispatched-function",
}
templates_path = ["_templates"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# Check every rule, for instance that a docstring lists the parameters of the signature, except these.
numpydoc_validation_checks = {
    "all",
    *("ES01", "EX01", "SA01"),  # sections that not every object needs
    *("PR01", "RT01", "YD01"),  # one line may explain parameters and results
    *("GL02", "GL03", "GL08", "PR08"),  # a phrase documents a field of a record
    *("SS02", "SS03", "SS05", "SS06"),
    "GL01",  # ruff checks the first line
}

html_theme = "furo"
html_title = "costgraph"
html_static_path = ["_static"]
html_css_files = ["site.css", "first.css"]
html_math_renderer = "mathml"
# syntax highlighting for the light and the dark theme
pygments_style, pygments_dark_style = "friendly", "github-dark"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def short_sidebar(app: Sphinx, page: str, template: str, context: dict[str, Any], document: nodes.document) -> None:
    """Show the sections in the sidebar, and the pages of the current section only."""
    if (whole := context.get("toctree")) is not None:
        context["toctree"] = lambda **options: whole(**options | {"collapse": True, "maxdepth": 2})


def source_module(app: Sphinx, module: str, name: str) -> str | None:
    """Return the module that defines a public function, which names the package that exports it."""
    try:
        function = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError):  # Sphinx documents fields that only instances have
        return None
    return unwrap(function).__module__ if isinstance(function, FunctionType) else None


def setup(app: Sphinx) -> None:
    """Find the source of functions, and shorten the table of contents before furo reads it, at a priority of 500."""
    app.connect("viewcode-follow-imported", source_module)
    app.connect("html-page-context", short_sidebar, priority=400)

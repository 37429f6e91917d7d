"""Configuration of the documentation: `sphinx-build -W --keep-going -b html docs OUT`."""

import atexit
import shutil
import sys
import tempfile
from pathlib import Path

import costgraph

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from outside import mapping

project = "costgraph"
version = release = costgraph.__version__
extensions = [
    *("sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.intersphinx", "sphinx.ext.viewcode"),
    *("numpydoc", "myst_nb", "sphinx_copybutton", "derived", "pictures"),
]
exclude_patterns = ["_build"]
# inventories are files: nothing is asked over the network
_folder = Path(tempfile.mkdtemp(prefix="inventories-"))
atexit.register(shutil.rmtree, _folder, ignore_errors=True)
intersphinx_mapping = mapping(_folder)

# of an example, what is typed is copied
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

myst_heading_anchors = 3
# notebooks are run whenever they are read, and one that fails fails the build
nb_execution_mode, nb_execution_raise_on_error = "force", True
nb_execution_timeout = 300
nb_merge_streams = True
highlight_language = "python"

# every name has its place on a page of the reference: no pages are generated
autosummary_generate = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
# Every rule, for instance that the parameters of a docstring are those of the signature, but for
numpydoc_validation_checks = {
    "all",
    *("ES01", "EX01", "SA01"),  # sections that not every name needs
    *("PR01", "RT01", "YD01"),  # one line is enough where parameters and results explain themselves
    *("GL02", "GL03", "GL08", "PR08"),  # fields of records, which a phrase documents
    *("SS02", "SS03", "SS05", "SS06"),
    "GL01",  # where a docstring begins: ruff's part
}

html_theme = "furo"
html_title = "costgraph"
html_static_path = ["_static"]
html_css_files = ["site.css", "first.css"]
html_math_renderer = "mathml"
# the mark of a light page and of a dark one
pygments_style, pygments_dark_style = "friendly", "github-dark"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

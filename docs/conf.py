"""Configuration of the documentation: `sphinx-build -W --keep-going -b html docs OUT`."""

import sys
from pathlib import Path

import costgraph

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "costgraph"
version = release = costgraph.__version__
extensions = ["sphinx.ext.autodoc", "sphinx.ext.autosummary", "numpydoc", "myst_parser", "derived"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3
highlight_language = "python"

# every name has its place on a page of the reference: no pages are generated
autosummary_generate = False
# the docstrings say it in words
autodoc_typehints = "none"
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

html_theme = "alabaster"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_theme_options = {
    "description": "What a model costs, as formulas",
    "fixed_sidebar": True,
    "page_width": "1200px",
    "sidebar_width": "240px",
    "body_max_width": "none",
    "show_powered_by": False,
    "font_family": "system-ui, sans-serif",
    "head_font_family": "system-ui, sans-serif",
}
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

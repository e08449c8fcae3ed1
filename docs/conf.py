"""Sphinx's settings, and what is generated before pages are read: the API reference, tables and pictures."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parent / "integration_tests"
sys.path[:0] = [str(HERE / "make"), str(TESTS / "support"), str(TESTS / "testing"), str(HERE.parent / "examples")]

import generate  # noqa: E402  (of make/, which is only now on the path)
import readmes  # noqa: E402

import opt_stack  # noqa: E402

project = "opt-stack"
author = "the opt-stack authors"
release = version = opt_stack.__version__
copyright = "the opt-stack authors, Apache-2.0"

extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
# The first level of generated/ is included in pages.
exclude_patterns = ["README.md", "generated/*.md", "generated.new"]

nitpicky = True  # a reference to a name that does not exist is a warning, and `nox -s docs` makes warnings errors
nitpick_ignore_regex = [("py:class", ".*")]  # annotations in signatures, which name classes of torch and Python too
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
copybutton_prompt_text = "$ "
suppress_warnings = ["misc.highlighting_failure"]  # formulas in docstrings are not Python

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own underlines the names of modules
html_title = "opt-stack"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#3b5bdb", "color-brand-content": "#3b5bdb"},
    "dark_css_variables": {"color-brand-primary": "#91a7ff", "color-brand-content": "#91a7ff"},
}
if url := readmes.repository():  # as in a release: no address is known to a build elsewhere
    html_theme_options |= {"source_repository": url, "source_branch": "main", "source_directory": "docs/"}


def setup(app: object) -> None:
    generate.write_all(HERE / "generated")

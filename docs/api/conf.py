"""The API reference: Sphinx over the docstrings of `weft_moe`. `./dev docs` builds it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import ModuleType

import weft_moe
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

logger = logging.getLogger(__name__)

project = "Weft"
copyright = "the Weft authors"
version = release = weft_moe.__version__
html_theme = "alabaster"
html_show_copyright = False
html_sidebars = {"**": ["localtoc.html", "searchbox.html"]}

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

# Every reference must lead somewhere. Those to torch, whose reference is not here, are left out.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|Tensor|nn|dist|DeviceMesh|collections\.abc|Sequence|Mapping)\b.*")
]

default_role = "name"


def name_role(role, rawtext, text, lineno, inliner, options=None, content=None):
    """Names of the package, as in `weft.moe` or `slice_experts`, link; anything else is code."""
    name = text.removeprefix("weft.").removeprefix("weft_moe.")
    owner = weft_moe
    if hasattr(weft_moe.state_dict, name):
        owner, name = weft_moe.state_dict, name
    if not text.startswith(("weft.", "weft_moe.")) and not _is_public(owner, name):
        return [nodes.literal(rawtext, text)], []
    reference = addnodes.pending_xref(
        "", nodes.literal(rawtext, text), refdomain="py", reftype="obj", refwarn=True,
        reftarget=f"{owner.__name__}.{name}",
    )  # fmt: skip
    return [reference], []


def _is_public(owner: object, name: str) -> bool:
    return not name.startswith("_") and not inspect.ismodule(getattr(owner, name, weft_moe))


def require_public_names(app: Sphinx, env: BuildEnvironment) -> None:
    """Warns of each public name that has no docstring, or that no page holds."""
    documented = env.get_domain("py").objects
    for module in (weft_moe, weft_moe.state_dict):
        for name in _public_names(module):
            if f"{module.__name__}.{name}" not in documented:
                logger.warning("%s.%s is public and not in the reference", module.__name__, name)


def _public_names(module: ModuleType) -> Iterator[str]:
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if inspect.getmodule(value) is module
    ]
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or inspect.ismodule(value):
            continue
        yield name
        if inspect.isclass(value):
            yield from (
                f"{name}.{member}"
                for member, method in vars(value).items()
                if inspect.isfunction(method) and not member.startswith("_")
            )


def setup(app: Sphinx) -> None:
    app.add_role("name", name_role)
    app.connect("env-check-consistency", require_public_names)

"""Reference of the command line, generated from the commands when the page is built.

The directive `commands` writes a section for each command: usage, description, examples, arguments and options.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


def loaded() -> dict[str, Any]:
    """Return the commands by name, with their parameters."""
    from typer.main import get_command

    from costgraph.cli import registry

    for module, _ in registry.COMMANDS.values():
        import_module(f"costgraph.cli.{module}")
    return {name: get_command(registry._APPS[name]) for name in registry.COMMANDS}


def paragraphs(text: str) -> list[nodes.Node]:
    """Return the paragraphs of a help text; one that begins with a backspace keeps its lines, as in a terminal."""
    found: list[nodes.Node] = []
    for part in re.split(r"\n\s*\n", text.strip()):
        if part.lstrip().startswith("\b"):
            title, _, lines = part.strip().lstrip("\b").strip().partition("\n")
            code = "\n".join(line.removeprefix("  ") for line in lines.split("\n"))
            found += [nodes.paragraph(text=title), nodes.literal_block(code, code, language="console")]
        else:
            found.append(nodes.paragraph(text=" ".join(part.split())))
    return found


def definitions(rows: list[tuple[str, str]]) -> nodes.definition_list:
    """Return a list of arguments or options, each with its help."""
    entries = nodes.definition_list()
    for name, text in rows:
        term = nodes.term("", "", nodes.literal(text=name))
        entries += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph(text=text)))
    return entries


class Commands(SphinxDirective):
    """Write a section for each command of the command line."""

    def run(self) -> list[nodes.Node]:
        """Return the sections in the order of `costgraph --help`."""
        from typer import Context

        sections: list[nodes.Node] = []
        for name, command in loaded().items():
            context = Context(command, info_name=f"costgraph {name}")
            section = nodes.section(ids=[nodes.make_id(f"costgraph {name}")])
            section += nodes.title("", "", nodes.literal(text=name))
            usage = command.get_usage(context).removeprefix("Usage: ")
            section += nodes.literal_block(usage, usage, language="console")
            section += paragraphs(command.help or "")
            rows = [record for p in command.params if (record := p.get_help_record(context)) is not None]
            if rows:
                section += definitions([(re.sub(r" <.*>", "", term), " ".join(text.split())) for term, text in rows])
            sections.append(section)
            self.env.note_dependency(import_module(command.callback.__module__).__file__ or "")
        return sections


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

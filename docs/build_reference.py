"""What the pages of the reference hold, made when the site is built.

A page says by a line of its own where the names of a package stand,
`[[names of PACKAGE]]`, and where the help of all commands, `[[commands]]`.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

from transformers import TrainingArguments

from hf_recurrent_lengthgen.cli.main import COMMANDS, main
from hf_recurrent_lengthgen.trainers import InitialStateConfig

ACTIONS = {
    "recipe": ("list", "show", "copy"),
    "state": ("read", "show", "ask"),
}
"""Commands whose actions have a help of their own."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for each page."""
    markdown = re.sub(
        r"^\[\[names of (.*)\]\]$",
        lambda found: names_of(found[1]),
        markdown,
        flags=re.MULTILINE,
    )
    return re.sub(
        r"^\[\[commands\]\]$", lambda _: commands(), markdown, flags=re.MULTILINE
    )


def names_of(package: str) -> str:
    """A table of the public names of a package, and below it what each of them does."""
    module = importlib.import_module(package)
    table, sections = ["| Name | |", "|---|---|"], []
    for name in sorted(
        module.__all__, key=lambda name: (name.strip("_").lower(), name)
    ):
        found = getattr(module, name)
        place = f"{package}.{name}"
        if getattr(found, "__module__", "") == place:
            place += f".{name}"  # static analysis takes the name for that of a module
        table.append(f"| [{in_words(name)}](#{place}) | {line_of(name, found)} |")
        sections.append(f'::: {place}\n    options:\n      heading: "{name}"\n')
        if inspect.isclass(found) and not (vars(found).get("__doc__") or "").strip():
            sections.append(f"{line_of(name, found)}\n")
        if inspect.isclass(found) and issubclass(found, TrainingArguments):
            sections.append(fields_of(found))
    return "\n".join(table) + "\n\n" + "\n".join(sections)


def in_words(name: str) -> str:
    """A name that may be broken between its words."""
    ends = r"(?<=[a-z0-9])(?=[A-Z])|(?<=[a-zA-Z]_)(?=[a-zA-Z])"
    return f"<code>{re.sub(ends, '<wbr>', name)}</code>"


def line_of(name: str, found: Any) -> str:
    """The first sentence on a name."""
    documented = inspect.isclass(found) or inspect.isfunction(found)
    text = (inspect.getdoc(found) or "") if documented else CONSTANTS[name]
    first = " ".join(text.split("\n\n")[0].split()).replace("|", r"\|")
    sentence = re.split(r"(?<=[.:]) (?=[A-Z])", first)[0]
    return re.sub(",? and:$", ", and its own.", sentence)


CONSTANTS = {
    "DEPTHS": "Where a passkey stands in its prompt, in shares of it: i/10.",
    "EVALUATION_SEED": "The seed of rows for evaluation; training takes small ones.",
    "FAMILIES": "The language model of each family, by our model type.",
    "STATEFUL_CLASSES": "The class that takes the weights of an upstream model type.",
    "INTERVENTIONS": "The trainers by the names of their methods.",
    "IGNORED_LABEL": "The label of tokens that the loss leaves out.",
    "PASSKEY_STYLES": "The wordings of passkey prompts, by their names.",
    "RecurrentState": "The state of a model: one `LayerState` for each layer.",
    "STRING_TASKS": "The names of the tasks on strings of symbols.",
    "TASKS": "The folder of the task files, for lm_eval's `include_path`.",
    "__version__": "The version of this package.",
}
"""What has no docstring when it is imported."""


def fields_of(config: type[TrainingArguments]) -> str:
    """What a config has beside `TrainingArguments`; in a method's, what is its own."""
    shared = TrainingArguments if config is InitialStateConfig else InitialStateConfig
    known = {field.name for field in dataclasses.fields(shared)}
    rows = [
        f"| {in_words(field.name)} | {' '.join(field.metadata['help'].split())} |"
        for field in dataclasses.fields(config)
        if field.name not in known and "help" in field.metadata
    ]
    return "\n".join(["| Setting | |", "|---|---|", *rows, ""]) if rows else ""


def commands() -> str:
    """All commands, and what `--help` says of each."""
    table = [
        f"| [`lengthgen {name}`](#lengthgen-{name}) | {what} |"
        for name, what in COMMANDS.items()
    ]
    sections = []
    for name in COMMANDS:
        sections.append(f"## lengthgen {name}\n\n{fenced(name)}")
        sections += [
            f"### lengthgen {name} {each}\n\n{fenced(name, each)}"
            for each in ACTIONS.get(name, ())
        ]
    return (
        "\n".join(["| Command | |", "|---|---|", *table]) + "\n\n" + "\n".join(sections)
    )


def fenced(*command: str) -> str:
    """The help of a command on 88 columns, without the paths of this machine."""
    shown = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS="88"),
        contextlib.redirect_stdout(shown),
        contextlib.suppress(SystemExit),
    ):
        os.environ.pop("LENGTHGEN_CACHE", None)
        main([*command, "--help"])
    return f"```text\n{shown.getvalue().strip().replace(str(Path.home()), '~')}\n```\n"

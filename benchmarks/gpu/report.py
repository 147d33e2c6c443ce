"""A row for each stage that has results, between two markers of a Markdown file."""

import json
from importlib import import_module
from pathlib import Path

BEGIN, END = "<!-- gpu results: written by run.py --report -->", "<!-- end of gpu results -->"
STAGES = ("tests", "kernels", "speed", "failure", "large")


def written_table(output: Path, readme: Path | None) -> str:
    """The table of the JSON files in a folder, written into a Markdown file if one is given.

    Raises:
        ValueError: if the file lacks the markers, or results are tiny and a file is given.
    """
    rows = []
    for name in STAGES:
        file = output / f"{name}.json"
        if not file.is_file():
            continue
        stage = json.loads(file.read_text(encoding="utf-8"))
        if stage["key"]["tiny"] and readme is not None:
            raise ValueError(f"{file} holds results of --tiny, which belong into no table: give another --output.")
        environment = stage["key"]["environment"]
        where = ", ".join(f"{key} {environment[key]}" for key in ("torch", "mamba_ssm", "causal_conv1d", "fla"))
        result = import_module(f"benchmarks.gpu.{name}").row(stage["parts"])
        rows.append(f"| {name} | {result} | {environment['device']}, {where} |\n")
    head = "| stage | result | machine |\n|---|---|---|\n"
    table = head + "".join(rows) if rows else "No stage has a result yet: none has been run on a GPU.\n"
    if readme is not None:
        text = readme.read_text(encoding="utf-8")
        if BEGIN not in text or END not in text:
            raise ValueError(f"{readme} lacks the lines {BEGIN!r} and {END!r}: put them where the table belongs.")
        before, _, rest = text.partition(BEGIN)
        readme.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return table

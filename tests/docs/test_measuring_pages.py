"""The pages on measuring, states and checkpoints: what they show runs, on a small model in place of the demo's."""

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.cli.harness import as_lm_eval_spells_it
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import read_options

ROOT = Path(__file__).parents[2]
PAGES = (
    "coming_from",
    "evaluate",
    "diagnose",
    "states",
    "state_files",
    "serving",
    "hybrids",
    "attention_window",
    "delta_rule",
    "surgery",
    "publish",
    "recipes",
    "harness",
)
QUICK = {
    "train": "--max-steps 2 --report-to none --eval-strategy no",
    "evaluate": "--sequences 2",
    "diagnose": "--sequences 2 --length 512 --patched-heads 0",
    "retrieve": "--lengths 256",
    "accuracy": "--samples 4",
    "verify": "--length 70",
}
"""What makes a command small; of repeated options the last one counts."""
ELSEWHERE = {
    "evaluate": ("my-mamba2", "runs/plain"),
    "diagnose": ("my-mamba2",),
    "delta_rule": ("BlinkDL",),
    "publish": (
        "state-spaces",
        "--model mamba2",
        "verify state-passing",
        "verify mamba2",
        "evaluate mamba2",
        "card state-passing",
        "push state-passing",
    ),
    "recipes": ("--data my-texts",),
    "harness": ("pretrained=MODEL",),
}
"""Commands that need the Hub, a GPU or data, or do not end: their options are read, and no more."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def read_only(command: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the options of a command, which raises or exits for wrong ones."""
    if command == "train":
        file = arguments.pop(0) if arguments[0].endswith(".yaml") else None
        read_options([*arguments, "--use-cpu"], file)
    elif command == "harness":
        from lm_eval._cli import HarnessCLI

        spelled = [as_lm_eval_spells_it(argument) for argument in arguments]
        monkeypatch.setattr(sys, "argv", ["lengthgen harness", "run", *spelled])
        HarnessCLI().parse_args()
    else:
        import_module(f"hf_recurrent_lengthgen.cli.{command}").command_parser().parse_args(arguments)


def run_commands(page: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["cd"]:
            monkeypatch.chdir(words[1])
        if words[:1] != ["lengthgen"]:
            assert words[:1] in ([], ["cd"], ["pip"]), line
            continue
        command, *arguments = words[1:]
        if any(part in " ".join(words) for part in ELSEWHERE.get(page, ())):
            read_only(command, arguments, monkeypatch)
            continue
        quick = QUICK.get(command, "")
        assert main([command, *arguments, *shlex.split(quick)]) == 0, line


@pytest.fixture
def quick_harness(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the task files of lm_eval itself, which take ten seconds to find, and what it asks of the machine."""
    if page != "harness":
        return
    from lm_eval.tasks import TaskManager

    start = TaskManager.__init__
    monkeypatch.setattr(
        TaskManager, "__init__", lambda self, *x, **options: start(self, *x, **{**options, "include_defaults": False})
    )
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.usefixtures("quick_harness")
def test_what_a_page_shows_runs(page: str, demo_output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {}
    languages = set()
    for language, block in BLOCK.findall(text_of(page)):
        languages.add(language)
        if language == "python":
            exec(compile(block, f"{page}.md", "exec"), names)
        elif language == "bash":
            run_commands(page, block, monkeypatch)
    assert languages & {"python", "bash"}


def test_files_that_pages_name_are_there() -> None:
    named = {
        path
        for page in (*PAGES, "hybrids_support", "read_a_diagnosis", "glossary")
        for path in re.findall(
            r"`((?:examples|benchmarks|tests|model_cards|hf_recurrent_lengthgen|\.github)/[\w./-]+)`", text_of(page)
        )
    }
    assert len(named) > 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []

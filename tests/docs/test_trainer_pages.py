"""The pages on training: their code and commands run, their tables are those of the code."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from hf_recurrent_lengthgen.cli.main import COMMANDS, main
from hf_recurrent_lengthgen.trainers import (
    AlignmentConfig,
    FittedNoiseConfig,
    InitialStateConfig,
    LearnedStateConfig,
    MixedStatesConfig,
    RandomNoiseConfig,
    StatePassingConfig,
    StateXConfig,
    TbttConfig,
)

DOCS = Path(__file__).parents[2] / "docs"
TABLES: dict[str, type[InitialStateConfig]] = {
    "index": InitialStateConfig,
    "state_passing": StatePassingConfig,
    "tbtt": TbttConfig,
    "random_noise": RandomNoiseConfig,
    "fitted_noise": FittedNoiseConfig,
    "mixed": MixedStatesConfig,
    "learned_state": LearnedStateConfig,
    "alignment": AlignmentConfig,
    "statex": StateXConfig,
}
PAGES = [
    *(f"trainers/{name}" for name in (*TABLES, "runs", "far_memory")),
    "with_trl",
    "scaling_out",
    "troubleshooting",
]
SHRUNK = {
    r'\.texts\("(train|validation)"\)': r'.texts("\1")[:4]',
    r"max_steps=\d+": "max_steps=2, report_to='none', dataloader_pin_memory=False",
    r"length=4096": "length=1024",
}
"""What makes the code of pages quick."""
TRAINING = "--max-steps 2 --report-to none --per-device-train-batch-size 4 --context-parallel-size 1"
QUICK = {
    "train": f"{TRAINING} --training-length 16 --data texts",
    "evaluate": "--sequences 2 --length 64 --data texts --split train",
    "diagnose": "--sequences 2 --length 64 --patched-heads 0 --data texts --split train",
    "expand": "",
    "retrieve": "--lengths 128,256 --samples 1",
    "merge": "",
}
"""Small settings for commands, the last of an option wins."""
CHECKPOINT = {"first/checkpoint-10": "first/checkpoint-2"}
"""What two steps write instead."""
LAUNCHERS = ("torchrun", "accelerate")
CITED = {
    "Buitrago Ruiz and Gu, 2025": "[Buitrago Ruiz and Gu (2025)](https://arxiv.org/abs/2507.02782)",
    "Cabannes et al., 2025": "[Cabannes et al. (2025)](https://arxiv.org/abs/2509.24552)",
    "Du et al., 2025": "[Du et al. (2025)](https://arxiv.org/abs/2506.11769)",
    "Shen et al., 2025": "[Shen et al. (2025)](https://arxiv.org/abs/2509.22630)",
}
"""Papers, in help texts and in pages."""


def text_of(page: str) -> str:
    return (DOCS / f"{page}.md").read_text(encoding="utf-8")


def blocks_of(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text_of(page), flags=re.DOTALL)


def settings_table(name: str) -> str:
    """The settings of a method with their help; on the page of the alignment loss, those of the loss."""
    config = TABLES[name]
    shared = InitialStateConfig.method_fields()
    own = shared if name == "index" else config.method_fields() - shared
    if name == "alignment":
        own = {setting for setting in shared if setting.startswith("alignment_")}
    rows = ["| setting | meaning |", "|---|---|"]
    for item in fields(config):
        if item.name in own:
            meaning = item.metadata["help"]
            for text, cited in CITED.items():
                meaning = meaning.replace(text, cited)
            rows.append(f"| `{item.name}` | {meaning} |")
    return "\n".join(rows)


def shrunk(code: str) -> str:
    for text, quick in SHRUNK.items():
        code = re.sub(text, quick, code)
    return code


def commands_of(page: str) -> list[list[str]]:
    """The arguments of `lengthgen`, also where a launcher starts it."""
    found = []
    for block in blocks_of(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            if words and words[0] in LAUNCHERS:
                found.append(words[words.index("hf_recurrent_lengthgen.cli.main") + 1 :])
            elif words and words[0] == "lengthgen":
                found.append(words[1:])
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning",  # TRL's configs have both names
    "ignore:This sequence already has </s>:UserWarning",  # TRL and ByT5 both end texts
)
@pytest.mark.parametrize("page", PAGES)
def test_the_page_runs(page: str, demo_output: Path) -> None:
    (demo_output / "texts").mkdir()
    (demo_output / "texts" / "one.txt").write_text("Some lines of text.\n" * 400)
    names: dict[str, Any] = {}
    for block in blocks_of(page, "python"):
        code = shrunk(block)
        assert "max_steps=" not in block or code != block
        exec(code, names)
    for arguments in commands_of(page):
        assert arguments[0] in COMMANDS
        prompts = {"passkey", "examples"} & set(arguments)
        quick = f"{TRAINING} --training-length 300" if prompts else QUICK[arguments[0]]
        assert main([*(CHECKPOINT.get(word, word) for word in arguments), *shlex.split(quick)]) == 0


@pytest.mark.parametrize("name", TABLES)
def test_the_settings_are_those_of_the_config(name: str) -> None:
    assert settings_table(name) in text_of(f"trainers/{name}")


def texts_in(code: ast.AST) -> Iterator[str]:
    """The strings of a module, with \\0 for what is put into them."""
    for node in ast.walk(code):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_messages_of_troubleshooting_are_in_the_code() -> None:
    page = text_of("troubleshooting")
    rows = re.findall(r"^\| message.*?\n\n", page, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"^\| `(.*?)` \|", "".join(rows), flags=re.MULTILINE)
    quoted += re.findall(r"^\*\*Symptom\.\*\* `((?:Training|The training|Cannot|State).*?)`", page, flags=re.MULTILINE)
    assert len(quoted) > 10
    folders = (DOCS.parent / "hf_recurrent_lengthgen", DOCS.parent / "trainers")
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    strings = "\n".join(text for file in files for text in texts_in(ast.parse(file.read_text(encoding="utf-8"))))
    for message in quoted:
        for part in re.split(r"\[?\.\.\.\]?|StatePassingTrainer", message):
            assert part.strip() in strings

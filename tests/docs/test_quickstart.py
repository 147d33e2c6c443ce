"""What Quickstart and How it works say to run, run on a small checkpoint in place of the demo's."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import MambaConfig, MambaForCausalLM

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page: str, language: str) -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_code_of_the_quickstart_runs(demo_output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    training, loading = blocks_of("index.md", "python")
    quick = {
        "max_steps=2000": "max_steps=2, report_to='none', dataloader_pin_memory=False",
        '.texts("train")': '.texts("train")[:20]',
    }
    for line, instead in quick.items():
        assert line in training
        training = training.replace(line, instead)
    exec(training, names)
    assert (demo_output / "state-passing" / "config.json").is_file()
    exec(loading, names)
    assert "def read(self" in capsys.readouterr().out


def save_a_stock_model(folder: Path) -> None:
    """A tiny model in the place of one of the Hub."""
    sizes = {"vocab_size": 384, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, eos_token_id=1)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def test_the_commands_of_the_quickstart_run(demo_output: Path) -> None:
    save_a_stock_model(demo_output / "state-spaces" / "mamba-130m-hf")
    Path("text.txt").write_text("A line of text, and another.\n" * 200)
    quick = {
        "train": "--max-steps 2 --training-length 16 --report-to none --data text.txt",
        "evaluate": "--sequences 2 --length 512 --data text.txt --split train",
    }
    text = "".join(blocks_of("index.md", "bash")).replace("\\\n", "")
    commands = [line for line in text.splitlines() if line.startswith("lengthgen ")]
    assert {shlex.split(command)[1] for command in commands} == set(quick)
    for command in commands:
        arguments = shlex.split(command)[1:]
        assert main([*arguments, *shlex.split(quick[arguments[0]])]) == 0
    assert (demo_output / "evaluation" / "index.html").is_file()


def test_the_code_of_how_it_works_runs(demo_output: Path) -> None:
    (code,) = blocks_of("how_it_works.md", "python")
    exec(code, {})

"""What the README says to run, run on a small checkpoint in place of the demo's."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.models import StatefulDeltaNetConfig, StatefulMamba2Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks_of(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def demo_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with small checkpoints in place of those of a clone, of `make demo` and of a training."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_heads": 4, "num_hidden_layers": 1, "vocab_size": 384}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "training_length": 16}
    mamba2 = StatefulMamba2Config(head_dim=8, state_size=8, n_groups=1, **sizes)
    names = {"state-passing": mamba2, "model_cards/mamba2-base": mamba2, "model_cards/mamba2-state-passing": mamba2}
    names |= dict.fromkeys(("demo-output/base", "demo-output/state-passing"), StatefulDeltaNetConfig(**sizes))
    for name, config in names.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    linked = ("bamba-base", "bamba-state-passing", "delta-net-state-passing", "falcon-h1-base", "passkey-base")
    for name in linked:
        (tmp_path / "model_cards" / name).symlink_to(ROOT / "model_cards" / name)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_post_training_code_runs(demo_output: Path) -> None:
    (code,) = (block for block in blocks_of("python") if "StatePassingTrainer(" in block)
    quick = code.replace("max_steps=2000", "max_steps=2, report_to='none', dataloader_pin_memory=False")
    assert quick != code
    exec(quick, {})


def test_the_code_with_states_runs(demo_output: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = (block for block in blocks_of("python") if "final_state" in block)
    exec(code, {})
    printed, shown = capsys.readouterr().out, blocks_of("text")[0]
    assert printed.startswith("def ")
    if sys.version_info[:2] == (3, 11):  # the text that is read is a source of Python
        assert printed == shown


def test_the_commands_run(demo_output: Path) -> None:
    quick = {
        "train": "--max-steps 2 --training-length 16 --report-to none --eval-strategy no",
        "evaluate": "--sequences 2 --length 512",
        "diagnose": "--sequences 2 --length 512 --patched-heads 0 --parts states,misalignment",
    }
    lines = [line for block in blocks_of("bash") for line in block.replace("\\\n", " ").splitlines()]
    commands = [line for line in lines if line.startswith("lengthgen ")]
    assert {shlex.split(command)[1] for command in commands} == set(quick)
    (demo_output / "state-passing" / "checkpoint-2000").mkdir()  # what the code above the commands leaves
    for command in commands:
        arguments = shlex.split(command)[1:]
        assert main([*arguments, *shlex.split(quick[arguments[0]])]) == 0


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "trainers" / "README.md"], ids=["README", "trainers"])
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
    here = [link for link in links if not link.startswith("http")]
    assert here
    assert [link for link in here if not (page.parent / link.partition("#")[0]).exists()] == []

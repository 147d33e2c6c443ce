"""The demo from end to end, in miniature."""

import html
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from hf_recurrent_lengthgen.checkpoints.records import read_lineage
from hf_recurrent_lengthgen.cli import demo, retrieve
from hf_recurrent_lengthgen.cli.demo import DemoSettings, MemoryBudget, passkey_section, passkey_stages, run_demo
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.evaluation.files import read_result, write_result
from hf_recurrent_lengthgen.metrics.context_harm.result import Comparison
from hf_recurrent_lengthgen.metrics.retrieval.result import RetrievalCell, RetrievalComparison
from hf_recurrent_lengthgen.trainers import TbttTrainer, ZeroStateTrainer
from tests.metrics.test_retrieval_figures import RESULT
from tests.without_package import clean_process

TINY = DemoSettings(
    hidden_size=16,
    num_heads=2,
    training_length=16,
    batch_size=2,
    base_steps=4,
    post_training_steps=3,
    evaluation_multiple=4,
    sequences=3,
)
MEMORY = MemoryBudget(sequences=2, chunks=2, steps=2, multiples=(1, 2), samples=1)
MEMORY_BASE = Path(__file__).parents[2] / "model_cards/passkey-base"
ROLES = ("base", "intervention", "control")
FOLDERS = ("base", "state-passing", "control")
FAR = ("far", "far-control")


class Finished(NamedTuple):
    output: Path
    comparison: Comparison
    printed: str
    errors: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run on the real corpus, as the command starts it."""
    output = tmp_path_factory.mktemp("demo") / "output"
    program = (
        "import sys; from pathlib import Path; from hf_recurrent_lengthgen.cli import demo, main\n"
        f"tiny = demo.{TINY!r}, demo.{MEMORY!r}\n"
        "run = demo.run_demo\n"
        "demo.run_demo = lambda *arguments: run(*arguments, *tiny)\n"
        f"arguments = ['--output', {str(output)!r}, '--seed', '3', '--memory-base', {str(MEMORY_BASE)!r}]\n"
        "sys.exit(main.main(['demo', *arguments]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return Finished(output, read_result(output / "result.json", Comparison), done.stdout, done.stderr)


@pytest.fixture
def run_tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_corpus: None) -> Callable[..., int]:
    """Run `lengthgen demo` with tiny settings into `tmp_path / "out"`."""
    monkeypatch.chdir(tmp_path)  # where there is no model_cards/

    def run(*arguments: str) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(demo, "run_demo", lambda *args: run_demo(*args, TINY, MEMORY))
            return main(["demo", "--output", str(tmp_path / "out"), *arguments])

    return run


def weights_written(output: Path) -> dict[str, int]:
    return {role: (output / role / "model.safetensors").stat().st_mtime_ns for role in FOLDERS}


@pytest.mark.slow
def test_everything_is_written(finished: Finished) -> None:
    figures = {f"{name}.{kind}" for name in ("position_wise", "context_harm", "in_window") for kind in ("png", "svg")}
    files = {"index.html", "result.json", "tables.md", "start.json", "passkeys"}
    assert {path.name for path in finished.output.iterdir()} == {*figures, *FOLDERS, *FAR, *files}
    assert (finished.output / "passkeys/heat_map.png").is_file()
    page = (finished.output / "index.html").read_text(encoding="utf-8")
    assert page.index("How far it generalizes") < page.index("<h2>Passkey retrieval") < page.index("<h2>Numbers")
    for role in FOLDERS:
        names = {path.name for path in (finished.output / role).iterdir()}
        assert names >= {"config.json", "model.safetensors", "modeling_stateful_delta_net.py", "tokenizer_config.json"}


@pytest.mark.slow
def test_the_numbers_say_what_was_done(finished: Finished) -> None:
    assert [model.role for model in finished.comparison.models] == list(ROLES)
    assert [model.evaluation.model for model in finished.comparison.models] == list(FOLDERS)
    trainings = [model.training for model in finished.comparison.models if model.training is not None]
    assert [training.steps for training in trainings] == [4, 3, 3]
    assert ["state passing" in training.methods for training in trainings] == [False, True, False]
    for model in finished.comparison.models:
        found = model.evaluation
        assert (found.training_length, found.evaluated_length, found.sequences, found.seed) == (16, 64, 3, 0)
        assert "standard library" in found.data.description
    losses = [model.evaluation.in_window.loss.mean for model in finished.comparison.models]
    assert len(set(losses)) == 3


@pytest.mark.slow
def test_what_is_printed_is_short_and_its_commands_do_the_same(finished: Finished, tmp_path: Path) -> None:
    assert finished.errors == ""  # no bars, no reports, no warnings
    stages = re.findall(r"^\[(\d)/7\] .*\n  lengthgen (.*)\n", finished.printed, flags=re.MULTILINE)
    assert [number for number, _ in stages] == [*"1234567"]
    far, control = (read_lineage(finished.output / role).steps[-1].training for role in FAR)  # type: ignore[union-attr]
    assert [run.methods[0].name for run in (far, control) if run is not None] == ["tbtt", "none"]
    assert [run.steps for run in (far, control) if run is not None] == [2, 2]
    assert re.search(r"^Total: \d+ s\. Page with figures: .*index.html$", finished.printed, flags=re.MULTILINE)
    assert re.search(r"^Data: Python .*\nbase.*\nstate-passing.*\ncontrol.*\n", finished.printed, flags=re.MULTILINE)
    assert len(finished.printed.splitlines()) < 85
    again = stages[0][1].replace(f"--output {finished.output / 'base'}", f"--output {tmp_path / 'base'}")
    assert main(shlex.split(again)) == 0
    weights = [folder / "base" / "model.safetensors" for folder in (finished.output, tmp_path)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
def test_the_code_on_the_page_runs_without_our_package(finished: Finished, tmp_path: Path) -> None:
    page = (finished.output / "index.html").read_text(encoding="utf-8")
    [code] = (html.unescape(block) for block in re.findall(r"<pre>(.*?)</pre>", page, flags=re.DOTALL))
    assert "trust_remote_code=True" in code
    proof = "\nassert type(model).__module__.startswith('transformers_modules.'), type(model).__module__"
    assert clean_process(tmp_path, code + proof).stdout


@pytest.mark.slow
def test_a_demo_may_be_run_again_in_its_folder(
    run_tiny: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run_tiny() == 0
    assert "No part 2, passkey retrieval: it requires --memory-base" in capsys.readouterr().out
    (output / "state-passing" / "old").mkdir()
    (output / "state-passing" / "old" / "file").touch()
    before = weights_written(output)
    assert run_tiny("--seed", "1", "--memory-base", "none") == 0
    assert all(written != before[role] for role, written in weights_written(output).items())
    assert not (output / "state-passing" / "old").exists()


@pytest.mark.parametrize("role", ["control", "far"])
def test_a_folder_with_other_files_is_left_alone(
    role: str, run_tiny: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "out" / role / "model.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_text("precious")
    assert run_tiny() == 1
    assert "holds files that no demo wrote: give another --output" in capsys.readouterr().err
    assert mine.read_text() == "precious"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [role]


def test_a_base_that_the_demo_would_overwrite_is_left_alone(
    run_tiny: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (far := tmp_path / "out" / "far").mkdir(parents=True)
    (tmp_path / "out" / "start.json").write_text("{}")  # of an earlier demo
    (far / "config.json").write_text('{"training_length": 16}')
    assert run_tiny("--memory-base", str(far)) == 1
    assert f"would overwrite --memory-base {far}: give another --output" in capsys.readouterr().err
    assert (far / "config.json").is_file()


@pytest.mark.slow
def test_a_part_2_that_fails_leaves_the_page_of_part_1(run_tiny: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"training_length": 16}')
    assert run_tiny("--memory-base", str(tmp_path)) == 1
    assert "How far it generalizes" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


def test_part_2_trains_on_up_to_16_chunks_and_tests_up_to_32(tmp_path: Path) -> None:
    (tmp_path / "a base").mkdir()
    (tmp_path / "a base/config.json").write_text('{"training_length": 32}')
    far, control, questions = map(shlex.split, passkey_stages(tmp_path / "a base", tmp_path, demo.MEMORY).values())
    (settings, training, trainer), (_, plain, without) = (read_options(words[1:], None) for words in (far, control))
    assert (settings.model, settings.task_length) == (str(tmp_path / "a base"), "32-512")
    assert (trainer, without) == (TbttTrainer, ZeroStateTrainer)
    same = ("max_steps", "learning_rate", "per_device_train_batch_size", "weight_decay")
    assert [getattr(training, name) for name in same] == [getattr(plain, name) for name in same]
    options = retrieve.command_parser().parse_args(questions[1:])
    assert options.models == [str(tmp_path / name) for name in ("a base", *FAR)]
    assert options.lengths == [32, 64, 128, 256, 512, 1024]


def test_the_section_says_how_far_passkeys_are_retrieved(tmp_path: Path) -> None:
    right = {"base": (20, 9, 0), "far": (20, 19, 12), "far-control": (18, 0, 0)}
    models = [
        replace(
            RESULT, model=name, cells=(tuple(RetrievalCell(n, 20, 9) for n in found),), rows=("0 %",), depths=(0.0,)
        )
        for name, found in right.items()
    ]
    write_result(tmp_path / "retrieval.json", RetrievalComparison(tuple(models)))
    section = passkey_section(tmp_path)
    assert "in prompts of 512 / 1,024 / 131,072 tokens: base 100% / 45% / 0%; far 100% / 95% / 60%; far-c" in section
    assert section.count("<svg") == 2

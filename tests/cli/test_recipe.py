"""`lengthgen recipe`: what it tells, and runs that go on where they were stopped. The commands are small stand-ins."""

import itertools
import os
import shlex
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_recurrent_lengthgen.cli import recipe, recipe_run
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.recipe_stages import Stage
from hf_recurrent_lengthgen.recipes import copy_recipes

NAME = "mamba2-130m-state-passing"
STAGES = ["convert", "check", "train", "verify", "evaluate", "diagnose", "card"]


class Commands:
    """Commands that write one file each, and note how they were called; `stop` fails in the named one."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.stop: dict[str, BaseException] = {}

    def module_of(self, called: Stage) -> SimpleNamespace:
        stage = called.name

        def run(arguments: Sequence[str]) -> int:
            self.calls.append((stage, list(arguments)))
            self.write(stage, list(arguments))
            if stage in self.stop:
                raise self.stop.pop(stage)
            return 0

        return SimpleNamespace(run=run)

    def write(self, stage: str, arguments: list[str]) -> None:
        flags = dict(itertools.pairwise(arguments))
        flags |= dict(part.split("=", 1) for part in arguments if part.startswith("--") and "=" in part)
        if stage in ("convert", "expand"):
            folder = Path(flags["--output"])
            if stage not in self.stop:  # all or nothing
                folder.mkdir(parents=True)
                (folder / "model.safetensors").write_text(f"{stage} of {arguments[0]}")
                (folder / "config.json").write_text("{}")
        elif stage == "train":
            folder = Path(flags["--output"])
            folder.mkdir(exist_ok=True)
            (folder / "begun").touch()
            if stage not in self.stop:
                (folder / "model.safetensors").write_text(f"trained {flags.get('--learning-rate')}")
                (folder / "config.json").write_text("{}")
        elif stage in ("check", "verify"):
            (Path(arguments[-1] if stage == "check" else arguments[0]) / "verification.json").write_text("{}")
        elif stage in ("evaluate", "diagnose"):
            Path(flags["--output"]).mkdir(parents=True, exist_ok=True)
            (Path(flags["--output"]) / "result.json").write_text(stage)
        elif stage == "card":
            (Path(arguments[0]) / "README.md").write_text("a card")

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Commands:
    commands = Commands()
    monkeypatch.setattr(recipe, "check_commands", lambda planned: None)  # slow; see the test of mistakes
    monkeypatch.setattr(Stage, "module", property(commands.module_of))
    monkeypatch.setattr(recipe_run, "gc", SimpleNamespace(collect=lambda: None))  # half a second each
    monkeypatch.setattr(recipe_run, "newest_complete_checkpoint", lambda folder: newest(Path(folder)))
    monkeypatch.chdir(tmp_path)
    Path("data/pile").mkdir(parents=True)
    return commands


def newest(folder: Path) -> str | None:
    return str(folder) if (folder / "begun").exists() else None


def start(*further: str) -> int:
    return recipe.run(["run", NAME, "--output", "here", "--device", "cpu", *further])


def marks() -> set[str]:
    return {path.name.split(".")[1] for path in Path("here").glob("*/.*.done")}


def test_all_stages_run_in_order_and_a_second_run_writes_the_card_only(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start() == 0
    assert commands.names == STAGES
    assert start() == 0
    assert commands.names == [*STAGES, "card"]  # a card finds by itself that nothing has changed
    assert capsys.readouterr().out.count("done before") == len(STAGES) - 1
    assert marks() == {*STAGES} - {"card"}
    by_name = dict(commands.calls)
    assert by_name["convert"][0] == "state-spaces/mamba2-130m"
    assert by_name["train"][1:3] == ["--model=here/convert", "--output=here/train"]
    assert by_name["evaluate"][:2] == ["here/convert", "here/train"]
    assert by_name["card"][-2:] == ["here/evaluate/result.json", "here/diagnose/result.json"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no space left")], ids=["interrupt", "error"])
def test_a_run_that_stops_in_a_stage_goes_on_with_it(
    stage: str, error: BaseException, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.stop[stage] = error
    with pytest.raises(type(error)):
        start()
    assert commands.names == STAGES[: STAGES.index(stage) + 1]
    assert stage not in marks()
    start()
    assert commands.names == STAGES[: STAGES.index(stage) + 1] + STAGES[STAGES.index(stage) :]
    resumed = [arguments for name, arguments in commands.calls if name == "train" and "--resume" in arguments]
    assert len(resumed) == (stage == "train")


def test_what_was_done_with_other_options_is_refused(commands: Commands) -> None:
    start("--set", "train.max_steps=5")
    with pytest.raises(ValueError, match=r"train was done by another command .*--max-steps=5.* instead of .*=6"):
        start("--set", "train.max_steps=6")
    with pytest.raises(ValueError, match="delete here/train and the folders of the stages after it"):
        start()
    with pytest.raises(ValueError, match=r"evaluate was done by another command .*32768.* instead of .*64"):
        start("--set", "train.max_steps=5", "--set", "evaluate.length=64")
    assert commands.names == STAGES
    start("--set", "train.max_steps=5", "--trust-remote-code")  # how it runs is no setting
    assert commands.names == [*STAGES, "card"]


def test_other_settings_in_a_copied_recipe_and_stages_before_the_first_are_seen(commands: Commands) -> None:
    recipe.run(["copy", "mine"])
    given = ["run", f"mine/checkpoints/{NAME}.yaml", "--output", "here", "--device", "cpu"]
    recipe.run(given)
    with pytest.raises(ValueError, match=r"Stage convert was done by another command"):
        recipe.run([*given, "--source", "other", "--from", "train"])
    file = Path("mine/post_training/state_passing.yaml")
    file.write_text(file.read_text() + "\n# another setting\n")
    with pytest.raises(ValueError, match=r"Stage train was done by another command .*state_passing.yaml#"):
        recipe.run(given)


def test_an_unfinished_training_is_not_continued_from_another_source(commands: Commands) -> None:
    commands.stop["train"] = ValueError("no space left")
    with pytest.raises(ValueError, match="no space left"):
        start()
    shutil.rmtree("here/convert")
    with pytest.raises(ValueError, match=r"Stage convert would run again, .*: delete here/train"):
        start("--source", "other")


def test_a_run_may_be_moved(commands: Commands) -> None:
    recipe.run(["copy", "mine"])
    recipe.run(["run", f"mine/checkpoints/{NAME}.yaml", "--output", "here", "--device", "cpu"])
    Path("mine").rename("moved")
    Path("here").rename("there")
    recipe.run(["run", f"moved/checkpoints/{NAME}.yaml", "--output", "there", "--device", "cpu"])
    assert commands.names == [*STAGES, "card"]


def test_a_stage_whose_folder_was_deleted_is_done_again_but_not_under_what_was_made_of_it(commands: Commands) -> None:
    start()
    shutil.rmtree("here/evaluate")
    start()
    assert commands.names == [*STAGES, "evaluate", "card"]
    shutil.rmtree("here/train")
    with pytest.raises(
        ValueError, match=r"Stage train would run again, .*: delete here/evaluate, here/diagnose as well"
    ):
        start()
    for stage in ("evaluate", "diagnose"):
        shutil.rmtree(f"here/{stage}")
    start("--set", "train.learning_rate=1e-5")
    assert Path("here/train/model.safetensors").read_text() == "trained 1e-5"
    assert commands.names == [*STAGES, "evaluate", "card", *STAGES[2:]]
    assert "--resume" not in commands.calls[-5][1]


def test_text_that_is_not_here_is_missed_before_anything_is_done(commands: Commands) -> None:
    Path("data/pile").rmdir()
    with pytest.raises(ValueError, match="data/pile does not exist: give --data, with the Pile"):
        start()
    assert commands.names == []
    assert start("--data", "EleutherAI/pile") == 0


def test_a_card_follows_what_it_tells(commands: Commands) -> None:
    start()
    start("--set", "card.language=en", "--push", "me/it")
    assert commands.names == [*STAGES, "card", "push"]
    assert commands.calls[-1][1] == ["here/train", "me/it"]


def test_some_stages_only(commands: Commands) -> None:
    start("--until", "check")
    assert commands.names == ["convert", "check"]
    start("--until", "train")
    assert commands.names == ["convert", "check", "train"]
    start("--from", "evaluate", "--until", "evaluate")
    assert commands.names == ["convert", "check", "train", "evaluate"]
    with pytest.raises(ValueError, match="no stage 'tain': the stages are convert, check, train"):
        start("--until", "tain")


def test_a_run_of_another_recipe_is_left_alone(commands: Commands) -> None:
    start("--until", "train")
    with pytest.raises(ValueError, match="train was done by another command"):
        recipe.run(["run", "mamba2-130m-tbtt", "--output", "here", "--device", "cpu"])
    assert commands.names == STAGES[:3]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["run", "mamba2-130m-random-noise"], r"needs train.noise_sigma, .* give --set train.noise_sigma=VALUE"),
        (["run", "rwkv6-1.6b-state-passing"], "is Python code in its repository: read it"),
        (["run", NAME, "--set", "max_steps=2"], "takes STAGE.OPTION=VALUE, .* got 'max_steps=2'"),
        (["run", NAME, "--set", "tran.max_steps=2"], "has no stage tran"),
        (["run", NAME, "--set", "expand.factor=2"], "has no stage expand"),
        (["run", NAME, "--set", "train.output_dir=x"], "train.output_dir does nothing here"),
        (["run", NAME, "--set", "train.max_stps=2"], "Stage train: .* did you mean max_steps"),
        (["run", NAME, "--set", "evaluate.lenght=2"], "Stage evaluate: .*unrecognized arguments: --lenght"),
        (["show", "mamba2-130m-state-pasing"], "did you mean mamba2-130m-state-passing"),
    ],
)
def test_mistakes_end_before_anything_is_done(
    arguments: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=complaint):
        recipe.run(arguments)
    assert not list(tmp_path.iterdir())


def test_the_list_has_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "list"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [
        NAME,
        "state-spaces/mamba2-130m",
        "state",
        "passing",
        "Buitrago",
        "Ruiz",
        "and",
        "Gu,",
        "2025",
        "100",
        "52.4M",
    ] in lines
    assert len(lines) == 33


def test_show_tells_all_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", "statex-mamba2-1.3b", "--output", "out", "--data", "slim"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for part in (
        "StateX: Enhancing RNN Recall via Post-training State Expansion",
        "model: state-spaces/mamba2-1.3b",
        "revision: main",
        "SlimPajama",
        "19,073 steps of 524,288 tokens (8 rows of 65,536), 10B tokens in all",
        "NIAH-Single-2: 0.94, 0.61, 0.32 and 0.09",
        "source: Table 9",
        "lengthgen expand out/convert --output out/expand --count 4 --factor 4",
        "--model=out/expand --output=out/train --data=slim",
        "lengthgen retrieve out/convert out/train --output out/retrieve --data slim --task niah",
        "lengthgen push out/train OWNER/NAME",
    ):
        assert part in shown, part


def test_the_commands_that_are_shown_are_those_that_run(
    commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe.run(["show", NAME, "--output", "here", "--device", "cpu", "--push", "me/it"])
    shown = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("    lengthgen")]
    start("--push", "me/it")
    names = {"check": "verify"}
    ran = [shlex.join(["lengthgen", names.get(stage, stage), *arguments]) for stage, arguments in commands.calls]
    assert shown == ran


def test_copy_gives_files_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "copy", str(tmp_path / "mine")]) == 0
    assert main(["recipe", "show", str(tmp_path / "mine/checkpoints/gla-1.3b-state-passing.yaml")]) == 0
    assert f"lengthgen train {tmp_path}/mine/post_training/state_passing.yaml" in capsys.readouterr().out
    assert main(["recipe", "copy", str(tmp_path / "mine")]) == 1


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_that_is_killed_in_a_stage_goes_on_with_it(
    stage: str, moment: str, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the stage has written its files."""
    write = commands.write

    def write_and_die(name: str, arguments: list[str]) -> None:
        if name != stage or moment == "after":
            write(name, arguments)
        if name == stage:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(commands, "write", write_and_die)
        try:
            start()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert stage not in marks()
    if (stage, moment) == ("convert", "after"):
        with pytest.raises(FileExistsError):  # `lengthgen convert` says so in words
            start()
        shutil.rmtree("here/convert")
        commands.calls.clear()
    start()
    assert commands.names == STAGES[STAGES.index(stage) :]
    assert marks() == {*STAGES} - {"card"}


def test_a_recipe_may_start_from_a_folder(commands: Commands) -> None:
    Path("official").mkdir()
    file = copy_recipes("mine") / "checkpoints" / f"{NAME}.yaml"
    file.write_text(file.read_text().replace("model: state-spaces/mamba2-130m", "model: official"))
    assert recipe.run(["run", str(file), "--output", "here", "--device", "cpu", "--until", "convert"]) == 0
    called = dict(commands.calls)["convert"]
    assert called[0] == "official"
    assert "--revision" not in called


def test_the_device_of_one_measurement_wins(commands: Commands) -> None:
    assert start("--set", "evaluate.device=meta") == 0
    evaluated, diagnosed = (dict(commands.calls)[stage] for stage in ("evaluate", "diagnose"))
    assert [evaluated[place + 1] for place, part in enumerate(evaluated) if part == "--device"] == ["meta"]
    assert diagnosed[diagnosed.index("--device") + 1] == "cpu"

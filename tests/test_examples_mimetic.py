"""The study of mimetic initialization runs in miniature, and its README holds the results."""

import shutil
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples" / "mimetic"


@pytest.fixture
def names(example: Any) -> dict[str, Any]:
    """Names of all files of the study."""
    found = example("mimetic/run.py")
    return {**vars(sys.modules["reports"]), **vars(sys.modules["starts"]), **found}


def trained(printed: str) -> list[str]:
    """Seeds and names of the arms."""
    return [line.partition(": ")[0] for line in printed.splitlines() if line.startswith("seed ")]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_a_study_runs(
    family: str, names: dict[str, Any], example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = f"{names['RATE']:g}"
    shutil.copy(FOLDER / "README.md", tmp_path)
    places = ("--output", tmp_path / "out", "--results", tmp_path / "results")
    example("mimetic/run.py", "--studies", "teacher", "--families", family, "--seeds", 4, "--tiny", *places)
    teachers = {f"seed 4 {task}/{family}/default/{rate}" for task in ("recall", "text")}
    teachers.add(f"seed 4 recall/{family}/one/{rate}")
    students = {
        f"seed 4 copying/{family}/layer_{layer}_of_{start}/{rate}"
        for layer in range(4)
        for start in ("default", "one", "default_on_text")
    }
    first = capsys.readouterr().out
    assert sorted(trained(first)) == sorted(teachers | students)
    table = first.partition("teacher:\n\n")[2].partition("\n\n")[0]
    assert f"## teacher\n\n{table}\n" in (tmp_path / "results/tables.md").read_text()
    assert (tmp_path / "results/tasks.png").is_file()  # of the teachers


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_starts_differ_as_they_say(family: str, names: dict[str, Any]) -> None:
    def layers(start: str) -> Any:
        return names["new_model"](names["Arm"](start, family=family), 22, seed=3).backbone.layers

    def same(one: Any, other: Any) -> bool:
        return all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())

    default = layers("default")
    for start, changed in {"one": [1], "all": [0, 1, 2, 3], "a": [1]}.items():
        new = layers(start)
        assert [not same(one, other) for one, other in zip(default, new, strict=True)] == [
            layer in changed for layer in range(4)
        ]
        mixer = new[1].mixer
        torch.testing.assert_close(mixer.A_log, -8 * default[1].mixer.A_log)
        assert torch.equal(mixer.in_proj.weight, default[1].mixer.in_proj.weight) == (
            start == "a" or family == "mamba"  # whose B and C are rows of x_proj
        )
    identity = torch.tensor([0.0, 0, 0, 1]).expand_as(default[1].mixer.conv1d.weight)
    assert torch.equal(layers("one")[1].mixer.conv1d.weight, identity) == (family == "mamba2")
    assert torch.equal(layers("conv")[1].mixer.conv1d.weight, identity)
    for start, shape in {"attention": (48, 48), "linear 8": (8, 48)}.items():
        mixers = [layer.mixer for layer in layers(start)]
        assert [tuple(mixer.q_proj.weight.shape) if hasattr(mixer, "q_proj") else None for mixer in mixers] == [
            None,
            shape,
            None,
            None,
        ]


def test_with_c_outside_a_log_only_its_gradient_differs(names: dict[str, Any]) -> None:
    """A = -exp(-c A_log): the same A, and minus c times the gradient that A_log has with c inside."""
    tokens = torch.randint(3, 10, (2, 22), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for start in ("one", "outside"):
        model = names["new_model"](names["Arm"](start), 22, seed=3)
        losses.append(model(input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert losses[0] == losses[1]
    layer = "backbone.layers.1.mixer."
    of_a = gradients[0].pop(f"{layer}A_log"), gradients[1].pop(f"{layer}parametrizations.A_log.original")
    torch.testing.assert_close(of_a[1], -8 * of_a[0], rtol=1e-6, atol=0)
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_results_of_decays_that_were_not_the_models_own_are_not_taken_for_new(
    names: dict[str, Any], tmp_path: Path
) -> None:
    study = names["StringStudy"](Namespace(tiny=True, output=tmp_path, results=tmp_path / "r", report=False))
    scaled = []
    for start in ("default", "one", "all", "a+bc", "delta+conv", "attention", "layer 2 of one", "layer 2 of default"):
        for family in ("mamba2", "mamba"):
            arm = names["Arm"](start, family=family)
            study.arms[arm.name] = arm
            scaled += [(start, family)] if "decays" in study.made_of(arm.name) else []
    assert scaled == [(start, "mamba2") for start in ("one", "all", "a+bc", "layer 2 of one")]
    arm, settings = replace(names["Arm"]("one"), tiny=True), {"multiples": [1, 2, 3, 4], "samples": 4}
    study.arms[arm.name] = arm
    key = {**study.made_of(arm.name), "settings": settings}
    of_before = {name: value for name, value in key.items() if name != "decays"}
    for seed, made in enumerate((key, of_before, of_before | {"arm": {}})):
        study.kept.put(arm.name, seed, {"key": made, "measured": {"1x": 0.5}})
    found = {seed: study.measured_of(arm, seed) for seed in range(4)}
    assert list(found.values()) == [{"1x": 0.5}, None, None, None]


def test_all_layers_start_from_one_of_a_teacher(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Namespace(tiny=True, output=tmp_path, results=tmp_path / "r", report=False)
    study, arm = names["StringStudy"](options), replace(names["Arm"]("layer 2 of one", 1e-2), tiny=True)
    study.arms[arm.name] = arm
    model = study.new_model(arm.name, 10, seed=1)
    taught = study.loaded(study.folder("recall/mamba2/one/0.01", 1)).backbone.layers
    for layer in model.backbone.layers:
        for name, value in layer.state_dict().items():
            assert torch.equal(value, taught[2].state_dict()[name])
    assert not torch.equal(taught[1].mixer.A_log, taught[2].mixer.A_log)


@pytest.mark.parametrize("begin", [False, True])
def test_strings_in_a_stream_follow_others(begin: bool, names: dict[str, Any]) -> None:
    """In a row of all strings of a stream, read at once."""
    shares = set()
    for seed in range(3):
        arm = replace(names["Arm"](changes=(("begin", begin), ("vocabulary", 2))), tiny=True)
        data = arm.data(0)
        row = data.resized(data.longest, 1, 0)[0]
        assert len(row["input_ids"]) == data.row_length == 2 * data.longest + 2 + begin
        assert not begin or (int(row["input_ids"][0]), int(row["labels"][0])) == (2, -100)
        model = names["new_model"](arm, data.row_length, seed).eval()
        task = names["string_task"](**model.config.task)
        rows = task.resized(task.longest, 9, names["EVALUATION_SEED"]).batch(range(9))
        right = questions = 0
        for lane in range(3):
            whole = torch.cat([rows["input_ids"][lane + 3 * place] for place in range(3)])[None]
            with torch.no_grad():
                predicted = model(input_ids=whole).logits[0].argmax(-1)
            labels, size = rows["labels"][lane + 6], rows["labels"].shape[1]
            for place in range(1, size - 1):  # without the end
                if labels[place] != -100:
                    questions += 1
                    right += int(predicted[2 * size + place - 1] == labels[place])
        shares.add(right / questions)
        assert names["in_stream"](model, task, 3, before=2) == pytest.approx(right / questions)
    assert max(shares) > 0


def test_a_step_of_packed_rows_has_as_many_strings_as_one_of_single_strings(example: Any) -> None:
    names = example("mimetic/packed.py")
    run, single = names["Run"](), names["Run"](packed=False)
    arm, strings = run.arm, run.arm.data(0)
    assert (single.arm.sizes.rows, arm.sizes.rows, run.row_length) == (32, 14, 49)  # 49 / 23 is 220 / 103
    rows = names["PackedStrings"](strings, run.row_length, 3000)
    ends = sum(int((row["labels"] == 2).sum()) for row in rows.__getitems__(range(3000)))
    assert 14 * ends / 3000 == pytest.approx(32, abs=0.5)
    kept = names["ArmResults"](FOLDER / "results")
    assert all(kept.seeds(names["Run"](False, passed).name) == [0, 1, 2] for passed in (False, True))


@pytest.mark.slow
def test_the_study_of_packed_rows_runs(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(FOLDER / "README.md", tmp_path)
    places = ("--output", tmp_path / "out", "--results", tmp_path / "results" / "packed")
    example("mimetic/packed.py", "--studies", "table", "mimetic", "--seeds", 4, "--tiny", *places)
    printed = capsys.readouterr().out
    assert len(trained(printed)) == 4
    page = (tmp_path / "README.md").read_text()
    for words in (
        "| one | zero | 2,000 | 3 | 1.00 ",
        "| several | zero | 2 | 1 | ",
        "| several | passed states | 2 | 1 | ",
    ):
        assert words in printed
        assert words in page
    assert (tmp_path / "results" / "packed" / "packed.png").is_file()


def test_a_table_and_a_figure_show_means_over_seeds(names: dict[str, Any]) -> None:
    layout = names["Layout"](("start", "rate"), ("1x", "2x"), drawn=("2x",), x=1)
    seeds = {0: {"1x": 1.0, "2x": 0.25}, 2: {"1x": 1.0, "2x": 0.75}}
    found = {
        ("mamba2", ("default", "0.1")): seeds,
        ("mamba2", ("default", "0.01")): {0: {"1x": 0.5, "2x": 0.125}},
        ("mamba", ("default", "0.1")): {0: {"1x": 0.5, "2x": 0.0}},
    }
    assert names["table"](layout, found).splitlines()[2:] == [
        "| Mamba-2 | default | 0.1 | 0, 2 | 1.00 (1.00 to 1.00) | 0.50 (0.25 to 0.75) |",
        "| Mamba-2 | default | 0.01 | 0 | 0.50 | 0.12 |",
        "| Mamba-1 | default | 0.1 | 0 | 0.50 | 0.00 |",
    ]
    (axis,) = names["figure"](layout, found).axes  # Mamba-1 has one rate
    assert axis.get_title("left") == "Mamba-2, 2x"
    (line,) = axis.lines
    assert sorted(zip(*line.get_data(), strict=True)) == [(0.01, 0.125), (0.1, 0.5)]


def test_the_area_under_a_curve(names: dict[str, Any]) -> None:
    area_under_curve = names["area_under_curve"]
    assert area_under_curve({1: 1.0, 2: 1.0, 4: 1.0}) == 1.0
    # between 50 and 100 the mean is 0.75, between 100 and 200 it is 0.25
    assert area_under_curve({200: 0.0, 50: 1.0, 100: 0.5}) == pytest.approx((50 * 0.75 + 100 * 0.25) / 150)

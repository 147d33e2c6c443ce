"""Every study runs in miniature, its models and rows are what they are called, and a report writes the page."""

import json
import math
import re
import shutil
import statistics
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
ALL_METHODS = "base control state_passing tbtt fitted_noise fitted_noise_zero fitted_noise_first"
STUDIES = {  # command, what it prints and how often, and a file that it writes
    "alignment/llama.py --tiny --seeds 3 --output out --results r": (r"^seed 3 llama/", 14, "r/llama.png"),
    "hybrids/run.py --tiny --families bamba --seeds 0 --output out --results r": (r"^\| Bamba", 27, "r/hybrids.png"),
    "interventions/run.py --tiny --output out --seeds 3": (r"\| 3 \| [+-]", 19, "out/interventions.png"),
    "interventions/budget.py --tiny --seeds 3 --rates tenth --output out --results r": (
        *(r"^\| (DeltaNet|Mamba-2, slow decay) \| (0\.1)? \| ", 12),
        "r/budget.png",
    ),
    "failure/run.py --tiny --output out --seeds 0": (r"\| 0 \| [+-]", 13, "out/failure.png"),
    "output_representations/run.py --tiny --output out --seeds 4": (r"\| 4 \|", 19, "out/output_representations.png"),
    "scaling_laws/run.py --quick --output out --seeds 3": (r"seed=3: ", 9, "out/recall.png"),
    "passkey/run.py --tiny --seeds 3 --arms base fitted_noise --output out --results r": (
        *(r"^seed 3 (base|fitted_noise)", 2),
        "r/passkey.png",
    ),
    "passkey/other_families.py --tiny --seeds 3 --families gla bamba --arms base tbtt_16 --output out --results r": (
        *(r"\| 3 \| ", 4),
        "r/families.png",
    ),
    "passkey/windows.py --tiny --seeds 3 --arms base tbtt_16_drawn --output out --results r": (
        *(r"\| (full attention|window of \d+) \|", 10),
        "r/windows.png",
    ),
    "passkey/keys.py --tiny --seeds 3 --kinds last --output out --results r": (r"^\| last of two codes", 5, "r"),
    "passkey/chunks.py --tiny --seeds 3 --output out --results r": (r"^\| 3 \| ", 9, "r"),
    "passkey/new_task.py --tiny --seeds 3 --output out --results r": (r"^\| 3 \| ", 3, "r"),
    "passkey/questions.py --tiny --seeds 3 --output out --results r": (r"^\| qa[12] ", 20, "r/questions.png"),
    "passkey/mixing.py --tiny --results r": (r"^(passkeys|text) ", 8, "r/results.json"),
    "state_expansion/run.py --tiny --bases heads --seeds 0 1 --output out --results r": (r"^seed [01]", 4, "r"),
    "planted_fault.py --type bamba --training-length 16 --length 64 --sequences 4 --steps 2 --output out": (
        *(r"^Report: ", 1),
        "out/diagnosis/attention_harm.png",
    ),
    **{
        f"families/run.py --tiny --families {family} --seeds 3 --output out --results r --methods {methods}": (
            *(rf"^seed 3 {family}/", len(methods.split())),
            "r/families.png",
        )
        for family, methods in (
            *((name, "base state_passing") for name in ("rwkv7", "qwen3_next")),
            *((name, ALL_METHODS) for name in ("mamba2", "bamba")),
        )
    },
}
REPORTS = [
    *("alignment/run.py", "families/run.py", "hybrids/run.py", "learned_state/run.py", "mimetic/run.py"),
    "interventions/budget.py",
    "learned_state/s0.py",
    "mimetic/packed.py",
    *("passkey/chunks.py", "passkey/keys.py", "passkey/new_task.py", "passkey/other_families.py"),
    *("passkey/run.py", "passkey/windows.py"),
    "passkey/mixing.py",
    *("forgetting/scales.py", "published/run.py", "scaling_laws/forgetting.py", "state_expansion/run.py"),
]
PART = re.compile(r"<!-- ([\w ]+) -->\n(.*?)<!-- end -->", flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("small_corpus")
@pytest.mark.parametrize("command", STUDIES, ids=lambda command: command.partition(" --out")[0])
def test_a_study_runs(
    command: str, example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = ROOT / "examples" / command.partition("/")[0]
    if study.is_dir():
        shutil.copy(study / "README.md", tmp_path)
    monkeypatch.syspath_prepend(str(study))
    pattern, count, written = STUDIES[command]
    places = {"out": str(tmp_path / "out"), "r": str(tmp_path / "r")}
    with suppress(SystemExit):  # of lengthgen, in one of them
        example(*(places.get(word, word) for word in command.split()))
    printed = capsys.readouterr().out
    assert len(re.findall(pattern, printed, flags=re.MULTILINE)) == count, printed
    assert (tmp_path / written).exists()


@pytest.mark.slow
@pytest.mark.parametrize("script", REPORTS)
def test_a_report_writes_the_page_that_is_there(
    script: str, tmp_path: Path, example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    for page in ("README.md", "docs/delta_rule.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    pages = {page: page.read_text() for page in tmp_path.rglob("*.md") if "model_cards" not in page.parts}
    for page, text in pages.items():
        page.write_text(PART.sub(r"<!-- \1 -->\n<!-- end -->", text))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str((copy / script).parent))
    example(str(copy / script), "--report")
    filled = {page: [part for part in PART.findall(page.read_text()) if part[1]] for page in pages}
    assert any(filled.values())
    for page, parts in filled.items():
        assert {*parts} <= {*PART.findall(pages[page])}


@pytest.mark.parametrize("name", ["interventions", "failure"])
def test_the_tables_hold_the_numbers_of_the_result_files(name: str) -> None:
    table = dict(PART.findall((ROOT / "examples" / name / "README.md").read_text()))["table"].splitlines()[2:]
    stages = json.loads((ROOT / "examples" / name / f"{name}.json").read_text())["stages"]
    assert len(table) == len(stages)
    for line, seeds in zip(table, stages.values(), strict=True):
        for quantity in ("harm_last", "in_window", "context_use"):
            mean = statistics.fmean(found[quantity]["mean"] for found in seeds.values())
            assert f"| {mean:{'+' if quantity == 'harm_last' else ''}.3f} " in line
        assert f"| {', '.join(seeds)} |" in line


@pytest.mark.usefixtures("small_corpus")
@pytest.mark.slow
def test_checkpoints_of_families_are_made(example: Any, tmp_path: Path) -> None:
    made = tmp_path / "cards"
    made.mkdir()
    (made / "README.md").write_text("<!-- table -->\n<!-- end -->\n")
    places = ["--output", tmp_path / "out", "--checkpoints", made]
    example("families/checkpoints.py", "--tiny", "--families", "gla", *places)
    assert {"gla-base", "gla-state-passing"} == {path.name for path in made.iterdir() if path.is_dir()}
    (row,) = (line for line in (made / "README.md").read_text().splitlines() if line.startswith("| GLA"))
    assert "[base](gla-base/README.md), [state passing](gla-state-passing/README.md)" in row


@pytest.mark.parametrize("family", ["rwkv6", "rwkv7"])
def test_slow_starts_of_rwkv_decay_by_powers_of_the_place_of_a_key(family: str, example: Any) -> None:
    run = example("families/run.py")
    study = SimpleNamespace(vocabulary=256)
    mixer = run["FamilyStudy"].new_model(study, f"{family}/base", 128, 0).model.layers[1].attn
    bias = (mixer.w_proj.linear if family == "rwkv6" else mixer.w_lora).lora[2].bias.double()
    rates = bias.exp() if family == "rwkv6" else math.exp(-0.5) * bias.sigmoid()
    expected = torch.tensor([[(n + 1) ** -5.0 for n in range(1, 33)]] * 3, dtype=torch.float64)
    torch.testing.assert_close(rates.view(3, 32), expected, rtol=1e-5, atol=0)


def test_styles_and_facts_of_learned_states_are_what_they_are_called(example: Any) -> None:
    study = example("learned_state/run.py")
    assert study["in_style"]("a = 1\nb\n", "comments") == "# a = 1\n# b\n"
    assert study["in_style"]("a = 1\n", "upper case") == "A = 1\n"
    ids = study["facts_ids"](64, seed=1)
    assert ids.shape == (64, 9)
    assert len({tuple(row[:4]) for row in ids.tolist()}) == 64
    rows, prompts = study["examples"]("16 facts", 0, 1)
    assert all(row["labels"].tolist() == [-100] * 5 + row["input_ids"].tolist()[5:] for row in rows)
    assert [row["input_ids"].tolist() for row in rows] == prompts.tolist()


@pytest.mark.slow
def test_the_study_of_learned_states_runs(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("<!-- table -->\n<!-- end -->\n")
    example("learned_state/run.py", "--output", tmp_path, "--tiny")
    assert "->" in capsys.readouterr().out
    assert (tmp_path / "README.md").read_text().count("\n| ") == 1 + 2
    assert (tmp_path / "learned_state.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_study_of_s0_tuning_runs(example: Any, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- s0 -->\n<!-- end -->\n")
    example("learned_state/s0.py", "--output", tmp_path, "--tiny")
    results = {entry["arm"]: entry for entry in map(json.loads, (tmp_path / "s0.jsonl").read_text().splitlines())}
    assert results["960 rows, l2 0.0005/1"]["norm"] < results["960 rows, l2 0/1"]["norm"]
    base, paper = results["base"]["inside"], "48 rows, all numbers of the paper"
    assert base > results[f"{paper}/0.07"]["inside"] > results[f"{paper}/1"]["inside"]
    assert (tmp_path / "README.md").read_text().count("\n| ") == 2 + 1 + 7 + 1


VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")


def author_file(path: Path) -> Path:
    """Random weights under the names of the author's file."""
    layer: dict[str, tuple[int, ...]] = {f"rwkv{{}}.{name}": (1, 1, 32) for name in VECTORS}
    layer |= {f"rwkv{{}}.{part}1": (32, 8) for part in "wavg"} | {f"rwkv{{}}.{part}2": (8, 32) for part in "wavg"}
    layer |= {f"rwkv{{}}.{name}.weight": (32, 32) for name in ("receptance", "key", "value", "output")}
    layer |= {f"{name}.{part}": (32,) for name in ("ln{}a", "ln{}b", "rwkv{}.ln_x") for part in ("weight", "bias")}
    layer |= {"rwkv{}.r_k": (2, 16), "rosa{}.o.bias": (32,), "ffn{}.x_k": (1, 1, 32)}
    layer |= {"ffn{}.key.weight": (128, 32), "ffn{}.value.weight": (32, 128)}
    shapes = {name.format(number): shape for number in (1, 2) for name, shape in layer.items()}
    shapes |= {"e.weight": (12, 32), "o.weight": (12, 32), "o.bias": (12,), "lno.weight": (32,), "lno.bias": (32,)}
    torch.save({name: torch.randn(shape) / 6 for name, shape in shapes.items()}, path)
    return path


def test_rows_of_the_published_model_are_problems_and_only_answers_are_labelled(example: Any) -> None:
    study = example("published/run.py")
    problems, tokens, labels = study["Problems"](40, 0), [11], [-100]
    for index in range(40):
        row = problems[index]
        real = int(row["attention_mask"].sum())
        one, size = row["input_ids"][:real].tolist(), real // 2 - 1
        assert one == [*one[:size], 10, *one[:size][::-1], 11]
        assert row["labels"].tolist() == [-100] * (size + 1) + one[size + 1 :] + [-100] * (128 - real)
        assert len(row["input_ids"]) == 128
        tokens += one
        labels += row["labels"][:real].tolist()
    chunks = study["ContinuedProblems"](4, 0, 2)
    assert len(chunks) == 4
    for index in range(4):
        place = index * 128
        assert chunks[index]["input_ids"].tolist() == tokens[place : place + 128]
        assert chunks[index]["shift_labels"].tolist() == labels[place + 1 : place + 129]


@pytest.mark.slow
def test_the_study_of_a_published_model_runs_on_random_weights(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--output", tmp_path / "out", "--results", tmp_path / "results"]
    example("published/run.py", "--tiny", *places, "--seeds", 0, "--weights", author_file(tmp_path / "author.pth"))
    said = capsys.readouterr().out
    assert said.count("seed 0 ") == 4
    assert (tmp_path / "results/published.png").stat().st_size > 1000

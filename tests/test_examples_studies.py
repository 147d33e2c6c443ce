"""Every study runs in miniature, and a report of its results writes the page that is there."""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FAMILIES = ("mamba", "falcon_mamba", "gla", "rwkv6", "rwkv5", "rwkv7", "hgrn2", "delta_net", "gated_deltanet", "kda")
ALL_METHODS = "base control state_passing tbtt fitted_noise fitted_noise_zero fitted_noise_first"
STUDIES = {  # command, what it prints and how often, and a file that it writes
    "alignment/llama.py --tiny --seeds 3 --output out --results r": (r"^seed 3 llama/", 4, "r/llama.png"),
    "hybrids/run.py --tiny --families bamba --seeds 0 --output out --results r": (r"^\| Bamba", 27, "r/hybrids.png"),
    "interventions/run.py --tiny --output out --seeds 3": (r"\| 3 \| [+-]", 19, "out/interventions.png"),
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
        *(r"\| (all keys|window of \d+) \|", 10),
        "r/windows.png",
    ),
    "passkey/keys.py --tiny --seeds 3 --kinds last --output out --results r": (r"^\| last of two codes", 5, "r"),
    "passkey/new_task.py --tiny --seeds 3 --output out --results r": (r"^\| 3 \| ", 3, "r"),
    "state_expansion/run.py --tiny --bases gla_deep --seeds 3 --arms vanilla inherit --output out --results r": (
        *(r"^seed 3", 3),
        "state_expansion.png",
    ),
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
            *((name, "base state_passing") for name in (*FAMILIES, "qwen3_next")),
            *((name, ALL_METHODS) for name in ("mamba2", "bamba")),
        )
    },
}
REPORTS = [
    *("alignment/run.py", "families/run.py", "hybrids/run.py", "learned_state/run.py", "mimetic/run.py"),
    *("passkey/keys.py", "passkey/new_task.py", "passkey/other_families.py", "passkey/run.py", "passkey/windows.py"),
    *("published/run.py", "scaling_laws/forgetting.py", "scaling_laws/run.py", "state_expansion/run.py"),
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
def test_a_report_writes_the_page_that_is_there(script: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "model_cards").symlink_to(ROOT / "model_cards")
    for page in ("README.md", "docs/delta_rule.md"):
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page, tmp_path / page)
    pages = {page: page.read_text() for page in tmp_path.rglob("*.md") if "model_cards" not in page.parts}
    for page, text in pages.items():
        page.write_text(PART.sub(r"<!-- \1 -->\n<!-- end -->", text))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, f"examples/{script}", "--report"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    filled = {page: [part for part in PART.findall(page.read_text()) if part[1]] for page in pages}
    assert any(filled.values())
    for page, parts in filled.items():
        assert {*parts} <= {*PART.findall(pages[page])}


@pytest.mark.parametrize("name", ["interventions", "failure"])
def test_the_tables_hold_the_numbers_of_the_result_files(name: str) -> None:
    table = [
        line for line in (ROOT / "examples" / name / "README.md").read_text().splitlines() if line.startswith("| ")
    ][2:]
    stages = json.loads((ROOT / "examples" / name / f"{name}.json").read_text())["stages"]
    assert len(table) == len(stages)
    for line, seeds in zip(table, stages.values(), strict=True):
        for quantity in ("harm_last", "in_window", "context_use"):
            mean = statistics.fmean(found[quantity]["mean"] for found in seeds.values())
            assert f"| {mean:{'+' if quantity == 'harm_last' else ''}.3f} " in line
        assert f"| {', '.join(seeds)} |" in line

"""Graphwalks, LongProc and LongBench v2: lm_eval's own tasks and scores, on small local files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from hf_recurrent_lengthgen.harness import StateLM, local_files
from tests.harness.test_tasks import evaluate, write

Manager = Callable[..., TaskManager]


class Oracle(LM):
    """Answers each prompt with a function of it."""

    def __init__(self, answer: Callable[[str], str]) -> None:
        super().__init__()
        self.answer = answer

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        raise NotImplementedError

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self.answer(str(request.args[0])) for request in requests]


def test_graphwalks_is_read_from_local_files(task_manager: Manager, tmp_path: Path) -> None:
    asked = {"prompt": "Edges: a -> b, a -> c. The children of a?", "problem_type": "bfs", "answer_nodes": ["b", "c"]}
    folder = write(tmp_path, {"graphwalks_128k": [asked], "graphwalks_1M": [asked | {"prompt": "longer"}]})
    answers = {asked["prompt"]: "First b.\nFinal Answer: [b, c]", "longer": "Final Answer: [b]\nBye."}
    found = evaluate(Oracle(lambda prompt: answers[prompt]), task_manager(data_dir=folder), "lengthgen_graphwalks")
    assert [found["graphwalks_128k"][name] for name in ("f1", "flexible_f1")] == [1, 1]
    # of two nodes one; what counts is the last line, or any line
    assert [found["graphwalks_1M"][name] for name in ("f1", "flexible_f1")] == [0, pytest.approx(2 / 3)]
    assert found["lengthgen_graphwalks"]["f1"] == pytest.approx(0.5)


def test_graphwalks_names_its_file_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: asked.append((names, options)))
    local_files.graphwalks_rows("", "graphwalks_128k_and_shorter.parquet")
    assert asked == [(("openai/graphwalks",), {"data_files": "graphwalks_128k_and_shorter.parquet", "split": "train"})]


LONGPROC: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "countdown": ("# Search Procedure\n...", {"nums": [1, 2, 3, 4], "target": 10}),
    "path_traversal": ("Ulm\nBonn", {}),
    "tom_tracking": ("- Step 1: the box\n- Step 2: the bag", {}),
    "html_to_tsv": ("name\tage\nAnn\t3\nBo\t4", {}),
    "pseudo_to_code": ("int main() {}", {"testcases": []}),
    "travel_planning": (
        "<Solving Procedure>",
        {"ground_truth_cities": "Ulm**Bonn", "ground_truth_durations": "2**2"},
    ),
}


@pytest.mark.slow
def test_longproc_is_read_from_local_files(task_manager: Manager, tmp_path: Path) -> None:
    manager = task_manager(data_dir=str(tmp_path))
    config = manager.task_index["lengthgen_longproc"].cfg
    assert config is not None
    assert len(config["task"]) == 16
    kinds = {task: task.removeprefix("longproc_").rpartition("_")[0] for task in config["task"]}
    assert set(kinds.values()) == set(LONGPROC)
    files = {}
    for task, kind in kinds.items():
        reference, metadata = LONGPROC[kind]
        row = {"input_prompt": kind, "reference_output": reference, "metadata": json.dumps(metadata)}
        files[task] = [row]
    write(tmp_path, files)
    answers = {kind: reference for kind, (reference, _) in LONGPROC.items()}
    answers["path_traversal"] = "<Route>Ulm\nBonn</Route>"
    answers["html_to_tsv"] = "```tsv\nname\tage\nAnn\t3\n```"
    answers["pseudo_to_code"] = "no code"  # nothing is compiled
    answers["countdown"] = "<Solution>1+2=3\n3+3=6\n6+4=10</Solution>"
    answers["travel_planning"] = (
        "<Plan>European cities for 3 days\nDay 1-2: Ulm\nDay 2: fly from Ulm to Bonn\nDay 2-3: Bonn</Plan>"
    )
    found = evaluate(
        Oracle(lambda prompt: answers[prompt]), manager, "lengthgen_longproc", confirm_run_unsafe_code=True
    )
    # one of two rows is there: precision 1, recall 1/2
    partly = {"html_to_tsv": pytest.approx(2 / 3), "pseudo_to_code": 0}
    scores = {task: found[task]["score"] for task in kinds}
    assert scores == {task: partly.get(kind, 1) for task, kind in kinds.items()}
    assert found["lengthgen_longproc"]["score"] == pytest.approx(sum(scores.values()) / 16)


@pytest.mark.slow
def test_longbench_2_reads_each_document_once(counting: StateLM, task_manager: Manager, tmp_path: Path) -> None:
    manager = task_manager(data_dir=str(tmp_path))
    config = manager.task_index["lengthgen_longbench2"].cfg
    assert config is not None
    assert len(config["task"]) == 20
    # after a space the counting model expects "!", and "A" is the nearest of the four
    row = {"context": "It counts. " * 90, "question": "How?", "choices": ["up", "down", "on", "off"], "answer": "A"}
    write(tmp_path, {task: [row, row | {"answer": "C"}] for task in config["task"]})
    found = evaluate(counting, manager, "lengthgen_longbench2")
    assert {found[task]["acc"] for task in config["task"]} == {0.5}
    assert found["lengthgen_longbench2"]["acc"] == 0.5
    assert counting.tokens_read < 1.2 * len(row["context"])  # 40 prompts with 4 choices each have one document

"""Our groups of tasks, run by lm_eval on small local files, with a model whose answers are known."""

import json
import math
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lm_eval.tasks
import pytest
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from hf_recurrent_lengthgen.harness import TASKS, StateLM, books, local_files, recall, ruler

Manager = Callable[..., TaskManager]
Rows = Mapping[str, list[dict[str, Any]]]

# after ":" the counting model writes ;<=>?@ABC...~, after a space it expects !"#
RIGHT, WRONG = '!"#', "zap"


def write(folder: Path, files: Rows) -> str:
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(folder)


PIQA, QASPER = (
    str(Path(lm_eval.tasks.__file__).parent / f"{name}.yaml") for name in ("piqa/piqa", "longbench/qasper_e")
)


def evaluate(model: StateLM, manager: TaskManager, task: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Results by task and group, without lm_eval's names of filters."""
    options |= {"bootstrap_iters": 0, "log_samples": False}
    found: Any = simple_evaluate(model, tasks=[task], task_manager=manager, **options)
    results = {**found["results"], **found.get("groups", {})}
    return {name: {key.partition(",")[0]: value for key, value in row.items()} for name, row in results.items()}


PIQA_ROW = {"goal": "Count.", "sol1": RIGHT, "sol2": WRONG, "label": 0}
HELLASWAG_ROW = {"ctx_a": "He counts.", "ctx_b": "he", "activity_label": "Counting", "label": "1"}
ARC = {"question": "Count?", "choices": {"text": [WRONG, RIGHT], "label": ["A", "B"]}, "answerKey": "B"}
SIQA_ROW = {"context": "c", "question": "q", "answerA": WRONG, "answerB": "zig", "answerC": RIGHT, "label": "3"}
COMMON_SENSE: Rows = {
    "piqa": [PIQA_ROW, PIQA_ROW | {"label": 1}],
    "hellaswag": [HELLASWAG_ROW | {"endings": [WRONG, RIGHT, "zzz", "yyy"]}],
    "winogrande": [{"sentence": 'Ann or Bo: _ !"#', "option1": "a b", "option2": "ab", "answer": "2"}],
    "arc_easy": [ARC],
    "arc_challenge": [ARC | {"answerKey": "A"}],
    "social_iqa": [SIQA_ROW],
}


def test_common_sense_is_the_mean_of_six_accuracies(counting: StateLM, task_manager: Manager, tmp_path: Path) -> None:
    folder = write(tmp_path, COMMON_SENSE)
    found = evaluate(counting, task_manager(data_dir=folder), "lengthgen_common_sense")
    accuracies = {name: row["acc"] for name, row in found.items() if name in COMMON_SENSE}
    # WRONG and RIGHT are as long, so that the likelier is the one that counts
    winogrande = accuracies.pop("winogrande")
    expected = {"piqa": 0.5, "hellaswag": 1, "arc_easy": 1, "arc_challenge": 0, "social_iqa": 1}
    assert accuracies == expected
    mean = (sum(expected.values()) + winogrande) / 6
    assert found["lengthgen_common_sense"]["acc"] == pytest.approx(mean)


PAIR = {"sentence1": "One.", "sentence2": "Two.", "premise": "One.", "hypothesis": "Two.", "label": 0}
CHOICE = {"question": "?", "choices": {"text": list("abcde"), "label": list("ABCDE")}, "answerKey": "A"}
CODAH = {"question_propmt": "It", "candidate_answers": [RIGHT, WRONG, "zig", "zag"], "correct_answer_idx": 0}
DREAM = {"dialogue": ["M: Hi.", "W: Bye."], "question": "?", "choice": [WRONG, RIGHT, "zig"], "answer": RIGHT}
WIC = {"sentence1": "a", "sentence2": "a b", "start1": 0, "end1": 1, "word": "a", "label": 0}
NUMBERED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "commonsense_qa": ("question", CHOICE),
    "arc_challenge": ("question", ARC),
    "copa": ("premise", {"question": "cause", "choice1": "Yes.", "choice2": "No.", "label": 0}),
    "cb": ("premise", PAIR),
    "mrpc": ("sentence1", PAIR),
    "sst2": ("sentence", {"label": 0}),
    "qqp": ("question1", {"question2": "b", "label": 0}),
    "cola": ("sentence", {"label": 0}),
    "sglue_rte": ("premise", PAIR),
    "wic": ("sentence1", WIC),
    "lengthgen_codah": ("question_propmt", CODAH),
    "lengthgen_dream": ("question", DREAM),
}
DEMONSTRATIONS = {name: [row | {field: f"a {n}."} for n in range(40)] for name, (field, row) in NUMBERED.items()}


@pytest.mark.slow
def test_twelve_tasks_are_shown_16_demonstrations(counting: StateLM, task_manager: Manager, tmp_path: Path) -> None:
    files = {f"{name}.train": rows for name, rows in DEMONSTRATIONS.items()}
    files |= {name: rows[:1] for name, rows in DEMONSTRATIONS.items()}
    manager = task_manager(data_dir=write(tmp_path, files))
    loaded = manager.load(["lengthgen_icl"])["tasks"]
    assert set(loaded) == set(DEMONSTRATIONS)
    assert {task.config.num_fewshot for task in loaded.values()} == {16}
    for name, shots in (("lengthgen_icl_8", 8), ("lengthgen_icl_24", 24)):
        loaded = manager.load([name])["tasks"]
        assert set(loaded) == set(DEMONSTRATIONS)
        assert {task.config.num_fewshot for task in loaded.values()} == {shots}
    found = evaluate(counting, manager, "lengthgen_icl")
    accuracies = [found[name]["acc"] for name in DEMONSTRATIONS]
    assert found["lengthgen_icl"]["acc"] == pytest.approx(sum(accuracies) / 12)
    assert [found[name]["acc"] for name in ("arc_challenge", "lengthgen_codah", "lengthgen_dream")] == [1, 1, 1]


RECALL: Rows = {
    "lengthgen_swde_twice": [
        {"text": "A film. director: X\n director:", "key": "director", "value": " ;<=>? "},
        {"text": "A film.", "key": "year", "value": "1999"},
    ],
    "lengthgen_squad_twice": [
        {"context": "It is so.", "question": "How?", "text": "It is so. So it is:", "value": "ABC"}
    ],
    "lengthgen_triviaqa_twice": [
        {"context": "[PAR]It is so.", "question": "It is:", "orig_question": "How?", "answers": ["nx", "xyZ"]}
    ],
    "lengthgen_nq_twice": [{"context": "It is so.", "question": "It is:", "answers": ["nx"]}],
    "lengthgen_drop_twice": [
        {"context": "It.", "question": "It is:", "orig_question": "How?:", "answers": ["nx", "klm"]},
        {"context": "It.", "question": "It is:", "orig_question": "How?:", "answers": [""]},
    ],
}


@pytest.mark.slow
def test_recall_counts_answers_that_the_continuation_contains(
    counting: StateLM, task_manager: Manager, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path, RECALL)
    found = evaluate(counting, task_manager(data_dir=folder, context_length=None), "lengthgen_recall")
    scores = {
        name: found[f"lengthgen_{name}_twice"]["contains"] for name in ("swde", "squad", "triviaqa", "nq", "drop")
    }
    # 48 characters after ":", from ; to j; in upper or lower case
    assert scores == {"swde": 0.5, "squad": 1, "triviaqa": 1, "nq": 0, "drop": 1}
    assert found["lengthgen_recall"]["contains"] == pytest.approx(3.5 / 5)
    assert "1 rows have no answer" in caplog.text


def prompts(folder: str, task: str, layout: str, keep: str = "answer", **metadata: Any) -> list[str]:
    source = str(TASKS / "recall" / f"{task}.yaml")
    rows = recall.rows(source, layout, keep, folder, **{"tokenizer": "bytes", **metadata})
    return [row["prompt"] for row in rows["validation"]]


def test_the_document_is_read_twice_between_question_and_cue(tmp_path: Path) -> None:
    folder = write(tmp_path, RECALL)
    assert prompts(folder, "lengthgen_swde_twice", "key")[0] == (
        "Information about Director. A film. director: X.\nA film. director: X. Director:"
    )
    assert prompts(folder, "lengthgen_squad_twice", "completion") == ["How? It is so.\nIt is so. So it is:"]
    assert prompts(folder, "lengthgen_triviaqa_twice", "question") == ["How? It is so.\nIt is so. It is:"]
    assert prompts(folder, "lengthgen_nq_twice", "question") == ["It is It is so.\nIt is so. It is:"]
    assert prompts(folder, "lengthgen_drop_twice", "question") == ["How? It.\nIt. It is:"]
    assert prompts(folder, "lengthgen_triviaqa_twice", "question", times=1) == ["It is so. It is:"]
    assert prompts(folder, "lengthgen_triviaqa_twice", "question", times=3)[0].count("It is so.") == 3


def test_long_documents_are_cut_around_the_answer_or_behind_the_beginning(tmp_path: Path) -> None:
    document = "a" * 200 + " Answer " + "b" * 200
    row = {"context": document, "question": "Q:", "orig_question": "Q?", "answers": ["answer"]}
    folder = write(tmp_path, {"lengthgen_nq_twice": [row]})
    [around] = prompts(folder, "lengthgen_nq_twice", "question", context_length=150)
    window = around.removeprefix("Q? ").partition(".\n")[0]
    assert window == document[201 - 50 : 201 + 50]  # 150 - 50 bytes, the answer in the middle
    [beginning] = prompts(folder, "lengthgen_nq_twice", "question", "beginning", context_length=150)
    assert beginning == f"Q? {'a' * 100}.\n{'a' * 100}. Q:"
    with pytest.raises(ValueError, match=r"cutting documents \(context_length\) needs a tokenizer"):
        prompts(folder, "lengthgen_nq_twice", "question", context_length=150, tokenizer=None)


@pytest.mark.slow
def test_perplexity_of_books(counting: StateLM, task_manager: Manager, known: Any, tmp_path: Path) -> None:
    book = (string.ascii_lowercase * 700)[:17_000]
    (tmp_path / "one.txt").write_text(book)
    (tmp_path / "two.txt").write_text(book[5:10_000])
    (tmp_path / "short.txt").write_text("too short")
    found = evaluate(counting, task_manager(data_dir=str(tmp_path), tokenizer="bytes"), "lengthgen_pg19")
    streams = {"8k": [book[:8192], book[5 : 5 + 8192]], "16k": [book[:16384]]}
    for name, texts in streams.items():
        likelihood, tokens = sum(map(known, texts)), sum(map(len, texts))
        row = found[f"lengthgen_pg19_{name}"]
        assert row["token_perplexity"] == pytest.approx(math.exp(-likelihood / tokens), rel=1e-4)
        assert row["byte_perplexity"] == pytest.approx(row["token_perplexity"])
        assert row["sample_len"] == len(texts)
    assert counting.tokens_read < 16384 + 8192 + 32  # the beginning of a book is read once for both lengths


def test_ruler_is_read_from_the_files_of_its_generator(
    counting: StateLM, task_manager: Manager, tmp_path: Path
) -> None:
    names = [path.stem.removeprefix("lengthgen_ruler_") for path in sorted((TASKS / "ruler").glob("lengthgen*"))]
    assert len(names) == 13
    rows = {name: [{"index": 0, "input": "It is", "outputs": ["ABC", "NOPE"], "answer_prefix": ":"}] for name in names}
    write(tmp_path, {f"1024/data/{name}/validation": row for name, row in rows.items()})
    write(tmp_path, {"4096/data/niah_single_2/validation": [{"input": "It is:", "outputs": ["ABC"]}]})
    found = evaluate(
        counting, task_manager(data_dir=str(tmp_path)), "lengthgen_ruler", gen_kwargs={"max_gen_toks": 16}
    )
    for name in names:
        assert found[f"lengthgen_ruler_{name}"]["1024"] == (1 if name.startswith("qa") else 0.5)
    assert found["lengthgen_ruler_niah_single_2"]["4096"] == 1
    assert found["lengthgen_ruler"]["1024"] == pytest.approx((11 * 0.5 + 2) / 13)
    assert found["lengthgen_ruler"]["4096"] == 1
    tasks = task_manager(data_dir=str(tmp_path)).load(["lengthgen_ruler"])["tasks"]
    lengths = {name: tasks[f"lengthgen_ruler_{name}"].config.generation_kwargs["max_gen_toks"] for name in names}
    others = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}  # RULER's own
    assert lengths == {**dict.fromkeys(names, 128), **others}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Using slow pure-python SequenceMatcher:UserWarning",  # fuzzywuzzy, of lm_eval[longbench]
    "ignore:invalid escape sequence:DeprecationWarning",  # jieba
    "ignore:invalid escape sequence:SyntaxWarning",
    "ignore:pkg_resources is deprecated:UserWarning",
)
def test_longbench_e_is_read_from_its_own_files(counting: StateLM, task_manager: Manager, tmp_path: Path) -> None:
    names = ["qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa"]
    names += ["samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"]
    # punctuation does not count in the scores of answers, nor does the case
    answer = string.ascii_lowercase * 2
    row = {"input": "How:", "context": "It is:", "answers": [answer], "all_classes": [answer], "length": 9}
    number = row | {"answers": ["Paragraph 3"]}
    files = {f"{name}_e": [number if name.startswith("passage") else row] for name in names}
    folder = write(tmp_path, files)
    until_tilde = {"max_gen_toks": ord("~") - ord(":")}
    found = evaluate(counting, task_manager(data_dir=folder), "lengthgen_longbench_e", gen_kwargs=until_tilde)
    scores = {name: found[f"longbench_{name}_e"]["score"] for name in names}
    assert [scores[name] for name in ("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa")] == [1] * 4
    assert found["lengthgen_longbench_e"]["score"] == pytest.approx(sum(scores.values()) / 13)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda folder: local_files.rows(PIQA, str(folder / "none")), "data_dir must be a folder, got .*none"),
        (lambda folder: local_files.rows(PIQA, str(folder)), r"neither piqa.validation.jsonl nor piqa.jsonl"),
        (lambda folder: local_files.longbench_rows(QASPER, str(folder)), "No such file .*qasper_e.jsonl"),
        (lambda folder: local_files.json_lines(folder / "broken.jsonl"), r"broken.jsonl must hold .* row 1: "),
        (lambda folder: books.rows(8), "give --metadata data_dir=FOLDER, with the books"),
        (lambda folder: books.rows(8, str(folder)), "cutting books to a number of tokens needs a tokenizer"),
        (lambda folder: books.rows(80, str(folder), tokenizer="bytes"), "of 80 tokens or more; the longest has 5"),
        (lambda folder: ruler.rows("vt"), "with LENGTH/data/vt/validation.jsonl of RULER"),
        (lambda folder: ruler.rows("vt", str(folder)), "has no LENGTH/data/vt/validation.jsonl"),
        (lambda folder: ruler.rows("cwe", str(folder)), "has a row without input or outputs: index"),
    ],
)
def test_data_that_cannot_be_used_are_reported(call: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "book.txt").write_text("short")
    write(tmp_path, {"1024/data/cwe/validation": [{"index": 0}]})
    with pytest.raises(ValueError, match=message):
        call(tmp_path)

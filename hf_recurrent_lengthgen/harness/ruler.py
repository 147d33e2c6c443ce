"""RULER (Hsieh et al., 2024, arXiv:2404.06654) from the files of its own generator.

Its script writes `LENGTH/data/TASK/validation.jsonl` with the tokenizer of the model; `data_dir` is the folder that
holds the lengths. Scores are the share of the expected strings that the continuation contains, ignoring case; in qa_1
and qa_2, one of them is enough.
"""

from typing import Any

import datasets

from hf_recurrent_lengthgen.harness.local_files import Splits, folder_of, json_lines

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""The lengths that have a metric."""


def rows(task: str, data_dir: str | None = None, max_seq_lengths: list[int] | None = None, **metadata: Any) -> Splits:
    """Prompts and answers at all lengths in the folder, or at some.

    Args:
        task: RULER's name of the task.
        data_dir: Folder that holds the lengths; required.
        max_seq_lengths: Some of `LENGTHS`; None for all in the folder.

    Raises:
        ValueError: without such a folder, for lengths that it lacks, and for rows that are not RULER's.
    """
    folder = folder_of(data_dir, f", with LENGTH/data/{task}/validation.jsonl of RULER's own generator")
    rows_of_lengths = []
    for length in max_seq_lengths or LENGTHS:
        path = folder / str(length) / "data" / task / "validation.jsonl"
        if not path.exists() and max_seq_lengths is None:
            continue
        for line in json_lines(path):
            if not line.get("input") or not line.get("outputs"):
                raise ValueError(f"{path} has a row without input or outputs: {', '.join(sorted(line))}.")
            prefix = line.get("answer_prefix", "")
            prompt = line["input"].removesuffix(prefix) + prefix
            rows_of_lengths.append({"prompt": prompt, "outputs": list(map(str, line["outputs"])), "length": length})
    if not rows_of_lengths:
        raise ValueError(f"{folder} has no LENGTH/data/{task}/validation.jsonl, for LENGTH one of {LENGTHS}.")
    return {"test": datasets.Dataset.from_list(rows_of_lengths)}


def share_found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    hits = [output.lower() in results[0].lower() for output in doc["outputs"]]
    return {str(doc["length"]): sum(hits) / len(hits)}


def one_found(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 if the continuation contains one of the strings, as the metric of the prompt's length."""
    return {str(doc["length"]): float(any(output.lower() in results[0].lower() for output in doc["outputs"]))}

"""Rows of tasks from local files, or from the Hub, and the tokenizer that the metadata of a task name.

Task files name a function of this folder as `custom_dataset`. lm_eval calls it with the metadata of the task, which
includes `--metadata` and `--model_args` of the command line.
"""

import json
import logging
from pathlib import Path
from typing import Any

import datasets
import yaml
from transformers import PreTrainedTokenizerBase

from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer

logger = logging.getLogger(__name__)
Splits = dict[str, datasets.Dataset]


class TaskLoader(yaml.SafeLoader):
    """Task files, with the names of their functions as text."""


TaskLoader.add_constructor("!function", lambda loader, node: node.value)


def task_config(path: str | Path) -> dict[str, Any]:
    """A task file with what it includes, which the file itself goes before."""
    config = yaml.load(Path(path).read_text(encoding="utf-8"), TaskLoader)
    names = config.pop("include", [])
    merged: dict[str, Any] = {}
    for name in [names] if isinstance(names, str) else names:
        merged |= task_config(Path(path).parent / name)
    return merged | config


def rows(config_source: str, data_dir: str | None = None, **metadata: Any) -> Splits:
    """The rows of a task by split, in the layout of its dataset on the Hub.

    With `data_dir`, they are read from the JSON lines in `TASK.SPLIT.jsonl` of that folder, or in `TASK.jsonl` for the
    evaluated split. Demonstrations are in the split `train` of most tasks; without its file there are none.

    Args:
        config_source: The task file, which lm_eval puts into the metadata.
        data_dir: Folder; None for the Hub.

    Raises:
        ValueError: for a missing folder or file, and lines that are not JSON objects.
    """
    config = task_config(config_source)
    if data_dir is None:
        options = (config.get("dataset_kwargs") or {}).get("hub", {})
        return datasets.load_dataset(config["dataset_path"], config.get("dataset_name"), **options)
    folder, task = folder_of(data_dir), config["task"]
    evaluated = config.get("test_split") or config.get("validation_split")
    splits: Splits = {}
    for split in filter(None, (config.get(f"{kind}_split") for kind in ("training", "validation", "test"))):
        path = folder / f"{task}.{split}.jsonl"
        if not path.exists() and split == evaluated:
            path = folder / f"{task}.jsonl"
        if path.exists():
            splits[split] = datasets.Dataset.from_list(json_lines(path))
        elif split == evaluated:
            raise ValueError(f"{folder} has neither {task}.{split}.jsonl nor {task}.jsonl with the rows of {task}.")
        else:
            logger.warning("%s has no %s.%s.jsonl, so %s has no demonstrations from it.", folder, task, split, task)
            splits[split] = datasets.Dataset.from_list([])
    return splits


def longbench_rows(config_source: str, data_dir: str | None = None, **metadata: Any) -> Splits:
    """The rows of a task of LongBench; local ones are its own files, such as `qasper_e.jsonl`.

    Raises:
        ValueError: as in `rows`.
    """
    if data_dir is None:
        return rows(config_source, **metadata)
    name = task_config(config_source)["dataset_name"]
    lines = json_lines(folder_of(data_dir) / f"{name}.jsonl")
    lines = [{"question": line.get("input"), **line} for line in lines]  # lm_eval's name for it
    return {"test": datasets.Dataset.from_list(lines)}


def folder_of(data_dir: str | None, files: str = "") -> Path:
    """The folder in the metadata of a task; a `ValueError` names the files that it should hold."""
    folder = Path(data_dir or "").expanduser()
    if data_dir is None or not folder.is_dir():
        raise ValueError(f"data_dir must be a folder, got {data_dir}: give --metadata data_dir=FOLDER{files}.")
    return folder


def json_lines(path: Path) -> list[dict[str, Any]]:
    objects: list[dict[str, Any]] = []
    try:
        objects += (dict(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    except (TypeError, ValueError, FileNotFoundError) as error:
        raise ValueError(f"{path} must hold JSON objects, one a line; row {len(objects)}: {error}.") from error
    return objects


def metadata_tokenizer(metadata: dict[str, Any], purpose: str) -> PreTrainedTokenizerBase:
    """The tokenizer in the metadata of a task: `tokenizer`, else the model's, `pretrained`.

    The command line puts the model's arguments into the metadata.

    Raises:
        ValueError: if the metadata have neither.
    """
    named = metadata.get("tokenizer") or metadata.get("pretrained")
    if isinstance(named, PreTrainedTokenizerBase):
        return named
    if not isinstance(named, str | Path):
        raise ValueError(
            f"{purpose} needs a tokenizer, got {type(named).__name__}: give tokenizer=FOLDER in the model's arguments "
            "or the metadata."
        )
    return load_tokenizer(str(named), bool(metadata.get("trust_remote_code")))

"""Settings and helpers of the tests of commands."""

import argparse
import json
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from hf_recurrent_lengthgen import cli
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.cli.options import read_options
from hf_recurrent_lengthgen.data import PackedBlocks

TINY = {
    "use_cpu": True,
    "training_length": 8,
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "logging_steps": 1,
    "save_strategy": "no",
}
Train = Callable[..., int]


def flags(**options: Any) -> list[str]:
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def parsed(*arguments: str, file: Path | None = None) -> dict[str, Any]:
    run, training, _ = read_options(
        ["--model", "m.json", "--use-cpu", *arguments], None if file is None else str(file)
    )
    return vars(training) | vars(run)


def run(*arguments: Any) -> int:
    return main([str(argument) for argument in arguments])


def train_briefly(model: Path, output: Path, text_file: Path, *options: Any) -> int:
    """Three steps of two rows; the last value of an option counts."""
    few = ("--max-steps", 3, "--per-device-train-batch-size", 2, "--logging-steps", 1, "--save-strategy", "no")
    data = ("--data", text_file, "--training-length", 8, "--use-cpu")
    return run("train", "--model", model, "--output", output, *data, *few, *options)


def trained_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def spy(seen: list[Any]) -> Callable[..., None]:
    """A constructor of `PackedBlocks` that also keeps the streams."""
    original = PackedBlocks.__init__

    def made(self: PackedBlocks, stream: torch.Tensor, length: int) -> None:
        seen.append(stream)
        original(self, stream, length)

    return made


def parser_of(command: str) -> argparse.ArgumentParser:
    module = import_module(f"{cli.__name__}.{command}")
    parser: argparse.ArgumentParser = module.command_parser()
    return parser


def with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()

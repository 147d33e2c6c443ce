"""What trackers get of a run: names that group, pictures of results; bars and limits of long evaluations.

TensorBoard's event file is read back where tensorboard is installed. wandb 0.31.0 and trackio 0.43.0 are stubs with
the calls that Transformers' callbacks and ours make: `log(dict)` and `Image(PIL image)`.
"""

from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback

from hf_recurrent_lengthgen.trainers import MetricCallback, length_evaluation, nll_by_length
from hf_recurrent_lengthgen.trainers.metric_callbacks import Pictured
from hf_recurrent_lengthgen.trainers.ready_metrics import at_most
from tests.trainers import toys

TOKENS = np.random.default_rng(0).integers(3, 17, (3, 65))
NAMES = {f"eval/length_{name}" for name in ("harm", "harm_low", "harm_high", "loss", "holds_to")}


class Library(SimpleNamespace):
    """wandb or trackio."""

    def __init__(self) -> None:
        run = SimpleNamespace(summary={})
        super().__init__(logged=[], run=run, Image=lambda image: image.copy(), finish=lambda: None)

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)


class Writer(Library):
    """A `SummaryWriter`."""

    def __init__(self) -> None:
        super().__init__()
        self.flush = self.close = self.add_text = lambda *_: None

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.log({name: value, "train/global_step": step})

    def add_figure(self, name: str, figure: Any, step: int, close: bool) -> None:
        figure.savefig(picture := BytesIO())
        self.log({name: Image.open(picture), "train/global_step": step})


def tracker(kind: type[Any], **parts: Any) -> Any:
    made = kind.__new__(kind)
    vars(made).update(_initialized=True, _space_id=None, _log_model=SimpleNamespace(is_enabled=False), **parts)
    return made


def test_trackers_get_numbers_under_eval_and_pictures(tmp_path: Path) -> None:
    libraries = Writer(), Library(), Library()
    board = tracker(TensorBoardCallback, tb_writer=libraries[0], logging_dir=str(tmp_path))
    others = tracker(WandbCallback, _wandb=libraries[1]), tracker(TrackioCallback, _trackio=libraries[2])
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no")
    for callback in (board, *others):
        trainer.add_callback(callback)
    MetricCallback([length_evaluation(TOKENS, 16)], every_steps=5).attach(trainer)
    trainer.train()
    for library in libraries:
        assert {name for values in library.logged for name in values if "length_" in name} >= NAMES
        shown = [values for values in library.logged if "eval/length" in values]
        pictures = {values["train/global_step"]: values["eval/length"] for values in shown}
        assert [*pictures] == [0, 5, 8]
        assert all(picture.size > (300, 200) for picture in pictures.values())
        assert len({np.asarray(picture.convert("RGB")).tobytes() for picture in pictures.values()}) > 1


def test_without_a_tracker_nothing_is_drawn(tmp_path: Path) -> None:
    result = SimpleNamespace(figure=lambda: pytest.fail("drawn"))
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no", max_steps=1)
    MetricCallback({"one": lambda model: Pictured(1.0, result)}, every_steps=1).attach(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["eval_one"] == 1


def test_a_picture_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise OSError("no space left")

    library = Library()
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no", max_steps=1)
    trainer.add_callback(tracker(TrackioCallback, _trackio=library))
    metric = Pictured(1.0, SimpleNamespace(figure=broken))
    MetricCallback({"one": lambda model: metric}, every_steps=1).attach(trainer)
    trainer.train()
    assert "picture 'eval/one' was not sent to the trackers: OSError: no space left" in caplog.text
    assert any(values.get("eval/one") == 1 for values in library.logged)


def test_tensorboard_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = toys.resumable_trainer(tmp_path / "run", save_strategy="no", report_to="tensorboard")
    MetricCallback([length_evaluation(TOKENS, 16)], every_steps=5).attach(trainer)
    trainer.train()
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {*events.Tags()["scalars"]} >= NAMES
    assert [picture.step for picture in events.Images("eval/length")] == [0, 5, 8]


@pytest.mark.parametrize("disabled", [False, True])
def test_a_long_metric_has_a_bar_where_the_training_has_one(
    disabled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = toys.resumable_trainer(tmp_path, save_strategy="no", max_steps=1, disable_tqdm=disabled)
    MetricCallback([nll_by_length(TOKENS, 16)], every_steps=1).attach(trainer)
    trainer.train()
    assert ("stream: " in capsys.readouterr().err) is not disabled


def test_a_long_metric_reads_so_many_tokens_at_most(caplog: pytest.LogCaptureFixture) -> None:
    texts = np.arange(70).reshape(7, 10)
    assert at_most(texts, 70, "a") is texts
    assert caplog.text == ""
    assert at_most(texts, 40, "a")[:, 0].tolist() == [0, 20, 40, 60]
    assert at_most(texts, 3, "a")[:, 0].tolist() == [0]
    caplog.clear()
    metric = nll_by_length(TOKENS, 16, max_tokens=130)
    assert "reads 2 of 3 texts in each measurement" in caplog.text
    caplog.clear()
    found = metric.function(toys.tiny_model())
    expected = nll_by_length(TOKENS[::2], 16).function(toys.tiny_model())
    assert found == expected
    assert caplog.text == ""

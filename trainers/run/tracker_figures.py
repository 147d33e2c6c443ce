"""`Trainer` gives trackers numbers, but no pictures: those of results go to TensorBoard, Weights & Biases and Trackio.

As in torch 2.13 (`SummaryWriter.add_figure`), wandb 0.31.0 (`wandb.Image`) and trackio 0.43.0 (`trackio.Image`).
"""

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from transformers import Trainer
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback


def send_figures(trainer: Trainer, draw: Mapping[str, Callable[[], Any]]) -> None:
    """Draw figures of matplotlib and send them, by name, to the trackers in use; without one nothing is drawn."""
    tracking = TensorBoardCallback, TrackioCallback, WandbCallback
    trackers = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, tracking)]
    for name, figure in ({name: make() for name, make in draw.items()} if trackers else {}).items():
        for tracker in trackers:
            _send(tracker, name, figure, trainer.state.global_step)


def _send(tracker: Any, name: str, figure: Any, step: int) -> None:
    if isinstance(tracker, TensorBoardCallback):
        if tracker.tb_writer is not None:
            tracker.tb_writer.add_figure(name, figure, step, close=False)
            tracker.tb_writer.flush()
        return
    from PIL import Image  # matplotlib needs it, too

    figure.savefig(picture := BytesIO(), format="png", facecolor="white")
    library = tracker._wandb if isinstance(tracker, WandbCallback) else tracker._trackio
    library.log({name: library.Image(Image.open(picture)), "train/global_step": step})

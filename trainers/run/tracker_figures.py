"""`Trainer` gives trackers numbers, but no pictures: those of results go to TensorBoard, Weights & Biases and Trackio.

As in torch 2.13 (`SummaryWriter.add_figure`), wandb 0.31.0 (`wandb.Image`) and trackio 0.43.0 (`trackio.Image`).
"""

from collections.abc import Callable, Mapping
from io import BytesIO
from typing import Any

from transformers import Trainer
from transformers.integrations import TensorBoardCallback, TrackioCallback, WandbCallback
from transformers.utils import logging

logger = logging.get_logger(__name__)


def send_figures(trainer: Trainer, draw: Mapping[str, Callable[[], Any]]) -> None:
    """Draw figures of matplotlib and send them, by name, to the trackers in use; without one nothing is drawn.

    A picture that fails is told and left out: an error here would end one process of several, and the others wait.
    """
    tracking = TensorBoardCallback, TrackioCallback, WandbCallback
    trackers = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, tracking)]
    for name, make in draw.items() if trackers else ():
        try:
            figure = make()
            for tracker in trackers:
                _send(tracker, name, figure, trainer.state.global_step)
        except Exception as error:
            logger.warning(f"The picture {name!r} was not sent to the trackers: {type(error).__name__}: {error}")


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

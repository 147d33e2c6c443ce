"""Training with the project's trainers, from the zero state or from the final state of another string."""

import tempfile
from typing import Any

from learning import Result, Run, measure, new_model
from transformers import PrinterCallback

from hf_recurrent_lengthgen.cli.inputs import quiet_libraries
from hf_recurrent_lengthgen.data.tasks import StringCollator
from hf_recurrent_lengthgen.trainers import InitialStateTrainer, StatePassingTrainer, ZeroStateTrainer

TRAINERS: dict[str, type[InitialStateTrainer]] = {"zero": ZeroStateTrainer, "passed": StatePassingTrainer}


def train_with_states(run: Run) -> Result:
    """As `learning.train`, but with the trainer of `run.states`, strings of several lengths in a batch, and measured
    at the end only."""
    model, trainer_class = new_model(run), TRAINERS[run.states]
    data = run.data().resized((run.shortest, run.length), run.steps * run.batch_size, run.seed)
    settings: dict[str, Any] = {
        "max_steps": run.steps,
        "per_device_train_batch_size": run.batch_size,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
        "warmup_steps": round(run.steps / 20),
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "seed": run.seed,
        **{"save_strategy": "no", "report_to": "none", "logging_strategy": "no"},
        **{"disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True},
    }
    with tempfile.TemporaryDirectory() as folder, quiet_libraries("warnings", "bars"):
        arguments = trainer_class.config_class(output_dir=folder, **settings)
        trainer = trainer_class(model, arguments, train_dataset=data, data_collator=StringCollator())
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return {"parameters": model.num_parameters(), "curve": [measure(model, run, run.steps)]}

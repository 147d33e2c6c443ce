"""Train a small Mamba-2 to copy strings, and measure it at 1, 2 and 4 times their length.

Mimetic initialization lets it learn in a few minutes; StatePassingTrainer and its config go in the same place.
"""

import argparse

from hf_recurrent_lengthgen.data import PaddingCollator
from hf_recurrent_lengthgen.data.tasks import string_task
from hf_recurrent_lengthgen.metrics.accuracy.measure import measure_accuracy
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM
from hf_recurrent_lengthgen.surgery import mimetic_initialization
from hf_recurrent_lengthgen.trainers import InitialStateConfig, ZeroStateTrainer

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", default="example-output")
parser.add_argument("--steps", type=int, default=500)
options = parser.parse_args()

strings = string_task("copying", (5, 10), vocabulary=16, samples=64 * options.steps, seed=0, begin=True)
model = StatefulMamba2ForCausalLM(
    StatefulMamba2Config(
        vocab_size=strings.vocab_size,
        hidden_size=32,
        num_heads=4,
        head_dim=16,
        state_size=32,
        n_groups=1,
        num_hidden_layers=2,
        initializer_range=0.1,
        training_length=strings.row_length,
    )
)
mimetic_initialization(model)
model.config.task = strings.record  # for `lengthgen accuracy`

arguments = InitialStateConfig(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=64,
    learning_rate=1e-2,
    lr_scheduler_type="cosine",
    logging_steps=50,
    save_strategy="no",
    report_to="none",
)
trainer = ZeroStateTrainer(model, arguments, train_dataset=strings, data_collator=PaddingCollator())
trainer.train()
trainer.save_model()

for right in measure_accuracy(model, strings).lengths:
    symbols, answers = right.symbols.accuracy, right.answers.accuracy
    print(f"{right.length} symbols: {symbols:.2f} of the symbols right, {answers:.2f} of the strings")

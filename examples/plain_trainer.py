"""Train a small Mamba-2 on the source files of the Python standard library and save it.

plain_trainer.py and state_passing_trainer.py are the same script with another trainer and its arguments.
"""

import argparse

from transformers import Trainer, TrainingArguments

from hf_recurrent_lengthgen.data import PackedBlocks, byte_tokenizer, standard_library_corpus, token_stream
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--output", default="example-output")
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

tokenizer = byte_tokenizer()
blocks = PackedBlocks(token_stream(standard_library_corpus().texts("train"), tokenizer), length=128)
model = StatefulMamba2ForCausalLM(
    StatefulMamba2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_heads=6,
        head_dim=32,
        state_size=32,
        n_groups=1,
        num_hidden_layers=2,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        training_length=blocks.length,
    )
)

arguments = TrainingArguments(
    output_dir=options.output,
    max_steps=options.steps,
    per_device_train_batch_size=16,
    learning_rate=4e-3,
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
trainer = Trainer(model, arguments, train_dataset=blocks, processing_class=tokenizer)
trainer.train()
trainer.save_model()

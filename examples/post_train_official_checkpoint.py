"""Post-train an official checkpoint so that it works beyond its training length, and prepare it for publishing.

    python examples/post_train_official_checkpoint.py --data my-texts --output mamba2-130m
    python examples/post_train_official_checkpoint.py --smoke --output smoke

It converts the checkpoint and verifies the conversion, post-trains it with state passing and verifies the result,
evaluates both far beyond the training length, and writes the model card. The defaults are those of Buitrago Ruiz & Gu,
2025 (arXiv:2507.02782, B.1, B.2) for Mamba-2 130m: 100 steps of 2^19 tokens of the Pile, at a tenth of the learning
rate of pre-training (for other sizes see hf_recurrent_lengthgen/recipes/README.md). --smoke uses a tiny random model
and a few steps: a minute on a CPU.
"""

import argparse
import shlex
import sys
from pathlib import Path

import torch

from hf_recurrent_lengthgen import load_model
from hf_recurrent_lengthgen.checkpoints.cards import write_card
from hf_recurrent_lengthgen.checkpoints.conversion.convert import convert_checkpoint
from hf_recurrent_lengthgen.checkpoints.conversion.tiny_random_models import write_tiny_random_model
from hf_recurrent_lengthgen.checkpoints.loading import load_tokenizer
from hf_recurrent_lengthgen.checkpoints.private_text import portable_command
from hf_recurrent_lengthgen.checkpoints.verification import verify_checkpoint
from hf_recurrent_lengthgen.cli.inputs import load_stream
from hf_recurrent_lengthgen.cli.main import main
from hf_recurrent_lengthgen.data import PackedBlocks
from hf_recurrent_lengthgen.trainers import StatePassingConfig, StatePassingTrainer

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="state-spaces/mamba2-130m", help="Hub name or folder (default: %(default)s)")
parser.add_argument("--tokenizer", default="EleutherAI/gpt-neox-20b", help="Hub name or folder (default: %(default)s)")
parser.add_argument("--data", help="texts with splits train and validation: a folder, a file or a name on the Hub")
parser.add_argument("--output", type=Path, required=True, help="new folder for base, state-passing and evaluation")
parser.add_argument(
    "--length", type=int, default=2048, help="tokens of a sequence, as in pre-training (default: %(default)s)"
)
parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
parser.add_argument("--rows", type=int, default=256, help="sequences of a step (default: %(default)s)")
parser.add_argument("--rows_at_once", type=int, default=16, help="sequences in memory at once (default: %(default)s)")
parser.add_argument("--learning-rate", type=float, default=6e-5, help="at its peak (default: %(default)s)")
parser.add_argument("--sequences", type=int, default=16, help="texts to evaluate on (default: %(default)s)")
parser.add_argument("--beyond", type=int, default=16, help="evaluate up to so many lengths (default: %(default)s)")
parser.add_argument("--smoke", action="store_true", help="a tiny random model, on the Python standard library")
options = parser.parse_args()
if options.smoke:
    options.data, options.tokenizer, options.model = "stdlib", "bytes", str(options.output / "official")
    options.length, options.steps, options.rows, options.rows_at_once, options.sequences = 32, 2, 4, 2, 4
    write_tiny_random_model("mamba-ssm", "mamba2", options.output / "official")
if options.data is None:
    parser.error("give --data, the texts to post-train and evaluate on, or --smoke")
if options.rows % options.rows_at_once:
    parser.error(f"--rows {options.rows} must be a multiple of --rows_at_once {options.rows_at_once}")
base, passed, evaluation = (options.output / name for name in ("base", "state-passing", "evaluation"))

# The official format becomes a checkpoint of ours, and gives what the official implementation gives.
tokenizer = load_tokenizer(options.tokenizer)
command = portable_command(sys.argv)  # for the lineage, without the folders of this machine
convert_checkpoint(options.model, base, tokenizer=tokenizer, training_length=options.length, command=command)
if not verify_checkpoint(base).passed:
    sys.exit(f"The conversion does not load elsewhere as it should: lengthgen verify {base} says where.")

# Each sequence of a step starts from the final state of a sequence of the step before.
stream = load_stream(options.data, "train", tokenizer)
arguments = StatePassingConfig(
    output_dir=str(passed),
    max_steps=options.steps,
    per_device_train_batch_size=options.rows_at_once,
    gradient_accumulation_steps=options.rows // options.rows_at_once,
    learning_rate=options.learning_rate,
    lr_scheduler_type="cosine_with_min_lr",
    lr_scheduler_kwargs={"min_lr": 1e-5},
    warmup_steps=0.1,
    adam_beta2=0.95,
    weight_decay=0.01,
    max_grad_norm=1.0,
    bf16=torch.cuda.is_available(),
    dataloader_pin_memory=torch.cuda.is_available(),
    save_strategy="no",
    logging_steps=10,
    report_to="none",
)
trainer = StatePassingTrainer(
    load_model(str(base)),
    arguments,
    train_dataset=PackedBlocks(stream.tokens, options.length),
    processing_class=tokenizer,
)
trainer.model.config.interventions = [f"state_passing, {options.steps} steps"]
trainer.data_description = stream.source
trainer.train()
trainer.save_model()

# What strangers will load must give what it gave here; then far beyond the training length; then the card.
if not verify_checkpoint(passed).passed:
    sys.exit(f"The result does not load elsewhere as it should: lengthgen verify {passed} says where.")
measure = ["evaluate", str(base), str(passed), "--roles", "base,intervention", "--data", options.data]
measure += ["--tokenizer", options.tokenizer, "--length", str(options.beyond * options.length)]
measure += ["--sequences", str(options.sequences), "--output", str(evaluation)]
if main([*measure, *(["--device", "cuda", "--dtype", "bfloat16"] if torch.cuda.is_available() else [])]):
    sys.exit(1)
card = write_card(passed, [evaluation / "result.json"])
print(f"\nThe card is {card}; its section Limits says what it lacks.")
print(f"Next: {shlex.join(['lengthgen', 'push', str(passed), 'OWNER/NAME', '--dry-run'])}")

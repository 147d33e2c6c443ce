"""Peak memory and CPU time of a training step with all logits, and with the loss in chunks of tokens.

python benchmarks/chunked_loss.py [--rows 8] [--tokens 2048] [--width 128] [--steps 2]

A process for each arm, which alternate for `--steps` rounds: what the step adds to the peak of the resident memory of
the process (Linux), and the CPU time of its second step, a core's seconds, which other programs change little. A
Mamba-2 of two layers in float32 with the vocabulary of the GPT-NeoX tokenizer.
"""

import argparse
import resource
import subprocess
import sys
import time

import torch

from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

VOCABULARY = 50_280


def step(rows: int, tokens: int, width: int, skip_logits: bool) -> None:
    """Print the MB that a step adds to the peak, the CPU seconds of another one, loss, and norm of the gradients."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    sizes = {"hidden_size": width, "num_heads": width // 32, "head_dim": 64, "state_size": 16, "num_hidden_layers": 2}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=VOCABULARY, n_groups=1, **sizes))
    ids = torch.randint(0, VOCABULARY, (rows, tokens))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        model.zero_grad()
        start = time.process_time()
        loss = model(ids, labels=ids, skip_logits=skip_logits).loss
        loss.backward()
        seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    norm = torch.stack([x.grad.norm() for x in model.parameters()]).norm()
    print(f"{(peak - before) / 1e3:.0f} MB, {seconds:.1f} s, loss {loss.item():.6f}, gradients {norm.item():.7g}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("rows", 8), ("tokens", 2048), ("width", 128), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arm", choices=("all", "chunks"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        step(given.rows, given.tokens, given.width, given.arm == "chunks")
    else:
        for _ in range(given.steps):
            for arm in ("all", "chunks"):
                command = [sys.executable, __file__, "--arm", arm, "--rows", str(given.rows)]
                command += ["--tokens", str(given.tokens), "--width", str(given.width)]
                print(f"{arm:>6}:", subprocess.run(command, capture_output=True, text=True, check=True).stdout, end="")

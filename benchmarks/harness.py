"""Tokens and CPU seconds of lm_eval's own model class and of ours, on the same weights and the same requests.

    python benchmarks/harness.py

40 questions of four choices behind 16 demonstrations, for a small Mamba-2 of random weights.
"""

import random
import time
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from hf_recurrent_lengthgen.data import byte_tokenizer
from hf_recurrent_lengthgen.harness import StateLM
from hf_recurrent_lengthgen.models import StatefulMamba2Config, StatefulMamba2ForCausalLM

QUESTIONS, CHOICES, DEMONSTRATIONS, ROWS = 40, 4, 16, 8


def requests(shared: bool) -> list[Instance]:
    """Questions of random words; with `shared`, all have the same demonstrations."""
    chosen = random.Random(0)

    def word() -> str:
        return "".join(chosen.choices("abcdefgh", k=5))

    def question() -> str:
        return f"Question: {' '.join(word() for _ in range(12))}\nAnswer:"

    def demonstrations() -> str:
        return "".join(f"{question()} {word()}\n\n" for _ in range(DEMONSTRATIONS))

    header = demonstrations()
    contexts = [(header if shared else demonstrations()) + question() for _ in range(QUESTIONS)]
    pairs = [(context, f" {word()}") for context in contexts for _ in range(CHOICES)]
    return [Instance("loglikelihood", {}, pair, 0) for pair in pairs]


def main() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
    model = StatefulMamba2ForCausalLM(StatefulMamba2Config(vocab_size=384, num_hidden_layers=2, **sizes)).eval()
    tokens = 0

    def count(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        nonlocal tokens
        ids = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        tokens += ids.numel()

    model.register_forward_pre_hook(count, with_kwargs=True)
    tokenizer = byte_tokenizer()
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=8192, batch_size=ROWS, add_bos_token=False)
    ours = StateLM(model, tokenizer=tokenizer, batch_size=ROWS)
    for shared, words in ((True, "the same demonstrations"), (False, "demonstrations of their own")):
        asked = requests(shared)
        found = {}
        for name, lm in (("hf", theirs), ("lengthgen", ours)):
            tokens, start = 0, time.process_time()
            found[name] = lm.loglikelihood(asked, disable_tqdm=True)
            print(f"{words}, {name}: {tokens:,} tokens, {time.process_time() - start:.1f} s")
        apart = max(abs(a[0] - b[0]) for a, b in zip(found["hf"], found["lengthgen"], strict=True))
        print(f"{words}: log-likelihoods differ by at most {apart:.0e}")


if __name__ == "__main__":
    main()

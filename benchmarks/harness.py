"""Tokens and CPU seconds of lm_eval's own model class and of ours, on the same weights and the same requests.

    python benchmarks/harness.py

40 questions of four choices behind 16 demonstrations, for a Mamba-2 and a hybrid (Falcon-H1, wrapped), small and of
random weights.
"""

import random
import time
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import FalconH1Config, FalconH1ForCausalLM

from hf_recurrent_lengthgen import stateful
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


def models() -> dict[str, Any]:
    sizes = {"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
    mamba2 = {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
    hybrid = {"mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_d_state": 16}
    return {
        "mamba2": StatefulMamba2ForCausalLM(StatefulMamba2Config(**sizes, **mamba2)),
        "falcon_h1": stateful(FalconH1ForCausalLM(FalconH1Config(**sizes, **heads, **hybrid))),
    }


def main() -> None:
    torch.manual_seed(0)
    for label, model in models().items():
        compare(label, model.eval())


def compare(label: str, model: Any) -> None:
    tokens = 0

    def count(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        nonlocal tokens
        ids = keywords["input_ids"] if "input_ids" in keywords else arguments[0]
        tokens += ids.numel()

    tokenizer = byte_tokenizer()
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=8192, batch_size=ROWS, add_bos_token=False)
    ours = StateLM(model, tokenizer=tokenizer, batch_size=ROWS)
    model.register_forward_pre_hook(count, with_kwargs=True)
    for shared, words in ((True, "the same demonstrations"), (False, "demonstrations of their own")):
        asked = requests(shared)
        scores = {}
        for name, lm in (("hf", theirs), ("lengthgen", ours)):
            tokens, start = 0, time.process_time()
            scores[name] = lm.loglikelihood(asked, disable_tqdm=True)
            print(f"{label}, {words}, {name}: {tokens:,} tokens, {time.process_time() - start:.1f} s")
        apart = max(abs(a[0] - b[0]) for a, b in zip(scores["hf"], scores["lengthgen"], strict=True))
        print(f"{label}, {words}: log-likelihoods differ by at most {apart:.0e}")


if __name__ == "__main__":
    main()

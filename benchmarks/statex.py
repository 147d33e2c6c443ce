"""What a larger state in a few layers costs (StateX, arXiv:2509.22630, Tables 3, 10 and 11)."""

import torch
from measure import take_turns
from torch import nn

from hf_recurrent_lengthgen.models import (
    StatefulGLAConfig,
    StatefulGLAForCausalLM,
    StatefulMamba2Config,
    StatefulMamba2ForCausalLM,
)
from hf_recurrent_lengthgen.models.modeling_generation import RecurrentCache
from hf_recurrent_lengthgen.surgery import expand_state

TRAINING_TOKENS, PREFILL_TOKENS = 256, 512
DECODE_ROWS = (1, 8, 64)
SMALL = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def vanilla(family: str) -> nn.Module:
    """A model of the widths of the 1.3B ones, with a quarter of their layers."""
    torch.manual_seed(0)
    if family == "gla":  # the defaults are GLA-1.3B
        return StatefulGLAForCausalLM(StatefulGLAConfig(num_hidden_layers=6, **SMALL)).to(DEVICE)
    sizes = {"hidden_size": 2048, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1}
    return StatefulMamba2ForCausalLM(StatefulMamba2Config(num_hidden_layers=12, **sizes, **SMALL)).to(DEVICE)


def bench_statex(rounds: int) -> dict[str, float]:
    """Expanded over vanilla throughput, widths of 1.3B, fp32: 4x state in 1 of 12 layers of Mamba-2, 1 of 6 of GLA."""
    result = {}
    for family in ("mamba2", "gla"):
        theirs = vanilla(family)
        models = {"ours": expand_state(theirs, count=1), "theirs": theirs}
        rows_of = {"training": [1], "prefill": [1], "decode": list(DECODE_ROWS)}
        for kind, batches in rows_of.items():
            for rows in batches:
                seconds, ratio = take_turns(rounds, {name: Run(kind, models[name], rows) for name in models})
                prefix = f"{family}_{kind}_{rows}_rows"
                tokens = rows * {"training": TRAINING_TOKENS, "prefill": PREFILL_TOKENS, "decode": 1}[kind]
                result |= {f"{prefix}_tokens_per_second": tokens / seconds["ours"], f"{prefix}_ratio": ratio}
        decode = [result[f"{family}_decode_{rows}_rows_ratio"] for rows in DECODE_ROWS]
        result[f"{family}_decode_mean_ratio"] = sum(decode) / len(decode)
        del models, theirs
    return result


class Run:
    """A training step (forward, backward, SGD), a prefill, or one more token as `generate` decodes it, when called."""

    def __init__(self, kind: str, model: nn.Module, rows: int) -> None:
        self.kind, self.model = kind, model
        length = {"training": TRAINING_TOKENS, "prefill": PREFILL_TOKENS, "decode": 1}[kind]
        self.ids = torch.arange(rows * length, device=DEVICE).view(rows, length) % 251
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.cache = RecurrentCache() if kind == "decode" else None
        if self.cache is not None:
            self.cache.set_in_generate(True)  # each token overwrites the state before it

    def __call__(self) -> None:
        if self.kind == "training":
            self.model(input_ids=self.ids, labels=self.ids).loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            with torch.inference_mode():
                self.model(input_ids=self.ids, past_key_values=self.cache, logits_to_keep=1)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

"""Write rwkv/x070.safetensors: what the code of RWKV's author computes from a small RWKV-7 .pth file.

Run by hand, in an environment of its own, no GPU needed:
pip install torch numpy safetensors "rwkv==0.8.32"
python tests/checkpoints/conversion/make_rwkv7_fixture.py

The weights are those of `rwkv_reference.even_draw`, which the test makes again. The file holds token ids (T,), logits
(T, vocabulary), and after SPLIT tokens of each layer N its state: N.time (D,), N.memory (H, N values, N keys) and
N.channel (D,).
"""

import importlib.metadata
import os
import tempfile
from pathlib import Path

os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}

import torch
from rwkv.model import RWKV
from rwkv_reference import RWKV7_SIZES, even_draw, rwkv7_shapes
from safetensors.torch import save_file

LENGTH, SPLIT = 37, 21


def main() -> None:
    weights = even_draw(rwkv7_shapes(RWKV7_SIZES))
    ids = torch.randint(RWKV7_SIZES.vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(0))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(weights, f"{folder}/model.pth")
        model = RWKV(model=f"{folder}/model", strategy="cpu fp32")
        logits, _ = model.forward(ids.tolist(), None, full_output=True)
        first, state = model.forward(ids[:SPLIT].tolist(), None, full_output=True)
        kept = {f"{n // 3}.{('time', 'memory', 'channel')[n % 3]}": part.clone() for n, part in enumerate(state)}
        second, _ = model.forward(ids[SPLIT:].tolist(), state, full_output=True)
    print(
        f"logits up to {logits.abs().max():.2f}; in two calls {(torch.cat([first, second]) - logits).abs().max():.1e}"
    )
    notes = {"split": str(SPLIT), **{name: importlib.metadata.version(name) for name in ("rwkv", "torch")}}
    path = Path(__file__).parent / "rwkv/x070.safetensors"
    save_file({"input_ids": ids, "logits": logits.contiguous(), **kept}, path, notes)
    print(f"{path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()

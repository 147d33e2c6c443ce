"""Tensors are made on the device of the model, and no number is read from it: passes on a GPU that does not exist.

`FakeTensorMode` computes shapes and devices only, but needs a CUDA build of torch. Backward passes need a real device.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_recurrent_lengthgen import stateful
from hf_recurrent_lengthgen.hybrids.mixers import take_mixers_over
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.configuration_stateful import OLD_CACHE_NAMES
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.state_value import states_checked_by_caller

from .hybrids.tiny_models import TINY, tiny_model

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a fake CUDA device needs a CUDA build of torch")


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of Mamba-1 needs triton only, which comes with torch, and would be launched."""
    monkeypatch.setattr(ScanMixer, "choose_backend", lambda mixer, setting, x: "torch")


def family_model(name: str) -> Any:
    model_class: Any = FAMILIES[name]
    sizes = {"vocab_size": 384, "hidden_size": 64, "num_hidden_layers": 2}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return model_class(model_class.config_class(**{**sizes, **special, **model_class.config_class.tiny}))


def reads(model: Any, what: str) -> None:
    ids = torch.zeros(2, 70, dtype=torch.long)
    if what == "decoding":
        model.eval()
        with torch.no_grad():
            output = model(ids, use_cache=True)
            name = next(name for name in ("cache", *OLD_CACHE_NAMES) if name in output)
            output = model(ids[:, :1], **{name: output[name]}, use_cache=True)
    else:
        model.train()
        state = {"initial_state": model.zero_state(2)} if what == "with a state" else {}
        output = model(ids, labels=ids, **state)
    devices = {part.device.type for layer in getattr(output, "final_state", None) or () for part in layer}
    assert devices <= {"cuda"}


WAYS = ("plain", "with a state", "decoding")


@pytest.mark.parametrize("what", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_stays_on_its_device(name: str, what: str) -> None:
    with FakeTensorMode(), torch.device("cuda"), states_checked_by_caller():
        reads(family_model(name), what)


# Not in these: experts, whose stock code asks the driver what the GPU can do, and xLSTM, whose steps are subclasses of
# tensors here.
WRAPPED = [
    *("bamba", "falcon_h1", "falcon_mamba", "lfm2", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "zamba", "zamba2"),
]


@pytest.mark.parametrize("name", [name for name in WRAPPED if name in TINY])
def test_a_wrapped_model_stays_on_its_device(name: str) -> None:
    real = stateful(tiny_model(name))  # which runs it
    for what in WAYS:
        with FakeTensorMode(), torch.device("cuda"), states_checked_by_caller():
            model: Any = tiny_model(name)
            model.__class__, model._layout = type(real), real._layout
            model.base_model.__class__, model.base_model._layout = type(real.base_model), real._layout
            take_mixers_over(model)
            reads(model, what)

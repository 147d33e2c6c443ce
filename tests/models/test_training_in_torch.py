"""Training on a GPU without the kernels is said once, with what to do; the inputs report a GPU as their device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_recurrent_lengthgen.hybrids import stateful
from hf_recurrent_lengthgen.models import scan_backends
from hf_recurrent_lengthgen.models.layers_mixer import ScanMixer
from hf_recurrent_lengthgen.models.scan_backends import INSTALL_HINT
from tests.hybrids.tiny_models import tiny_model

from .families import MAMBA2, build

X = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
START = "is trained on a GPU in plain torch, without its kernels, which need"


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> dict[str, None]:
    warnings: dict[str, None] = {}
    logger = SimpleNamespace(warning_once=warnings.setdefault, info=lambda text: None)
    monkeypatch.setattr(scan_backends, "logger", logger)
    return warnings


def first_mixer(model: Any) -> Any:
    mixer: Any = next(module for module in model.train().modules() if isinstance(module, ScanMixer))
    mixer.kernel_available = False
    return mixer


def test_it_names_what_is_missing_once(said: dict[str, None]) -> None:
    for mixer in first_mixer(build(MAMBA2)), first_mixer(stateful(tiny_model("qwen3_5_text"))):
        said.clear()
        for _ in range(2):
            assert mixer.backend_for(X) == "torch"
        assert list(said) == [f"{type(mixer).__name__} {START} to be installed ({INSTALL_HINT})."]


def test_it_names_the_limit_that_is_not_met(said: dict[str, None], monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = first_mixer(build(MAMBA2))
    mixer.kernel_available = True
    monkeypatch.setattr(type(mixer), "kernel_limit", lambda *_: "a state_size of at most 256, got 300")
    assert mixer.backend_for(X) == "torch"
    assert list(said) == [f"StatefulMamba2Mixer {START} a state_size of at most 256, got 300."]


@pytest.mark.parametrize(
    "why", ["kernels run", "torch is requested", "a CPU", "evaluation", "no gradients", "compiled"]
)
def test_nothing_is_said_otherwise(why: str, said: dict[str, None], monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = first_mixer(build(MAMBA2))
    x: Any = X
    if why == "kernels run":
        mixer.kernel_available = True
        monkeypatch.setattr(type(mixer), "kernel_limit", lambda *_: "")
    elif why == "torch is requested":
        mixer.config.scan_backend = "torch"
    elif why == "a CPU":
        x = torch.zeros(1)
    elif why == "evaluation":
        mixer.eval()
    elif why == "compiled":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.set_grad_enabled(why != "no gradients"):
        mixer.backend_for(x)
    assert not said

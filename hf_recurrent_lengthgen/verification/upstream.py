"""Upstream implementations to compare with: Transformers' own classes, mamba-ssm, fla.

Each reads tokens at once from the zero state and returns a reading under our names. The kernels of mamba-ssm and fla
need a GPU. If no implementation runs, a new model of this package is used in float64.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hf_recurrent_lengthgen.conversion.format_mamba_ssm import MAMBA_SSM
from hf_recurrent_lengthgen.conversion.format_transformers import TRANSFORMERS
from hf_recurrent_lengthgen.conversion.formats import Format, Settings, is_tied
from hf_recurrent_lengthgen.conversion.key_maps import expand
from hf_recurrent_lengthgen.models import FAMILIES
from hf_recurrent_lengthgen.models.configuration_code import OLD_CACHE_NAMES
from hf_recurrent_lengthgen.verification import clean_process
from hf_recurrent_lengthgen.verification.comparing import TOLERANCE, Reading, named_parts

KERNEL_TOLERANCE = 1e-3
"""For logits of kernels, which sum in another order and partly in lower precision."""
STOCK_CHUNK = 32
"""Tokens per chunk of Transformers' Mamba-2 without kernels: it affects the memory, not the results."""

Weights = Mapping[str, Tensor]


class Upstream(ABC):
    """An implementation for one config.

    Attributes:
        name: Name and version.
        tolerance: The largest allowed difference.
        dtype: Dtype of its computation; None for the requested one.
    """

    name: str
    tolerance = TOLERANCE
    dtype: torch.dtype | None = None

    def __init__(self, layout: Format, config: Any, settings: Settings | None, device: str) -> None:
        self.layout, self.config, self.settings, self.device = layout, config, settings, device

    @abstractmethod
    def read(self, weights: Weights, tokens: Tensor) -> Reading:
        """Logits (B, T, V), and final states if it returns them, for weights under our names."""


class OwnScan(Upstream):
    """A new model of this package in float64."""

    name = "our own scan in float64"
    dtype = torch.float64

    def read(self, weights: Weights, tokens: Tensor) -> Reading:
        self.config.scan_backend = "torch"
        model = _filled(FAMILIES[self.config.model_type], self.config, weights).to(self.device)
        with torch.no_grad():
            return clean_process.read(model, tokens, [tokens.shape[1]], carry=True)


class Stock(Upstream):
    """Transformers' Mamba, Mamba-2 or FalconMamba, row by row to save memory."""

    def __init__(self, layout: Format, config: Any, settings: Settings | None, device: str) -> None:
        super().__init__(layout, config, settings, device)
        stock = TRANSFORMERS.from_config(config)
        assert stock is not None
        self._class = getattr(transformers, stock["architectures"][0])
        self._config = self._class.config_class.from_dict(stock)
        if hasattr(self._config, "chunk_size"):
            self._config.chunk_size = STOCK_CHUNK
        self.name = f"transformers {transformers.__version__} {self._class.__name__}"
        if device != "cpu" and find_spec("mamba_ssm") is not None:
            self.tolerance = KERNEL_TOLERANCE

    def read(self, weights: Weights, tokens: Tensor) -> Reading:
        model = _filled(self._class, self._config, weights).to(self.device)
        with torch.no_grad():
            rows = [self._read_row(model, row[None].to(self.device)) for row in tokens]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _read_row(self, model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
        output = model(tokens, use_cache=True)
        cache = next(output[name] for name in ("cache", *OLD_CACHE_NAMES) if name in output)
        parts = [_stock_state(cache, layer) for layer in range(self._config.num_hidden_layers)]
        return {"logits": output.logits.cpu(), **{name: part.cpu() for name, part in named_parts(parts).items()}}


class MambaSSM(Upstream):
    """mamba-ssm's language model with its kernels; it returns no states."""

    tolerance = KERNEL_TOLERANCE

    def __init__(self, layout: Format, config: Any, settings: Settings | None, device: str) -> None:
        super().__init__(layout, config, settings, device)
        self.name = f"mamba_ssm {_version('mamba_ssm')} MambaLMHeadModel"
        self._settings = (settings if layout.name == MAMBA_SSM.name else MAMBA_SSM.from_config(config)) or {}

    def read(self, weights: Weights, tokens: Tensor) -> Reading:
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        dtype = next(iter(weights.values())).dtype
        model = MambaLMHeadModel(MambaConfig(**self._settings), device=self.device, dtype=dtype).eval()
        theirs = _their_weights(MAMBA_SSM, self.config, weights)
        if is_tied(self.config):
            theirs[MAMBA_SSM.tied_head] = weights["backbone.embeddings.weight"]
        model.load_state_dict(theirs, strict=True)
        with torch.no_grad(), _exact_triton():
            return {"logits": model(tokens.to(self.device)).logits.cpu()}


class Fla(Upstream):
    """The model of flash-linear-attention with its kernels; it returns no states."""

    tolerance = KERNEL_TOLERANCE

    def __init__(self, layout: Format, config: Any, settings: Settings | None, device: str) -> None:
        super().__init__(layout, config, settings, device)
        self.name = f"fla {_version('flash-linear-attention')} {(settings or {}).get('model_type')}"

    def read(self, weights: Weights, tokens: Tensor) -> Reading:
        import_module("fla")  # registers its models
        config = AutoConfig.for_model(**(self.settings or {}))
        model = AutoModelForCausalLM.from_config(config, dtype=next(iter(weights.values())).dtype).eval()
        theirs = _their_weights(self.layout, self.config, weights)
        missing, unexpected = model.load_state_dict(theirs, strict=False)
        if unexpected or set(missing) - {self.layout.tied_head}:
            raise ValueError(f"{self.name} has other weights: missing {missing}, unexpected {unexpected}.")
        with torch.no_grad(), _exact_triton():
            return {"logits": model.to(self.device)(tokens.to(self.device)).logits.float().cpu()}


def upstream_of(layout: Format, config: Any, settings: Settings | None, device: str) -> Upstream:
    """The first implementation that runs: mamba-ssm, Transformers, fla, or our own scan.

    For Mamba-3 it is our own: the kernel of mamba-ssm, which fla's layer runs, too, rounds its inputs to bfloat16.
    """
    on_gpu = device.startswith("cuda")
    kind: type[Upstream] = OwnScan
    if config.model_type in TRANSFORMERS.families:
        falcon = getattr(config, "mixer_rms_eps", None) is not None  # mamba-ssm has no norms inside the mixer
        kind = MambaSSM if on_gpu and not falcon and find_spec("mamba_ssm") is not None else Stock
    elif layout.name == "fla" and "mamba3" not in config.upstream_types and on_gpu and find_spec("fla") is not None:
        kind = Fla
    return kind(layout, config, settings, device)


def _filled(model_class: Any, config: Any, weights: Weights) -> Any:
    """A model that holds the given tensors themselves, not copies."""
    with init_empty_weights(include_buffers=False):
        model = model_class(config)
    _, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or unexpected:
        raise ValueError(f"{model_class.__name__} has other weights: missing {left}, unexpected {unexpected}.")
    return model.eval()


def _stock_state(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """Recurrent state, and the last K - 1 convolution columns; newer versions have several states per layer."""
    parts = (cache.layers[layer].recurrent_states, cache.layers[layer].conv_states)
    recurrent, conv = (part[0] if isinstance(part, list | tuple | dict) else part for part in parts)
    return recurrent, conv[..., 1:]


def _their_weights(layout: Format, config: Any, weights: Weights) -> dict[str, Tensor]:
    """Weights under the names of a layout, from those under our names."""
    theirs: dict[str, Tensor] = {}
    for rename in expand(layout.renames(config), config.num_hidden_layers):
        made = rename.transform.to_theirs(*(weights[name] for name in rename.our_names))
        theirs |= dict(zip(rename.their_names, (made,) if isinstance(made, Tensor) else made, strict=True))
    return theirs


@contextmanager
def _exact_triton() -> Iterator[None]:
    """A context in which Triton kernels are compiled without TF32."""
    before = os.environ.get("TRITON_F32_DEFAULT")
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    try:
        yield
    finally:
        del os.environ["TRITON_F32_DEFAULT"]
        if before is not None:
            os.environ["TRITON_F32_DEFAULT"] = before


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"

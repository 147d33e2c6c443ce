"""Comparison of a checkpoint with the source it was converted from: config, weights and outputs must be equal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from hf_recurrent_lengthgen.conversion.convert import has_own_tokenizer, our_entries, read_settings
from hf_recurrent_lengthgen.conversion.exported_configs import NOT_ARCHITECTURE
from hf_recurrent_lengthgen.conversion.formats import (
    SOURCE_CONFIG,
    Format,
    Settings,
    config_errors,
    plain,
    told_settings,
    with_settings,
)
from hf_recurrent_lengthgen.conversion.registry import detect
from hf_recurrent_lengthgen.conversion.sources import Source, locate
from hf_recurrent_lengthgen.conversion.tensor_files import TensorFiles, same_bits
from hf_recurrent_lengthgen.conversion.tensor_writing import Entry
from hf_recurrent_lengthgen.conversion.tokenizer_files import tokenizer_files
from hf_recurrent_lengthgen.loading import quiet_transformers
from hf_recurrent_lengthgen.records import Check, file_digest, read_lineage
from hf_recurrent_lengthgen.verification.comparing import Reading, compare_readings, count
from hf_recurrent_lengthgen.verification.upstream import upstream_of

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Sizes(NamedTuple):
    """Tokens (B, T) to read, dtype, and device."""

    tokens: Tensor
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class OpenedSource:
    """A source whose weights fit its config, and the checkpoint to compare with.

    Args:
        located: Where the source is.
        layout: Its format.
        settings: Its config.json.
        config: Its config, converted to ours.
        entries: Its weights, converted to ours.
        checkpoint: The folder of the checkpoint.
        our_config: The config in this folder.
    """

    located: Source
    layout: Format
    settings: Settings | None
    config: Any
    entries: Sequence[Entry]
    checkpoint: Path
    our_config: Any

    def checks(self, sizes: Sizes, ours: Reading) -> list[Check]:
        """Checks of config, weights and tokenizer, and of the upstream outputs of the source's weights."""
        checks = [self._config_check(), self._token_ids_check(), self._weights_check(), *self._tokenizer_checks()]
        return checks + self._reading_checks(sizes, ours)

    def _config_check(self) -> Check:
        return self._config_count("entries of the config", different_fields(self.config, self.our_config))

    def _token_ids_check(self) -> Check:
        """Ids of special tokens that both configs have; the source may lack those of the tokenizer."""
        ids = {name: [plain(getattr(of, name, None)) for of in (self.config, self.our_config)] for name in TOKEN_IDS}
        names = [name for name, (theirs, ours) in ids.items() if None not in (theirs, ours) and theirs != ours]
        return self._config_count("ids of special tokens", names)

    def _config_count(self, kind: str, different: list[str]) -> Check:
        what = f"config: {', '.join(different)}" if different else f"{kind} that differ"
        return count(what, f"the config of {self.located.name}", 0, len(different))

    def _weights_check(self) -> Check:
        """The weights must be equal bit for bit, in the dtype of the checkpoint."""
        ours = TensorFiles(self.checkpoint)
        unequal = len(ours.metas.keys() - {entry.name for entry in self.entries})
        for entry in self.entries:
            tensor = ours.tensor(entry.name) if entry.name in ours else None
            unequal += tensor is None or not same_bits(tensor, entry.read().to(tensor.dtype))
        return count("weights that differ in any bit", f"the weight files of {self.located.name}", 0, unequal)

    def _tokenizer_checks(self) -> list[Check]:
        """The tokenizer files must be equal byte for byte; no check if the checkpoint has another tokenizer."""
        given = tokenizer_files(self.located.folder)
        if not given or has_own_tokenizer(read_lineage(self.checkpoint)):
            return []
        names = {*given, *tokenizer_files(self.checkpoint)}
        unequal = sum(not _same_file(self.located.folder / name, self.checkpoint / name) for name in names)
        what = "tokenizer files that are missing or differ"
        return [count(what, f"the tokenizer of {self.located.name}", 0, unequal)]

    def _reading_checks(self, sizes: Sizes, ours: Reading) -> list[Check]:
        upstream = upstream_of(self.layout, self.config, self.settings, sizes.device)
        dtype = upstream.dtype or sizes.dtype
        weights = {entry.name: entry.read().to(dtype) for entry in self.entries}
        against = f"{upstream.name}, weights of {self.located.name}"
        with quiet_transformers():  # it says that it has no kernels
            theirs = upstream.read(weights, sizes.tokens)
        return compare_readings(against, ours, theirs, upstream.tolerance)


def _same_file(one: Path, other: Path) -> bool:
    return one.is_file() and other.is_file() and file_digest(one) == file_digest(other)


def different_fields(source: Any, checkpoint: Any) -> list[str]:
    """Differing entries of two of our configs that affect predictions."""
    ignored = NOT_ARCHITECTURE | {SOURCE_CONFIG}
    if checkpoint.model_type == "stateful_mamba2":
        ignored |= {"time_step_rank"}  # Mamba-2 has none
    one, other = ({name: plain(value) for name, value in config.to_dict().items()} for config in (source, checkpoint))
    return sorted(name for name in (one.keys() | other.keys()) - ignored if one.get(name) != other.get(name))


def locate_source(source: str, revision: str | None, folder: Path) -> Source:
    """Find a source, by default at the commit that the folder was converted from. Errors as in `locate`."""
    lineage = read_lineage(folder)
    origin = None if lineage is None else lineage.source
    if revision is None and origin is not None and origin.on_hub and not Path(source).expanduser().exists():
        same = source == origin.name or (source.startswith(f"{origin.name}/") and source.endswith((".pth", ".pt")))
        revision = origin.revision if same else None
    return locate(source, revision)


def open_source(located: Source, folder: Path) -> OpenedSource:
    """Read the config of a source and the names of its weights, to compare with the converted checkpoint.

    Raises:
        ValueError: as in `convert_checkpoint`, for a source of another family, and for values of a wrong type in the
            config of the checkpoint.
    """
    source = located.name
    settings = read_settings(located)
    files = TensorFiles(located.path)
    layout = detect(settings, files.metas, source)
    config = layout.config_of(settings, files.metas)
    with config_errors(f"The config.json in {folder}"):
        our_config = AutoConfig.from_pretrained(folder)
    if our_config.model_type != config.model_type:
        raise ValueError(
            f"{source} is converted to a checkpoint of type {config.model_type}, but {folder} is of type "
            f"{our_config.model_type}: as the first argument, give the source that it was converted from."
        )
    config = with_settings(config, told_settings(our_config))
    entries = our_entries(layout, config, files, source)
    return OpenedSource(located, layout, settings, config, entries, folder, our_config)

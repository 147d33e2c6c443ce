"""What a checkpoint was converted from: its config and weights must be those of the checkpoint, and so its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig

from hf_recurrent_lengthgen.conversion.convert import has_own_tokenizer, our_entries, read_settings
from hf_recurrent_lengthgen.conversion.exported_configs import NOT_ARCHITECTURE
from hf_recurrent_lengthgen.conversion.formats import SOURCE_CONFIG, Format, Settings, config_errors, plain
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
    """Tokens (B, T) to read, the dtype to compute in, and where."""

    tokens: Tensor
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class OpenedSource:
    """A source whose weights fit its config, and the folder to compare with.

    Args:
        located: Where the source is.
        layout: Its format.
        settings: Its config.json.
        config: What our config of it is.
        entries: Our weights, as they are made of its own.
        checkpoint: The folder.
        our_config: The config in the folder.
    """

    located: Source
    layout: Format
    settings: Settings | None
    config: Any
    entries: Sequence[Entry]
    checkpoint: Path
    our_config: Any

    def checks(self, sizes: Sizes, ours: Reading) -> list[Check]:
        """Config, weights, tokenizer, and what the source's weights give upstream."""
        checks = [self._config_check(), self._token_ids_check(), self._weights_check(), *self._tokenizer_checks()]
        return checks + self._reading_checks(sizes, ours)

    def _config_check(self) -> Check:
        return self._config_count("entries of the config", different_fields(self.config, self.our_config))

    def _token_ids_check(self) -> Check:
        """Ids of special tokens where both configs have one, as a tokenizer gives those that the source lacks."""
        ids = {name: [plain(getattr(of, name, None)) for of in (self.config, self.our_config)] for name in TOKEN_IDS}
        names = [name for name, (theirs, ours) in ids.items() if None not in (theirs, ours) and theirs != ours]
        return self._config_count("ids of special tokens", names)

    def _config_count(self, kind: str, different: list[str]) -> Check:
        what = f"config: {', '.join(different)}" if different else f"{kind} that differ"
        return count(what, f"the config of {self.located.name}", 0, len(different))

    def _weights_check(self) -> Check:
        """Equal bit for bit, in the dtype of the checkpoint."""
        ours = TensorFiles(self.checkpoint)
        unequal = len(ours.metas.keys() - {entry.name for entry in self.entries})
        for entry in self.entries:
            tensor = ours.tensor(entry.name) if entry.name in ours else None
            unequal += tensor is None or not same_bits(tensor, entry.read().to(tensor.dtype))
        return count("weights that differ in any bit", f"the weight files of {self.located.name}", 0, unequal)

    def _tokenizer_checks(self) -> list[Check]:
        """The files of the source's tokenizer, byte by byte; nothing if the checkpoint was given another one."""
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
    """Entries of two configs of ours that predictions depend on and that differ."""
    ignored = NOT_ARCHITECTURE | {SOURCE_CONFIG}
    if checkpoint.model_type == "stateful_mamba2":
        ignored |= {"time_step_rank"}  # Mamba-2 has none
    one, other = ({name: plain(value) for name, value in config.to_dict().items()} for config in (source, checkpoint))
    return sorted(name for name in (one.keys() | other.keys()) - ignored if one.get(name) != other.get(name))


def locate_source(source: str, revision: str | None, folder: Path) -> Source:
    """Find a source, as `locate` raises; without a `revision`, at the commit that the folder was converted from."""
    lineage = read_lineage(folder)
    origin = None if lineage is None else lineage.source
    if revision is None and origin is not None and origin.on_hub and not Path(source).expanduser().exists():
        same = source == origin.name or (source.startswith(f"{origin.name}/") and source.endswith((".pth", ".pt")))
        revision = origin.revision if same else None
    return locate(source, revision)


def open_source(located: Source, folder: Path) -> OpenedSource:
    """Read the config of a source and the names of its weights, to compare with the checkpoint made of it.

    Raises:
        ValueError: as `convert_checkpoint`, for a source of another family, and values of a wrong type in the config
            of the checkpoint.
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
            f"{source} is converted to a checkpoint of type {config.model_type}, and {folder} is of type "
            f"{our_config.model_type}: give the source that it was converted from, before it."
        )
    entries = our_entries(layout, config, files, source)
    return OpenedSource(located, layout, settings, config, entries, folder, our_config)

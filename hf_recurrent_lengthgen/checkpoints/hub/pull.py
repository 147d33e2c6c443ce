"""Pull one commit of a checkpoint from the Hub into a new folder, completely or not at all."""

import glob
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import get_token, snapshot_download
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.checkpoints.conversion.new_folders import check_new, new_folder
from hf_recurrent_lengthgen.checkpoints.hub.contents import PICKLES, PUSHED, TRAINER_FILES, matches
from hf_recurrent_lengthgen.checkpoints.hub.names import unsafe_names
from hf_recurrent_lengthgen.checkpoints.hub.remote import hub_api, telling
from hf_recurrent_lengthgen.checkpoints.records import read_json_object

CONFIGS = ("config.json", "learned_state_config.json")
"""One of these describes what a repository holds."""


def pull_checkpoint(
    repo_id: str, revision: str | None, output: str | os.PathLike[str], *, token: str | None = None
) -> str:
    """Download a checkpoint into a new folder.

    Only the files of a checkpoint are downloaded (`contents.PUSHED`): no pickles, no files of a trainer. Files that
    were downloaded before come from the cache of the client.

    Args:
        repo_id: owner/name.
        revision: Branch, tag or commit (default: main).
        output: Folder, new or empty.
        token: Token of the Hub (default: HF_TOKEN, or that of `hf auth login`).

    Returns:
        The commit, 40 hex digits.

    Raises:
        ValueError: if the repository or revision does not exist, the Hub does not answer, the repository holds no
            checkpoint, only pickles, or unsafe names (`names.unsafe_names`), or `output` is not new.
    """
    output, revision, token = Path(output), revision or "main", token or get_token()
    check_new(output)
    validate_repo_id(repo_id)
    with telling(f"Looking for revision {revision} of {repo_id}"):
        info = hub_api(token).model_info(repo_id, revision=revision)
    chosen = _checkpoint_files(repo_id, sorted(file.rfilename for file in info.siblings or ()))
    patterns = [glob.escape(name) for name in chosen]
    with telling(f"Downloading {repo_id} (files that are complete are kept)"):
        cache = Path(snapshot_download(repo_id, revision=info.sha, allow_patterns=patterns, token=token or False))
    read_json_object(cache / next(name for name in CONFIGS if name in chosen))
    with new_folder(output) as folder:
        for name in chosen:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(cache / name, folder / name)
    return cache.name


def _checkpoint_files(repo_id: str, names: Sequence[str]) -> list[str]:
    chosen = [name for name in names if matches(name, PUSHED) and not matches(name, TRAINER_FILES)]
    if unsafe := unsafe_names(chosen):
        raise ValueError(f"Nothing is pulled from {repo_id}, because of names of its files: {'; '.join(unsafe)}.")
    if not {*CONFIGS} & {*chosen}:
        raise ValueError(f"{repo_id} holds no {' or '.join(CONFIGS)}, so it is no checkpoint or learned state.")
    if not any(name.endswith(".safetensors") and "/" not in name for name in chosen):
        pickles = [name for name in names if name.endswith(PICKLES)]
        advice = f", only {', '.join(pickles)}: lengthgen convert {repo_id} reads such files" if pickles else ""
        raise ValueError(f"{repo_id} holds no weights as safetensors{advice}.")
    return chosen

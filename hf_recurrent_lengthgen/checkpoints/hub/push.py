"""Push a checkpoint to the Hub as one commit, completely or not at all."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, get_token
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.checkpoints.card_mark import card_mark, read_card_mark
from hf_recurrent_lengthgen.checkpoints.hub.contents import LOADED, PUSHED, choose_files, matches, refusals_of_files
from hf_recurrent_lengthgen.checkpoints.records import unverified, verified_files
from hf_recurrent_lengthgen.versions import installed_versions


@dataclass(frozen=True)
class PushPlan:
    """What of a folder a push sends.

    Args:
        files: Sizes in bytes of the files to push, by name.
        left_out: Names of the other files of the folder; whole folders have a slash.
        refusals: Reasons why the push is refused.
    """

    folder: Path
    files: dict[str, int]
    left_out: tuple[str, ...]
    refusals: tuple[str, ...]


def plan_push(folder: str | os.PathLike[str], token: str | None = None) -> PushPlan:
    """What a push of this folder would send, leave out and refuse, without contacting the Hub.

    Args:
        folder: A checkpoint.
        token: Token of the Hub (default: HF_TOKEN, or that of `hf auth login`), which no file may hold.

    Raises:
        OSError: if the folder does not exist.
    """
    folder = Path(folder)
    names, left_out = choose_files(folder)
    refusals = refusals_of_files(folder, names, token or get_token())
    now = verified_files(folder)
    refusals += _card_refusals(folder, now)
    if problem := unverified(folder, now):  # of all that is loaded
        refusals.append(f"{problem}: run lengthgen verify {folder}")
    files = {name: (folder / name).stat().st_size for name in names}
    return PushPlan(folder, files, tuple(left_out), tuple(refusals))


def _card_refusals(folder: Path, now: dict[str, str]) -> list[str]:
    card = folder / "README.md"
    if not card.is_file():
        return [f"it has no card: lengthgen card {folder} writes README.md"]
    try:
        text = card.read_text(encoding="utf-8")
        data = ModelCard(text).data.to_dict()
    except Exception as error:  # of the YAML parser and of the checks of each field
        return [f"the metadata of README.md cannot be read ({' '.join(str(error).split())})"]
    if not data:
        return [f"README.md has no metadata: lengthgen card {folder} writes a card with metadata"]
    if read_card_mark(text) not in (None, card_mark(now)):
        return [f"its card is of other weights or another config: measure it, and run lengthgen card {folder} again"]
    return []


def do_push(
    plan: PushPlan, repo_id: str, *, private: bool = True, overwrite: bool = False, token: str | None = None
) -> str:
    """Push the files of a plan as one commit; returns its address.

    A commit by somebody else at the same time is never overwritten. If all files are in place, no commit is made.

    Args:
        plan: A plan without refusals.
        repo_id: owner/name; a name alone belongs to the account of the token.
        private: Whether a new repository is private; an existing one must agree.
        overwrite: Delete the files of a checkpoint in the repository that are not in the folder. Otherwise, those that
            would be loaded (`contents.LOADED`) are refused, and the rest stays.
        token: As in `plan_push`.

    Raises:
        ValueError: for a plan with refusals, which are all listed, a repository that is public or holds other weights,
            and if the Hub or the connection fails.
    """
    validate_repo_id(repo_id)
    token, refusals = token or get_token(), list(plan.refusals)
    refusals += ["there is no token for the Hub: set one with hf auth login or HF_TOKEN"] if token is None else []
    if refusals:
        raise ValueError(f"{plan.folder} cannot be pushed: {'; '.join(refusals)}.")
    version = installed_versions()["hf_recurrent_lengthgen"]
    api = HfApi(token=token, library_name="hf_recurrent_lengthgen", library_version=version)
    try:
        return _pushed(api, plan, repo_id, private, overwrite)
    except ValueError:
        raise
    except Exception as error:  # of the HTTP library of this huggingface_hub, files, and threads
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        raise ValueError(
            f"Pushing to {repo_id} failed: {' '.join(str(cause).split())}. Run the command again."
        ) from error


def _pushed(api: HfApi, plan: PushPlan, repo_id: str, private: bool, overwrite: bool) -> str:
    repository = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    info = api.model_info(repository)
    remote = [file.rfilename for file in info.siblings or () if file.rfilename not in plan.files]
    problems = []
    if info.private is not private:
        option = f"push with{'out' if info.private else ''} --public, or change it in its settings"
        problems.append(f"is {'private' if info.private else 'public'}: {option}")
    if not overwrite and (loaded := [name for name in remote if matches(name, LOADED)]):
        problems.append(
            f"holds files that this push does not have and that would be loaded with it ({', '.join(loaded)}): choose "
            "another name, or give --overwrite to delete them in the same commit"
        )
    if problems:
        raise ValueError(f"{repository} {'; it '.join(problems)}. Nothing was sent.")
    added = [CommitOperationAdd(file, plan.folder / file) for file in plan.files]
    stale = [CommitOperationDelete(name) for name in remote if overwrite and matches(name, (*LOADED, *PUSHED))]
    options: Any = {"commit_message": "Upload checkpoint", "parent_commit": info.sha}
    return str(api.create_commit(repository, [*added, *stale], **options).commit_url)

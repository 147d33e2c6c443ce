"""Push a checkpoint, or a learned state, to the Hub as one commit, completely or not at all."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, ModelCard, constants, get_token
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.checkpoints.adapters import holds_learned_state
from hf_recurrent_lengthgen.checkpoints.card_mark import cards_digest, read_card_mark
from hf_recurrent_lengthgen.checkpoints.hub.contents import LOADED, PUSHED, choose_files, matches, refusals_of_files
from hf_recurrent_lengthgen.checkpoints.hub.remote import hub_api, telling
from hf_recurrent_lengthgen.checkpoints.records import read_json_object, read_lineage, unverified, verified_files


@dataclass(frozen=True)
class PushPlan:
    """What of a folder a push sends.

    Args:
        files: Sizes in bytes of the files to push, by name.
        left_out: Why other files of the folder are not pushed, by name; whole folders have a slash.
        refusals: Reasons why the push is refused.
    """

    folder: Path
    files: dict[str, int]
    left_out: dict[str, str]
    refusals: tuple[str, ...]


class PushResult(NamedTuple):
    """A finished push: where, at which commit, and whether the push made it or found all files in place."""

    url: str
    commit: str
    created: bool


def plan_push(folder: str | os.PathLike[str], token: str | None = None) -> PushPlan:
    """What a push of this folder would send, leave out and refuse. The Hub is not asked.

    Args:
        folder: A checkpoint, or a learned state.
        token: Token of the Hub (default: HF_TOKEN, or that of `hf auth login`), which no file may hold.

    Raises:
        ValueError: if the folder does not exist.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a checkpoint.")
    names, left_out = choose_files(folder)
    refusals = refusals_of_files(folder, names, token or get_token())
    now = verified_files(folder)
    refusals += _card_refusals(folder, now) + _unreadable(folder, names)
    if not holds_learned_state(folder) and (problem := unverified(folder, now)):  # of all that is loaded
        refusals.append(f"{problem}: run lengthgen verify {folder}")
    files = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    return PushPlan(folder, files, left_out, tuple(refusals))


def _unreadable(folder: Path, names: list[str]) -> list[str]:
    """Errors in records and results among the files."""
    problems = []
    for name in names:
        try:
            if name == "lineage.json":
                read_lineage(folder)
            elif matches(name, ["results/*.json"]):
                read_json_object(folder / name)
        except (ValueError, OSError) as error:
            problems.append(f"{name} cannot be read ({error})")
    return problems


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
    try:
        mark = read_card_mark(text)
    except ValueError as error:
        return [f"the mark in README.md is damaged ({error}): run lengthgen card {folder} --overwrite"]
    if mark is not None and mark.made_of != cards_digest(now):
        return [f"its card is of other weights or another config: measure it, and run lengthgen card {folder} again"]
    return []


def do_push(
    plan: PushPlan, repo_id: str, *, private: bool = True, overwrite: bool = False, token: str | None = None
) -> PushResult:
    """Push the files of a plan as one commit.

    A commit by somebody else at the same time is never overwritten. If all files are in place, no commit is made.

    Args:
        plan: A plan without refusals.
        repo_id: owner/name; a name alone belongs to the account of the token.
        private: Whether a new repository is private; an existing one must agree.
        overwrite: Delete the files of a checkpoint in the repository that are not in the folder. Otherwise, those that
            would be loaded (`contents.LOADED`) are refused, and others are kept.
        token: As in `plan_push`.

    Raises:
        ValueError: for a plan with refusals, which are all listed, a repository that is public or holds other weights,
            and if the Hub or the connection fails.
    """
    validate_repo_id(repo_id)
    token, refusals = token or get_token(), list(plan.refusals)
    refusals += ["there is no token for the Hub: set one with hf auth login or HF_TOKEN"] if token is None else []
    refusals += ["HF_HUB_OFFLINE is set: unset it"] if constants.HF_HUB_OFFLINE else []
    if refusals:
        raise ValueError(f"{plan.folder} cannot be pushed: {'; '.join(refusals)}.")
    api = hub_api(token)
    with telling(f"Looking for {repo_id}, or creating it,"):
        name = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        info = api.model_info(name)
    if info.private is not private:
        raise ValueError(
            f"{name} is {'private' if info.private else 'public'}: push with{'out' if info.private else ''} --public, "
            "or change it in its settings. Nothing was sent."
        )
    others = [file.rfilename for file in info.siblings or () if file.rfilename not in plan.files]
    if not overwrite and (loaded := [other for other in others if matches(other, LOADED)]):
        raise ValueError(
            f"{name} holds files that this push does not have and that would be loaded with it ({', '.join(loaded)}): "
            "choose another name, or give --overwrite to delete them in the same commit."
        )
    stale = [other for other in others if overwrite and matches(other, (*LOADED, *PUSHED))]
    additions = [CommitOperationAdd(file, plan.folder / file) for file in plan.files]
    with telling(f"Pushing to {name}"):
        commit = api.create_commit(
            name,
            [*additions, *map(CommitOperationDelete, stale)],
            commit_message="Upload checkpoint",
            parent_commit=info.sha,
        ).oid
    return PushResult(f"{api.endpoint}/{name}/commit/{commit}", commit, commit != info.sha)

"""Push a checkpoint, or a learned state, to the Hub as one commit, completely or not at all."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.adapters import holds_learned_state
from hf_recurrent_lengthgen.hub.contents import LOADED, PUSHED, choose_files, matches, refusals_of_files
from hf_recurrent_lengthgen.hub.remote import HubError, hub_api, telling
from hf_recurrent_lengthgen.json_files import read_json_object
from hf_recurrent_lengthgen.records import cards_digest, read_card_mark, read_lineage, unverified, verified_files


@dataclass(frozen=True)
class PushPlan:
    """What a push will do.

    Args:
        private: Whether a repository that the push creates is private.
        files: Sizes in bytes of the files to push, by name.
        left_out: Why other files of the folder are not pushed, by name; whole folders have a slash.
        refusals: Reasons why the push is refused.
        exists: Whether the repository exists; None if unknown.
        parent: The last commit; None without one.
        there: Names of the files of that commit.
        removed: Those of them that the push deletes.
        unknown: Why the Hub was not asked in a trial; "" if it was.
    """

    folder: Path
    repo_id: str
    private: bool
    files: dict[str, int]
    left_out: dict[str, str]
    refusals: tuple[str, ...]
    exists: bool | None = None
    parent: str | None = None
    there: frozenset[str] = frozenset()
    removed: tuple[str, ...] = ()
    unknown: str = ""


class PushResult(NamedTuple):
    """A finished push: where, at which commit, and whether the push made it or found all files in place."""

    url: str
    commit: str
    created: bool


def plan_push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    token: str | None = None,
    overwrite: bool = False,
    trial: bool = False,
) -> PushPlan:
    """What a push would do. Nothing is changed, and the Hub is not asked if the folder itself is refused.

    Args:
        folder: The checkpoint.
        repo_id: owner/name; a name alone belongs to the account of the token.
        private: Whether a new repository is private; an existing one must agree.
        token: Token of the Hub (default: HF_TOKEN, or that of `hf auth login`).
        overwrite: Delete the checkpoint files in the repository that are not in the folder. Otherwise, those that
            would be loaded (`contents.LOADED`) are refused, and others are kept.
        trial: Only show the plan; without a token or a connection, the content of the Hub is unknown.

    Raises:
        ValueError: if the folder does not exist, the name is not valid, or the Hub refuses to answer; except in a
            trial, also without a connection.
    """
    folder, token = Path(folder), token or get_token()
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the folder of a checkpoint.")
    validate_repo_id(repo_id)
    names, left_out, refusals = look_through(folder, token)
    lacking = ["there is no token for the Hub: set one with hf auth login or HF_TOKEN"] if token is None else []
    lacking += ["HF_HUB_OFFLINE is set: unset it"] if constants.HF_HUB_OFFLINE else []
    refusals += [] if trial else lacking
    files = {name: (folder / name).stat().st_size for name in names if (folder / name).is_file()}
    plan = PushPlan(folder, repo_id, private, files, left_out, tuple(refusals))
    if refusals or lacking:
        return replace(plan, unknown="; ".join(lacking))
    try:
        return _compare(plan, hub_api(token), overwrite)
    except HubError as error:
        if not trial or not error.lost:
            raise
        return replace(plan, unknown=str(error))


def look_through(folder: Path, token: str | None = None) -> tuple[list[str], dict[str, str], list[str]]:
    """Files to push, reasons to leave others out, and reasons to refuse the push; the Hub is not asked."""
    names, left_out = choose_files(folder)
    refusals = refusals_of_files(folder, names, token)
    now = verified_files(folder)
    refusals += _card_refusals(folder, now) + _unreadable(folder, names)
    if not holds_learned_state(folder) and (
        problem := unverified(folder, now)
    ):  # then its loaded files have changed, too
        refusals.append(f"{problem}: run lengthgen verify {folder}")
    return names, left_out, refusals


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


def _compare(plan: PushPlan, api: HfApi, overwrite: bool) -> PushPlan:
    """The plan, completed with what is on the Hub."""
    with telling("Asking the Hub whose token this is"):
        account = api.whoami()
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    refusals = [f"the token of {account['name']} may only read: use one that can write"] if role == "read" else []
    name = plan.repo_id if "/" in plan.repo_id else f"{account['name']}/{plan.repo_id}"
    with telling("Asking the Hub about the metadata of README.md"):
        try:
            ModelCard.load(plan.folder / "README.md").validate(repo_type="model")
        except ValueError as error:
            refusals.append(f"the Hub does not accept the metadata of README.md ({' '.join(str(error).split())})")
    plan = replace(plan, repo_id=name, refusals=tuple(refusals))
    with telling(f"Looking for {name}"):
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:
            return replace(plan, exists=False)
    if plan.private and not info.private:
        refusals.append(f"{name} exists and is public: give --public to push to it")
    elif not plan.private and info.private:
        refusals.append(
            f"{name} exists and is private, which a push does not change: leave out --public, or make it public in "
            "its settings"
        )
    there = frozenset(file.rfilename for file in info.siblings or ()) - {".gitattributes"}
    stale = [name for name in sorted(there - plan.files.keys()) if matches(name, (*LOADED, *PUSHED))]
    loaded = [name for name in stale if matches(name, LOADED)]
    if loaded and not overwrite:
        refusals.append(
            f"{name} holds files that this push does not have and that would be loaded with it ({', '.join(loaded)}): "
            "choose another name, or give --overwrite to delete them in the same commit"
        )
    return replace(
        plan,
        refusals=tuple(refusals),
        exists=True,
        parent=info.sha,
        there=there,
        removed=tuple(stale) if overwrite else (),
    )


def do_push(plan: PushPlan, token: str | None = None) -> PushResult:
    """Push the files of a plan as one commit.

    Large files are uploaded first, each once, so an interrupted push continues with the missing ones. The parent of
    the commit is that of the plan, so a commit by somebody else at the same time is never overwritten. If all files
    are in place already, no commit is made.

    Args:
        plan: A plan without refusals.
        token: As in `plan_push`.

    Raises:
        ValueError: for a plan with refusals, which are all listed, and if the Hub or the connection fails.
    """
    if plan.refusals:
        raise ValueError(f"{plan.folder} cannot be pushed: {'; '.join(plan.refusals)}.")
    api, name, parent = hub_api(token or get_token()), plan.repo_id, plan.parent
    if not plan.exists:
        with telling(f"Creating {name}"):
            api.create_repo(name, private=plan.private)
            parent = api.model_info(name).sha
    additions = [CommitOperationAdd(file, plan.folder / file) for file in plan.files]
    with telling(f"Uploading to {name} (what was uploaded is kept, and is not sent again)"):
        # a .gitignore on the Hub must not leave a file out
        api.preupload_lfs_files(name, additions, free_memory=False, gitignore_content="")
    with telling(f"Pushing to {name}"):
        if api.model_info(name).private is not plan.private:  # an upload may take hours
            raise ValueError(
                f"{name} is not {'private' if plan.private else 'public'} as asked for: its owner has another default "
                "for new repositories, or somebody has just changed it. Nothing was committed; check its settings."
            )
        commit = api.create_commit(
            name,
            [*additions, *(CommitOperationDelete(file) for file in plan.removed)],
            commit_message="Upload checkpoint",
            parent_commit=parent,
        ).oid
    return PushResult(f"{api.endpoint}/{name}/commit/{commit}", commit, commit != parent)

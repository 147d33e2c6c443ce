"""Push a checkpoint folder to the Hub as one commit: all of it, or nothing."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, constants, get_token
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id

from hf_recurrent_lengthgen.hub.collections import add_to_collection
from hf_recurrent_lengthgen.hub.contents import choose_files, matches, refusals_of_files
from hf_recurrent_lengthgen.hub.remote import (
    HUB_ERRORS,
    WAITS,
    again,
    git_name,
    hub_api,
    is_lost,
    list_files,
    may_pass,
    once,
    status_of,
    told,
    wait_after,
)
from hf_recurrent_lengthgen.records import (
    TOKENIZER_FILES,
    card_files,
    carded,
    file_digest,
    unverified,
    verified_files,
)

MARK = "Pushed by lengthgen push."
"""In the description of each commit, so that a later push knows which files it may delete."""
MESSAGE = "Upload checkpoint"
LOADED = (
    *("*.safetensors", "*.bin", "*.pth", "*.index.json", "adapter_*", "generation_config.json"),
    *TOKENIZER_FILES,
)
"""Files at the top of a repository that Transformers looks for: they change what is loaded."""
BAD_BRANCH = re.compile(r"[\s~^:?*\[\\\x00-\x1f\x7f]|\.\.|//|@\{|^[-/.]|^refs/|[/.]$|\.lock$")
LARGEST_IN_GIT = 20_000_000
"""Bytes, above the 10 MB from which the Hub keeps a file outside of git."""


@dataclass(frozen=True)
class PushFile:
    """A file to push.

    Args:
        name: Path in the folder and in the repository.
        size: Bytes.
        sha256: Of the content.
        git_name: Its SHA-1 as git computes it; None for a file too large to be kept by git.
        change: Against what is on the Hub; None if that is not known.
    """

    name: str
    size: int
    sha256: str
    git_name: str | None
    change: Literal["new", "changed", "same"] | None = None

    def equals(self, entry: RepoFile | None) -> bool:
        """Whether the Hub holds the same content."""
        if entry is None or entry.size != self.size:
            return False
        return entry.lfs.sha256 == self.sha256 if entry.lfs is not None else entry.blob_id == self.git_name


@dataclass(frozen=True)
class PushPlan:
    """What a push will do.

    Args:
        folder: The checkpoint.
        repo_id: owner/name.
        private: Whether a repository that the push creates is private.
        revision: The branch.
        files: What the commit will hold, with what is there already.
        left_out: Why other files of the folder are not pushed, by name; of whole folders with a slash.
        card: The text of README.md; "" without one.
        refusals: What keeps the push from being done.
        exists: Whether the repository is there; None if that is not known.
        branch_exists: Likewise the branch.
        parent: The commit of the branch, or of main where the branch is to be made; None without one.
        removed: Files that the commit deletes: those of an earlier push that are not in the folder any more, and with
            `overwrite` those of others that would change what is loaded.
        kept: Files on the Hub that somebody else put or changed there; they stay.
        unknown: Why the Hub was not asked in a trial; "" if it was.
    """

    folder: Path
    repo_id: str
    private: bool
    revision: str
    files: tuple[PushFile, ...]
    left_out: dict[str, str]
    card: str
    refusals: tuple[str, ...]
    exists: bool | None = None
    branch_exists: bool | None = None
    parent: str | None = None
    removed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def to_send(self) -> tuple[PushFile, ...]:
        return tuple(file for file in self.files if file.change != "same")


class PushResult(NamedTuple):
    """A finished push: where, at which commit, and whether the push made that commit or found all in place.

    `collection` is the address of the collection, or None; `collection_problem` says what went wrong with it.
    """

    plan: PushPlan
    url: str
    commit: str
    created: bool
    collection: str | None = None
    collection_problem: str | None = None


def plan_push(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    token: str | None = None,
    include: Sequence[str] = (),
    overwrite: bool = False,
    trial: bool = False,
) -> PushPlan:
    """What a push would do. Nothing is changed, and nothing asked of the Hub if the folder itself is refused.

    Args:
        folder: The checkpoint.
        repo_id: owner/name; a name alone is one of the account that the token belongs to.
        private: For a repository that is not there yet. An existing one must be as given.
        revision: Branch (default: main).
        token: Of the Hub (default: HF_TOKEN, or that of `hf auth login`).
        include: Patterns of files to push beside those of a checkpoint (`contents.PUSHED`).
        overwrite: Delete what others put there and Transformers would load (`LOADED`), which is refused otherwise.
        trial: Only to be shown: without a token or a connection, what the Hub holds stays unknown.

    Raises:
        ValueError: for a folder that is none, a name that cannot be one, and if the Hub refuses to be asked; but for a
            trial, also without a connection.
    """
    folder, token = Path(folder), token or get_token()
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give that of a checkpoint.")
    check_name(repo_id)
    if revision is not None and (not revision or BAD_BRANCH.search(revision)):
        raise ValueError(f"--revision is {revision!r}, but must be the name of a branch, such as main or v2.")
    names, left_out, refusals = look_through(folder, include, token)
    lacking = ["there is no token of the Hub: hf auth login sets one, or HF_TOKEN"] if token is None else []
    lacking += ["HF_HUB_OFFLINE is set: unset it"] if constants.HF_HUB_OFFLINE else []
    refusals += [] if trial else lacking
    files = tuple(_push_file(folder, name) for name in names if (folder / name).is_file())
    card = (folder / "README.md").read_text(encoding="utf-8", errors="replace") if "README.md" in names else ""
    plan = PushPlan(folder, repo_id, private, revision or "main", files, left_out, card, tuple(refusals))
    if refusals or lacking:
        return replace(plan, unknown="; ".join(lacking))
    try:
        return _compare(plan, hub_api(token), overwrite)
    except ValueError as error:
        if not trial or not is_lost(error):
            raise
        return replace(plan, unknown=str(error))


def check_name(repo_id: str) -> None:
    """Raise a `ValueError` for what cannot be a name on the Hub."""
    try:
        validate_repo_id(repo_id)
    except ValueError as error:
        raise ValueError(f"{repo_id!r} cannot be a name on the Hub, give owner/name: {error}") from error


def _push_file(folder: Path, name: str) -> PushFile:
    path = folder / name
    size = path.stat().st_size
    return PushFile(name, size, file_digest(path), git_name(path) if size <= LARGEST_IN_GIT else None)


def look_through(
    folder: Path, include: Sequence[str] = (), token: str | None = None
) -> tuple[list[str], dict[str, str], list[str]]:
    """What of a folder would be pushed, why other files not, and what in it keeps it from being pushed.

    Args: as of `plan_push`; the Hub is not asked.
    """
    names, left_out = choose_files(folder, include)
    refusals = refusals_of_files(folder, names, include, token)
    if "config.json" in names:
        now = verified_files(folder)
        refusals += _card_refusals(folder, now)
        if problem := unverified(folder, now):
            refusals.append(f"{problem}: run lengthgen verify {folder}")
    return names, left_out, refusals


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
        return [f"README.md has no metadata: lengthgen card {folder} writes a card with them"]
    written_for = card_files(text)
    differing = {} if written_for is None else written_for.items() ^ carded(now).items()
    if differing:
        names = ", ".join(sorted({name for name, _ in differing}))
        return [f"its card was written before {names} changed: measure it and run lengthgen card {folder} again"]
    return []


def _compare(plan: PushPlan, api: HfApi, overwrite: bool) -> PushPlan:
    """The plan, completed by what is on the Hub."""
    account = again(api.whoami, "Asking the Hub whose token this is")
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    refusals = [f"the token of {account['name']} may only read: take one that can write"] if role == "read" else []
    name = plan.repo_id if "/" in plan.repo_id else f"{account['name']}/{plan.repo_id}"
    plan = replace(plan, repo_id=name, exists=False, branch_exists=False)
    info = _repository(api, name)
    if info is not None:
        if plan.private and not info.private:
            refusals.append(f"{name} is there and public: give --public to push to it")
        elif not plan.private and info.private:
            refusals.append(f"{name} is there and private, which a push does not change: leave out --public, or make "
                            "it public in its settings")  # fmt: skip
        branch = _branch_head(api, name, plan.revision)
        plan = replace(plan, exists=True, branch_exists=branch is not None, parent=branch or info.sha)
    there = list_files(api, name, plan.parent) if plan.parent is not None else {}
    files = tuple(
        replace(
            file, change="same" if file.equals(there.get(file.name)) else "changed" if file.name in there else "new"
        )
        for file in plan.files
    )
    others = sorted(there.keys() - {file.name for file in files} - {".gitattributes"})
    # What is in the folder and left out of this push, such as what --include named before, stays as it is there.
    ours = [name for name in _of_earlier_pushes(api, plan, others) if not (plan.folder / name).exists()]
    loaded = [name for name in others if name not in ours and matches(name, LOADED)]
    if loaded and not overwrite:
        refusals.append(
            f"{name} holds files that are not in {plan.folder} and would be loaded with it ({', '.join(loaded)}): "
            "choose another name, or give --overwrite to delete them in the same commit"
        )
    removed = (*ours, *(loaded if overwrite else ()))
    kept = tuple(name for name in others if name not in removed)
    return replace(plan, files=files, removed=removed, kept=kept, refusals=tuple(refusals))


def _repository(api: HfApi, name: str) -> Any | None:
    """What the Hub tells of a repository; None if there is none."""
    try:
        return again(lambda: api.model_info(name), f"Looking for {name}")
    except ValueError as error:
        if status_of(error) == 404:
            return None
        raise


def _branch_head(api: HfApi, name: str, branch: str) -> str | None:
    """The commit of a branch; None if there is no such branch."""

    def heads() -> dict[str, str]:
        return {ref.name: ref.target_commit for ref in api.list_repo_refs(name).branches}

    return again(heads, f"Looking for the branches of {name}").get(branch)


def _of_earlier_pushes(api: HfApi, plan: PushPlan, names: Sequence[str]) -> tuple[str, ...]:
    """Those of the files on the Hub that `push_checkpoint` was the last to write."""
    if not names or plan.parent is None:
        return ()
    repo, commit = plan.repo_id, plan.parent
    history = again(lambda: api.list_repo_commits(repo, revision=commit), f"Reading the history of {repo}")
    ours = {made.commit_id for made in history if MARK in made.message}
    infos: list[Any] = again(
        lambda: api.get_paths_info(repo, list(names), revision=commit, expand=True), f"Reading the files of {repo}"
    )
    return tuple(info.path for info in infos if info.last_commit is not None and info.last_commit.oid in ours)


def push_checkpoint(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool = True,
    revision: str | None = None,
    token: str | None = None,
    message: str | None = None,
    collection: str | None = None,
    include: Sequence[str] = (),
    overwrite: bool = False,
) -> PushResult:
    """Push a checkpoint folder as one commit. Arguments as of `plan_push`, and

    Large files go up first, each once: a push that stopped goes on with what is missing. The commit is made on that
    one that the plan has seen, so that what somebody else commits at the same time is never overwritten. If all is in
    place already, no commit is made. At the end the files of the commit are compared with those of the folder.

    Args:
        message: Title of the commit.
        collection: Title or slug of a collection that the model is added to; one of that title is made if there is
            none. If that fails, the push stays done, and the result tells the problem.

    Raises:
        ValueError: listing all reasons why the folder is refused; if the Hub or the connection fails.
    """
    token = token or get_token()
    plan = plan_push(
        folder, repo_id, private=private, revision=revision, token=token, include=include, overwrite=overwrite
    )
    if plan.refusals:
        raise ValueError(f"{plan.folder} cannot be pushed: {'; '.join(plan.refusals)}.")
    return do_push(plan, token=token, message=message, collection=collection)


def do_push(
    plan: PushPlan, *, token: str | None = None, message: str | None = None, collection: str | None = None
) -> PushResult:
    """Do what a plan without refusals says; arguments and errors as of `push_checkpoint`."""
    assert not plan.refusals
    api, name = hub_api(token or get_token()), plan.repo_id
    if not plan.exists:
        again(lambda: api.create_repo(name, private=plan.private, exist_ok=True), f"Creating {name}")
        plan = replace(plan, parent=_of_that_visibility(api, plan).sha)
    if not plan.branch_exists and plan.revision != "main":
        again(
            lambda: api.create_branch(name, branch=plan.revision, revision=plan.parent, exist_ok=True),
            f"Creating the branch {plan.revision} of {name}",
        )
    commit, created = plan.parent, False
    if plan.to_send or plan.removed:
        commit = _commit(api, plan, message or MESSAGE)
        created = commit != plan.parent
    assert commit is not None
    wrong = _differing(plan, list_files(api, name, commit))
    if wrong:
        raise ValueError(
            f"{name} holds other content than {plan.folder} at commit {commit}: {', '.join(wrong)}. Was the folder "
            "changed during the push? Run it again."
        )
    result = PushResult(plan, f"{api.endpoint}/{name}/commit/{commit}", commit, created)
    if collection is None:
        return result
    try:
        return result._replace(collection=add_to_collection(api, collection, name, plan.private))
    except ValueError as error:
        return result._replace(collection_problem=str(error))


def _of_that_visibility(api: HfApi, plan: PushPlan) -> Any:
    """What the Hub tells of the repository, if it is private or public as the plan says."""
    info = _repository(api, plan.repo_id)
    if info is None or info.private is not plan.private:
        raise ValueError(
            f"{plan.repo_id} is not {'private' if plan.private else 'public'} as asked for: its owner has set that "
            "for new repositories, or somebody has made or changed it just now. Nothing was committed; look at its "
            "settings."
        )
    return info


def _commit(api: HfApi, plan: PushPlan, message: str) -> str:
    """Upload and commit; the id of the commit.

    A connection that breaks during the commit leaves open whether it was made, so the branch is looked at first.
    """
    name, doing = plan.repo_id, f"Pushing to {plan.repo_id}"
    additions = [CommitOperationAdd(file.name, plan.folder / file.name) for file in plan.to_send]
    once(
        # no .gitignore on the Hub may leave a file out
        lambda: api.preupload_lfs_files(
            name, additions, revision=plan.revision, free_memory=False, gitignore_content=""
        ),
        f"Uploading to {name} (what was uploaded is kept, and is not sent again)",
    )
    _of_that_visibility(api, plan)  # an upload may take hours
    operations: list[Any] = [*additions, *(CommitOperationDelete(removed) for removed in plan.removed)]
    for wait in (*WAITS, None):
        try:
            return api.create_commit(
                name,
                operations,
                commit_message=message,
                commit_description=MARK,
                revision=plan.revision,
                parent_commit=plan.parent,
            ).oid
        except HUB_ERRORS as error:
            head = _branch_head(api, name, plan.revision) if may_pass(error) or status_of(error) == 412 else None
            if head is not None and head != plan.parent and not _differing(plan, list_files(api, name, head)):
                return head
            if wait is None or not may_pass(error) or head != plan.parent:
                raise told(error, doing) from error
            wait_after(error, wait)
    raise AssertionError


def _differing(plan: PushPlan, there: dict[str, RepoFile]) -> list[str]:
    """Names of files on the Hub that are not as the plan wants them."""
    wrong: Iterable[str] = (file.name for file in plan.files if not file.equals(there.get(file.name)))
    return [*wrong, *(name for name in plan.removed if name in there)]

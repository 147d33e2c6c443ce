"""What a hub for tests keeps in memory: repositories with a history of commits, large files."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

GITATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.png filter=lfs diff=lfs merge=lfs -text\n"
LARGE = 10_000_000


class Refused(Exception):
    """An answer that is no success: its status, message and error code."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass(frozen=True)
class Blob:
    """Content of a file; of a large one git keeps a pointer that has the SHA-256 that the client has sent."""

    content: bytes
    sha256: str | None = None

    @property
    def oid(self) -> str:
        """The name that git gives to the content, or to the pointer."""
        content = self.content
        if self.sha256 is not None:
            content = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (
                self.sha256.encode(),
                len(content),
            )
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_large(path: str, size: int) -> bool:
    """Whether a file is kept outside of git."""
    return path.endswith((".safetensors", ".png")) or size > LARGE


@dataclass(frozen=True)
class Commit:
    id: str
    parent: str | None
    title: str
    files: dict[str, Blob]


@dataclass
class Repository:
    """Branches, and all commits by id."""

    name: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, title: str, files: dict[str, Blob]) -> str:
        """Set the branch to a new commit whose tree is `files`."""
        parent = self.branches.get(branch)
        tree = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        text = f"{len(self.commits)}\n{parent}\n{title}\n{tree}"
        commit = Commit(hashlib.sha1(text.encode()).hexdigest(), parent, title, dict(files))
        self.commits[commit.id] = commit
        self.branches[branch] = commit.id
        return commit.id

    def at(self, revision: str) -> Commit:
        """The commit of a branch, or of an id or the beginning of one."""
        if revision in self.branches:
            return self.commits[self.branches[revision]]
        found = [commit for commit in self.commits.values() if len(revision) > 4 and commit.id.startswith(revision)]
        if len(found) != 1:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def history(self, revision: str) -> list[Commit]:
        """The commit and those before it, latest first."""
        commits = [self.at(revision)]
        while (parent := commits[-1].parent) is not None:
            commits.append(self.commits[parent])
        return commits


class Store:
    """Everything that a hub keeps. `accounts` are names by token; `large_files` is content by SHA-256."""

    def __init__(self) -> None:
        self.accounts = {"hf_test": "user"}
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}

    def create(self, name: str, private: bool = True) -> Repository:
        if name in self.repositories:
            raise Refused(409, "You already created this model repo")
        repository = self.repositories[name] = Repository(name, private)
        repository.commit("main", "initial commit", {".gitattributes": Blob(GITATTRIBUTES)})
        return repository

    def put(self, name: str, files: dict[str, bytes]) -> str:
        """Commit files as somebody would on the site, beside those that are there; the repository may be new."""
        repository = self.repositories.get(name) or self.create(name)
        blobs = {path: self.blob(path, content) for path, content in files.items()}
        return repository.commit("main", "by hand", repository.at("main").files | blobs)

    def blob(self, path: str, content: bytes) -> Blob:
        """Keep a file's content."""
        if not is_large(path, len(content)):
            return Blob(content)
        sha256 = hashlib.sha256(content).hexdigest()
        self.large_files[sha256] = content
        return Blob(content, sha256)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        """Content of all files but .gitattributes."""
        files = self.repositories[name].at(revision).files
        return {path: blob.content for path, blob in files.items() if path != ".gitattributes"}

    def change(
        self,
        repository: Repository,
        branch: str,
        header: dict[str, str],
        added: dict[str, Blob],
        removed: Iterable[str],
    ) -> str:
        """Commit changes to a branch, all or none.

        Raises:
            Refused: if the branch has moved on from the parent that the header names, or a file to remove is not
                there.
        """
        now = repository.at(branch)
        if header.get("parentCommit", now.id) != now.id:
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        files = dict(now.files)
        for path in removed:
            if path not in files:
                raise Refused(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
            del files[path]
        files.update(added)
        return repository.commit(branch, header["summary"], files)

"""What the hub for tests answers to each kind of request."""

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .store import Blob, Commit, Refused, is_large

if TYPE_CHECKING:
    from .endpoint import Endpoint

DATE = "2025-01-01T00:00:00.000Z"
REPOSITORY = r"/api/models/(?P<name>[\w.-]+/[\w.-]+)"
Headers = dict[str, str]


@dataclass
class Request:
    method: str
    path: str
    token: str | None
    body: bytes
    query: dict[str, list[str]]


@dataclass
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Headers = field(default_factory=dict)


def refusal(refused: Refused) -> Answer:
    answer = as_json({"error": refused.message}, refused.status)
    answer.headers["X-Error-Message"] = refused.message
    if refused.code is not None:
        answer.headers["X-Error-Code"] = refused.code
    return answer


def as_json(value: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def whoami(hub: "Endpoint", request: Request) -> Answer:
    account = hub.account(request)
    if account is None:
        raise Refused(401, "Invalid username or password.")
    access = {"accessToken": {"displayName": "test", "role": "write"}}
    return as_json({"type": "user", "name": account, "orgs": [], "auth": access})


def create_repository(hub: "Endpoint", request: Request) -> Answer:
    account, body = hub.account(request), json.loads(request.body)
    if account is None:
        raise Refused(401, "Invalid username or password.")
    owner = body.get("organization") or account
    name = f"{owner}/{body['name']}"
    if owner != account:
        raise Refused(403, "You don't have the rights to create a model under this namespace")
    private = body.get("private") or body.get("visibility") == "private"
    made = {"url": f"{hub.url}/{name}", "name": name, "id": "0" * 24}
    if name in hub.repositories:  # the client reads the address from this answer as well
        return as_json(made | {"error": "You already created this model repo"}, 409)
    hub.create(name, bool(private))
    return as_json(made)


def model_info(hub: "Endpoint", request: Request, name: str, revision: str = "main") -> Answer:
    repository = hub.repository(request, name)
    commit = repository.at(revision)
    siblings: list[dict[str, Any]] = []
    for path, blob in sorted(commit.files.items()):
        entry = {"rfilename": path}
        if "blobs" in request.query:
            entry |= {"blobId": blob.oid, "size": len(blob.content)}
            if blob.sha256 is not None:
                entry["lfs"] = {"sha256": blob.sha256, "size": len(blob.content), "pointerSize": 130}
        siblings.append(entry)
    about = {"id": name, "sha": commit.id, "private": repository.private, "gated": False}
    return as_json(about | {"siblings": siblings, "tags": [], "lastModified": DATE, "createdAt": DATE})


def entry_of(commit: Commit, path: str) -> dict[str, Any]:
    blob = commit.files[path]
    entry: dict[str, Any] = {"type": "file", "path": path, "oid": blob.oid, "size": len(blob.content)}
    if blob.sha256 is not None:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 130}
    return entry


def tree(hub: "Endpoint", request: Request, name: str, revision: str, folder: str = "") -> Answer:
    commit = hub.repository(request, name).at(revision)
    if folder:  # of templates of a tokenizer, which none has here
        raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    return as_json([entry_of(commit, path) for path in sorted(commit.files)])


def preupload(hub: "Endpoint", request: Request, name: str, revision: str) -> Answer:
    files = hub.repository(request, name, write=True).at(revision).files
    body, answers = json.loads(request.body), []
    hosted = files[".gitignore"].content.decode() if ".gitignore" in files else ""
    ignored = body.get("gitIgnore", hosted).split()  # names of files only, of what git can
    for file in body["files"]:
        there = files.get(file["path"])
        oid = None if there is None else there.sha256 or there.oid
        mode = "lfs" if is_large(file["path"], file["size"]) else "regular"
        ignore = file["path"].rpartition("/")[2] in ignored
        answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": ignore, "oid": oid})
    return as_json({"files": answers})


def large_file_batch(hub: "Endpoint", request: Request, name: str) -> Answer:
    hub.repository(request, name, write=True)
    objects = []
    for item in json.loads(request.body)["objects"]:
        sha256, size = item["oid"], item["size"]
        answer: dict[str, Any] = {"oid": sha256, "size": size}
        if sha256 not in hub.large_files:
            upload = {"href": f"{hub.url}/upload/{sha256}/{size}", "header": {}}
            answer["actions"] = {"upload": upload}
        objects.append(answer)
    return as_json({"transfer": "basic", "objects": objects})


def upload(hub: "Endpoint", request: Request, sha256: str, size: str) -> Answer:
    if hashlib.sha256(request.body).hexdigest() != sha256:
        raise Refused(400, "The SHA-256 of the content is not the one announced")
    hub.large_files[sha256] = request.body
    return Answer()


def commit(hub: "Endpoint", request: Request, name: str, revision: str) -> Answer:
    repository = hub.repository(request, name, write=True)
    header: dict[str, str] = {}
    added, removed = {}, []
    for line in request.body.splitlines():
        entry = json.loads(line)
        value = entry["value"]
        if entry["key"] == "header":
            header = value
        elif entry["key"] == "file":
            added[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif entry["key"] == "lfsFile":
            if value["oid"] not in hub.large_files:
                raise Refused(400, f"The large file of {value['path']} has not been uploaded")
            added[value["path"]] = Blob(hub.large_files[value["oid"]], value["oid"])
        elif entry["key"] == "deletedFile":
            removed.append(value["path"])
        else:
            raise Refused(400, f"Unknown key {entry['key']}")
    oid = hub.change(repository, revision, header, added, removed)
    return as_json(
        {"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{name}/commit/{oid}", "hookOutput": ""}
    )


def validate_card(hub: "Endpoint", request: Request) -> Answer:
    return as_json({"errors": [], "warnings": []})


def resolve(hub: "Endpoint", request: Request, name: str, revision: str, path: str) -> Answer:
    at = hub.repository(request, name).at(revision)
    headers = {"X-Repo-Commit": at.id}
    if path not in at.files:
        answer = refusal(Refused(404, "Entry not found", "EntryNotFound"))
        answer.headers |= headers
        return answer
    blob = at.files[path]
    if blob.sha256 is None:
        return Answer(200, blob.content, headers | {"ETag": f'"{blob.oid}"'})
    linked = {"X-Linked-Etag": f'"{blob.sha256}"', "X-Linked-Size": str(len(blob.content))}
    return Answer(302, b"", headers | linked | {"Location": f"{hub.delivery}/large/{blob.sha256}"})


def large_file(hub: "Endpoint", request: Request, sha256: str) -> Answer:
    return Answer(200, hub.large_files[sha256], {"ETag": f'"{sha256}"'})


LARGE_FILES = r"/(?P<name>[\w.-]+/[\w.-]+?)\.git/info/lfs/objects"
ROUTES: list[tuple[str, str, Callable[..., Answer]]] = [
    ("GET", r"/api/whoami-v2", whoami),
    ("POST", r"/api/repos/create", create_repository),
    ("POST", r"/api/validate-yaml", validate_card),
    ("GET", REPOSITORY, model_info),
    ("GET", REPOSITORY + r"/revision/(?P<revision>[^/]+)", model_info),
    ("GET", REPOSITORY + r"/tree/(?P<revision>[^/]+)", tree),
    ("GET", REPOSITORY + r"/tree/(?P<revision>[^/]+)/(?P<folder>.+)", tree),
    ("POST", REPOSITORY + r"/preupload/(?P<revision>[^/]+)", preupload),
    ("POST", REPOSITORY + r"/commit/(?P<revision>[^/]+)", commit),
    ("POST", LARGE_FILES + r"/batch", large_file_batch),
    ("PUT", r"/upload/(?P<sha256>[0-9a-f]{64})/(?P<size>\d+)", upload),
    ("GET HEAD", r"/(?P<name>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    ("GET HEAD", r"/large/(?P<sha256>[0-9a-f]{64})", large_file),
]

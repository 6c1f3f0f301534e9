"""A small model hub on 127.0.0.1 that speaks the upload and download protocol of `huggingface_hub`.

    whoami-v2 -> repos/create -> preupload -> the large files, one of two ways -> commit (NDJSON) -> resolve

Large files come by LFS (PUT) where HF_HUB_DISABLE_XET is set, else by Xet: then the token names a `local://` store,
which the real `hf_xet` writes its chunks to. Everything else that is uploaded is kept in memory.

Like the hub it refuses a wrong token, an owner that the user does not belong to, an empty or unknown object, and a
model card whose `base_model` is no model's id.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_the-right-one"
USER = "user"
MODEL_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass
class File:
    """`content` is None for what lies in the Xet store, under `xet_hash`."""

    oid: str
    size: int
    content: bytes | None
    xet_hash: str | None = None


@dataclass
class Repository:
    private: bool
    files: dict[str, File] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)  # their messages

    @property
    def head(self) -> str:
        return hashlib.sha1(repr(self.commits).encode()).hexdigest()


class Hub:
    """`refuse[step]`: statuses that the next requests of this step are answered with; 0 closes the connection."""

    def __init__(self, folder: Path) -> None:
        self.xet_store = folder / "xet"
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by sha256
        self.refuse: dict[str, list[int]] = defaultdict(list)
        self.steps: list[str] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def xet_hash_of(self, sha256: str) -> str | None:
        """Where the Xet store has the file with this sha256: its shards say so."""
        for shard in self.xet_store.glob("xet/xorbs/shards/*.mdb"):
            data, at = shard.read_bytes(), 48  # after the header; then one record per file
            while data[at : at + 32] != b"\xff" * 32:
                name, flags, parts = struct.unpack_from("<32sII", data, at)
                at += 48 + 48 * parts * (2 if flags & 1 << 31 else 1)
                if flags & 1 << 30:
                    if _hex(data[at : at + 32]) == sha256:
                        return _hex(name)
                    at += 48
        return None


def _hex(digest: bytes) -> str:
    """Xet writes a digest as four little-endian words."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", digest))


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _refuse_bad_card(text: str) -> None:
    _, _, rest = text.partition("---\n")
    card = yaml.safe_load(rest.partition("\n---\n")[0]) or {}
    base_model = card.get("base_model")
    if base_model is not None and not MODEL_ID.fullmatch(str(base_model)):
        raise _Refused(
            400, f'"base_model" with value "{base_model}" is not valid. Use a model id from https://hf.co/models.'
        )


ROUTES: list[tuple[str, str, str]] = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("GET", r"/api/models/(?P<id>[^/]+/[^/]+)(?:/revision/[^/]+)?", "info"),
    ("POST", r"/api/models/(?P<id>[^/]+/[^/]+)/preupload/main", "preupload"),
    ("GET", r"/api/models/(?P<id>[^/]+/[^/]+)/xet-(?:read|write)-token/[^/]+", "xet"),
    ("POST", r"/(?P<id>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs"),
    ("POST", r"/api/models/(?P<id>[^/]+/[^/]+)/commit/main", "commit"),
    ("GET", r"/(?P<id>[^/]+/[^/]+)/resolve/[^/]+/(?P<file>.+)", "resolve"),
]


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._route(self.command)

    do_POST = do_PUT = do_GET

    def do_HEAD(self) -> None:
        self._route("GET")

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _route(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        step, found = next(
            ((step, match) for verb, way, step in ROUTES if verb == method and (match := re.fullmatch(way, path))),
            ("", None),
        )
        try:
            if found is None:
                raise _Refused(404, f"{method} {path} is not here")
            self.hub.steps.append(step)
            if self.hub.refuse[step]:
                status = self.hub.refuse[step].pop(0)
                if status == 0:
                    self.close_connection = True
                    return
                raise _Refused(status, f"{step} does not work today")
            if step != "lfs" and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise _Refused(401, "Invalid username or password.")
            getattr(self, step)(body, **found.groupdict())
        except _Refused as refused:
            answer = {"error": str(refused), "errors": [{"message": str(refused)}]}
            self._answer(answer, refused.status, {"X-Error-Message": str(refused)})

    def _answer(self, content: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repository(self, id: str) -> Repository:
        if id not in self.hub.repositories:
            raise _Refused(404, "Repository not found")
        return self.hub.repositories[id]

    # ---------------------------------------------------------------------------------------------------- steps

    def whoami(self, body: bytes) -> None:
        auth = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        self._answer({"type": "user", "name": USER, "fullname": "A User", "orgs": [], "auth": auth})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        id = f"{asked['organization']}/{asked['name']}"
        if asked["organization"] != USER:
            raise _Refused(403, f"You don't have the rights to create a model under {asked['organization']}")
        existed = id in self.hub.repositories
        if not existed:
            self.hub.repositories[id] = Repository(private=asked.get("visibility") == "private")
        self._answer({"url": f"{self.hub.endpoint}/{id}", "name": id}, 409 if existed else 200)

    def validate(self, body: bytes) -> None:
        _refuse_bad_card(json.loads(body)["content"])
        self._answer({"errors": [], "warnings": []})

    def info(self, body: bytes, id: str) -> None:
        found = self._repository(id)
        siblings = [{"rfilename": name} for name in found.files]
        self._answer({"id": id, "sha": found.head, "private": found.private, "siblings": siblings, "tags": []})

    def preupload(self, body: bytes, id: str) -> None:
        files = self._repository(id).files
        self._answer(
            {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                        **({"oid": files[each["path"]].oid} if each["path"] in files else {}),
                    }
                    for each in json.loads(body)["files"]
                ]
            }
        )

    def xet(self, body: bytes, id: str) -> None:
        self._repository(id)
        url, expires = f"local://{self.hub.xet_store}", int(time.time()) + 3600
        headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)}
        self._answer({"casUrl": url, "accessToken": "xet", "exp": expires}, headers=headers)

    def batch(self, body: bytes, id: str) -> None:
        self._repository(id)
        objects = []
        for each in json.loads(body)["objects"]:
            upload = {"href": f"{self.hub.endpoint}/lfs/{each['oid']}"}
            objects.append(each if each["oid"] in self.hub.objects else {**each, "actions": {"upload": upload}})
        self._answer({"transfer": "basic", "objects": objects})

    def lfs(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "other bytes came than were announced")
        self.hub.objects[oid] = body
        self._answer({})

    def commit(self, body: bytes, id: str) -> None:
        found = self._repository(id)
        header, *operations = (json.loads(line) for line in body.splitlines())
        files: dict[str, File] = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                content = base64.b64decode(value["content"])
                if value["path"] == "README.md":
                    _refuse_bad_card(content.decode())
                blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                files[value["path"]] = File(blob, len(content), content)
            else:
                assert operation["key"] == "lfsFile", operation
                oid = value["oid"]
                content, xet_hash = self.hub.objects.get(oid), self.hub.xet_hash_of(oid)
                if content is None and xet_hash is None:
                    raise _Refused(400, f"{value['path']} was never uploaded")
                files[value["path"]] = File(oid, value["size"], content, xet_hash)
        found.files.update(files)
        found.commits.append(header["value"]["summary"])
        url = f"{self.hub.endpoint}/{id}/commit/{found.head}"
        self._answer({"success": True, "commitOid": found.head, "commitUrl": url, "hookOutput": ""})

    def resolve(self, body: bytes, id: str, file: str) -> None:
        found = self._repository(id)
        if file not in found.files:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        entry = found.files[file]
        headers = {"ETag": f'"{entry.oid}"', "X-Repo-Commit": found.head}
        if entry.content is not None:
            self._answer(entry.content, headers=headers)
            return
        # The client fetches it from the Xet store by itself.
        headers["X-Xet-Hash"] = entry.xet_hash or ""
        headers["X-Xet-Refresh-Route"] = f"{self.hub.endpoint}/api/models/{id}/xet-read-token/main"
        headers["X-Linked-Size"], headers["X-Linked-Etag"] = str(entry.size), f'"{entry.oid}"'
        self._answer(b"", headers=headers)

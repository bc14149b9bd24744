"""A Hugging Face Hub on the loopback interface: as much of its API as pushing and loading models needs.

It speaks what `huggingface_hub` speaks (repositories, commits as ndjson, git-LFS for weights, `resolve` with ETags),
keeps everything in memory, asks for a token, and can be told to fail.
"""

import base64
import hashlib
import json
import re
import threading
from urllib.parse import unquote, urlsplit

from loopback import Handler, Loopback

LFS = (".safetensors", ".bin", ".pt", ".pth", ".png")


class _Handler(Handler):
    @property
    def hub(self):
        return self.server.serving

    def do_GET(self):
        self.answer("GET")

    def do_HEAD(self):
        self.answer("HEAD")

    def do_POST(self):
        self.answer("POST")

    def do_PUT(self):
        self.answer("PUT")

    def answer(self, method):
        body = self.body()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{method} {path}")
        for pattern, status in self.hub.refuse.items():
            if re.search(pattern, f"{method} {path}"):
                return self.send(status, {"error": f"refused with {status}"})
        for verb, pattern, handle in ROUTES:
            match = re.fullmatch(pattern, path)
            if verb == method and match:
                groups = match.groupdict()
                return self.refused(method, handle, **groups) or handle(self, body, **groups)
        return self.send(404, {"error": f"no route for {method} {path}"})

    def refused(self, method, handle, repo=None, **others):
        """Whether the client may not, which it has been told; to read a public repository it needs no token."""
        known = self.hub.repos.get(repo)
        reads_public = known is not None and not known["private"] and method in ("GET", "HEAD")
        has_token = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if not has_token and not reads_public and handle not in OPEN:
            self.send(401, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return True
        if repo is not None and known is None:
            self.send(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            return True
        return False

    def send(self, status, content=b"", **headers):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.say(status, {name.replace("_", "-"): value for name, value in headers.items()}, data)

    # Routes

    def whoami(self, body):
        self.send(200, {"type": "user", "name": "tester", "orgs": [], "auth": {"accessToken": {"role": "write"}}})

    def create(self, body):
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'tester'}/{asked['name']}"
        if name in self.hub.repos:
            return self.send(409, {"error": "You already created this repo", "url": f"{self.hub.url}/{name}"})
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.repos[name] = {"private": private, "commits": [commit("initial commit", {})]}
        return self.send(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def validate(self, body):
        metadata = re.match(r"---\n(.*?)\n---", json.loads(body)["content"], re.DOTALL)
        errors = [] if metadata else [{"message": "no metadata"}]
        if metadata and re.search(r"^base_model: /", metadata[1], re.MULTILINE):
            errors.append({"message": '"base_model" with value "/..." is not valid.'})
        self.send(400 if errors else 200, {"errors": errors, "warnings": []})

    def preupload(self, body, repo):
        modes = [
            {"path": path, "uploadMode": "lfs" if path.endswith(LFS) else "regular"}
            | {"shouldIgnore": False, "oid": None}
            for path in (file["path"] for file in json.loads(body)["files"])
        ]
        self.send(200, {"files": modes})

    def lfs_batch(self, body, repo):
        objects = []
        for wanted in json.loads(body)["objects"]:
            entry = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            objects.append(entry)
        self.send(200, {"transfer": "basic", "objects": objects})

    def lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return self.send(400, {"error": "hash mismatch"})
        self.hub.objects[oid] = body
        return self.send(200)

    def commit(self, body, repo):
        files, message = dict(self.hub.files(repo)), ""
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        new = commit(message, files)
        self.hub.repos[repo]["commits"].append(new)
        self.send(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{new['sha']}", "commitOid": new["sha"]})

    def info(self, body, repo, rev=None):
        newest = self.hub.repos[repo]["commits"][-1]
        siblings = [{"rfilename": path} for path in newest["files"]]
        private = self.hub.repos[repo]["private"]
        self.send(200, {"id": repo, "modelId": repo, "sha": newest["sha"], "private": private, "siblings": siblings})

    def tree(self, body, repo, rev, folder):
        below = (folder or "").strip("/") + "/" if folder else ""
        found = {path: data for path, data in self.hub.files(repo).items() if path.startswith(below)}
        if below and not found:
            return self.send(404, {"error": "no such folder"}, X_Error_Code="EntryNotFound")
        entries = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for path, data in found.items()
        ]
        return self.send(200, entries)

    def resolve(self, body, repo, rev, file):
        newest = self.hub.repos[repo]["commits"][-1]
        if file not in newest["files"]:
            return self.send(404, {"error": "not there"}, X_Error_Code="EntryNotFound", X_Repo_Commit=newest["sha"])
        data = newest["files"][file]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X_Repo_Commit": newest["sha"]}
        return self.send(200, data, **headers)


def commit(message, files):
    content = json.dumps([message, sorted(files)]) + str(threading.get_ident())
    digest = hashlib.sha1(content.encode() + b"".join(hashlib.sha1(data).digest() for data in files.values()))
    return {"sha": digest.hexdigest(), "message": message, "files": files}


OPEN = (_Handler.validate, _Handler.lfs_put)  # no token is sent there
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES = [
    ("GET", "/api/whoami-v2", _Handler.whoami),
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", f"/api/models/{REPO}/preupload/[^/]+", _Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/[^/]+", _Handler.commit),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", "/lfs/(?P<oid>[0-9a-f]+)", _Handler.lfs_put),
    ("GET", f"/api/models/{REPO}", _Handler.info),
    ("GET", f"/api/models/{REPO}/revision/(?P<rev>[^/]+)", _Handler.info),
    ("GET", f"/api/models/{REPO}/tree/(?P<rev>[^/]+)(?P<folder>/.*)?", _Handler.tree),
    *[(verb, f"/{REPO}/resolve/(?P<rev>[^/]+)/(?P<file>.+)", _Handler.resolve) for verb in ("GET", "HEAD")],
]


class Hub(Loopback):
    """The state of the server, and the server.

    Args:
        token (`str`): What a client must send to write, and to read a private repository.
    """

    handler = _Handler

    def __init__(self, token):
        self.token = token
        self.repos = {}  # id -> {"private": bool, "commits": [{"sha", "message", "files": {path: bytes}}]}
        self.objects = {}  # git-LFS, by sha256
        self.refuse = {}  # regular expression on "METHOD path" -> status
        self.requests = []
        super().__init__()

    def files(self, repo):
        """The files of the newest commit."""
        return self.repos[repo]["commits"][-1]["files"]

    def messages(self, repo):
        return [commit["message"] for commit in self.repos[repo]["commits"]]

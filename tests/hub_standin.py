"""A small stand-in for the Hugging Face Hub, for the real client libraries in real processes.

    with HubStandin() as hub:
        hub.add_user("hf_token", "ada", organisations={"acme": "write"})
        hub.put("model", "acme/run", {"run.toml": "…"})
        subprocess.run([…], env={**os.environ, **hub.environment(tmp_path)})

It serves whoami-v2, the OAuth device flow and userinfo, members of organisations, repository information, trees,
downloads with ranges, new repositories, large files and commits (also of pull requests), and fails on request
(`fault`).
The client reads HF_ENDPOINT when it is imported, hence the processes.
"""

# No `from __future__ import annotations`: FastAPI resolves annotations, and here they are local imports.
import asyncio
import base64
import ctypes
import hashlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote

KINDS = {"model": "models", "dataset": "datasets"}
LARGE = (".safetensors", ".parquet", ".tar", ".br")


class HubStandin:
    """The server as a child process, and what a test may do to it."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self._process.stdout.readline())}"
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()

    def environment(self, home: Path) -> dict[str, str]:
        """Variables for a client's process; `home` takes its HOME, its cache and its tokens."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf"),
            "HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def reset(self) -> None:
        """Forget all users, repositories, faults, codes and the log."""
        self._control("reset")

    def add_user(self, token: str, name: str, organisations: dict[str, str] | None = None, role: str = "read") -> None:
        """Make `token` that of user `name`; organisations: name -> role. role: of the token; "oauth" for a login's."""
        self._control("user", token=token, name=name, organisations=organisations or {}, role=role)

    def move(self, old: str, new: str) -> None:
        """Have the Hub follow a repository's old name to its new one."""
        self._control("move", old=old, new=new)

    def commit_aside(self, repository: str, files: dict[str, str]) -> str:
        """A commit of a pull request in a model repository: it is served, and not on the main branch. Its id."""
        sha = hashlib.sha1(json.dumps(files, sort_keys=True).encode()).hexdigest()
        self._control("aside", repository=repository, files=files, sha=sha)
        return sha

    def put(self, kind: str, repository: str, files: dict[str, str | bytes], access: str = "open") -> None:
        """Make a "model" or "dataset" repository.

        access: "open", "gated", "forbidden", or "broken store", which is that of large files.
        """
        content = {
            path: base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
            for path, data in files.items()
        }
        self._control("put", kind=kind, repository=repository, files=content, access=access)

    def fault(self, match: str, status: int = 503, times: int = 1, delay: float = 0.0) -> None:
        """Answer the next `times` requests whose path contains `match` with `status` after `delay` seconds.

        status 0: answer as usual, but late. status -1: begin to answer, and cut the connection; nothing is done.
        status -2: the same after what was asked for is done.
        """
        self._control("fault", match=match, status=status, times=times, delay=delay)

    def decide(self, user_code: str, decision: str) -> None:
        """Decide a pending device login: "approve:TOKEN" or an OAuth error such as "access_denied"."""
        self._control("decide", user_code=user_code, decision=decision)

    def log(self) -> list[str]:
        """The requests so far, as "METHOD path"."""
        entries: list[str] = self._control("log")["log"]
        return entries

    def files(self, repository: str, kind: str = "model") -> dict[str, bytes]:
        """What is on the main branch of a "model" or "dataset" repository; KeyError without one."""
        found = self._control("files", kind=kind, repository=repository)["files"]
        return {path: base64.b64decode(data) for path, data in found.items()}

    def _control(self, action: str, **arguments: object) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_test/{action}", json.dumps(arguments).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            result: dict[str, Any] = json.load(answer)
        return result


# --- the server's side ---


class State:
    """What the server knows."""

    def __init__(self) -> None:
        self.users: dict[str, dict[str, Any]] = {}
        self.repositories: dict[tuple[str, str], dict[str, Any]] = {}
        self.faults: list[dict[str, Any]] = []
        self.codes: dict[str, str] = {}  # user code -> "authorization_pending" or what was decided
        self.moved: dict[str, str] = {}
        self.objects: dict[str, bytes] = {}  # large files by their SHA-256
        self.log: list[str] = []

    def control(self, action: str, body: dict[str, Any]) -> dict[str, Any]:
        """Do what a test asks for."""
        if action == "reset":
            self.__init__()  # type: ignore[misc]
        elif action == "user":
            self.users[body["token"]] = body
        elif action == "put":
            files = {path: base64.b64decode(data) for path, data in body["files"].items()}
            sha = hashlib.sha1(json.dumps(body["files"], sort_keys=True).encode()).hexdigest()
            repository = {"files": files, "access": body["access"], "sha": sha}
            self.repositories[KINDS[body["kind"]], body["repository"]] = repository
        elif action == "move":
            self.moved[body["old"]] = body["new"]
        elif action == "aside":
            files = {path: text.encode() for path, text in body["files"].items()}
            self.repositories["models", body["repository"]].setdefault("aside", {})[body["sha"]] = files
        elif action == "fault":
            self.faults.append(body)
        elif action == "decide":
            self.codes[body["user_code"]] = body["decision"]
        elif action == "files":
            files = self.repositories.get((KINDS[body["kind"]], body["repository"]), {}).get("files")
            return {} if files is None else {"files": {path: base64.b64encode(files[path]).decode() for path in files}}
        return {"log": self.log}


def serve() -> None:
    """Serve on a free port, print it, end with the parent."""
    import uvicorn
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse

    state = State()
    app = FastAPI()

    def error(status: int, code: str = "", message: str = "") -> Response:
        headers = {"X-Error-Code": code, "X-Error-Message": message or code, "X-Request-Id": "stand-in"}
        return JSONResponse({"error": message or code}, status, {key: value for key, value in headers.items() if value})

    @app.middleware("http")
    async def record_and_fail(request: Request, call_next: Any) -> Response:
        path = request.scope["raw_path"].decode()
        if not path.startswith("/_test/"):
            state.log.append(f"{request.method} {path}")
            for fault in state.faults:
                if fault["match"] in path and fault["times"] > 0:
                    fault["times"] -= 1
                    await asyncio.sleep(fault["delay"])
                    if fault["status"] == -2:
                        await call_next(request)
                    if fault["status"] < 0:
                        return Response(b"", 200, {"Content-Length": "100"})
                    if fault["status"]:
                        return error(fault["status"], message="fault on request")
                    break
        return await call_next(request)  # type: ignore[no-any-return]

    @app.post("/_test/{action}")
    async def control(action: str, request: Request) -> dict[str, Any]:
        return state.control(action, await request.json())

    def user_of(request: Request) -> dict[str, Any] | None:
        return state.users.get(request.headers.get("authorization", "").removeprefix("Bearer "))

    @app.get("/api/whoami-v2")
    async def whoami(request: Request) -> Response:
        if (user := user_of(request)) is None:
            return error(401, message="Invalid credentials in Authorization header")
        name, role = user["name"], user["role"]
        organisations = [
            {"type": "org", "id": org, "name": org, "fullname": org.title(), "roleInOrg": role}
            for org, role in user["organisations"].items()
        ]
        access: dict[str, Any] = {"accessToken": {"displayName": f"token of {name}", "role": role}}
        auth = {"type": "oauth"} if role == "oauth" else {"type": "access_token", **access}
        answer = {"type": "user", "id": name, "name": name, "fullname": name.title(), "auth": auth}
        return JSONResponse(answer | {"orgs": organisations})

    @app.get("/oauth/userinfo")
    async def userinfo(request: Request) -> Response:
        if (user := user_of(request)) is None:
            return error(401, message="Invalid token")
        # `name` is what somebody likes to be called: here, the name of an organisation that they are not in.
        organisations = [
            {"sub": name, "name": "acme", "preferred_username": name, "roleInOrg": role}
            for name, role in user["organisations"].items()
        ]
        answer = {"sub": user["name"], "name": "Anyone", "preferred_username": user["name"]}
        return JSONResponse(answer | {"orgs": organisations})

    @app.get("/api/organizations/{organisation}/members")
    async def members(organisation: str, page: int = 0) -> Response:
        found = {
            user["name"]
            for user in state.users.values()
            if organisation.lower() in {name.lower() for name in user["organisations"]}
        }
        if not found:
            return error(404, "RepoNotFound", "no such organization")
        names = sorted(found)
        answer = [{"user": name, "fullname": name.title(), "type": "user"} for name in names[2 * page : 2 * page + 2]]
        more = f'<{state_url}/api/organizations/{organisation}/members?page={page + 1}>; rel="next"'
        return JSONResponse(answer, headers={"Link": more} if len(names) > 2 * page + 2 else {})

    def may_write(request: Request, owner: str) -> bool:
        user = user_of(request)
        if user is None or user["role"] != "write":
            return False
        return user["name"] == owner or user["organisations"].get(owner) in ("write", "admin")

    @app.post("/api/validate-yaml")
    async def validate_yaml() -> dict[str, Any]:
        return {"errors": [], "warnings": []}

    @app.post("/api/repos/create")
    async def create(request: Request) -> Response:
        body = await request.json()
        owner = body.get("organization") or (user_of(request) or {"name": "?"})["name"]
        if not may_write(request, owner):
            return error(403, message="You don't have the rights to create a model under this namespace")
        name = f"{owner}/{body['name']}"
        kind = KINDS[body.get("type") or "model"]
        answer = {"url": f"{state_url}/{'datasets/' if kind == 'datasets' else ''}{name}", "name": name}
        if (kind, name) in state.repositories:
            return JSONResponse({**answer, "error": "You already created this model repo"}, 409)
        private = body.get("private") or body.get("visibility") == "private"
        state.repositories[kind, name] = {"files": {}, "access": "open", "sha": "0" * 40, "private": private}
        return JSONResponse(answer)

    @app.post("/api/{kind}/{owner}/{name}/preupload/{revision}")
    async def preupload(kind: str, owner: str, name: str, revision: str, request: Request) -> Response:
        if not may_write(request, owner):
            return error(403, message="Forbidden")
        files = (await request.json())["files"]
        modes = {one["path"]: "lfs" if one["path"].endswith(LARGE) else "regular" for one in files}
        told = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        return JSONResponse({"files": told})

    @app.post("/{owner}/{name}.git/info/lfs/objects/batch")
    @app.post("/datasets/{owner}/{name}.git/info/lfs/objects/batch")
    async def batch(owner: str, name: str, request: Request) -> Response:
        if not may_write(request, owner):
            return error(403, message="Forbidden")
        asked = [{"oid": one["oid"], "size": one["size"]} for one in (await request.json())["objects"]]
        for one in asked:
            if one["oid"] not in state.objects:
                one["actions"] = {"upload": {"href": f"{state_url}/lfs/{one['oid']}"}}
        return JSONResponse({"transfer": "basic", "objects": asked})

    @app.put("/lfs/{oid}")
    async def upload(oid: str, request: Request) -> Response:
        data = await request.body()
        if hashlib.sha256(data).hexdigest() != oid:
            return error(400, message="not what was announced")
        state.objects[oid] = data
        return Response()

    @app.post("/api/{kind}/{owner}/{name}/commit/{revision}")
    async def commit(kind: str, owner: str, name: str, revision: str, request: Request) -> Response:
        if not may_write(request, owner):
            return error(403, message="Forbidden")
        repository = state.repositories[kind, f"{owner}/{name}"]
        entries = [json.loads(line) for line in (await request.body()).splitlines()]
        if entries[0]["value"].get("parentCommit") not in (None, repository["sha"]):
            return error(412, message="A commit has happened since. Please refresh and try again.")
        files = dict(repository["files"])
        for entry in entries[1:]:
            path = entry["value"]["path"]
            if entry["key"] == "file":
                files[path] = base64.b64decode(entry["value"]["content"])
            elif entry["key"] == "lfsFile" and entry["value"]["oid"] in state.objects:
                files[path] = state.objects[entry["value"]["oid"]]
            elif entry["key"] == "deletedFile" and path in files:
                del files[path]
            else:
                return error(400, message=f"no such file: {path}")
        repository["files"], repository["changed"] = files, datetime.now(UTC).isoformat().replace("+00:00", "Z")
        repository["sha"] = hashlib.sha1(f"{repository['sha']} {sorted(repository['files'])}".encode()).hexdigest()
        url = f"{state_url}/{owner}/{name}/commit/{repository['sha']}"
        return JSONResponse({"commitOid": repository["sha"], "commitUrl": url, "success": True})

    @app.post("/oauth/device")
    async def device() -> dict[str, Any]:
        code = f"CODE-{len(state.codes) + 1:04d}"
        state.codes[code] = "authorization_pending"
        page = f"{state_url}/device"
        return {
            "device_code": code,
            "user_code": code,
            "verification_uri": page,
            "expires_in": 60,
            "interval": 0.05,
        }

    @app.post("/oauth/token")
    async def token(request: Request) -> Response:
        form = parse_qs((await request.body()).decode())
        decision = state.codes.get(form.get("device_code", [""])[0], "expired_token")
        if not decision.startswith("approve:"):
            return JSONResponse({"error": decision}, 400)
        answer = {"access_token": decision.removeprefix("approve:"), "token_type": "bearer"}
        return JSONResponse({**answer, "refresh_token": "refresh", "expires_in": 30 * 86400})

    def found(kind: str, name: str) -> dict[str, Any] | Response:
        repository = state.repositories.get((kind, state.moved.get(name, name)))
        if repository is None:
            return error(404, "RepoNotFound", "Repository not found")
        if repository["access"] == "gated":
            return error(403, "GatedRepo", "Access to this repository is restricted")
        if repository["access"] == "forbidden":
            return error(403, message="Forbidden")
        return repository

    def entry(path: str, data: bytes) -> dict[str, Any]:
        blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
        return {"type": "file", "oid": blob, "size": len(data), "path": path}

    @app.get("/api/{rest:path}")
    async def information(request: Request) -> Response:
        # Revision and path are one quoted segment each, so the raw path counts.
        raw = request.scope["raw_path"].decode()
        if raw == "/api/store":
            facts = {"X-Xet-Cas-Url": state_url, "X-Xet-Access-Token": "-", "X-Xet-Token-Expiration": str(2**40)}
            return Response(headers=facts)
        match = re.fullmatch(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)(?:/(revision|tree)/([^/]+)(/.*)?)?", raw)
        if match is None:
            return error(404, "RepoNotFound", "no such address")
        kind, name, what, revision, folder = match.groups()
        repository = found(kind, unquote(name))
        if isinstance(repository, Response):
            return repository
        if revision not in (None, "main", repository["sha"]):
            return error(404, "RevisionNotFound", "Invalid rev id")
        files: dict[str, bytes] = repository["files"]
        if what != "tree":
            siblings = [{"rfilename": path} for path in files]
            shown = state.moved.get(unquote(name), unquote(name))
            private = bool(repository.get("private"))
            known = {"id": shown, "sha": repository["sha"], "private": private, "siblings": siblings}
            return JSONResponse(known | {"lastModified": repository.get("changed")})
        start = unquote(folder or "").strip("/")
        start = f"{start}/" if start else ""
        items = [entry(path, data) for path, data in files.items() if path.startswith(start)]
        folders = {path.rpartition("/")[0] for path in files if path.startswith(start) and "/" in path}
        items += [{"type": "directory", "oid": "0" * 40, "path": path} for path in sorted(folders)]
        if start and not items:
            return error(404, "EntryNotFound", "no such folder")
        return JSONResponse(items)

    @app.api_route("/{rest:path}", methods=["GET", "HEAD"])
    async def resolve(request: Request) -> Response:
        raw = request.scope["raw_path"].decode()
        match = re.fullmatch(r"/(datasets/)?([^/]+(?:/[^/]+)?)/resolve/([^/]+)/(.+)", raw)
        if match is None:
            return error(404, "RepoNotFound", "no such address")
        prefix, name, revision, path = match.groups()
        repository = found("datasets" if prefix else "models", unquote(name))
        if isinstance(repository, Response):
            return repository
        aside = repository.get("aside", {})
        if revision not in ("main", repository["sha"], *aside):
            return error(404, "RevisionNotFound", "Invalid rev id")
        commit = {"X-Repo-Commit": repository["sha"]}
        data = aside.get(revision, repository["files"]).get(unquote(path))
        if data is None:
            missing = error(404, "EntryNotFound", "Entry not found")
            missing.headers.update(commit)
            return missing
        headers = {**commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if repository["access"] == "broken store":
            headers |= {"X-Xet-Hash": hashlib.sha256(data).hexdigest(), "X-Xet-Refresh-Route": f"{state_url}/api/store"}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
        if request.method == "HEAD" or wanted is None:
            headers["Content-Length"] = str(len(data))
            return Response(b"" if request.method == "HEAD" else data, 200, headers)
        first, last = wanted.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        end = min(int(last), len(data) - 1) if first and last else len(data) - 1
        if start >= len(data):
            return Response(b"", 416, {**headers, "Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
        return Response(data[start : end + 1], 206, headers)

    listener = socket.create_server(("127.0.0.1", 0))
    state_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    print(listener.getsockname()[1], flush=True)  # connections wait in the listener until the server is up
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listener])


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the test process
    serve()

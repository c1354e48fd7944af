"""A small stand-in for the Hugging Face Hub, for the real client libraries in real processes.

    with HubStandin() as hub:
        hub.add_user("hf_token", "ada", organisations={"acme": "write"})
        hub.put("model", "acme/run", {"run.toml": "…"})
        subprocess.run([…], env={**os.environ, **hub.environment(tmp_path)})

It serves whoami-v2, the OAuth device flow, repository information, trees and downloads with ranges, and
fails on request (`fault`). The client reads HF_ENDPOINT when it is imported, hence the processes.
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
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, unquote

KINDS = {"model": "models", "dataset": "datasets"}


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

    def add_user(self, token: str, name: str, organisations: dict[str, str] | None = None) -> None:
        """Make `token` that of user `name`; organisations: name -> role."""
        self._control("user", token=token, name=name, organisations=organisations or {})

    def put(self, kind: str, repository: str, files: dict[str, str | bytes], access: str = "open") -> None:
        """Make a "model" or "dataset" repository. access: "open", "gated" or "forbidden"."""
        content = {
            path: base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
            for path, data in files.items()
        }
        self._control("put", kind=kind, repository=repository, files=content, access=access)

    def fault(self, match: str, status: int = 503, times: int = 1, delay: float = 0.0) -> None:
        """Answer the next `times` requests whose path contains `match` with `status` after `delay` seconds.

        status 0: answer as usual, but late.
        """
        self._control("fault", match=match, status=status, times=times, delay=delay)

    def decide(self, user_code: str, decision: str) -> None:
        """Decide a pending device login: "approve:TOKEN" or an OAuth error such as "access_denied"."""
        self._control("decide", user_code=user_code, decision=decision)

    def log(self) -> list[str]:
        """The requests so far, as "METHOD path"."""
        entries: list[str] = self._control("log")["log"]
        return entries

    def _control(self, action: str, **arguments: object) -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_test/{action}", json.dumps(arguments).encode())
        with urllib.request.urlopen(request, timeout=10) as answer:
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
        elif action == "fault":
            self.faults.append(body)
        elif action == "decide":
            self.codes[body["user_code"]] = body["decision"]
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
                    if fault["status"]:
                        return error(fault["status"], message="fault on request")
                    break
        return await call_next(request)  # type: ignore[no-any-return]

    @app.post("/_test/{action}")
    async def control(action: str, request: Request) -> dict[str, Any]:
        return state.control(action, await request.json())

    @app.get("/api/whoami-v2")
    async def whoami(request: Request) -> Response:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        user = state.users.get(token)
        if user is None:
            return error(401, message="Invalid credentials in Authorization header")
        organisations = [
            {"type": "org", "id": name, "name": name, "fullname": name.title(), "roleInOrg": role}
            for name, role in user["organisations"].items()
        ]
        access = {"displayName": f"token of {user['name']}", "role": "read"}
        return JSONResponse(
            {
                "type": "user",
                "id": user["name"],
                "name": user["name"],
                "fullname": user["name"].title(),
                "orgs": organisations,
                "auth": {"type": "access_token", "accessToken": access},
            }
        )

    @app.post("/oauth/device")
    async def device() -> dict[str, Any]:
        code = f"CODE-{len(state.codes) + 1:04d}"
        state.codes[code] = "authorization_pending"
        page = f"{state_url}/device"
        return {
            "device_code": code,
            "user_code": code,
            "verification_uri": page,
            "verification_uri_complete": f"{page}?user_code={code}",
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
        repository = state.repositories.get((kind, name))
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
            return JSONResponse({"id": unquote(name), "sha": repository["sha"], "private": False, "siblings": siblings})
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
        if revision not in ("main", repository["sha"]):
            return error(404, "RevisionNotFound", "Invalid rev id")
        commit = {"X-Repo-Commit": repository["sha"]}
        data = repository["files"].get(unquote(path))
        if data is None:
            missing = error(404, "EntryNotFound", "Entry not found")
            missing.headers.update(commit)
            return missing
        headers = {**commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
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

"""The run's web page over HTTP: the answers under /api, live updates, /metrics, /health, and the page's own files.

Everything may be read by anybody and nothing can be changed. An error is {"detail": "one line for a person"}; 503 says
that the database does not answer or that the coordinator has not looked yet, with Retry-After.
"""

# No `from __future__ import annotations`: FastAPI resolves the annotations of the functions inside `make_app`.
import functools
import mimetypes
import re
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tt_cli.database import DatabaseDown
from tt_cli.identity.rate_limit import address_key
from tt_cli.supervisor.http_server import malformed, problem, problems
from tt_cli.web import notebooks, schemas
from tt_cli.web.index_html import STATIC, index_html
from tt_cli.web.live_updates import EventStream, LiveUpdates
from tt_cli.web.metrics import CONTENT_TYPE, Metrics
from tt_cli.web.queries import DAY_SECONDS, Answers, NothingYet, Window
from tt_cli.web.response_cache import FILE_QUALITY, Representation, ResponseCache, accepted_coding, respond

RETRY_SECONDS = 5
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
MALFORMED = {422: "malformed"}
PICTURE = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}\.(png|jpg|webp|txt)"

Points = Annotated[int, Query(ge=10, le=schemas.MOST_ROWS)]
StepNumber = Annotated[int | None, Query(ge=0, lt=2**53)]


def make_app(answers: Answers, pictures: Path) -> FastAPI:
    """The page of one run. pictures: the folder of those that were drawn."""
    app = FastAPI(title="tt", version="1", docs_url=None, redoc_url=None)
    app.add_middleware(SafeHeaders)
    live, cache = LiveUpdates(answers), ResponseCache()
    metrics = Metrics(answers, live)
    app.add_exception_handler(DatabaseDown, _later("the run's history does not answer at the moment"))
    app.add_exception_handler(NothingYet, _later("the swarm has not been looked at yet"))
    app.add_exception_handler(RequestValidationError, malformed)

    def cached(request: Request, key: Hashable, seconds: float, make: Callable[[], Any]) -> Response:
        return respond(request, cache.get(key, seconds, lambda: Representation.of_json(make())))

    def described(form: type[Any], refusals: Mapping[int, str] | None = None) -> dict[str, Any]:
        reasons = {503: "the database does not answer, or nothing is known yet", **(refusals or {})}
        return {
            "response_model": None,
            "responses": {
                200: {"model": form},
                304: {"description": "Still what If-None-Match names"},
                **problems(reasons),
            },
        }

    def publish(name: str, form: type[Any], seconds: float, make: Callable[[], Any], description: str) -> None:
        def answer(request: Request) -> Response:
            return cached(request, name, seconds, make)

        app.get(f"/api/{name}", name=name, description=description, **described(form))(answer)

    publish("run", schemas.Run, 5.0, answers.run, "The run, and how to join it.")
    publish("snapshot", schemas.Snapshot, 1.0, answers.snapshot, "The swarm now.")

    @app.get("/api/history", **described(schemas.Steps, MALFORMED))
    def history(request: Request, points: Points = 1000, first: StepNumber = None, last: StepNumber = None) -> Response:
        """The recorded steps, thinned."""
        answers.history.look()
        key = ("history", points, first, last, answers.history.mark)
        return cached(request, key, DAY_SECONDS, lambda: answers.steps(points, first, last))

    @app.get("/api/activity", **described(schemas.Activity, MALFORMED))
    def activity(
        request: Request,
        points: Points = 1000,
        since: Annotated[float, Query(ge=0, le=1e11, allow_inf_nan=False)] = 0.0,
    ) -> Response:
        """The number of trainers and their speed over time."""
        return cached(request, ("activity", points, since // 30), 15.0, lambda: answers.activity(points, since))

    @app.get("/api/leaderboard", **described(schemas.Leaderboard, MALFORMED))
    def leaderboard(request: Request, window: Window = "ever") -> Response:
        """Samples by user, most first."""
        return cached(request, ("leaderboard", window), 10.0, lambda: answers.leaderboard(window))

    publish("peers", schemas.Peers, 10.0, answers.peers, "Everybody who has been seen.")
    drawn = functools.partial(answers.checkpoints, pictures)
    publish("checkpoints", schemas.Checkpoints, 5.0, drawn, "Checkpoints, and what was drawn from them.")
    publish("rounds", schemas.Rounds, 2.0, answers.rounds, "The newest averaging rounds.")
    publish("figures", schemas.Figures, 10.0, answers.figures, "This run's own numbers for the five challenges.")

    @app.get("/api/calculator", **described(schemas.Table, {**MALFORMED, 404: "no such model"}))
    def calculator(request: Request, model: Annotated[str, Query(max_length=40)] = "run") -> Response:
        """Memory that training takes: all answers for one model, of which the page shows what is asked."""
        if model not in answers.tables.names:
            raise HTTPException(404, "no such model")
        return cached(request, ("calculator", model), DAY_SECONDS, lambda: answers.calculator(model))

    @app.get("/api/events", include_in_schema=False)
    async def events(request: Request) -> Any:
        """Live updates, as server-sent events."""
        address = address_key(request.client.host if request.client else None)
        if not live.has_room(address):
            raise HTTPException(503, "too many follow live updates: ask again and again instead", {"Retry-After": "60"})
        return EventStream(live, accepted_coding(request, "gzip") == "gzip", address)

    @app.get("/metrics", response_class=PlainTextResponse)
    def numbers() -> Response:
        """Figures for Prometheus."""
        text = cache.get("metrics", 1.0, metrics.text)
        return Response(text, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})

    @app.get("/health", response_model=None, responses={200: {"model": schemas.Health}, 503: {"model": schemas.Health}})
    def health() -> Response:
        """The state of the parts, and what does not work."""
        report = cache.get("health", 1.0, answers.health)  # which writes, and waits for the disk
        return JSONResponse(report, 200 if report["status"] == "ok" else 503, {"Cache-Control": "no-store"})

    @app.get("/pictures/{name}", include_in_schema=False)
    def picture(name: str) -> Response:
        """One that was drawn from a checkpoint."""
        file = pictures / name
        if not re.fullmatch(PICTURE, name) or not file.is_file():
            raise HTTPException(404, "no such picture")
        return FileResponse(file, headers={"Cache-Control": "public, max-age=86400"})

    @app.get("/notebooks/{name}", include_in_schema=False)
    def joining(name: str) -> Response:
        """One for Colab or Kaggle, with the run in it."""
        facts = answers.run()
        if f"notebooks/{name}" not in facts["join"]["notebooks"]:
            raise HTTPException(404, "no such notebook")
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return Response(notebooks.notebook(name, facts), 200, headers, notebooks.CONTENT_TYPE)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def index(request: Request) -> Response:
        """The page, with what the run is written into it."""
        if not (STATIC / "index.html").is_file():
            return PlainTextResponse(
                "The page has not been built: scripts/build_page builds it. The answers are under /api.\n"
            )
        page = cache.get("index", 5.0, lambda: Representation(index_html(answers.run()).encode()))
        return respond(request, page, "text/html; charset=utf-8")

    @app.api_route("/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    def asset(request: Request, name: str) -> Response:
        """One of the files that the page loads."""
        if name not in page_files(STATIC):
            raise HTTPException(404, "no such file")
        if name == "index.html":
            return index(request)
        return respond(request, page_files(STATIC)[name], mimetypes.guess_type(name)[0] or "text/plain")

    return app


@functools.cache
def page_files(folder: Path) -> dict[str, Representation]:
    """The built page's files by name, to be compressed as well as can be."""
    return {file.name: Representation(file.read_bytes(), FILE_QUALITY) for file in folder.glob("*")}


class SafeHeaders:
    """Adds to every response what keeps a browser from doing more than the page needs."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")  # asked again, by its ETag
            await send(message)

        await self._app(scope, receive, with_headers)


def _later(words: str) -> Callable[[Request, Exception], Response]:
    return lambda request, error: problem(503, words, RETRY_SECONDS)

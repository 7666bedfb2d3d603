"""The routes of one engine: which path serves what, and that every fault is one JSON body.

Lives in ``server``. A request walks: guard, body, fields, prompt (in a thread of its own: JSON, templates and
tokenizers take time), answer, response. What the interface has and this version has not answers 501 with a line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from strata import version
from strata.errors import EngineError, RequestError, StrataError
from strata.server.answers import Answers
from strata.server.body import parse_body, read_bytes
from strata.server.faults import FieldError, NotServed, error_response, json_bytes
from strata.server.fields import ChatFields, CompletionFields, read_chat, read_completion
from strata.server.guard import LoopbackOnly
from strata.server.respond import respond
from strata.server.shapes import ChatShape, CompletionShape
from strata.server.status import health, metrics_text, status

if TYPE_CHECKING:
    from strata.engine.engine import Request as EngineRequest
    from strata.server.served import ServedEngine

__all__ = ["build_app"]

logger = logging.getLogger(__name__)

# Parts of the interface, and of two others, that this version does not serve.
NOT_SERVED = (
    "responses", "messages", "embeddings", "moderations", "images", "audio", "files", "batches", "fine_tuning",
    "assistants", "threads", "vector_stores", "uploads", "rerank", "score", "realtime", "videos", "conversations",
)  # fmt: skip


def build_app(answers: Answers) -> FastAPI:
    """The application; ``answers`` holds the engine, which stays the caller's."""
    app = FastAPI(title="Strata", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(LoopbackOnly)
    _add_faults(app)
    _add_answers(app, answers)
    _add_views(app, answers)
    for name in NOT_SERVED:
        app.add_api_route(f"/v1/{name}", _not_served, methods=["GET", "POST", "DELETE"])
        app.add_api_route(f"/v1/{name}/{{rest:path}}", _not_served, methods=["GET", "POST", "DELETE"])
    return app


async def _not_served(request: Request) -> Response:
    raise NotServed(request.url.path, "not served by this version", "/v1/chat/completions and /v1/completions are")


def _add_answers(app: FastAPI, answers: Answers) -> None:
    engine = answers.engine

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        data = await read_bytes(request)
        prepared, fields = await answers.prepare(_chat_request, engine, data)
        shape = ChatShape(prepared, engine.name, engine.text.tokenizer, include_usage=fields.include_usage)
        return await respond(request.receive, answers.start(prepared), shape, stream=fields.stream)

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        data = await read_bytes(request)
        prepared, fields, echo = await answers.prepare(_plain_request, engine, data)
        usage = fields.include_usage
        shape = CompletionShape(prepared, engine.name, engine.text.tokenizer, include_usage=usage, echo=echo)
        return await respond(request.receive, answers.start(prepared), shape, stream=fields.stream)


def _add_views(app: FastAPI, answers: Answers) -> None:
    engine = answers.engine
    began, created, about = time.monotonic(), int(time.time()), version.describe()
    model = {"id": engine.name, "object": "model", "created": created, "owned_by": "strata"}
    model["context_length"] = engine.max_context

    @app.get("/health")
    async def tell_health() -> Response:
        return _json(health(answers), 503 if answers.stopping else 200)

    @app.get("/v1/models")
    async def tell_models() -> Response:
        return _json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def tell_model(name: str) -> Response:
        _check_model(name, engine.name)
        return _json(model)

    @app.get("/v1/status")
    async def tell_status() -> Response:
        return _json(status(answers, about, began))

    @app.get("/metrics")
    async def tell_metrics() -> Response:
        return Response(metrics_text(engine), headers={"content-type": CONTENT_TYPE_LATEST})


def _add_faults(app: FastAPI) -> None:
    @app.exception_handler(StrataError)
    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, StrataError)
        if error.http_status >= 500 and not isinstance(error, NotServed):
            logger.error("%s: %s", request.url.path, error)
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        words = f"{request.method} {request.url.path}: {error.detail}"
        hint = "/v1/chat/completions, /v1/completions, /v1/models, /v1/status, /health and /metrics are served"
        return error_response(RequestError(words, hint, http_status=error.status_code, code="no_such_route"))

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # written to nobody

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        words = f"unexpected {type(error).__name__}: {error}"
        return error_response(EngineError(words, "the server's log says where"))


def _read_body(data: bytes, served: str) -> Mapping[str, Any]:
    """The request's JSON object, its ``model`` checked. Raises ``RequestError``."""
    body = parse_body(data)
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise FieldError("model", f"{model!r} is not allowed", f"send {served!r} or leave it out")
    if model:
        _check_model(model, served)
    return body


def _check_model(name: str, served: str) -> None:
    if name != served:
        raise FieldError(
            "model", f"{name!r} is not served", f"served: {served}", http_status=404, code="model_not_found"
        )


def _chat_request(engine: ServedEngine, data: bytes) -> tuple[EngineRequest, ChatFields]:
    fields = read_chat(_read_body(data, engine.name))
    sampling = dict(fields.sampling)
    if "max_tokens" not in sampling and engine.requested.origin("max_tokens") == "default":
        sampling["max_tokens"] = engine.max_context  # the context's end comes first
    if fields.tools and engine.text.tool_format is None:
        raise NotServed("tools", "the chat template of this model has no tool calls that are read", "leave them out")
    prepared = engine.chat_request(
        fields.messages,
        engine.sampling(sampling),
        tools=fields.tools,
        options=fields.options,
        continue_last=fields.continue_last,
    )
    return prepared, fields


def _plain_request(engine: ServedEngine, data: bytes) -> tuple[EngineRequest, CompletionFields, str]:
    """The request, and the prompt's text where the answer begins with it."""
    fields = read_completion(_read_body(data, engine.name))
    prompt = fields.prompt
    prepared = engine.plain_request(prompt, engine.sampling(fields.sampling), parse_special=fields.parse_special)
    if not fields.echo:
        return prepared, fields, ""
    return (
        prepared,
        fields,
        prompt if isinstance(prompt, str) else engine.text.tokenizer.decode(prompt, show_hidden=True),
    )


def _json(value: Mapping[str, Any], code: int = 200) -> Response:
    return Response(json_bytes(value), code, media_type="application/json")

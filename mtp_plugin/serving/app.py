"""The HTTP endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mtp_plugin.errors import format_value
from mtp_plugin.hosts.embedded import LLM
from mtp_plugin.serving import page
from mtp_plugin.serving.errors import APIError, Problem, json_response
from mtp_plugin.serving.generation import EngineService, Generation
from mtp_plugin.serving.protocol import (
    Body,
    ChatBody,
    CompletionBody,
    ConversationBody,
    DetokenizeBody,
    TokenizeBody,
    TokenizeChatBody,
    check_sizes,
    parse_body,
    sampling_params,
)
from mtp_plugin.serving.reasoning import ReasoningSplit
from mtp_plugin.serving.responses import ChatWriter, CompletionWriter, Writer
from mtp_plugin.serving.security import Guard, read_json
from mtp_plugin.serving.settings import ServerSettings
from mtp_plugin.version import __version__

_logger = logging.getLogger(__name__)
T = TypeVar("T")


class EventStreamResponse(StreamingResponse):
    """A stream that aborts its generation when it ends, also before its first event."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(writer.stream(), media_type="text/event-stream")
        self._generation = writer.generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close()


class Endpoints:
    """One method for each endpoint."""

    def __init__(self, service: EngineService) -> None:
        self._service = service
        self._settings = service.settings
        self._llm = service.llm
        self._started = int(time.time())

    # ---- generation -------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body, problems = await self._read(request, CompletionBody)
        if body is None:
            raise APIError(400, *problems)
        prompts = body.prompts()
        params, more = sampling_params(body)
        problems += more
        self._check_sizes(prompts, "prompt", problems)
        decode = self._service.decoder(params)

        def writer(generation: Generation) -> Writer:
            texts = [
                prompt if isinstance(prompt, str) else decode(prompt) if body.echo else ""
                for prompt in prompts
            ]
            splits = [
                ReasoningSplit(None, prompt, decode)
                for prompt in generation.prompts
                for _ in range(params.n)
            ]
            model = self._settings.model_name
            return CompletionWriter(body, generation, model, texts, splits, decode)

        submit = self._service.submit(prompts, params, problems, "prompt")
        return await self._respond(request, submit, writer)

    async def chat_completions(self, request: Request) -> Response:
        """``POST /v1/chat/completions``."""
        body, problems = await self._read(request, ChatBody)
        if body is None:
            raise APIError(400, *problems)
        params, more = sampling_params(body)
        problems += more
        prompt = await self._render(body, problems)
        decode = self._service.decoder(params)

        def writer(generation: Generation) -> Writer:
            splits = [
                ReasoningSplit(self._service.thinking, generation.prompts[0], decode)
                for _ in range(params.n)
            ]
            model = self._settings.model_name
            return ChatWriter(body, generation, model, [prompt], splits, decode)

        submit = self._service.submit([prompt], params, problems, "messages")
        return await self._respond(request, submit, writer)

    async def _respond(
        self,
        request: Request,
        submit: Awaitable[Generation],
        make_writer: Callable[[Generation], Writer],
    ) -> Response:
        """Submit a request and return its response; whatever fails aborts its generation."""
        generation = await submit
        try:
            writer = make_writer(generation)
            if writer.body.stream:
                return EventStreamResponse(writer)
            if await unless_disconnected(request, writer.wait()) is None:
                return Response(status_code=499)  # it is not sent
            parts = yielding(writer.whole())
            if writer.has_logprobs:
                return StreamingResponse(parts, media_type="application/json")
            content = "".join([part async for part in parts])
            return Response(content, media_type="application/json")
        except BaseException:
            generation.close()
            raise

    async def _render(self, body: ConversationBody, problems: list[Problem]) -> str:
        """Return the prompt of a conversation."""
        options = {**body.template_options(), "chat_template": self._settings.chat_template}
        if not self._has_chat_template:
            message = (
                "messages: the checkpoint has no chat template; start the server with "
                "--chat-template FILE, or send a prompt to v1/completions"
            )
            raise APIError(400, *problems, ("messages", message))
        contents = [str(message.get("content") or "") for message in options["messages"]]
        self._check_sizes(["".join(contents)], "messages", problems)
        render = partial(self._llm.apply_chat_template, **options)
        try:
            return await self._service.run_tokenizer(render, "messages")
        except APIError as error:
            raise APIError(error.status, *problems, *error.problems) from None

    @property
    def _has_chat_template(self) -> bool:
        own = getattr(self._llm.tokenizer, "chat_template", None)
        return bool(self._settings.chat_template or own)

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body | None, list[Problem]]:
        """Return the body of a request and its problems.

        Raises:
            APIError: no body can be read, or it names another model.
        """
        return self._parse(kind, await read_json(request, self._settings))

    def _parse(
        self, kind: type[Body], content: dict[str, Any]
    ) -> tuple[Body | None, list[Problem]]:
        body, problems = parse_body(kind, content)
        model = getattr(body, "model", None)
        expected = self._settings.model_name
        if model not in (None, expected):
            message = f"model: {format_value(model)} is not served, expected {expected!r}"
            if not problems:
                raise APIError(404, ("model", message), code="model_not_found")
            problems.append(("model", message))
        return body, problems

    def _check_sizes(self, prompts: list[Any], field: str, problems: list[Problem]) -> None:
        check_sizes(
            prompts,
            field,
            problems,
            max_prompts=self._settings.max_prompts,
            max_chars=self._settings.max_prompt_chars,
        )

    # ---- tokenizer --------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``."""
        content = await read_json(request, self._settings)
        text: str
        body: TokenizeBody | TokenizeChatBody | None
        if "messages" in content:
            chat, problems = self._parse(TokenizeChatBody, content)
            text = await self._render(chat, problems) if chat is not None else ""
            body = chat
        else:
            body, problems = self._parse(TokenizeBody, content)
            text = body.prompt if body is not None else ""
        if body is None or problems:
            raise APIError(400, *problems)
        self._check_sizes([text], "prompt", [])
        tokens, texts = await self._service.tokenize(
            text, body.add_special_tokens, with_texts=body.return_token_strs
        )
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._llm.max_seq_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            answer["token_strs"] = texts
        return json_response(answer)

    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``."""
        body, problems = await self._read(request, DetokenizeBody)
        if body is None or problems:
            raise APIError(400, *problems)
        if len(body.tokens) > self._settings.max_prompt_chars:
            message = f"tokens: at most {self._settings.max_prompt_chars} are served"
            raise APIError(400, ("tokens", message))
        return json_response({"prompt": await self._service.detokenize(body.tokens)})

    # ---- state ------------------------------------------------------------------------------

    async def models(self) -> Response:
        """``GET /v1/models``."""
        model = {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "mtp_plugin",
            "max_model_len": self._llm.max_seq_len,
            "has_chat_template": self._has_chat_template,
        }
        return json_response({"object": "list", "data": [model]})

    async def health(self) -> Response:
        """``GET /health``: 200, or 503 when the engine has ended."""
        return Response(status_code=200 if self._service.is_healthy else 503)

    async def version(self) -> Response:
        """``GET /version``."""
        return json_response({"version": __version__})

    async def metrics(self) -> Response:
        """``GET /metrics``."""
        return Response(self._service.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def yielding(parts: Iterable[str]) -> AsyncIterator[str]:
    """Yield parts of a response; the event loop serves other requests between two of them."""
    for part in parts:
        yield part
        await asyncio.sleep(0)


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of ``work``; None: the client disconnected, and ``work`` was cancelled."""

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_for_disconnect())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def make_app(llm: LLM, settings: ServerSettings | None = None) -> FastAPI:
    """Return the ASGI application that serves an `LLM`; ``app.state.service`` is its state."""
    settings = settings or ServerSettings()
    service = EngineService(llm, settings)
    endpoints = Endpoints(service)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.service = service
    routes = (
        ("POST", "/v1/completions", endpoints.completions),
        ("POST", "/v1/chat/completions", endpoints.chat_completions),
        ("POST", "/tokenize", endpoints.tokenize),
        ("POST", "/detokenize", endpoints.detokenize),
        ("GET", "/v1/models", endpoints.models),
        ("GET", "/health", endpoints.health),
        ("GET", "/version", endpoints.version),
        ("GET", "/metrics", endpoints.metrics),
        ("GET", "/", page.page),
    )
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.add_exception_handler(APIError, _on_api_error)
    served = ", ".join(f"{method} {path}" for method, path, _ in routes)
    app.add_exception_handler(HTTPException, partial(_on_http_exception, served=served))
    app.add_exception_handler(Exception, _on_defect)
    app.add_middleware(Guard, settings=settings)
    return app


Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _on_api_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, APIError):
        raise error
    return error.response()


async def _on_http_exception(request: Request, error: Exception, *, served: str) -> Response:
    """Return OpenAI's error object for an unknown path or method, which names the endpoints."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else "internal error"
    if status in (404, 405):
        detail += f": {request.method} {request.url.path[:100]}; expected one of {served}"
    headers = error.headers if isinstance(error, HTTPException) else None
    return APIError(status, (None, detail), headers=headers).response()


async def _on_defect(_: Request, error: Exception) -> Response:  # noqa: ARG001
    """Hide the details of a defect, which the server logs."""
    return APIError(500, (None, "internal error")).response()

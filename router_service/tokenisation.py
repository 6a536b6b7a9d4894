"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer that serves, for clients that count tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from common.model.config import ModelConfig
from common.model.tokenizer import Tokenizer, decode
from router_service.chat_encoding import ChatEncoding
from router_service.chat_protocol import ChatMessage, check_messages
from router_service.errors import HTTPError, bad_request
from router_service.protocol import check_text


class TokenizeRequest(BaseModel):
    """Either a prompt, or messages as /v1/chat/completions would encode them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool = Field(False, description="put the beginning of sequence before a prompt")
    return_token_strs: bool = False


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]


def add_tokenisation(
    app: FastAPI,
    config: ModelConfig,
    tokenizer: Tokenizer,
    encoding: ChatEncoding,
    model_name: str,
    context: Callable[[], int],
) -> None:
    def check_model(model: str | None) -> None:
        if model is not None and model != model_name:
            raise HTTPError(404, f"the model {model!r} does not exist", "model", "model_not_found")

    def encoded(body: TokenizeRequest) -> list[int]:
        if body.messages is not None:
            check_messages(body.messages)
            return encoding.encode(body.messages, thinks=None, most=False).token_ids
        check_text(body.prompt or "", "prompt")
        start = [config.bos_token_id] if body.add_special_tokens else []
        return start + tokenizer.encode(body.prompt or "")

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("one of prompt and messages is required", "prompt", "missing_required_parameter")
        # Long texts are tokenised beside the event loop: other clients' tokens go on meanwhile.
        tokens = await asyncio.to_thread(encoded, body)
        texts = [tokenizer.token_text(token) for token in tokens] if body.return_token_strs else None
        return {"count": len(tokens), "max_model_len": context(), "tokens": tokens, "token_strs": texts}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        check_model(body.model)
        if body.tokens and max(body.tokens) >= config.vocab_size:
            raise bad_request(f"tokens: {max(body.tokens)} is not below {config.vocab_size}", "tokens")
        return {"prompt": decode(tokenizer, body.tokens)}

    @app.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "hash": tokenizer.hash,
            "vocab_size": config.vocab_size,
            "bos_token": tokenizer.token_text(config.bos_token_id),
            "bos_token_id": config.bos_token_id,
            "eos_token": tokenizer.token_text(config.eos_token_id[0]),
            "eos_token_id": config.eos_token_id[0],
            "pad_token": None,
            "chat_encoding": encoding.name,
            "chat_template": None,
        }

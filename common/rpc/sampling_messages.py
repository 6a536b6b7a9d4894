"""SamplingSettings and sampled tokens to and from their messages."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

from common.rpc.gen.dsv4pd.v1 import common_pb2
from common.sampling import SampledToken, SamplingSettings


def from_message(message: common_pb2.SamplingParams) -> SamplingSettings:
    """Unset fields get their neutral value; without a seed one is drawn."""
    return SamplingSettings(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        seed=message.seed if message.HasField("seed") else secrets.randbits(63),
        logit_bias=dict(message.logit_bias),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def to_message(settings: SamplingSettings) -> common_pb2.SamplingParams:
    values = dataclasses.asdict(settings)
    return common_pb2.SamplingParams(**{name: value for name, value in values.items() if value is not None})


def token_to_message(token: SampledToken) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
        top=[common_pb2.TokenLogprob(token_id=i, logprob=p) for i, p in token.top],
    )


def tokens_to_messages(tokens: Sequence[SampledToken]) -> list[common_pb2.TokenLogprobs]:
    return [token_to_message(token) for token in tokens]


def token_from_message(message: common_pb2.TokenLogprobs) -> SampledToken:
    top = tuple((pair.token_id, pair.logprob) for pair in message.top)
    return SampledToken(message.chosen.token_id, message.chosen.logprob, top)

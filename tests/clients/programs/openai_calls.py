"""Runs where the openai package is: one call of each kind; prints what came as JSON. Arguments: base URL, prompt."""

import json
import sys
from typing import Any

from openai import BadRequestError, NotFoundError, OpenAI

url, prompt = sys.argv[1:]
client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
settings: dict[str, Any] = {"model": "dsv4-nano", "temperature": 0, "stop": "\n"}
text = settings | {"prompt": prompt, "max_tokens": 6}
chat = settings | {"messages": [{"role": "user", "content": prompt}], "max_completion_tokens": 6}
usage = {"stream_options": {"include_usage": True}}

found: dict[str, Any] = {"models": [model.id for model in client.models.list()]}
whole = client.completions.create(**text, logprobs=2, echo=True)
found["text"] = whole.choices[0].text.removeprefix(prompt)
found["first_logprob"] = whole.choices[0].logprobs.token_logprobs[0]
found["usage"] = whole.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"})
chunks = list(client.completions.create(**text, stream=True, **usage))
found["streamed"] = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
found["streamed_usage"] = chunks[-1].usage.completion_tokens
message = client.chat.completions.create(**chat, n=2, logprobs=True, top_logprobs=2)
found["chat"] = [choice.message.content for choice in message.choices]
found["chat_tokens"] = "".join(token.token for token in message.choices[0].logprobs.content)
with client.chat.completions.stream(**chat) as stream:
    kinds = {event.type for event in stream}
    found["chat_streamed"] = stream.get_final_completion().choices[0].message.content
found["chat_events"] = sorted(kinds)
raw = client.completions.with_raw_response.create(**text, extra_headers={"x-request-id": "from-openai"})
found["request_id"] = raw.headers["x-request-id"]
try:
    client.completions.create(**text, extra_body={"nonsense": 1})
except BadRequestError as error:
    found["bad"] = [error.param, error.code, error.type]
try:
    client.chat.completions.create(**(chat | {"model": "another"}))
except NotFoundError as error:
    found["missing"] = error.code
print(json.dumps(found))

"""Runs where vllm's files and aiohttp are: what `vllm bench serve` does for each request, several at once; prints what came as
JSON. Arguments: base URL, prompt. The file is loaded by its path: importing the package would want torch."""

import asyncio
import importlib.util
import json
import sys
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

FILE = Path(sysconfig.get_paths()["platlib"]) / "vllm" / "benchmarks" / "lib" / "endpoint_request_func.py"
spec = importlib.util.spec_from_file_location("endpoint_request_func", FILE)
assert spec is not None
assert spec.loader is not None
vllm = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = vllm
spec.loader.exec_module(vllm)
url, prompt = sys.argv[1:]
CALLS = {
    "completions": (vllm.async_request_openai_completions, "/v1/completions"),
    "chat": (vllm.async_request_openai_chat_completions, "/v1/chat/completions"),
}


def asked(path: str, output_tokens: int, **extra: Any) -> Any:
    return vllm.RequestFuncInput(
        prompt=prompt, api_url=url + path, prompt_len=len(prompt), output_len=output_tokens, model="dsv4-nano", **extra
    )


async def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    recall = {"extra_body": {"temperature": 0, "stop": "\n"}}
    async with aiohttp.ClientSession() as session:
        for name, (call, path) in CALLS.items():
            together = (call(asked(path, 6, **recall), session) for _ in range(4))
            found[name] = [asdict(output) for output in await asyncio.gather(*together)]
            # As its benchmark asks: every token that was asked for, whatever the model would say.
            found[f"{name}_to_the_length"] = asdict(await call(asked(path, 20, ignore_eos=True), session))
            found[f"{name}_refused"] = asdict(await call(asked(path, 6, extra_body={"nonsense": 1}), session))
    return found


print(json.dumps(asyncio.run(main())))

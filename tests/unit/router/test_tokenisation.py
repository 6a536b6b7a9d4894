"""The tokenizer over HTTP, and what the router says of itself."""

from hypothesis import given
from hypothesis import strategies as st

from common.model.config import ModelConfig
from common.model.small_checkpoint import small_config
from common.model.tokenizer import ByteTokenizer
from router_service.chat_encoding import THINK
from tests.unit.router.chat_tokenizer import CONTROL, chat_tokenizer
from tests.unit.router.conftest import ServeRouter

TOKENIZER = ByteTokenizer(ModelConfig.from_dict(small_config()))


async def test_tokenize_and_detokenize_are_each_others_inverse(serve_router: ServeRouter):
    router = await serve_router()
    made = (await router.client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
    assert made == {
        "count": 3, "max_model_len": 4096, "tokens": [101, 199, 173], "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9"],
    }  # fmt: skip
    back = await router.client.post("/detokenize", json={"tokens": made["tokens"]})
    assert back.json() == {"prompt": "aé"}
    started = (await router.client.post("/tokenize", json={"prompt": "a", "add_special_tokens": True})).json()
    assert started["tokens"] == [0, 101]


async def test_messages_are_tokenised_as_a_chat_would(serve_router: ServeRouter):
    router = await serve_router(chat_tokens=True)
    made = (await router.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
    assert made["tokens"][-1] == CONTROL[THINK]
    assert made["count"] == 5


async def test_bad_bodies_are_400_by_name(serve_router: ServeRouter):
    router = await serve_router()
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "more": 1}, "more"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ):
        answer = await router.client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), (path, body)
    assert (await router.client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404


async def test_the_tokenizer_and_the_server_are_described(serve_router: ServeRouter):
    router = await serve_router()
    info = (await router.client.get("/tokenizer_info")).json()
    assert (info["bos_token_id"], info["eos_token_id"], info["eos_token"]) == (0, 1, "<eos>")
    assert (info["vocab_size"], info["chat_encoding"]) == (260, "plain")
    server = (await router.client.get("/server_info")).json()
    assert server["model"]["max_model_len"] == 4096
    (worker,) = server["workers"]["decode"]
    assert worker["usable"]


@given(st.text())
def test_plain_encoding_of_any_text_comes_back(text: str):
    text = text.encode("utf-8", "ignore").decode()
    for tokenizer in (TOKENIZER, chat_tokenizer()):
        assert b"".join(tokenizer.id_to_bytes(t) for t in tokenizer.encode_plain(text)).decode() == text

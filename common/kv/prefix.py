"""Names of prompt prefixes: a hash chain over blocks of one page's tokens, so that equal names mean equal KV.

Link i names tokens 0 ... 256 * (i + 1) - 1 of a sequence: it is the hash of link i - 1 and the block's token ids. The
chain begins with the hashes of model and tokenizer, since other weights make other KV of the same tokens. KV of a token
depends on the tokens up to it and on nothing else, so two sequences with one link have one content for that page.
Links are 128 bits of BLAKE2b: nobody can make a prompt that is taken for another's.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from common.kv.layout import C4_PAGE, LOGICAL_PAGE_TOKENS

LINK_BYTES = 16


def chain_seed(model_hash: str, tokenizer_hash: str) -> bytes:
    """What the first link of every chain continues."""
    return blake2b(f"{model_hash}\n{tokenizer_hash}".encode(), digest_size=LINK_BYTES).digest()


def extend_chain(seed: bytes, chain: bytes, token_ids: Sequence[int]) -> bytes:
    """The chain of all full blocks of `token_ids`, given that of its first ones (b"" = none); LINK_BYTES a link."""
    links = [chain]
    last = chain[-LINK_BYTES:] or seed
    for block in range(link_count(chain), len(token_ids) // LOGICAL_PAGE_TOKENS):
        tokens = array("I", token_ids[block * LOGICAL_PAGE_TOKENS : (block + 1) * LOGICAL_PAGE_TOKENS])
        last = blake2b(last + tokens.tobytes(), digest_size=LINK_BYTES).digest()
        links.append(last)
    return b"".join(links)


def link_count(chain: bytes) -> int:
    return len(chain) // LINK_BYTES


def link(chain: bytes, page: int) -> bytes:
    """The name of the sequence up to and with page `page`."""
    return chain[page * LINK_BYTES : (page + 1) * LINK_BYTES]


def first_links(chain: bytes, count: int) -> bytes:
    """The names of the first `count` pages."""
    return chain[: count * LINK_BYTES]


def pages_on_host(prompt_tokens: int, seen_tokens: int) -> int:
    """Full pages whose C4 entries are all on the host, of a sequence whose first `seen_tokens` tokens went through
    the model, `prompt_tokens` of them in prefill.

    What prefill computed landed there; of the entries born in decode all but the newest were backed up.
    """
    landed = prompt_tokens // LOGICAL_PAGE_TOKENS
    backed_up = max(0, seen_tokens // 4 - 1) // C4_PAGE.rows
    return max(landed, backed_up)

"""The prefill service: computes prompts, packs their KV into pages, writes them to decode."""

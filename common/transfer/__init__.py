"""Moving KV between processes over Mooncake: engine, sender, send ring, tickets, digests."""

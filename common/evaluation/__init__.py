"""Questions whose answers show whether the KV that a request attends to is its own."""

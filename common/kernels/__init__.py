"""Device operations on KV pages: one interface, one implementation a backend. The cpu one is the definition."""

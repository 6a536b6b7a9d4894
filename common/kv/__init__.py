"""KV bytes and indices: layouts, quantisation, what a handover carries. Knows no device and no gRPC."""

"""The router: OpenAI's HTTP in front, gRPC to the workers behind. Imports no torch."""

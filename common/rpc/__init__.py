"""gRPC between the services: generated code, channels, errors, conversions to and from plain facts."""

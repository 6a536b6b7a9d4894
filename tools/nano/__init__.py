"""Training of dsv4-nano, the small DeepSeek-V4 that ships with this repository."""

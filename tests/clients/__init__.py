"""Third-party clients against the real services: each as its users run it, in a virtual environment of its own."""

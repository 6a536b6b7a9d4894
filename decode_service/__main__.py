"""`python -m decode_service`."""

from decode_service.main import main

main()

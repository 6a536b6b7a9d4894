"""`python -m prefill_service`."""

from prefill_service.main import main

main()

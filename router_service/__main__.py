"""`python -m router_service`."""

from router_service.main import main

main()

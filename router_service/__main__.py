"""`python -m router_service`."""

import os

# Events then pass one thread less on their way to the loop; gRPC reads this when it is imported.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")

from router_service.main import main

main()

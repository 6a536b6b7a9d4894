"""What at least two of the services share."""

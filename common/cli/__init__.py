"""The command `dsv4-pd`."""

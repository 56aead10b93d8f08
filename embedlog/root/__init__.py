"""A log root: attaching to it, checking it at startup, verifying and repairing it."""

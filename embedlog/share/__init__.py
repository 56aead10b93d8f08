"""Share groups (KIP-932): records one by one, to any number of consumers."""

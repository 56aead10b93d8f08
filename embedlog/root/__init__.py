"""A log root: opening and closing it, what is done before it is trusted, verify and repair."""

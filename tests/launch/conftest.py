from launching import sandbox  # noqa: F401

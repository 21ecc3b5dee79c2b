"""What an override is about."""


def key_of(override: str) -> str:
    """`network.bandwidth` of `+network.bandwidth=1e9`."""
    return override.lstrip("+~").partition("=")[0]


def group_of(override: str) -> str:
    """`network` of `+network.bandwidth=1e9`."""
    return key_of(override).partition(".")[0]

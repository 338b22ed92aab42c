"""What a wrong answer is, for servers in processes of their own."""


def never(_request: object, full: str, reused: str) -> bool:
    """Every answer is right, as long as there are two of them."""
    assert full
    assert reused
    return False

"""Stop sequences: the text ends before the first of them."""

from collections.abc import Sequence


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop sequence in it, and whether there was one. Empty sequences are ignored."""
    places = [place for stop in stops if stop and (place := text.find(stop)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


def safe_length(text: str, stops: Sequence[str]) -> int:
    """Length of a growing text that can be sent: a possible beginning of a stop sequence is held back."""
    held = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), 0, -1):
            if text.endswith(stop[:length]):
                held = max(held, length)
                break
    return len(text) - held

"""Which part of a text is embedded: the part that varies.

An embedding is an average. Where prompts share a long preamble, it is the preamble that is averaged, all prompts look
alike and a threshold means nothing. So the levels compare a request's *chunk*, not its prompt (`--chunk-source` picks it:
by default the question alone); of the chunk, a known `preamble` is cut off, and with `--chunk-window N` only the first N
characters that remain are embedded.
"""


def varying_part(text: str, window: int = 0, preamble: str = "") -> str:
    """The text without the preamble, at most `window` characters of it (0: all). Never empty where the text is not."""
    part = text.strip()
    opening = preamble.strip()
    if opening and part.startswith(opening):
        part = part[len(opening) :].lstrip() or part
    return part[:window].rstrip() if window else part

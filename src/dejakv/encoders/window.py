"""The part of a text that is embedded: the part that varies.

An embedding is an average. If prompts share a long preamble, the preamble dominates the average, all prompts look
alike and a threshold means nothing. So the levels compare a request's *chunk*, not its prompt (`--chunk-source` picks it;
the default is the question alone). A known `preamble` of the chunk is cut off, and with `--chunk-window N` only the first
N remaining characters are embedded.
"""


def varying_part(text: str, window: int = 0, preamble: str = "") -> str:
    """The text without the preamble, at most `window` characters of it (0: all). Never empty unless the text is."""
    part = text.strip()
    opening = preamble.strip()
    if opening and part.startswith(opening):
        part = part[len(opening) :].lstrip() or part
    return part[:window].rstrip() if window else part

"""Write docs/llms.txt and docs/agents.md from the other pages: `python -m scripts.agent_pages`.

llms.txt (https://llmstxt.org) lists the pages of mkdocs.yml, each with its first sentence;
agents.md is one page for a program that writes code with DejaKV or operates it. A test says when
they are out of date.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MADE = "Made from the other pages by `python -m scripts.agent_pages`."
RULES = """\
- Ask first whether reuse pays: `dejakv estimate LOG`. It runs no model.
- Leave `reuse` at `exact` unless the user accepts approximate answers. `blend` and `adopt` are \
approximate, must be asked for, and are labelled: keep the label.
- In Python load models in float32 at first: in bf16 and fp16 prompts of up to 256 tokens are \
computed in full.
- Read why nothing was reused before you change a setting: `record.reason`, `dejakv explain`.
- Every error names its cause and its remedy. Wrong settings are refused with their names.
- `DEJAKV_OFF=1` rules DejaKV out."""


def pages() -> Iterator[tuple[str, str, str]]:
    """The section, the title and the path of every page in the navigation."""
    # mkdocs.yml has tags of its own in other parts, so that the navigation is read alone.
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for entry in yaml.safe_load(text[text.index("\nnav:") :])["nav"]:
        [(section, inside)] = entry.items()
        for page in [{section: inside}] if isinstance(inside, str) else inside:
            [(title, path)] = page.items() if isinstance(page, dict) else [("", page)]
            yield section, title or _title(path), path


def llms() -> str:
    """The index of all pages."""
    lines = [f"# DejaKV\n\n> {_claim()}\n\n{MADE} [One page for agents](agents.md)."]
    last = ""
    for section, title, path in pages():
        # Pages of results change with each run and are listed in their index.
        if path == "index.md" or (section == "Results" and path != "results/index.md"):
            continue
        if section != last:
            lines.append(f"\n## {section}\n")
        last = section
        lines.append(f"- [{title}]({path}): {_summary(path)}")
    return "\n".join(lines) + "\n"


def agents() -> str:
    """The page for agents: rules, limits, and of each task the first commands."""
    index = _text("index.md")
    limits = index.partition("## Limits\n\n")[2].strip()
    lines = [
        f"# For agents\n\n*{MADE} All pages: [llms.txt](llms.txt).*\n\n{_claim()}",
        f"## Rules\n\n{RULES}",
        f"## Limits\n\n{limits}",
    ]
    for section, title, path in pages():
        if section not in ("Tutorials", "How-to", "Recipes") or path == "agents.md":
            continue
        lines.append(f"## {title}\n\n[{path}]({path}). {_summary(path)}")
        block = re.search(r"^(```.*?^```)", _text(path), re.MULTILINE | re.DOTALL)
        if block:
            lines.append(block[1])
    return "\n\n".join(lines) + "\n"


def _claim() -> str:
    return _text("index.md").split("\n\n")[1].replace("**", "")


def _text(path: str) -> str:
    return (DOCS / path).read_text(encoding="utf-8")


def _title(path: str) -> str:
    return _text(path).partition("\n")[0].removeprefix("# ")


def _summary(path: str) -> str:
    """The first sentence of a page, without links, emphasis and what a script wrote there."""
    for paragraph in re.split(r"\n\s*\n", _text(path)):
        if paragraph.startswith(("#", "*Made", "```", "|", "!", "- ", "<")):
            continue
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
        plain = plain.replace("**", "").rstrip(":") + " "
        return re.split(r"(?<=[.?!]) (?=[A-Z\[`]|$)", plain)[0].strip()
    return _title(path)


PAGES = {"llms.txt": llms, "agents.md": agents}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")

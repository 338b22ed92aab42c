"""Write the log of `dejakv estimate sample`: `python scripts/sample_log.py`.

It is src/dejakv/datasets/sample.jsonl.
"""

import json
import random
from itertools import islice
from pathlib import Path

from dejakv.datasets.sessions import SessionsDataset

REQUESTS = 80
BEGAN = 1_767_340_800
"""2026-01-02, 8 o'clock UTC."""


def main() -> None:
    rng = random.Random("sample log")
    place = Path(__file__).parents[1] / "src" / "dejakv" / "datasets" / "sample.jsonl"
    at, lines = float(BEGAN), list[str]()
    for sample in islice(SessionsDataset(window=8), REQUESTS):
        at += rng.expovariate(1 / 360)
        messages = [{"role": role, "content": text} for role, text in sample.messages]
        user = ("support", "research", "billing")[int(str(sample.fields["session"])) % 3]
        lines.append(json.dumps({"timestamp": round(at, 3), "user": user, "messages": messages}))
    place.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Ten lines: put the cache behind a model's own `generate`.

python examples/quickstart.py
"""

import dejakv
from dejakv.models import load
from dejakv.records import Record
from dejakv_models.docs import DocsDataset, prompt

model, tokenizer = load("docs-lm")
sample = next(iter(DocsDataset(samples=1, facts=40)))
inputs = tokenizer(prompt(sample), return_tensors="pt")
records: list[Record] = []

with dejakv.attach(model, tokenizer, on_record=records.append):
    first = model.generate(**inputs, max_new_tokens=4)
    second = model.generate(**inputs, max_new_tokens=4)

print(
    sample.question,
    "->",
    tokenizer.decode(second[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True),
)
for record in records:
    print(
        f"{record.provenance}: {record.computed_tokens} of {record.prompt_tokens} tokens "
        f"computed, {record.ttft_ms:.1f} ms"
    )
assert first.tolist() == second.tolist()

"""What the error bound holds and what it costs, beside other ways to choose hits.

python -m benchmarks.trust arithmetic                        labels that a bound needs, and how soon drift is noticed
python -m benchmarks.trust replay TABLE.jsonl --orders 1000  a recorded table in random orders
python -m benchmarks.trust pairs docs --output T.jsonl       a table of labelled pairs for `replay`: docs, shapes, or --pairs FILE
"""

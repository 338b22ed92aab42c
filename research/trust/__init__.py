"""The error bound beside other ways to choose hits: a recorded table of labelled hits in random orders.

python -m research.trust replay TABLE.jsonl --orders 1000
"""

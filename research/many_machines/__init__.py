"""One cache of many machines, on a real S3 server and Valkey.

It measures hits, times, kills, budgets, and what 100 replicas would cost.
"""

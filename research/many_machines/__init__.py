"""One cache of many machines, on a real S3 server and Valkey: hits, times, kills, budgets, and what 100 replicas would cost.

python -m research.many_machines --quick --output FILE.json      # every part, in under 5 minutes
python -m research.many_machines --output FILE.json              # about an hour; --part PART for one of them

A part's figures are written when it ends, and a stopped run goes on with the next. The services are those of the tests (`pip install 'dejakv[test]'`).
"""

"""What reuse saves in a stream of sessions on a model with recurrent layers.

python -m research.training.state_kinds --kind hybrid --out runs/hybrid
OMP_NUM_THREADS=1 python -m research.hybrid_sessions --model runs/hybrid/model [--json FILE]
"""

"""The trainer side: plans become gradients here.

plan (advantages.py) -> rows (packing.py) -> losses (algo.py) -> update (trainer.py), on the sharded
model of model.py, with its state saved by checkpoint.py and fingerprinted by digest.py.
"""

"""Benchmarks behind `weft-bench` (cli.py): the layer, the routing plan, and the record of a GPU."""

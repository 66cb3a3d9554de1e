"""Stands in for torchtitan 0.3, as much of it as `weft_moe.torchtitan` and its example touch.

Written from the interface: names, arguments, shapes and the order of calls. An installed torchtitan
takes its place in the tests.
"""

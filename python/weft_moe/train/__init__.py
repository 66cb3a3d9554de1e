"""Trains a Qwen3-style mixture-of-experts model with a choice of dispatch backends.

`weft-train CONFIG.toml` is the way in (cli.py); config.py lists all options.
"""

"""Weft: an expert-parallel mixture-of-experts layer for training, one call a direction.

    import weft_moe as weft

Without the compiled ops the names of the layer raise ImportError when they are used, and not before:
the trainer's and the benchmark's unfused baseline run without them.
"""

from . import state_dict
from .huggingface import replace_experts

try:
    from .group import Group, ep_group, virtual_ep_group
    from .layer import MoE
    from .ops import check, moe
    from .support import supports
except ImportError as error:
    if error.name != "weft_torch":
        raise
    _not_built = error

    def __getattr__(name: str) -> object:
        if name in __all__:
            raise _not_built
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Group",
    "MoE",
    "check",
    "ep_group",
    "moe",
    "replace_experts",
    "state_dict",
    "supports",
    "virtual_ep_group",
]
__version__ = "0.1.0"

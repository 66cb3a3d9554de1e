"""Components that are built from a nested Config, and overrides that exchange Configs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar


class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar[type | None] = None

        def build(self):
            return self._owner(config=dataclasses.replace(self))

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            cls.Config._owner = cls


def override(*, target, fqns=None, description="", exact=False):
    """Registers a factory; here nothing looks it up."""
    assert issubclass(target, Configurable.Config)
    return lambda factory: factory


def derive(source, target_cls, **deltas):
    """A target_cls with the fields of source that it knows, and those of deltas instead."""
    names = {field.name for field in dataclasses.fields(target_cls)}
    if unknown := set(deltas) - names:
        raise ValueError(f"derive() got deltas for fields not on it: {sorted(unknown)}")
    shared = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
    return target_cls(**{n: v for n, v in shared.items() if n in names} | deltas)

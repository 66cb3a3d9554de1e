"""A TOML file's tables as frozen dataclasses, checked on the way: every table is a dataclass, every
key one of its fields. A key that no dataclass knows is refused, never ignored.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used; the message says what to change."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    choices: Collection[str] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of a table: its default, none where the key is required, and the values allowed."""
    limits = {"choices": choices, "minimum": minimum, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=limits)


def merged(base: Any, over: Any) -> Any:
    """Tables with those of `over` in place of, or within, those of `base`."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


def parse(cls: type, table: Any, where: str = "") -> Any:
    """A table, which stands at `where` in its file, as the dataclass `cls`.

    Raises:
        ConfigError: a table or key is unknown or missing; a value has the wrong type or range; or
            `cls` refuses them with a ValueError.
    """
    title = f"[{where}]" if where else "the file"
    if not isinstance(table, Mapping):
        raise ConfigError(f"{title} = {table!r}: a table is needed")
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            raise ConfigError(f"{title} has an unknown key {key!r}: known are {', '.join(fields)}")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in fields.items():
        path = f"{where}.{name}".lstrip(".")
        # X | None only marks an optional key: TOML has no null.
        kind: Any = next(t for t in _alternatives(hints[name]) if t is not types.NoneType)
        required = field.default is dataclasses.MISSING
        if name not in table and not required:
            continue
        if dataclasses.is_dataclass(kind):
            values[name] = parse(kind, table.get(name, {}), path)
        elif name in table:
            values[name] = _value(kind, table[name], f"{title} {name}", field.metadata)
        else:
            raise ConfigError(f"{title} lacks the key {name!r}")
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{title} {error}") from error


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _value(kind: type, value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    accepted = (int, float) if kind is float else kind
    # bool is an int to Python, not to a reader of a configuration.
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise ConfigError(f"{key} = {value!r}: {names[kind]} is needed")
    choices, minimum = limits.get("choices"), limits.get("minimum")
    above, below = limits.get("above"), limits.get("below")
    if choices is not None and value not in choices:
        raise ConfigError(f"{key} = {value!r}: choose one of {', '.join(map(repr, choices))}")
    # Written so that nan, which compares false with everything, is refused as well.
    if minimum is not None and not value >= minimum:
        raise ConfigError(f"{key} = {value!r}: must be at least {minimum}")
    if above is not None and not value > above:
        raise ConfigError(f"{key} = {value!r}: must be more than {above}")
    if below is not None and not value < below:
        raise ConfigError(f"{key} = {value!r}: must be less than {below}")
    return kind(value)

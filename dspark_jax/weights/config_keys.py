"""Reading somebody else's config.json strictly: every key is taken once, and what is left over is refused by name."""

from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax.config import ConfigError

_MISSING: Any = object()


class Keys:
    """The keys of one JSON object. Each message names the file, the key, its value and what was expected."""

    def __init__(self, raw: Mapping[str, Any], where: object, prefix: str = "") -> None:
        self._raw = dict(raw)
        self.where = where
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._raw.get(key) is not None

    def take(self, key: str, kind: type | tuple[type, ...] = int, default: Any = _MISSING) -> Any:
        """The value of a key; null counts as absent. Raises ConfigError for a missing key or another type."""
        value = self._raw.pop(key, None)
        if value is None:
            if default is _MISSING:
                raise ConfigError(f"{self.where}: key {self._prefix + key!r} is missing")
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(one.__name__ for one in kinds)
            raise ConfigError(f"{self.where}: {self._prefix}{key} = {value!r}: expected {names}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """A list of integers."""
        values = self.take(key, list)
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
            raise ConfigError(f"{self.where}: {self._prefix}{key} = {values!r}: expected a list of integers")
        return tuple(values)

    def expect(self, key: str, *allowed: Any) -> None:
        """Takes a key that must have one of these values where it is given at all."""
        value = self._raw.pop(key, None)
        if value is not None and value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ConfigError(f"{self.where}: {self._prefix}{key} = {value!r}: supported here: {names}")

    def section(self, key: str) -> "Keys":
        """A nested object, empty where it is absent."""
        return Keys(self.take(key, dict, {}), self.where, f"{self._prefix}{key}.")

    def move(self, other: "Keys", *keys: str) -> None:
        """Takes keys over from `other`, where some writers put them. Raises ConfigError where the two disagree."""
        for key in keys:
            value = other._raw.pop(key, None)
            if value is not None and self._raw.setdefault(key, value) != value:
                raise ConfigError(
                    f"{self.where}: {other._prefix}{key} = {value!r}, but {self._prefix}{key} = {self._raw[key]!r}:"
                    " expected the same"
                )

    def finish(self, ignored: Collection[str] = ()) -> None:
        """Raises ConfigError naming a key that nobody took and that is not among `ignored`; null says nothing."""
        unknown = sorted(key for key, value in self._raw.items() if value is not None and key not in ignored)
        if unknown:
            key = unknown[0]
            raise ConfigError(
                f"{self.where}: unknown key {self._prefix + key!r} = {self._raw[key]!r}: it might change the drafter"
            )

    def rest(self) -> dict[str, Any]:
        """What nobody has taken yet."""
        return dict(self._raw)

"""Which algorithms there are, as far as settings and their checks go; drafters/registry.py has the modules that run."""

from typing import Literal

from dspark_jax.kinds import chains, dflash2, dspark, lm
from dspark_jax.kinds.base import Kind

AlgorithmName = Literal["dspark", "dflash2", "eagle3", "mtp", "lm"]

KINDS: dict[AlgorithmName, Kind] = {
    "dspark": dspark.KIND,
    "dflash2": dflash2.KIND,
    "eagle3": chains.EAGLE3,
    "mtp": chains.MTP,
    "lm": lm.KIND,
}


def foreign(name: AlgorithmName) -> list[str]:
    """The fields of DrafterConfig that only drafters of other kinds read."""
    own = KINDS[name].own
    return [field for field in dict.fromkeys(f for kind in KINDS.values() for f in kind.own) if field not in own]

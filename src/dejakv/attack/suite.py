"""All attacks, and how they are made one after the other."""

import time
from collections.abc import Callable, Iterator, Sequence

from dejakv.attack.base import Attack, Done, Result, not_applicable
from dejakv.attack.client import SpentError
from dejakv.attack.collision import KeyCollision
from dejakv.attack.hostile_folder import HostileFolder
from dejakv.attack.hostile_inputs import HostileInputs
from dejakv.attack.leakage import Leakage
from dejakv.attack.poisoning import Poisoning
from dejakv.attack.probing import Probing
from dejakv.attack.scene import Scene
from dejakv.attack.shared_parts import SharedParts
from dejakv.attack.timing import Timing
from dejakv.errors import ConfigError, MissingExtraError

ATTACKS: tuple[Attack, ...] = (
    KeyCollision(),
    Poisoning(),
    Leakage(),
    Probing(),
    SharedParts(),
    Timing(),
    HostileFolder(),
    HostileInputs(),
)


def chosen(names: Sequence[str]) -> tuple[Attack, ...]:
    """The attacks of these names, all without any. Raises: ConfigError for an unknown name."""
    known = [one.name for one in ATTACKS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--only {name[:80]!r} is no attack: choose from {', '.join(known)}")
    return tuple(one for one in ATTACKS if not names or one.name in names)


def attack(
    scene: Scene, attacks: Sequence[Attack] = ATTACKS, before: Callable[[str], object] | None = None
) -> Iterator[Done]:
    """Makes attacks in their order. `before`: told the name of each. Raises: DejaKVError for a server that went away."""
    for one in attacks:
        if before is not None:
            before(one.name)
        began = time.monotonic()
        result = _made(one, scene)
        yield Done(one.name, one.tries, one.broken_if, result, time.monotonic() - began)


def _made(one: Attack, scene: Scene) -> Result:
    if scene.remote and not one.outside:
        return not_applicable("it needs the cache in its own process: run it without --server")
    try:
        return one.run(scene)
    except (MissingExtraError, SpentError) as error:
        return not_applicable(str(error))

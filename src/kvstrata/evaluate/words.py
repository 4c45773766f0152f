"""Words that the generated tasks are made of, ours, so that nothing needs a download."""

from __future__ import annotations

import random
import uuid

ADJECTIVES = """
amber ancient arctic brave brisk bronze calm careful clever coastal copper crimson curious dapper distant dusty
eager early elegant faint fearless fertile fluffy formal fragile frosty gentle giant glossy golden graceful
grand hazel hollow humble hungry icy idle indigo ivory jolly keen lively lonely lucky marble mellow mighty misty
modest nimble noble northern olive orderly pale patient plain polished proud quiet rapid rare royal
rustic salty scarlet secret shallow silent silver simple sleepy slender smooth solar spotted stormy sturdy sunny
swift tender thirsty tidy tiny tranquil velvet violet vivid wandering warm wild windy wise wooden young zesty
""".split()  # noqa: SIM905
NOUNS = """
acorn anchor apple badger balcony barrel basket beacon blanket bottle bridge bucket butter button cabin
camel candle canyon carpet castle cedar cellar chapel cherry clover cobbler compass cottage cradle cricket
crystal curtain dolphin donkey drawer eagle engine falcon feather fiddle forest fountain garden garlic glacier
goblet hammer harbor harvest hedge helmet heron honey island jacket kettle ladder lantern lemon lobster magnet
maple market meadow mirror mitten monkey mountain needle oyster paddle parrot pebble pencil pepper piano pigeon
pillow planet pocket potato puzzle rabbit ribbon river rocket saddle scarf shadow shovel sparrow spoon stable
statue summit sweater teapot temple thimble thunder ticket tiger timber tunnel turtle valley violin walnut wagon
whistle willow window winter wolf
""".split()  # noqa: SIM905


def names(rng: random.Random, count: int) -> list[str]:
    """Different names of an adjective and a noun, numbered where there are not enough."""
    found: dict[str, None] = {}
    while len(found) < count:
        name = f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"
        found[name if name not in found else f"{name}-{len(found)}"] = None
    return list(found)


def thing(rng: random.Random) -> str:
    """An adjective and a noun."""
    return f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def number(rng: random.Random) -> str:
    """Seven digits."""
    return str(rng.randrange(1_000_000, 10_000_000))


def unique_id(rng: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))

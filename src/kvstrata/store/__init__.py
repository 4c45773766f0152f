"""Where entries live: payload, per-entry columns and byte accounts. The only code that frees memory."""

from kvstrata.store.account import Account, Bytes
from kvstrata.store.arena import Arenas
from kvstrata.store.store import Block, LayerStore

__all__ = ["Account", "Arenas", "Block", "Bytes", "LayerStore"]

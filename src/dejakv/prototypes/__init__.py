"""Methods and faces of the four prototypes, each behind a seam that is open to everybody.

    from dejakv.prototypes import KVChunk, SemanticTextMatch, VisualCacheResult

The core names none of them: `dejakv.plugins` resolves methods of reuse, types of models and
observers by name, and works without this package.

`top_layer`: reuse of the top layer's KV (Sim-LLM). `lckv`: models with a layer-condensed KV cache.
`sim_llm`: Sim-LLM's own interface. `fusion`: states of fusion modules. `lsh`, `token_store`:
`LSHIndex` and `LRUCacheStore`.
"""

from dejakv.prototypes.names import CacheHit as CacheHit
from dejakv.prototypes.names import EmbeddingMatch as EmbeddingMatch
from dejakv.prototypes.names import KVChunk as KVChunk
from dejakv.prototypes.names import QueueingController as QueueingController
from dejakv.prototypes.names import ReuseReport as ReuseReport
from dejakv.prototypes.names import SemanticTextMatch as SemanticTextMatch
from dejakv.prototypes.names import VisualCacheResult as VisualCacheResult

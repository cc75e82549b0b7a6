"""Which memory technique a large model needs on a cluster that one does not have.

    python examples/plan_for_a_cluster.py

It is arithmetic over what the model's modules declare of their memory: no GPU, no data, seconds.
"""

from pathlib import Path

from search import plan

here = Path(__file__).parent
cluster = here / "plan_cluster.yaml"

# 1. A model: a shipped one by its name, a file, a bundle, or a mapping like this, six layers of three modules.
layer = {"modules": ["attention", "dcn_v2", "linear"], "ensemble": "sum", "out_embeddings": 128}
model = {"embedding_dim": 256, "head": [1024], "layers": [layer] * 6}

# 2. Its inputs, as far as memory depends on them, and how it trains: examples of a step over all ranks.
schema = {
    "tables": [
        {"name": "user", "rows": 20_000_000},
        {"name": "item", "rows": 5_000_000},
        {"name": "history", "rows": 5_000_000, "multi_hot": True, "mean_ids": 30},
    ],
    "numeric": 200,
}
training = {"batch_size": 16 * 4096, "precision": "bf16"}

# 3. Every technique is priced, from plain data parallel on; the fewest that fit are chosen.
held = plan(model, cluster=cluster, schema=schema, training=training)
print(held)
cheapest = held.ladder.head(6)
print(cheapest[["fits", "peak_bytes", "lacking_bytes", "step_ms"]])

# 4. Where the bytes are: of plain data parallel, and of the one chosen.
compared = held.memory.loc[["dp", *([held.technique] if held.technique else [])]]
print((compared.T / 2**30).round(2).rename_axis("GiB"))

# 5. What if? More examples per step, fewer or larger ranks: change an argument and ask again.
for batch_size in (16 * 1024, 16 * 4096, 16 * 8192):
    asked = plan(model, cluster=cluster, schema=schema, training={**training, "batch_size": batch_size})
    print(f"{batch_size:7,} examples: {asked.technique or 'nothing fits'}")
larger = plan(model, cluster=cluster, hbm="80GiB", schema=schema, training=training)
print(f"with 80 GiB per rank: {larger.technique}")

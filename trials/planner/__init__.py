"""The planner: for a model, a batch and a cluster, the least strategy that fits, priced beforehand.

`plan.plan` is the way in. Nothing here imports torch but `memory_counter`, and that only when a module declares no
memory.
"""

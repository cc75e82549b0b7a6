"""Clusters as values: named ones in `trials/cluster/catalog/`, this machine, a YAML file of your own.

`this_machine.load_cluster` is the way in. Nothing here imports torch but `machine`, and only when it measures.
"""

"""Clusters as values: named ones in `trials/cluster/catalog/`, this machine, a YAML file of your own.

`load.load_cluster` is the way in. Nothing here imports torch but `here`, and only when it measures.
"""

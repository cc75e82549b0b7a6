"""The processes that train, on this machine and on the hosts of a cluster."""

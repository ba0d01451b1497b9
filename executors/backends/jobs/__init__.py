"""The common code of all backends that run replicas as jobs of a service.

A job is one command that the service runs. The service is a cloud or a cluster.
"""

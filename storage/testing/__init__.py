"""The test kit: a device with faults, a model of power loss, the contract of a store of rows.

Shipped, because whoever writes another store or tier needs it too.  `contract` imports pytest and
hypothesis; nothing here is imported by the store itself.
"""

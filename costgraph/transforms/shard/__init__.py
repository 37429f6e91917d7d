"""Sharding: build the per-rank graph from the graph of all devices.

Start with these names:

- `parallelize`: `parallelize`
- `shard`: `shard`, `mesh`
- `choice`: `choose`
- `placed_tensors`: `PlacedTensors`
- `fsdp`: `ParamGroups`
- `token_routing`: `TokenRouting`
- `fsdp_policy`: `FullyShard`
- `grad_reduction`: `Buckets`
"""

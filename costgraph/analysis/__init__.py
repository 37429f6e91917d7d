"""Analyses of a graph: free functions that return formulas, or numbers once all sizes are bound.

Start with these names:

- `costs`: `costs`, `flops`
- `params`: `param_count`
- `memory`: `peak_memory`, `timeline`
- `liveness`: `play`
- `training_memory`: `state_bytes`
- `training`: `model_flops`
- `roofline`: `roofline`
- `regimes`: `regimes`, `crossover`
- `step_time`: `seconds`
- `communication`: `communication`
- `tiling`: `tiling`
- `compare`: `compare`
"""

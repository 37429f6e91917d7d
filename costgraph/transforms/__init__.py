"""Graph -> Graph. A transform never edits the graph that it was given.

Start with these names:

- `rewrite`: `Rewriter`
- `backward`: `backward`
- `checkpoint`: `Checkpoint`
- `training`: `training_step`
- `precision`: `apply_precision`
- `quantize`: `quantize`
- `fuse`: `fuse`
- `reroll`: `fold`
- `unroll`: `unroll`
- `inference`: `decode`, `prefill`
- `lora`: `lora`
- `offload`: `offload`
- `pipeline_schedules`: `SCHEDULES`
- `pipeline_stages`: `cut`
"""

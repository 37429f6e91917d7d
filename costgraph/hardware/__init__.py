"""Hardware: device and network specifications, units, and result tables.

Start with these names:

- `specs`: `Hardware`, `load_hardware`, `list_hardware`
- `networks`: `Network`, `load_network`
- `links`: `wire`
- `units`: `Quantity`, `format_quantity`
- `tables`: `Table`, `Column`
"""

"""What of a graph becomes one kernel: index points that ops run over, and groups of them in an order that is legal."""

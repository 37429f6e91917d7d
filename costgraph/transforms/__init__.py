"""Graph -> Graph. A transform never edits the graph that it was given."""

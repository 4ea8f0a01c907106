"""The replay store: columns over host memory, the ring that says which rows are there, and how they are drawn."""

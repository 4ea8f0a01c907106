"""File formats, independent of the classes that use them."""

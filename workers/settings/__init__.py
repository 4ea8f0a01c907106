"""What a worker takes over of its parent's settings, and the log records that it sends back."""

"""What a run learns from: data sets by name, the order of their samples, and the loader."""

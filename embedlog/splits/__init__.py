"""Parts of topics that other processes read with plain reads: planned here, read anywhere."""

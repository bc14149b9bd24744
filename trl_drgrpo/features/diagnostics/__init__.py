"""What a run is doing, as pure functions over one generation batch and callbacks that warn."""

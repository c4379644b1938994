"""Draft releases on the device: signed by a publisher, fetched and checked here, tried out, then kept or given up."""

"""Draft releases on the device: signed by a publisher, fetched, checked and loaded here."""

"""Draft releases: which draft the devices of a target use, and by what evidence a new one takes the old one's place."""

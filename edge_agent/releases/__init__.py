"""Draft releases on the device: signed by a publisher, fetched and checked here, tried out, then kept or given up.

`check` decides which manifest may be fetched, `download` fetches its file, `state` and `folder` remember what was
tried, `loader` loads releases and gives them up, `trials` judges the one in use, `follower` follows the coordinator's
offers, `updater` runs all of this for one client, and `commands` shows it.
"""

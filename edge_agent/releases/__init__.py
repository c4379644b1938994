"""Draft releases on the device: signed by a publisher, fetched and checked here, tried out, kept or given up.

`keys` whom to believe, `check` what a manifest must say, `download` the file, `slots` what is remembered and `store`
where, `shelf` what is loaded and given up, `follower` what happens when, `updater` all of it for one client, `commands`
what people see.
"""

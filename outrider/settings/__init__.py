"""How a process is told what to do: flags over environment over a table of a TOML file over defaults.

`file` reads the file, `layers` puts the sources on top of one another, `problems` says what is wrong with them,
`options` makes flags of a settings model, and `report` tells what came from where.
"""

"""Read the settings of a process: flags over environment over a table of a TOML file over defaults.

`layers` reads the sources and puts them on top of one another, `problems` describes what is wrong with them,
`options` makes flags of a settings model, and `report` shows every setting with its source.
"""

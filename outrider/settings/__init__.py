"""Read the settings of a process: flags over environment over a table of a TOML file over defaults.

`file` reads the file, `layers` puts the sources on top of one another, `problems` describes what is wrong with them,
`options` makes flags of a settings model, and `report` shows every setting with its source.
"""

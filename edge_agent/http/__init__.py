"""The device as an OpenAI-compatible HTTP server: `outrider-edge serve`.

`serve` the command, `app` the routes, `bodies` what is asked, `generation` the choices while they are made, `answers`
and `event_stream` what is answered and `schema` its description, `page` the chat page, `problems` errors in OpenAI's
shape, `access` who may ask and how much.
"""

"""POST /v1/responses, OpenAI's newer API, translated: ``request`` into a chat request, ``answer`` out of its events.

Nothing is stored: a client sends the whole conversation each time. ``items`` writes the output items and the events
that tell of them; a whole answer is what a stream ends with.
"""

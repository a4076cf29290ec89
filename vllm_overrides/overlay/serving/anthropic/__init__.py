"""POST /v1/messages, Anthropic's API, translated: ``request`` into a chat request, ``answer`` out of its events.

``blocks`` writes the content blocks and the events that tell of them; ``failure`` has the API's own form of errors.
"""

"""The OpenAI-compatible API: normalise -> render -> generate -> parse -> respond, one small module each.

A request goes through these modules in this order; streamed and whole answers share every one of them:

    app          routes; handling: what each of them does; every failure becomes an error object of the route's API
    responses/   /v1/responses and anthropic/ /v1/messages: translations (translate) to a chat request and back
    normalise    JSON body -> ChatRequest / CompletionRequest (messages, tools, thinking, options, fields, structured)
    pictures/    data URLs and addresses -> patches for the vision tower, off the event loop
    render       messages -> prompt text -> token ids, off the event loop
    prepare      all of that for one conversation, whatever the endpoint
    policy       how many tokens a request may generate; sampling: request + model defaults -> SamplingParams
    generate     the engine's outputs, closed (so aborted) as soon as nobody listens
    choice       one answer: detokenise -> parse/ (thought, content, tool calls) -> stop strings -> events
    respond      events -> chat chunks or one chat message; completions, responses/items and anthropic/blocks do the
                 same for theirs
    connection   event stream and "stop when the client has gone"

``server`` starts all of it; ``engine_client`` starts the engine process; ``service`` holds what requests share.
``vllm.entrypoints.openai.serving_chat`` leads here: the chat route asks it, and so does stock's ``run_batch``, whose
Service ``standalone`` makes.
"""

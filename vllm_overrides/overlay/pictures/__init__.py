"""Pictures of a prompt, from the request to the rows of a step.

A prompt that reaches the engine already holds one placeholder token for every embedding of a picture, and its pictures
beside it (`picture`, checked and kept by `prompt_pictures`). The scheduler keeps the book of which pictures a step must
compute, place and keep (`book`), its orders travel to every rank (`orders`), each rank computes and holds embeddings
(`store`), and the model reads which rows to overwrite (`picture_step`). `positions` gives the three rotary positions of
a token, `hashing` what the prefix cache takes for the content of a placeholder. docs/engine.md.
"""

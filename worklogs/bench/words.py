"""Plain words, each about one token in every tokenizer of ours."""

WORDS = """
    river mountain lake forest garden field road bridge house window door table light water wind rain snow sun moon star
    sky cloud tree leaf flower grass stone sand fire summer winter spring morning evening night day week year city
    village station train ship boat bird horse fish dog cat book letter story song music color
""".split()  # noqa: SIM905

"""How often the twin must be right, as shares of what it is asked. Below its card's figures, which hold for other
samples of the same tasks."""

# Recall of words, numbers and codes over several turns (test_recall.py).
RECALL = 0.85
# The thirteen turns of test_conversation.py.
CONVERSATION = 0.3
# Whole tasks with files, from the question to what lies in the folder (test_agent.py).
FILES = 0.3

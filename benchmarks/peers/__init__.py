"""What others train the same network with: scripts as their users write them, in our words.

Each is run as `python -m benchmarks.peers.NAME` by benchmarks.run, on the same files, and writes down what it measures.
"""

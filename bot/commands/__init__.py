"""The commands of ``sysom``, one file each. A command loads its parts when it runs: a node that has only the
agent's dependencies can run ``agent`` and ``doctor``."""

"""A job at a standstill: who never came, who is stuck and with what, which calls contradict each other."""

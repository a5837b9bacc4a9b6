"""Operations of steps as a graph, replayed with other durations: what a worker, a stage, an operation costs."""

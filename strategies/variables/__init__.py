"""Variables: state that a step reads and writes by name, kept in step over replicas."""

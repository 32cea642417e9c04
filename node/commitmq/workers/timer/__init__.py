"""The timer process: delivers messages at the time that their sender named."""

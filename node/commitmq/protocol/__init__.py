"""The protocol between clients and processes: headers, and the packets of the writer's Unix socket."""

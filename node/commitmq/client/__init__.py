"""Producer, consumer and admin clients, their asyncio twins, and the wire protocol they share with the workers."""

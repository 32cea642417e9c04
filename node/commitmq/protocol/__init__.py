"""What clients and processes say to each other: headers, and the packets of the short way to the writer."""

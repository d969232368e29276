"""Transport between ranks of one Linux host that read and write each other's memory."""

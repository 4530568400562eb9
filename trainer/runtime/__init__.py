"""The processes of a job: start, agreement, stop, failure, end, and the lock of the dump folder."""

"""The experiments: the paper's tables as resumable runs, reports, benchmarks. Nothing else imports this room."""

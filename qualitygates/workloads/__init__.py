"""The workloads that come with qualitygates."""

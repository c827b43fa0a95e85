"""Metrics: tensors in, numbers out. Fractions, never per cent.

A tie counts against the model; a score that is not finite is an error, never a miss and never a hit; what a number
would be whatever the model is left out or refused.
"""

from __future__ import annotations

from twinreel.metrics.classification import (
    AveragePrecision,
    CombinedViews,
    aggregate_views,
    confusion_matrix,
    mean_average_precision,
    per_class_accuracy,
    predicted_classes,
    ranked_classes,
    top_k_accuracies,
    top_k_accuracy,
)
from twinreel.metrics.retrieval import (
    RECALL_AT,
    chance_retrieval,
    embedding_ranks,
    mean_rank,
    median_rank,
    recall_at_k,
    recall_from_ranks,
    retrieval_metrics,
    retrieval_ranks,
)

__all__ = [
    "RECALL_AT",
    "AveragePrecision",
    "CombinedViews",
    "aggregate_views",
    "chance_retrieval",
    "confusion_matrix",
    "embedding_ranks",
    "mean_average_precision",
    "mean_rank",
    "median_rank",
    "per_class_accuracy",
    "predicted_classes",
    "ranked_classes",
    "recall_at_k",
    "recall_from_ranks",
    "retrieval_metrics",
    "retrieval_ranks",
    "top_k_accuracies",
    "top_k_accuracy",
]

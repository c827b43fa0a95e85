"""Metrics: tensors in, numbers out. Fractions, never per cent.

A tie counts against the model; a score that is not finite is an error, never a miss and never a hit; what a number
would be whatever the model is left out or refused.
"""

from __future__ import annotations

from twinreel.metrics.answers import (
    accuracy_by_type,
    answered_right,
    answers_metrics,
    chosen_right,
    soft_accuracy,
)
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
from twinreel.metrics.rerank import FirstStage, first_candidates, reranked_ranks
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
    "FirstStage",
    "accuracy_by_type",
    "aggregate_views",
    "answered_right",
    "answers_metrics",
    "chance_retrieval",
    "chosen_right",
    "confusion_matrix",
    "embedding_ranks",
    "first_candidates",
    "mean_average_precision",
    "mean_rank",
    "median_rank",
    "per_class_accuracy",
    "predicted_classes",
    "ranked_classes",
    "recall_at_k",
    "recall_from_ranks",
    "reranked_ranks",
    "retrieval_metrics",
    "retrieval_ranks",
    "soft_accuracy",
    "top_k_accuracies",
    "top_k_accuracy",
]

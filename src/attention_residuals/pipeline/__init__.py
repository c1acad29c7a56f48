"""Pipeline stages whose hops carry the partial sum and the block sums that the receiver lacks."""

from attention_residuals.pipeline.pipeline import SCHEDULES, Pipeline
from attention_residuals.pipeline.stage_model import plan_stages, split_model
from attention_residuals.pipeline.stage_plan import StagePlan, even_split

__all__ = ["SCHEDULES", "Pipeline", "StagePlan", "even_split", "plan_stages", "split_model"]

"""The collector in verl's V1 trainer."""

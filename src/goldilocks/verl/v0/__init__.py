"""The collector in verl's V0 trainer."""

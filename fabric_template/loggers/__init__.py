"""self.log's arithmetic, the CSV files, the history and the console."""

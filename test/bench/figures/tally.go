package figures

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// BenchmarkRun is one run of a benchmark: its results so far, and its progress output.
type BenchmarkRun struct {
	Records []Record
	Rows    []Row

	Progress io.Writer // output for the waiting user

	start time.Time
}

// StartRun returns a BenchmarkRun that starts now and prints its progress to progress.
func StartRun(progress io.Writer) BenchmarkRun {
	return BenchmarkRun{Progress: progress, start: time.Now()}
}

// LogProgress prints a line of progress with the seconds since the start.
func (t *BenchmarkRun) LogProgress(format string, args ...any) {
	fmt.Fprintf(t.Progress, "%6.1fs  %s\n", time.Since(t.start).Seconds(), fmt.Sprintf(format, args...))
}

// AddRow adds a row to the table of results.
func (t *BenchmarkRun) AddRow(r Row) { t.Rows = append(t.Rows, r) }

// SaveRecords writes the records as JSON lines to the file at path.
func (t *BenchmarkRun) SaveRecords(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("-json: %w", err)
	}
	return errors.Join(WriteLines(f, t.Records), f.Close())
}

package figures

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Tally is one run of a benchmark: what was measured so far.
type Tally struct {
	Records []Record
	Rows    []Row

	Progress io.Writer // to the person who waits

	began time.Time
}

// Begin begins a run, which tells the person who waits of itself.
func Begin(progress io.Writer) Tally { return Tally{Progress: progress, began: time.Now()} }

// Say tells the person who waits.
func (t *Tally) Say(format string, args ...any) {
	fmt.Fprintf(t.Progress, "%6.1fs  %s\n", time.Since(t.began).Seconds(), fmt.Sprintf(format, args...))
}

// Row adds a row to the table.
func (t *Tally) Row(r Row) { t.Rows = append(t.Rows, r) }

// Save writes the records to the file that -json names.
func (t *Tally) Save(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("-json: %w", err)
	}
	return errors.Join(WriteLines(f, t.Records), f.Close())
}

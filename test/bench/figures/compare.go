package figures

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

// Compare writes rows as one aligned table. Its third column is a reference measured in the same
// run. Successive rows with the same Params are below one line with the Params.
func Compare(w io.Writer, rows []Row, reference string) error {
	if reference == "" {
		reference = "reference"
	}
	lines := [][]string{{"MEASURE", "OURS", strings.ToUpper(reference), "RATIO", "BOUND", "VERDICT"}}
	for i, r := range rows {
		if r.Params != "" && (i == 0 || rows[i-1].Params != r.Params) {
			lines = append(lines, []string{r.Params})
		}
		lines = append(lines, r.comparisonCells())
	}
	return writeAligned(w, lines)
}

// comparisonCells returns the cells of a row for Compare.
func (r Row) comparisonCells() []string {
	name, other, ratio, bound := r.Measure, "", "", ""
	if r.Params != "" {
		name = "  " + name
	}
	if r.Reference != nil {
		other = Format(r.Reference.Figure, r.Unit)
		if v := r.Ratio(); !math.IsNaN(v) {
			ratio = fmt.Sprintf("%.2f", v)
		}
	}
	if target, ok := Targets[r.Key]; ok {
		bound = target.formatBound(r.Unit)
	}
	cells := []string{name, Format(r.Figure, r.Unit), other, ratio, bound, r.Verdict()}
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	return cells
}

// writeAligned writes lines of cells in aligned columns. A line with a single cell is not aligned.
func writeAligned(w io.Writer, lines [][]string) error {
	var widths []int
	for _, cells := range lines {
		for i, c := range cells {
			if len(widths) == i {
				widths = append(widths, 0)
			}
			if len(cells) > 1 {
				widths[i] = max(widths[i], utf8.RuneCountInString(c))
			}
		}
	}
	for _, cells := range lines {
		var line strings.Builder
		for i, c := range cells {
			line.WriteString(c)
			line.WriteString(strings.Repeat(" ", max(0, widths[i]-utf8.RuneCountInString(c))+2))
		}
		if _, err := fmt.Fprintln(w, strings.TrimRight(line.String(), " ")); err != nil {
			return err
		}
	}
	return nil
}

// Named is a set of samples with a name.
type Named struct {
	Name    string
	Samples []float64
}

// maxBuckets is the most intervals of a histogram. The last interval has all samples beyond.
const maxBuckets = 40

// Buckets counts samples by intervals of a width. Count i is the number of samples in [i*width,
// (i+1)*width); the last count has no upper bound.
func Buckets(samples []float64, width float64, buckets int) []int {
	out := make([]int, buckets)
	for _, s := range samples {
		at := buckets - 1
		if s < float64(buckets-1)*width {
			at = max(0, int(s/width))
		}
		out[at]++
	}
	return out
}

// Histogram writes the number of samples per interval, with one column for each set. It starts at
// the first and ends at the last interval that is not empty.
func Histogram(w io.Writer, width float64, sets ...Named) error {
	first, last := maxBuckets, -1
	counts := make([][]int, len(sets))
	for i, set := range sets {
		counts[i] = Buckets(set.Samples, width, maxBuckets)
		for at, n := range counts[i] {
			if n > 0 {
				first, last = min(first, at), max(last, at)
			}
		}
	}
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	heading := []string{""}
	for _, set := range sets {
		heading = append(heading, fmt.Sprintf("%s (%d)", set.Name, len(set.Samples)))
	}
	fmt.Fprintln(t, strings.Join(heading, "\t"))
	skipped := false
	for at := first; at <= last; at++ {
		if isEmptyInterval(counts, at) && isEmptyInterval(counts, at-1) && isEmptyInterval(counts, at+1) {
			// at is neither the first nor the last
			if !skipped {
				fmt.Fprintln(t, "..."+strings.Repeat("\t", len(sets)))
			}
			skipped = true
			continue
		}
		skipped = false
		label := fmt.Sprintf("%.0f to %.0f", float64(at)*width, float64(at+1)*width)
		if at == maxBuckets-1 {
			label = fmt.Sprintf("%.0f and more", float64(at)*width)
		}
		cells := []string{label}
		for i := range sets {
			cells = append(cells, formatBar(counts[i][at], len(sets[i].Samples)))
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// isEmptyInterval reports whether no set has samples in the interval with this index.
func isEmptyInterval(counts [][]int, interval int) bool {
	for _, c := range counts {
		if c[interval] > 0 {
			return false
		}
	}
	return true
}

// formatBar returns a bar whose length is the share of n in all, followed by n.
func formatBar(n, all int) string {
	if n == 0 {
		return "."
	}
	const longest = 40
	return strings.Repeat("#", max(1, (n*longest+all/2)/all)) + fmt.Sprintf(" %d", n)
}

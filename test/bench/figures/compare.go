package figures

import (
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"
	"unicode/utf8"
)

// Compare writes rows as one aligned table whose third column is a reference
// measured in the same run. Rows in succession that were measured in the same
// way stand below one line that tells how.
func Compare(w io.Writer, rows []Row, reference string) error {
	if reference == "" {
		reference = "reference"
	}
	lines := [][]string{{"MEASURE", "OURS", strings.ToUpper(reference), "RATIO", "BOUND", "VERDICT"}}
	for i, r := range rows {
		if r.Params != "" && (i == 0 || rows[i-1].Params != r.Params) {
			lines = append(lines, []string{r.Params})
		}
		lines = append(lines, r.compared())
	}
	return align(w, lines)
}

// compared are the cells of a row of Compare.
func (r Row) compared() []string {
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
		bound = target.beat(r.Unit)
	}
	cells := []string{name, Format(r.Figure, r.Unit), other, ratio, bound, r.Verdict()}
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	return cells
}

// align writes lines of cells in columns. A line of one cell is no part of them.
func align(w io.Writer, lines [][]string) error {
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

// Named is a set of samples with its name.
type Named struct {
	Name    string
	Samples []float64
}

// maxBuckets bounds a histogram; the last bucket holds everything beyond.
const maxBuckets = 40

// Buckets counts samples by intervals of a width: the i-th count is of samples
// in [i*width, (i+1)*width), the last of all from there on.
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

// Histogram writes how often samples fall into intervals of a width, one column
// for each set, from the first interval that is not empty to the last.
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
		if empty(counts, at) && empty(counts, at-1) && empty(counts, at+1) { // at is neither the first nor the last
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
			cells = append(cells, bar(counts[i][at], len(sets[i].Samples)))
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// empty says whether no set has samples in an interval.
func empty(counts [][]int, at int) bool {
	for _, c := range counts {
		if c[at] > 0 {
			return false
		}
	}
	return true
}

// bar draws a count as a share of all, with the count behind.
func bar(n, all int) string {
	if n == 0 {
		return "."
	}
	const longest = 40
	return strings.Repeat("#", max(1, (n*longest+all/2)/all)) + fmt.Sprintf(" %d", n)
}

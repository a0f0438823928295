package figures

import (
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
)

// Row is one line of the table.
type Row struct {
	Measure string
	Params  string // for Compare: the parameters, shown on a line above the rows
	Key     string // key of Targets; "" = no target
	Figure  float64
	Unit    string // "ms", "/s", "MiB", "%"; "" = a count
	Note    string // shown beside the figure

	// Reference was measured in the same run, in the same unit; nil = no reference.
	Reference *Reference
}

// Reference is the figure with which another figure is compared.
type Reference struct {
	Name   string
	Figure float64

	// Paired is the median of the ratios of each round in which both were measured in turn; 0 = no
	// rounds. It is robust against noise that changes from round to round.
	Paired float64
}

// Verdict returns "ok" or "not yet". It returns "-" if there is no target, or if the target is
// relative and the reference was not measured.
func (r Row) Verdict() string {
	t, ok := Targets[r.Key]
	figure := r.Figure
	if t.Relative && r.Reference != nil {
		figure = r.Ratio()
	}
	switch {
	case !ok || t.Relative && r.Reference == nil:
		return "-"
	case t.IsMet(figure):
		return "ok"
	default:
		return "not yet"
	}
}

// Ratio returns the ratio of the figure to the reference: the median ratio of the rounds if it is
// known. It returns NaN without a reference.
func (r Row) Ratio() float64 {
	if r.Reference == nil || r.Reference.Figure == 0 {
		return math.NaN()
	}
	if r.Reference.Paired != 0 {
		return r.Reference.Paired
	}
	return r.Figure / r.Reference.Figure
}

// Print writes the rows as one aligned table.
func Print(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "MEASURE\tFIGURE\tTO BEAT\tVERDICT\tREFERENCE IN THIS RUN\tRATIO\tFIGURE TO BEAT IS FROM\tNOTE")
	for _, r := range rows {
		beat, source, reference, ratio := "", "", "", ""
		if target, ok := Targets[r.Key]; ok {
			beat, source = target.formatBound(r.Unit), target.Source
		}
		if r.Reference != nil {
			reference = r.Reference.Name + " " + Format(r.Reference.Figure, r.Unit)
			ratio = fmt.Sprintf("%.2f", r.Ratio())
		}
		cells := []string{r.Measure, Format(r.Figure, r.Unit), beat, r.Verdict(), reference, ratio, source, r.Note}
		for i, c := range cells {
			if c == "" {
				cells[i] = "-"
			}
		}
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	return t.Flush()
}

// Format returns a figure with its unit, with at least three significant digits if it is 1 or more.
// NaN is "none".
func Format(v float64, unit string) string {
	if math.IsNaN(v) {
		return "none"
	}
	if unit == "" { // a count
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	digits := 0
	switch {
	case math.Abs(v) < 10:
		digits = 2
	case math.Abs(v) < 100:
		digits = 1
	}
	space := " "
	if strings.HasPrefix(unit, "/") || unit == "%" {
		space = ""
	}
	return fmt.Sprintf("%.*f", digits, v) + space + unit
}

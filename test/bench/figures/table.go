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
	Params  string // what was measured and how, for Compare, where it is a line above its rows
	Key     string // of Targets; "" = no figure to beat
	Figure  float64
	Unit    string // "ms", "/s", "MiB", "%"
	Note    string // beside the figure

	// Reference was measured in the same run; nil = none. Its unit is the figure's.
	Reference *Reference
}

// Reference is what a figure is a multiple of.
type Reference struct {
	Name   string
	Figure float64

	// Paired is the median of the ratios of rounds that took both in turn, 0 where there were none: noise that changes from
	// round to round is in both.
	Paired float64
}

// Verdict is "ok", "not yet", or "-" where there is nothing to beat: no target,
// or one relative to a reference that was not measured.
func (r Row) Verdict() string {
	t, ok := Targets[r.Key]
	figure := r.Figure
	if t.Relative && r.Reference != nil {
		figure = r.Ratio()
	}
	switch {
	case !ok || t.Relative && r.Reference == nil:
		return "-"
	case t.Met(figure):
		return "ok"
	default:
		return "not yet"
	}
}

// Ratio is the figure as a multiple of the reference, as rounds in turn say it where there were some; NaN without one.
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
			beat, source = target.beat(r.Unit), target.Source
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

// Format writes a figure with as many digits as it deserves.
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

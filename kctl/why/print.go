package why

import (
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"k8s.io/apimachinery/pkg/util/duration"
)

func shortDuration(d time.Duration) string { return duration.HumanDuration(max(d, 0)) }

// Print writes the report to out as text. Times are shown as ages relative to now.
func (r Report) Print(out io.Writer, now time.Time) error {
	var b strings.Builder
	if len(r.Findings) == 0 {
		fmt.Fprintf(&b, "nothing is wrong with %s", r.Object)
		if r.Well != "" {
			b.WriteString(": " + r.Well)
		}
		b.WriteByte('\n')
	}
	for i, f := range r.Findings {
		if i > 0 {
			b.WriteByte('\n')
		}
		f.printTo(&b, now)
	}
	if len(r.Unread) > 0 {
		fmt.Fprintf(&b, "\nnot judged, for you may not read: %s\n", strings.Join(r.Unread, ", "))
	}
	_, err := io.WriteString(out, strings.Map(printableRune, b.String()))
	return err
}

// printableRune returns r if it is a newline or printable, and '?' otherwise. Messages of
// containers and events therefore cannot send control sequences to the terminal.
func printableRune(r rune) rune {
	if r == '\n' || unicode.IsPrint(r) {
		return r
	}
	return '?'
}

func (f Finding) printTo(b *strings.Builder, now time.Time) {
	fmt.Fprintf(b, "%s: %s", f.Object, f.What)
	if f.Since != nil {
		fmt.Fprintf(b, ", since %s", shortDuration(now.Sub(f.Since.Time)))
	}
	b.WriteByte('\n')
	row := func(title string, lines ...string) {
		for _, l := range lines {
			fmt.Fprintf(b, "  %-8s %s\n", title, l)
			title = ""
		}
	}
	if f.Because != "" {
		row("because", f.Because)
	}
	row("", f.Details...)
	row("mend", f.Mend...)
}

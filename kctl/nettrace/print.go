package nettrace

import (
	"fmt"
	"io"
	"strings"
	"unicode"
)

// Print writes the report to out as text: one row for each step, then the result with commands for
// repair.
func (r Report) Print(out io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "from %s\nto   %s\n\n", r.From, r.To)
	for _, s := range r.Steps {
		fmt.Fprintf(&b, "  %-9s %s\n", s.Name, s.Says)
		for _, d := range s.Details {
			fmt.Fprintf(&b, "  %-9s   %s\n", "", d)
		}
	}
	b.WriteByte('\n')
	switch last := r.Steps[len(r.Steps)-1]; {
	case r.Stops != "":
		fmt.Fprintf(&b, "stops at %s: %s\n", r.Stops, last.Says)
		for i, m := range last.Mend {
			title := ""
			if i == 0 {
				title = "mend"
			}
			fmt.Fprintf(&b, "  %-9s %s\n", title, m)
		}
	case r.Partly:
		b.WriteString("some connections get through, and some hang\n")
	case last.Name == "match":
		b.WriteString("nothing stands in the way: the proxy answers by itself\n")
	case last.Name == "policy" || last.Name == "route":
		b.WriteString("nothing stands in the way: whether anything answers is the pod's own affair\n")
	default:
		b.WriteString("goes on outside of the cluster\n")
	}
	if len(r.Unread) > 0 {
		fmt.Fprintf(&b, "not judged, for you may not read: %s\n", strings.Join(r.Unread, ", "))
	}
	_, err := io.WriteString(out, strings.Map(printableRune, b.String()))
	return err
}

// printableRune returns r if it is a newline or printable, and '?' otherwise. Texts from API
// objects therefore cannot send control sequences to the terminal.
func printableRune(r rune) rune {
	if r == '\n' || unicode.IsPrint(r) {
		return r
	}
	return '?'
}

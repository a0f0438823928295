package crd

import (
	"regexp/syntax"
	"strings"
	"testing"
)

// The estimate is not far below the size of the compiled regular expression.
func TestPatternSize(t *testing.T) {
	for _, p := range []string{"", "a", `^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`, "(a|b|c){1,999}", "(a{3,7}){2,}",
		"(" + strings.Repeat("(abc)?", 9) + "){1,20}", "[a-zA-Z]{0,63}x+"} {
		re, err := syntax.Parse(p, syntax.Perl)
		if err != nil {
			t.Fatal(err)
		}
		prog, err := syntax.Compile(re.Simplify())
		if err != nil {
			t.Fatal(err)
		}
		if guess := patternSize(p); guess*3+8 < len(prog.Inst) {
			t.Errorf("%q: %d steps, guessed %d", p, len(prog.Inst), guess)
		}
	}
}

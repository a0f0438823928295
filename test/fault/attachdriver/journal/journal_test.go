package journal

import (
	"strings"
	"testing"
)

// What must not be is seen, and nothing else.
func TestWrong(t *testing.T) {
	for _, c := range []struct{ about, lines, want string }{
		{"in order", "attached w1, mounted w1, unmounted w1, detached w1, detached w1, attached w2, mounted w2", ""},
		{"power cut", "attached w1, mounted w1, power-cut w1, detached w1, attached w2, mounted w2", ""},
		{"twice attached", "attached w1, attached w2", "attached to w1"},
		{"mounted where it is not", "attached w1, mounted w2", `attached to "w1"`},
		{"mounted where it was", "attached w1, detached w1, mounted w1", `attached to ""`},
		{"taken while mounted", "attached w1, mounted w1, detached w1", "mounted on w1"},
		{"taken after another's power cut", "attached w1, mounted w1, power-cut w2, detached w1", "mounted on w1"},
		{"unheard of", "stolen w1", "nobody knows"},
	} {
		dir := t.TempDir()
		for line := range strings.SplitSeq(c.lines, ", ") {
			what, node, _ := strings.Cut(line, " ")
			if err := Write(dir, Line{What: strings.ReplaceAll(what, "-", " "), Node: node, Volume: "v", Path: "/p"}); err != nil {
				t.Fatal(err)
			}
		}
		lines, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		wrong := Wrong(lines)
		if c.want == "" && len(wrong) > 0 || c.want != "" && (len(wrong) != 1 || !strings.Contains(wrong[0], c.want)) {
			t.Errorf("%s: %q, want %q", c.about, wrong, c.want)
		}
	}
}

package journal

import (
	"strings"
	"testing"
)

// FindViolations reports every violation, and nothing else.
func TestWrong(t *testing.T) {
	for _, c := range []struct{ about, lines, want string }{
		{"in order", "attached w1, mounted w1, unmounted w1, detached w1, detached w1, attached w2, mounted w2", ""},
		{"power cut", "attached w1, mounted w1, power-cut w1, detached w1, attached w2, mounted w2", ""},
		{"twice attached", "attached w1, attached w2", "attached to w1"},
		{"mounted on a node without an attachment", "attached w1, mounted w2", `attached to "w1"`},
		{"mounted where it was", "attached w1, detached w1, mounted w1", `attached to ""`},
		{"taken while mounted", "attached w1, mounted w1, detached w1", "mounted on w1"},
		{"taken after another's power cut", "attached w1, mounted w1, power-cut w2, detached w1", "mounted on w1"},
		{"unknown event", "stolen w1", "unknown event"},
	} {
		dir := t.TempDir()
		for _, l := range parseLines(c.lines) {
			if err := Write(dir, l); err != nil {
				t.Fatal(err)
			}
		}
		lines, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		wrong := FindViolations(lines)
		if c.want == "" && len(wrong) > 0 || c.want != "" && (len(wrong) != 1 || !strings.Contains(wrong[0], c.want)) {
			t.Errorf("%s: %q, want %q", c.about, wrong, c.want)
		}
	}
}

// A call that finds its effect already present writes the line of an earlier call whose process was
// killed before it could write it. No line is written twice.
func TestRecord(t *testing.T) {
	const power = "power-cut w1"
	for _, c := range []struct{ about, lines, record, want string }{
		{"the first line", "", "attached w1", "attached w1"},
		{"attached, and no line", "", "attached w1, attached w1", "attached w1"},
		{"detached, and no line", "attached w1", "detached w1, detached w1", "attached w1, detached w1"},
		{"mounted, and no line", "attached w1", "mounted w1, mounted w1", "attached w1, mounted w1"},
		{"unmounted, and no line", "attached w1, mounted w1", "unmounted w1, unmounted w1",
			"attached w1, mounted w1, unmounted w1"},
		{"never attached there", "attached w1", "detached w2", "attached w1"},
		{"never mounted there", "attached w1, mounted w1", "unmounted w2", "attached w1, mounted w1"},
		{"mounts end with the power", "attached w1, mounted w1, " + power, "unmounted w1",
			"attached w1, mounted w1, " + power},
		{"mounted again after it", "attached w1, mounted w1, " + power, "mounted w1",
			"attached w1, mounted w1, " + power + ", mounted w1"},
	} {
		dir := t.TempDir()
		for _, l := range parseLines(c.lines) {
			if err := Write(dir, l); err != nil {
				t.Fatal(err)
			}
		}
		for _, l := range parseLines(c.record) {
			if err := Record(dir, l); err != nil {
				t.Fatal(err)
			}
		}
		lines, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, l := range lines {
			got = append(got, strings.ReplaceAll(l.What, " ", "-")+" "+l.Node)
		}
		if got := strings.Join(got, ", "); got != c.want {
			t.Errorf("%s: the journal has %q, want %q", c.about, got, c.want)
		}
	}
}

// parseLines returns the lines of volume v and path /p in "WHAT NODE, WHAT NODE".
func parseLines(text string) (lines []Line) {
	for line := range strings.SplitSeq(text, ", ") {
		if what, node, ok := strings.Cut(line, " "); ok {
			lines = append(lines, Line{What: strings.ReplaceAll(what, "-", " "), Node: node, Volume: "v", Path: "/p"})
		}
	}
	return lines
}

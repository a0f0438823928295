// Package docpages reads the command lines in the pages of docs. Tests run these command lines as
// the pages show them. For each command line of the pages for operators, the package names the test
// that runs it, or the reason why no test does.
package docpages

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Subject is a group of pages for operators. Every command line of these pages is run by a test or
// has a reason.
type Subject struct {
	Name  string
	Pages []string // relative to docs, without .md, in reading order
}

// Operators are the subjects in which every command line is run by a test or has a reason.
var Operators = []Subject{
	{"install", []string{
		"how-to/install-with-script", "how-to/install-with-package", "how-to/install-with-cluster-file",
		"how-to/run-standby-replicas",
		"how-to/configure-firewalls", "how-to/use-an-outbound-proxy", "how-to/share-an-api-address",
		"how-to/test-on-virtual-machines",
		"how-to/uninstall", "reference/ports", "reference/api-addresses", "reference/release",
		"reference/configuration",
	}},
	{"operate", []string{
		"how-to/check-cluster-health", "how-to/maintain-a-worker", "how-to/maintain-a-control-plane-machine",
		"how-to/manage-join-tokens",
		"how-to/renew-certificates", "how-to/back-up", "how-to/free-store-space", "reference/node-pressure",
		"how-to/debug-a-workload",
		"how-to/collect-a-support-bundle",
	}},
	{"upgrade", []string{
		"how-to/upgrade-with-cluster-file", "how-to/upgrade-by-hand", "how-to/upgrade-a-lab", "explanation/upgrades",
		"reference/formats",
	}},
	{"recover", []string{
		"how-to/test-backups", "how-to/replace-a-replica", "how-to/replace-replicas-automatically",
		"how-to/recover-from-lost-quorum",
		"how-to/restore-a-backup", "how-to/restore-a-deleted-object", "how-to/recover-from-lost-keys",
		"explanation/recovery",
	}},
	{"secure", []string{
		"how-to/rotate-keys", "how-to/rotate-the-cluster-ca", "how-to/rotate-the-peer-ca-by-hand",
		"how-to/respond-to-a-leaked-key",
		"reference/keys", "reference/hardening", "reference/files", "reference/limits", "explanation/node-trust",
	}},
}

// Line is a command line of a page.
type Line struct {
	Page        string // relative to docs, without .md
	Number      int    // line number in the page, from 1
	Text        string // without the comment at its end
	InCodeBlock bool   // the line is in a code block, not in a sentence
	Shown       []string
}

// Read returns the command lines of a page in the folder docs.
func Read(docs, page string) ([]Line, error) {
	raw, err := os.ReadFile(filepath.Join(docs, page+".md"))
	if err != nil {
		return nil, err
	}
	return Lines(page, string(raw)), nil
}

// ReadSubject returns the command lines of all pages of a subject, in reading order.
func ReadSubject(docs, name string) ([]Line, error) {
	i := slices.IndexFunc(Operators, func(s Subject) bool { return s.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("test/docpages has no subject %q", name)
	}
	var out []Line
	for _, page := range Operators[i].Pages {
		lines, err := Read(docs, page)
		if err != nil {
			return nil, err
		}
		out = append(out, lines...)
	}
	return out, nil
}

// inlineCommand matches inline code that is a command line: it starts with one of these programs
// and has arguments.
var inlineCommand = regexp.MustCompile("`((?:sudo |[A-Z]+=\\S+ )*" +
	`(?:kctl|keelson-controlplane|keelson-agent|systemctl|journalctl|make|vagrant|(?:\./)?install\.sh)` +
	" [^`]+|/usr/lib/keelson/uninstall.sh[^`]*)`")

// Lines returns the command lines of a page. In a code block without a language every line is a
// command; two spaces and a # start a comment. In a "console" block the lines with a $ are
// commands, and the lines below a command are its output. Blocks with other languages have no
// command lines. A block within a list is indented, and Lines removes that indentation.
func Lines(page, text string) []Line {
	var out []Line
	box := false
	kind, indent := "", ""
	for i, line := range strings.Split(text, "\n") {
		l := Line{Page: page, Number: i + 1, InCodeBlock: box}
		bare := strings.TrimLeft(line, " ")
		mark, isMark := strings.CutPrefix(bare, "```")
		if isMark && !box {
			indent = line[:len(line)-len(bare)]
		}
		if box {
			line = strings.TrimPrefix(line, indent)
		}
		switch {
		case isMark:
			box, kind = !box, mark
		case !box:
			for _, m := range inlineCommand.FindAllStringSubmatch(line, -1) {
				l.Text = m[1]
				out = append(out, l)
			}
		case kind == "":
			l.Text, _, _ = strings.Cut(line, "  #")
			if l.Text = strings.TrimSpace(l.Text); l.Text != "" {
				out = append(out, l)
			}
		case kind == "console" && strings.HasPrefix(line, "$ "):
			l.Text = line[2:]
			out = append(out, l)
		case kind == "console" && len(out) > 0:
			last := &out[len(out)-1]
			last.Shown = append(last.Shown, line)
		}
	}
	return out
}

// MatchesOutput reports whether output is the output that the page shows below the command, line by
// line. In the page, "…" matches any text, and a line with only "…" matches any number of
// lines.
func (l Line) MatchesOutput(output string) bool {
	pattern := "(?s)^"
	for _, line := range l.Shown {
		if line == "…" {
			pattern += `(?:[^\n]*\n)*?`
			continue
		}
		for i, part := range strings.Split(line, "…") {
			if i > 0 {
				pattern += `[^\n]*`
			}
			pattern += strings.Join(strings.Fields(" "+regexp.QuoteMeta(part)+" "), `[ \t]+`)
			if strings.HasSuffix(part, " ") {
				pattern += `[ \t]*`
			}
		}
		pattern += "[ \t]*\n"
	}
	return regexp.MustCompile(pattern + "$").MatchString(output)
}

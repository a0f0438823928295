// Package docpages reads the command lines of the pages of docs, for tests that run them as they stand there, and says of each line of
// those pages for operators which test does so, or why none does. A page cannot say something else than what is run.
package docpages

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// Subject is a group of pages for operators. Every command line of these pages is accounted for.
type Subject struct {
	Name  string
	Pages []string // relative to docs, without .md, in reading order
}

// Operators are the subjects whose command lines all are accounted for.
var Operators = []Subject{
	{"install", []string{
		"how-to/install-with-script", "how-to/install-with-package", "how-to/install-with-cluster-file", "how-to/run-standby-replicas",
		"how-to/configure-firewalls", "how-to/use-an-outbound-proxy", "how-to/share-an-api-address", "how-to/test-on-virtual-machines",
		"how-to/uninstall", "reference/ports", "reference/api-addresses", "reference/release", "reference/configuration",
	}},
	{"operate", []string{
		"how-to/check-cluster-health", "how-to/maintain-a-worker", "how-to/maintain-a-control-plane-machine", "how-to/manage-join-tokens",
		"how-to/renew-certificates", "how-to/back-up", "how-to/free-store-space", "reference/node-pressure", "how-to/debug-a-workload",
		"how-to/collect-a-support-bundle",
	}},
	{"upgrade", []string{
		"how-to/upgrade-with-cluster-file", "how-to/upgrade-by-hand", "how-to/upgrade-a-lab", "explanation/upgrades", "reference/formats",
	}},
	{"recover", []string{
		"how-to/test-backups", "how-to/replace-a-replica", "how-to/replace-replicas-automatically", "how-to/recover-from-lost-quorum",
		"how-to/restore-a-backup", "how-to/restore-a-deleted-object", "how-to/recover-from-lost-keys", "explanation/recovery",
	}},
	{"secure", []string{
		"how-to/rotate-keys", "how-to/rotate-the-cluster-ca", "how-to/rotate-the-peer-ca-by-hand", "how-to/respond-to-a-leaked-key",
		"reference/keys", "reference/hardening", "reference/files", "reference/limits", "explanation/node-trust",
	}},
}

// Line is a command line of a page.
type Line struct {
	Page   string // relative to docs, without .md
	Number int    // in the page, from 1
	Text   string // without the comment behind it
	Boxed  bool   // it stands in a box, not within a sentence
	Shown  []string
}

// Read reads the page of that name in the folder of the docs.
func Read(docs, page string) ([]Line, error) {
	raw, err := os.ReadFile(filepath.Join(docs, page+".md"))
	if err != nil {
		return nil, err
	}
	return Lines(page, string(raw)), nil
}

// ReadSubject reads all pages of the subject with that name, in reading order.
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

// What a sentence says in code is a command line where it begins with one of these and goes on.
var command = regexp.MustCompile("`((?:sudo |[A-Z]+=\\S+ )*" +
	`(?:kctl|keelson-controlplane|keelson-agent|systemctl|journalctl|make|vagrant|(?:\./)?install\.sh)` +
	" [^`]+|/usr/lib/keelson/uninstall.sh[^`]*)`")

// Lines reads a page. In a box that is marked as nothing every line is a command, but for what follows two spaces and a #; in one of a
// console those behind a $, and what follows is what they say; boxes that are marked otherwise have none. A box within a list is indented,
// and its lines are read without that indentation.
func Lines(page, text string) []Line {
	var out []Line
	box := false
	kind, indent := "", ""
	for i, line := range strings.Split(text, "\n") {
		l := Line{Page: page, Number: i + 1, Boxed: box}
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
			for _, m := range command.FindAllStringSubmatch(line, -1) {
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

// Says is whether an output is what the page shows: line by line, "…" is what differs, and alone on a line any number of lines.
func (l Line) Says(output string) bool {
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

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/test/bed"
)

// command is one of a page's, and what the page shows of its output.
type command struct {
	line  int
	text  string
	shown []string
}

// commands reads the boxes of a page that are marked as a console.
func commands(page string) []command {
	var out []command
	inside := false
	for i, line := range strings.Split(page, "\n") {
		switch {
		case !inside:
			inside = line == "```console"
		case line == "```":
			inside = false
		case strings.HasPrefix(line, "$ "):
			out = append(out, command{line: i + 1, text: line[2:]})
		case len(out) > 0:
			c := &out[len(out)-1]
			c.shown = append(c.shown, line)
		}
	}
	return out
}

// says is whether an output is what a page shows: line by line, "…" is what differs, and alone on a line any number of lines.
func (c command) says(output string) bool {
	pattern := "(?s)^"
	for _, line := range c.shown {
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

func TestPagesAreRead(t *testing.T) {
	page := "text\n```console\n$ a b\nNAME …\n…\nw1 … yes\n$ c\n```\n$ no command\n```\n$ nor this\n```\n"
	all := commands(page)
	if len(all) != 2 || all[0].text != "a b" || all[0].line != 3 || all[1].text != "c" || len(all[1].shown) != 0 {
		t.Fatalf("%+v", all)
	}
	for output, want := range map[string]bool{
		"NAME  AGE\nw0 1s yes\nw1  7s  yes\n": true, "NAME\nw1 yes\n": true, "NAME AGE\nw0\n": false, "w1 7s yes\n": false,
		"NAME\nw1 7s no\n": false, "NAME\nw1 7s yes\nmore\n": false, "": false,
	} {
		if all[0].says(output) != want {
			t.Errorf("%q is what is shown: %v", output, !want)
		}
	}
	if all[1].says("something\n") || !all[1].says("") {
		t.Error("where nothing is shown nothing is to be said")
	}
}

// Every command of the page for those who run a cluster works, in its order, and says what the page shows.
func TestOperatePage(t *testing.T) {
	page, err := os.ReadFile("../../docs/operate.md")
	if err != nil {
		t.Fatal(err)
	}
	all := commands(string(page))
	if len(all) < 20 {
		t.Fatalf("the page has %d commands", len(all))
	}
	dir := t.TempDir()
	t.Cleanup(func() { _, _ = bed.Try(t, bed.Lab().Config.BinDir+"/kctl", "uncordon", "w3") })
	// One shell for all of them, as a person has one: it ends at the first that fails.
	const mark = "\x01"
	var script strings.Builder
	fmt.Fprintf(&script, "cd %s\n", dir)
	for _, c := range all {
		fmt.Fprintf(&script, "%s || { code=$?; printf '%s%%s' $code; exit $code; }\nprintf '%s0'\n", c.text, mark, mark)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	shell := exec.CommandContext(ctx, "sh")
	shell.Stdin = strings.NewReader(script.String())
	shell.Env = append(os.Environ(), "KUBECONFIG="+bed.Lab().Config.Kubeconfig,
		"PATH="+bed.Lab().Config.BinDir+string(filepath.ListSeparator)+os.Getenv("PATH"))
	var out bytes.Buffer
	shell.Stdout, shell.Stderr = &out, &out
	failed := shell.Run()
	parts := strings.Split(out.String(), mark+"0")
	for i, c := range all {
		switch {
		case i >= len(parts)-1:
			t.Fatalf("docs/operate.md, line %d: %s\n%s\n%v", c.line, c.text, parts[len(parts)-1], failed)
		case !c.says(parts[i]):
			t.Errorf("docs/operate.md, line %d: %s: it says\n%sand the page shows\n%s", c.line, c.text, parts[i], strings.Join(c.shown, "\n"))
		}
	}
	if failed != nil {
		t.Errorf("%v\n%s", failed, out.String())
	}
}

package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"keelson.dev/keelson/test/bed"
	"keelson.dev/keelson/test/pages"
)

// Every command of the page for those who run a cluster works, in its order, and says what the page shows.
func TestOperatePage(t *testing.T) {
	all, err := pages.Read("../../docs", "operate")
	if err != nil {
		t.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(l pages.Line) bool { return !l.Boxed })
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
		fmt.Fprintf(&script, "%s || { code=$?; printf '%s%%s' $code; exit $code; }\nprintf '%s0'\n", c.Text, mark, mark)
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
			t.Fatalf("docs/operate.md, line %d: %s\n%s\n%v", c.Number, c.Text, parts[len(parts)-1], failed)
		case !c.Says(parts[i]):
			t.Errorf("docs/operate.md, line %d: %s: it says\n%sand the page shows\n%s", c.Number, c.Text, parts[i], strings.Join(c.Shown, "\n"))
		}
	}
	if failed != nil {
		t.Errorf("%v\n%s", failed, out.String())
	}
}

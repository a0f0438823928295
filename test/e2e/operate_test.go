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

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/test/docpages"
	"keelson.dev/keelson/test/testenv"
)

// Every command of the how-to pages for operators works, in reading order, and prints the output of
// the pages.
func TestOperatePage(t *testing.T) {
	all, err := docpages.ReadSubject("../../docs", "operate")
	if err != nil {
		t.Fatal(err)
	}
	all = slices.DeleteFunc(all, func(l docpages.Line) bool { return !l.InCodeBlock })
	if len(all) < 20 {
		t.Fatalf("the pages have %d commands", len(all))
	}
	dir := t.TempDir()
	t.Cleanup(func() { _, _ = testenv.Try(t, testenv.Lab().Config.BinDir+"/kctl", "uncordon", "w3") })
	testenv.Eventually(t, soon, func() error { // pods of the tests before, which the page's drain would not take away
		l, err := testenv.Client(t).CoreV1().Pods("").List(t.Context(),
			metav1.ListOptions{FieldSelector: "spec.nodeName=w3"})
		for i := range l.Items {
			if p := &l.Items[i]; err == nil && metav1.GetControllerOf(p) == nil {
				err = fmt.Errorf("pod %s/%s is on w3 and no controller would recreate it", p.Namespace, p.Name)
			}
		}
		return err
	})
	// One shell for all of them, as a person has one: it ends at the first that fails.
	const mark = "\x01"
	var script strings.Builder
	fmt.Fprintf(&script, "cd %s\n", dir)
	for _, c := range all {
		fmt.Fprintf(&script, "%s || { code=$?; printf '%s%%s' $code; exit $code; }\nprintf '%s0'\n", c.Text, mark, mark)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	shell := exec.CommandContext(ctx, "sh")
	shell.Stdin = strings.NewReader(script.String())
	shell.Env = append(os.Environ(), "KUBECONFIG="+testenv.Lab().Config.Kubeconfig,
		"PATH="+testenv.Lab().Config.BinDir+string(filepath.ListSeparator)+os.Getenv("PATH"))
	var out bytes.Buffer
	shell.Stdout, shell.Stderr = &out, &out
	failed := shell.Run()
	parts := strings.Split(out.String(), mark+"0")
	for i, c := range all {
		switch {
		case i >= len(parts)-1:
			t.Fatalf("docs/%s.md, line %d: %s\n%s\n%v", c.Page, c.Number, c.Text, parts[len(parts)-1], failed)
		case !c.MatchesOutput(parts[i]):
			t.Errorf("docs/%s.md, line %d: %s: the output is\n%sand the page shows\n%s", c.Page, c.Number,
				c.Text, parts[i],
				strings.Join(c.Shown, "\n"))
		}
	}
	if failed != nil {
		t.Errorf("%v\n%s", failed, out.String())
	}
}

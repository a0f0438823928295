package kinds_test

import (
	_ "embed"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// columnsText is what Kubernetes' own printers say of each kind.
//
//go:embed testdata/columns.txt
var columnsText string

// F18: the columns of every kind that is shown have the names, types and order that Kubernetes gives them; those in
// parentheses are shown by -o wide, and those without a type are strings. Of a kind without a row of its own
// Kubernetes shows when it was made.
func TestColumns(t *testing.T) {
	var b strings.Builder
	for _, k := range kinds.All().All() {
		var cols []string
		for _, c := range k.Lists.Columns {
			col := c.Name
			if c.Type != "string" {
				col += " " + c.Type
			}
			if c.Format != "" && (c.Format != "name" || c.Name != "Name") {
				col += " " + c.Format
			}
			if c.Priority > 0 {
				col = "(" + col + ")"
			}
			cols = append(cols, col)
		}
		if len(cols) > 0 {
			fmt.Fprintf(&b, "%s %s: %s\n", k.GVK.GroupVersion(), k.GVK.Kind, strings.Join(cols, ", "))
		}
	}
	if diff := cmp.Diff(strings.Split(columnsText, "\n"), strings.Split(b.String(), "\n")); diff != "" {
		t.Errorf("-Kubernetes +ours:\n%s\n%s", diff, b.String())
	}
}

package crd

import (
	"strings"
	"testing"
	"time"
)

// Paths of columns that multiply what they find are not evaluated; those that real definitions have are.
func TestColumnPathsAreBounded(t *testing.T) {
	deep := map[string]any{"b": "end"}
	for range 40 {
		deep = map[string]any{"b": deep}
	}
	list := make([]any, 2000)
	for i := range list {
		list[i] = map[string]any{"type": "Ready", "status": "True", "n": int64(i)}
	}
	object := map[string]any{"deep": deep, "list": list}
	for _, path := range []string{
		".deep" + strings.Repeat("['b','b']", 25),
		".list[:]}{range .list[:]}{range $.list[:]}{range $.list[:]}{.n}{end}{end}{end}{.n",
		".." + strings.Repeat("..", 30) + "b",
	} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			finder(path)(object)
		}()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatalf("%.60s takes more than 10 s", path)
		}
	}
	for path, want := range map[string]any{
		`.list[?(@.type=="Ready")].status`: "True", ".list[0].status": "True", ".list[0:1].status": "True",
		".list[*].n": int64(0), ".list[-1:].n": int64(1999), `.list[0]['status','type']`: "True", ".list[0,1].n": int64(0),
	} {
		if got, ok := finder(path)(object); !ok || got != want {
			t.Errorf("%s: %v, %v", path, got, ok)
		}
	}
}

package apiserver

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
)

// F75: a replica that begins with definitions in its store serves their kinds before it is ready, and whoever watched
// their objects goes on where it was: their history is loaded with that of all others.
func TestCustomResourcesOfAReplicaThatBegins(t *testing.T) {
	r := withDefinitions(t)
	c := r.adminHTTP()
	r.establish(c, crontabs)
	for range 5000 { // further back than a cache begins to load
		if _, err := r.store.Commit(t.Context(), raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/elsewhere", []byte("x"))}}); err != nil {
			t.Fatal(err)
		}
	}
	r.ok(r.call(c, "POST", crontabsPath, crontab("a", `{"cronSpec":"* * * * *"}`), "Content-Type", "application/json"))
	from := fmt.Sprint(uint64(r.store.Applied()))
	for i := range 20 {
		r.ok(r.call(c, "PATCH", crontabsPath+"/a", fmt.Sprintf(`{"spec":{"image":"i%d"}}`, i), "Content-Type", "application/merge-patch+json"))
	}

	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	all := kinds.All()
	objects := registry.New(r.store, all, registry.WithScheme(api.Scheme()), registry.WithLog(quiet))
	again := New(Config{Name: "again", Registry: objects, Kinds: all, Scheme: api.Scheme(), ClientCAs: r.trust.Pool,
		ServiceTokens: r.tokens, Timeline: api.NewTimeline(64), Log: quiet})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- objects.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended; <-ended })
	<-objects.Ready()
	// Definitions are not even followed yet.
	var k *api.Kind
	for _, one := range all.All() {
		if one.Definition == "crontabs.stable.example.com" {
			k = one
		}
	}
	if k == nil {
		t.Fatal("a replica that has loaded its store does not serve the kinds of the definitions in it")
	}
	go func() { ended <- again.Run(ctx) }()
	w, err := objects.Watch(ctx, &api.Request{Verb: api.VerbWatch, Kind: k, List: metav1.ListOptions{Watch: true, ResourceVersion: from}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for i := range 20 {
		ev := <-w.ResultChan()
		if ev.Type != watch.Modified {
			t.Fatalf("change %d is told as %s: %+v", i, ev.Type, ev.Object)
		}
		if got := ev.Object.(*custom.Object).Content["spec"].(map[string]any)["image"]; got != fmt.Sprint("i", i) {
			t.Fatalf("change %d is told as %v", i, got)
		}
	}
	<-again.CustomKinds()
	if now := all.ByGVK(k.GVK); now != k {
		t.Error("what is served from the beginning is made anew when definitions are followed")
	}
}

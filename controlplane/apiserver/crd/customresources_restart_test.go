package crd_test

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
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
)

// F75: a replica that begins with definitions in its store serves their kinds before it is ready,
// and whoever watched their objects goes on where it was: their history is loaded with that of all
// others.
func TestCustomResourcesOfAReplicaThatBegins(t *testing.T) {
	r := apiservertest.WithDefinitions(t)
	c := r.AdminHTTP()
	r.Establish(c, apiservertest.Crontabs)
	for range 5000 { // further back than a cache begins to load
		if _, err := r.Store.Commit(t.Context(),
			raftstore.Commit{Ops: []raftstore.Op{raftstore.Put("/elsewhere", []byte("x"))}}); err != nil {
			t.Fatal(err)
		}
	}
	r.OK(r.Call(c, "POST", crontabsPath, apiservertest.Crontab("a", `{"cronSpec":"* * * * *"}`), "Content-Type",
		"application/json"))
	from := fmt.Sprint(uint64(r.Store.Applied()))
	for i := range 20 {
		r.OK(r.Call(c, "PATCH", crontabsPath+"/a", fmt.Sprintf(`{"spec":{"image":"i%d"}}`, i), "Content-Type",
			"application/merge-patch+json"))
	}

	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	all := kinds.All()
	objects := registry.New(r.Store, all, registry.WithScheme(api.Scheme()), registry.WithLog(quiet))
	again := apiserver.New(apiserver.Config{Name: "again", Registry: objects, Kinds: all,
		Scheme: api.Scheme(), Log: quiet,
		Authentication: apiserver.AuthenticationConfig{ClientCAs: r.Trust.Pool, ServiceTokens: r.Tokens},
		Timeline:       apiserver.TimelineConfig{Stages: api.NewTimeline(64)}})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- objects.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended; <-ended })
	<-objects.Ready()
	// Definitions are not even followed yet.
	var k *api.Kind
	for _, one := range all.All() {
		if one.Serving.Definition == "crontabs.stable.example.com" {
			k = one
		}
	}
	if k == nil {
		t.Fatal("a replica that has loaded its store does not serve the kinds of the definitions in it")
	}
	go func() { ended <- again.Run(ctx) }()
	w, err := objects.Watch(ctx,
		&api.Request{Verb: api.VerbWatch, Kind: k, List: metav1.ListOptions{Watch: true, ResourceVersion: from}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for i := range 20 {
		ev := <-w.ResultChan()
		if ev.Type != watch.Modified {
			t.Fatalf("event %d is %s: %+v", i, ev.Type, ev.Object)
		}
		if got := ev.Object.(*custom.Object).Content["spec"].(map[string]any)["image"]; got != fmt.Sprint("i", i) {
			t.Fatalf("event %d has image %v", i, got)
		}
	}
	<-again.CustomKinds()
	if now := all.ByGVK(k.GVK); now != k {
		t.Error("resources that are served at the start are rebuilt when definitions are watched")
	}
}

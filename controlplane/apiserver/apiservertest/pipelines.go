package apiservertest

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest"
)

// PipelineClient returns a client that sends requests to the pipeline of the API server without
// HTTP. Its user is an administrator with the given name.
func (r *Replica) PipelineClient(name string) *client.Client {
	return newPipelineClient(r.Server, r.Kinds, name)
}

func newPipelineClient(s *apiserver.Server, all *api.Kinds, name string) *client.Client {
	return client.New(s.Backend(), all).As(api.User{Name: name, Groups: []string{api.GroupMasters}})
}

// StartPipelines starts three API servers without HTTP on a cluster of three stores. The cluster
// has namespace default and its default ServiceAccount. For each server, it returns the store and a
// client of an administrator (see PipelineClient). change may modify the configurations.
func StartPipelines(t *testing.T, change ...func(*apiserver.Config)) (
	stores []raftstore.Store, clients []*client.Client,
) {
	t.Helper()
	c := storetest.NewCluster(t, 3, nil)
	c.AwaitReady()
	quiet := slog.New(slog.NewTextHandler(io.Discard, nil))
	for _, name := range c.Names() {
		all, scheme := kinds.All(), api.Scheme()
		reg := registry.New(c.Replica(name), all, registry.WithScheme(scheme), registry.WithLog(quiet),
			registry.WithCompanions(&corev1.Service{}, networking.ServiceCompanions))
		cfg := apiserver.Config{Name: name, Registry: reg, Kinds: all, Scheme: scheme, Log: quiet}
		for _, f := range change {
			f(&cfg)
		}
		s := apiserver.New(cfg)
		ctx, cancel := context.WithCancel(context.Background())
		var running sync.WaitGroup
		running.Go(func() { _ = reg.Run(ctx) }) // it ends with the store
		t.Cleanup(func() { cancel(); running.Wait() })
		<-reg.Ready()
		stores, clients = append(stores, c.Replica(name)), append(clients, newPipelineClient(s, all, "admin"))
	}
	for _, o := range []api.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "default"}},
	} {
		if err := TryCreate(clients[0], o, false); err != nil {
			t.Fatal(err)
		}
	}
	return stores, clients
}

// TryCreate creates o, as a dry run if dry is true, and returns the error of the API server.
func TryCreate(c *client.Client, o api.Object, dry bool) error {
	r := &api.Request{
		Verb: api.VerbCreate, Kind: c.Kinds().ByType(o), Namespace: o.GetNamespace(), Name: o.GetName(), Object: o,
	}
	if dry {
		r.Create.DryRun = []string{metav1.DryRunAll}
	}
	_, err := c.Do(context.Background(), r)
	return err
}

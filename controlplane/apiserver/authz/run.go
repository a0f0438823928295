package authz

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/follow"
	"keelson.dev/keelson/internal/lifecycle"
)

// Follower keeps RBAC and Node current from the stored objects.
type Follower struct {
	Source follow.Source
	Kinds  *api.Kinds
	RBAC   *RBAC
	Node   *Node
	Log    *slog.Logger

	places [len(followed)]follow.Place
}

// followed are the resources that the rules rest on.
var followed = [...]schema.GroupVersionResource{
	rbacv1.SchemeGroupVersion.WithResource("roles"),
	rbacv1.SchemeGroupVersion.WithResource("clusterroles"),
	rbacv1.SchemeGroupVersion.WithResource("rolebindings"),
	rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"),
	{Version: "v1", Resource: "pods"},
}

// Mark is how far a Follower had come.
type Mark [len(followed)]uint64

// Mark says how far it has come.
func (f *Follower) Mark() (m Mark) {
	for i := range f.places {
		m[i] = f.places[i].At()
	}
	return m
}

// Behind returns once every rule is known that anybody has been told of, and says whether one of them was not at the mark.
func (f *Follower) Behind(ctx context.Context, at Mark) (bool, error) {
	asked := false
	for i, gvr := range followed {
		kind := f.Kinds.ByResource(gvr)
		if kind == nil {
			continue
		}
		// What the first question brought this replica to know holds for the others.
		if err := f.places[i].CaughtUp(ctx, f.Source, kind, asked); err != nil {
			return false, err
		}
		asked = true
	}
	return f.Mark() != at, nil
}

// placed is a sink with its place.
type placed struct {
	follow.Sink
	*follow.Place
}

// Run follows until ctx ends and calls ready once everything has been seen.
// A kind that is not served is one without objects.
func (f *Follower) Run(ctx context.Context, ready func()) error {
	sinks := [len(followed)]follow.Sink{
		rbacSink{z: f.RBAC}, rbacSink{z: f.RBAC, clustered: true}, rbacSink{z: f.RBAC, binding: true},
		rbacSink{z: f.RBAC, binding: true, clustered: true}, f.Node,
	}
	var parts []lifecycle.Part
	var waiting sync.WaitGroup
	for i, gvr := range followed {
		kind := f.Kinds.ByResource(gvr)
		if kind == nil {
			continue
		}
		waiting.Add(1)
		var once sync.Once
		parts = append(parts, lifecycle.Part{Name: "authz " + gvr.Resource, Run: func(ctx context.Context) error {
			return follow.Run(ctx, f.Log, f.Source, kind, placed{sinks[i], &f.places[i]}, func() { once.Do(waiting.Done) })
		}})
	}
	if len(parts) == 0 {
		return fmt.Errorf("authorization: none of the kinds it rests on is served")
	}
	parts = append(parts, lifecycle.Part{Name: "authz ready", Run: func(ctx context.Context) error {
		seen := make(chan struct{})
		go func() { waiting.Wait(); close(seen) }()
		select {
		case <-seen:
			ready()
		case <-ctx.Done():
		}
		<-ctx.Done()
		return ctx.Err()
	}})
	return lifecycle.Run(ctx, parts...)
}

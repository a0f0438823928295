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

// Follower updates RBAC and Node from watches of the stored objects.
type Follower struct {
	Source follow.Source
	Kinds  *api.Kinds
	RBAC   *RBAC
	Node   *Node
	Log    *slog.Logger

	places [len(followed)]follow.Place
}

// followed are the resources on which the authorizers depend.
var followed = [...]schema.GroupVersionResource{
	rbacv1.SchemeGroupVersion.WithResource("roles"),
	rbacv1.SchemeGroupVersion.WithResource("clusterroles"),
	rbacv1.SchemeGroupVersion.WithResource("rolebindings"),
	rbacv1.SchemeGroupVersion.WithResource("clusterrolebindings"),
	{Version: "v1", Resource: "pods"},
}

// Mark contains the revision up to which a Follower has applied each followed resource.
type Mark [len(followed)]uint64

// Mark returns the revisions up to which the Follower has applied changes.
func (f *Follower) Mark() (m Mark) {
	for i := range f.places {
		m[i] = f.places[i].At()
	}
	return m
}

// Behind waits until every change of the rules that any client has seen is applied. It then reports
// whether the Follower has applied changes since the mark at.
func (f *Follower) Behind(ctx context.Context, at Mark) (bool, error) {
	asked := false
	for i, gvr := range followed {
		kind := f.Kinds.ByResource(gvr)
		if kind == nil {
			continue
		}
		// The revision that the first read confirmed is sufficient for the other kinds.
		if err := f.places[i].CaughtUp(ctx, f.Source, kind, asked); err != nil {
			return false, err
		}
		asked = true
	}
	return f.Mark() != at, nil
}

// placed is a sink that also records its revision.
type placed struct {
	follow.Sink
	*follow.Place
}

// Run follows the objects until ctx is done. It calls ready once the initial objects of all kinds
// are applied. A kind that is not served counts as having no objects.
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
